"""Keeps a script's checkpoints out of the way while it is compared.

In the view of its folder the script writes as it likes. A checkpoint that it writes elsewhere is
redirected, at the functions through which weights are written: `torch.save`, safetensors'
`save_file` and torch.distributed.checkpoint's writer; accelerate, transformers and DeepSpeed go
through these. Deleting, moving or overwriting a checkpoint that was there before is refused, and so
is any change in the real folder that the script has a view of.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from deepytorch_core import config
from deepytorch_core.compare import workspace
from deepytorch_core.compare.plan import Plan
from deepytorch_core.errors import CompareError
from deepytorch_core.import_hook import ImportHook
from deepytorch_core.patching import Patches

_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp")
# How torch names the folders that its compiler keeps for the user.
_COMPILERS = f"{os.sep}torchinductor_"
_WRITES = os.O_WRONLY | os.O_RDWR
_TICK = 0.1  # s: kernels stamp files by a clock that is up to one timer interrupt behind
_NO_FOLDER = -1  # what Python's audit events say where a path is no name within an open folder
_Function = Callable[..., Any]


class Saves:
    """Put in place for the life of the process by `install`; `redirected` is what was moved."""

    def __init__(self, plan: Plan) -> None:
        self._view = os.path.realpath(plan.workspace)
        self._outside = os.path.realpath(plan.outside)
        self._source = workspace.source_of(self._view)
        self._tools_own = () if self._source is None else _tools_own(self._source)
        self._began = time.time() - _TICK
        self._patches = Patches()
        self._is_copying = False
        # Where the script writes into nothing that stays.
        own = os.path.realpath(plan.folder)
        self._scratch = (self._view, self._outside, own, "/dev", "/proc")
        self.redirected: dict[str, str] = {}
        self.made_folders: list[str] = []

    def install(self) -> None:
        """From now on: every write of weights, and what may destroy some."""
        import torch

        self._patches.replace(torch, "save", self._with_path(1, "f"))
        self._patches.replace(torch.serialization, "save", self._with_path(1, "f"))
        self._patches.replace(torch, "load", self._reading)
        ImportHook("safetensors.torch", self._safetensors).install()
        ImportHook("torch.distributed.checkpoint.filesystem", self._distributed).install()
        for name in ("remove", "unlink"):
            self._patches.replace(os, name, self._reading)
        for name in ("rename", "replace"):
            self._patches.replace(os, name, self._moving)
        sys.addaudithook(self._watch)

    def place(self, path: str) -> str:
        """Where weights go that the script writes to `path`."""
        path = workspace.located(path)
        if self._is_scratch(path):
            self._make_own(path, keeps_content=False)
            return path
        moved = os.path.join(self._outside, path.lstrip(os.sep))
        os.makedirs(os.path.dirname(moved), exist_ok=True)
        self.redirected[path] = moved
        return moved

    def _is_scratch(self, path: str) -> bool:
        return any(workspace.is_within(path, one) for one in self._scratch)

    def _with_path(self, index: int, name: str) -> Callable[[_Function], _Function]:
        """Replaces the path that a function takes as argument `index` or keyword `name`."""

        def make(original: _Function) -> _Function:
            def save(*args: Any, **kwargs: Any) -> Any:
                given = list(args)
                if len(given) > index and isinstance(given[index], str | os.PathLike):
                    given[index] = self.place(os.fspath(given[index]))
                elif isinstance(kwargs.get(name), str | os.PathLike):
                    kwargs[name] = self.place(os.fspath(kwargs[name]))
                return original(*given, **kwargs)

            return save

        return make

    def _reading(self, original: _Function) -> _Function:
        """What takes a path first finds what was redirected there."""

        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self._found(path), *args, **kwargs)

        return read

    def _moving(self, original: _Function) -> _Function:
        def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._found(source)
            is_weights = os.fsdecode(target).endswith(_WEIGHTS)
            if not kwargs and not self._is_copying and (found is not source or is_weights):
                self._refuse_loss(workspace.located(os.fsdecode(found)), "move")
                target = self.place(os.fsdecode(target))
            return original(found, target, *args, **kwargs)

        return move

    def _found(self, path: Any) -> Any:
        if self.redirected and isinstance(path, str | os.PathLike):
            return self.redirected.get(workspace.located(os.fsdecode(path)), path)
        return path

    def _safetensors(self, module: ModuleType) -> None:
        self._patches.replace(module, "save_file", self._with_path(1, "filename"))

    def _distributed(self, module: ModuleType) -> None:
        self._patches.replace(module.FileSystemWriter, "__init__", self._with_path(1, "path"))

    def _watch(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook: sees every file that Python itself is about to touch."""
        if event == "open":
            path, _, flags = args
            if isinstance(path, str | os.PathLike) and flags & _WRITES and not self._is_copying:
                self._opening(os.fsdecode(path), flags)
        elif event == "os.mkdir":
            path = workspace.located(os.fsdecode(args[0]))
            is_known = self._is_scratch(path) or _COMPILERS in path
            if not is_known and not os.path.exists(path):
                self.made_folders.append(path)
        elif event in ("os.remove", "shutil.rmtree"):
            self._losing(args[0], args[1], "delete")
        elif event == "os.rename":
            source, target, source_folder, target_folder = args
            self._losing(source, source_folder, "move")
            self._losing(target, target_folder, "replace")

    def _losing(self, path: Any, folder: int | None, verb: str) -> None:
        # What is in a tree is named within its folder: the tree is judged as a whole.
        if isinstance(path, str | bytes | os.PathLike) and folder in (None, _NO_FOLDER):
            self._refuse_loss(workspace.located(os.fsdecode(path)), verb)

    def _opening(self, path: str, flags: int) -> None:
        path = workspace.located(path)
        if os.path.isdir(path):
            return  # in place of a file of no name in it yet, whose own opening comes next
        self._make_own(path, keeps_content=not flags & os.O_TRUNC)
        self._refuse_change(os.path.realpath(path), "write to")
        if flags & os.O_TRUNC:
            self._refuse_loss(path, "overwrite")

    def _make_own(self, path: str, *, keeps_content: bool) -> None:
        self._is_copying = True
        try:
            workspace.before_write(path, self._view, keeps_content=keeps_content)
        finally:
            self._is_copying = False

    def _refuse_change(self, path: str, verb: str) -> None:
        """Nothing changes in the real folder, except in folders that the view links whole."""
        if self._source is None or not workspace.is_within(path, self._source):
            return
        if self._is_scratch(path) or self._is_of_tools(path):
            return
        inner = os.path.relpath(path, self._source).split(os.sep)
        folders = (os.path.join(self._view, *inner[:end]) for end in range(1, len(inner)))
        if any(os.path.islink(folder) for folder in folders):
            return
        raise CompareError(
            f"the script would {verb} {path} itself, not its copy: name it from the folder that "
            "the script is started in, not by an absolute path, or give it another folder"
        )

    def _is_of_tools(self, path: str) -> bool:
        # Libraries lock what they only read.
        is_shared = path.endswith(".lock") or "__pycache__" in path.split(os.sep)
        return is_shared or path.startswith(self._tools_own)

    def _refuse_loss(self, path: str, verb: str) -> None:
        self._refuse_change(path, verb)
        if self._is_scratch(path) or not self._holds_old_weights(path):
            return
        path = os.path.realpath(path)
        raise CompareError(
            f"the script would {verb} {path}, which was there before the comparison: give it "
            "another folder for its output, or one below the folder it is started in"
        )

    def _holds_old_weights(self, path: str) -> bool:
        files = [path]
        if os.path.isdir(path):
            files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]
        return any(
            file.endswith(_WEIGHTS)
            and os.path.isfile(file)
            and os.stat(file).st_mtime < self._began
            for file in files
        )


def _tools_own(source: str) -> tuple[str, ...]:
    """How paths in `source` begin that libraries keep for themselves: caches, temporary files."""
    found = [os.path.join(config.temporary_dir().resolve(), "")]
    with contextlib.suppress(RuntimeError):  # no home
        found.append(os.path.join(config.cache_dir().resolve(), ""))
        found.append(os.path.join(Path.home().resolve(), "."))
    profile = config.profile_path()
    if profile is not None:
        found.append(str(profile.resolve()))
    return tuple(one for one in found if workspace.is_within(one, source))
