"""Keeps a script's checkpoints from harm, and from staying, while it is compared.

In the view of its folder the script writes as it likes. Elsewhere no file that was there before the
comparison is changed if it could be weights or describes some. Deleting, moving and overwriting it
is refused. Functions that write weights write to another folder instead of its place. These
functions are `torch.save`, torch.jit's and torch.export's, safetensors' `save_file` and
torch.distributed.checkpoint's writer; accelerate, transformers and DeepSpeed go through these.
Where nothing was, weights are written in place; the comparison removes them after the run, see
`made`. Any change in the real folder that the script has a view of is refused, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.base.errors import CompareError
from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import Patches
from deepytorch_core.compare import weights, workspace
from deepytorch_core.compare.made import MadeFiles
from deepytorch_core.compare.plan import Plan

_WRITES = os.O_WRONLY | os.O_RDWR
_NO_FOLDER = -1  # what Python's audit events say where a path is no name within an open folder
_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")
# Audit events of what changes a file without opening it: the verb, and which argument is the open
# folder that the file is named in.
_CHANGES = {
    "os.truncate": ("truncate", None),
    "os.chmod": ("change", 2),
    "os.utime": ("change", 3),
    "os.chown": ("change", 3),
    "os.setxattr": ("change", None),
    "os.removexattr": ("change", None),
}
# How torch names the folders that its compiler keeps for the user.
_COMPILERS = f"{os.sep}torchinductor_"
# Libraries keep these for the user: those, the Hugging Face Hub's, and what is called so.
_CACHES = re.compile(f"{_COMPILERS}|/models--|/datasets--|/[^/]*cache", re.IGNORECASE)
_CACHE_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
_Function = Callable[..., Any]
_Path = str | bytes | os.PathLike[str]
_PATHS = (str, bytes, os.PathLike)


class Saves:
    """Put in place for the life of the process by `install`."""

    def __init__(self, plan: Plan) -> None:
        self._view = os.path.realpath(plan.workspace)
        self._outside = os.path.realpath(plan.outside)
        self._source = workspace.source_of(self._view)
        self._tools_own = () if self._source is None else _tools_own(self._source)
        self._caches = _caches()
        self._began = plan.began
        self._patches = Patches()
        self._own_work = threading.local()
        # The script's files there don't stay.
        own = os.path.realpath(plan.folder)
        self._scratch = (self._view, self._outside, own, "/dev", "/proc")
        self._moved: set[str] = set()
        self._made = MadeFiles(self._outside)

    @property
    def redirected(self) -> set[str]:
        """The paths of weights that the script has written elsewhere; none of them is kept."""
        return self._moved | self._made.weights()

    @property
    def made_folders(self) -> list[str]:
        """The folders that the script has made elsewhere."""
        return self._made.folders()

    def install(self) -> None:
        """From now on: every write of weights, and what may destroy some."""
        import torch

        replace = self._patches.replace
        for owner in (torch, torch.serialization):
            replace(owner, "save", self._with(self.place, 1, "f"))
        for owner in (torch, torch.serialization, torch.jit):
            replace(owner, "load", self._with(self._found, 0, "f"))
        # torch.export, torch.package and torch.save's other callers write through these.
        replace(torch._C.PyTorchFileWriter, "__init__", self._with(self.place, 1, "file_name"))
        replace(torch._C.PyTorchFileReader, "__init__", self._with(self._found, 1, "arg0"))
        for kind in (torch._C.ScriptModule, torch._C.ScriptFunction):
            for name in ("save", "_save_for_mobile"):
                replace(kind, name, self._with(self.place, 1, "filename"))
        replace(torch, "from_file", self._mapping)
        for name in ("safetensors.torch", "safetensors.numpy"):
            ImportHook(name, self._safetensors).install()
        ImportHook("torch.distributed.checkpoint.filesystem", self._distributed).install()
        for name in ("remove", "unlink"):
            replace(os, name, self._with(self._found, 0, "path"))
        for name in ("rename", "replace"):
            replace(os, name, self._moving)
        sys.addaudithook(self._watch)

    def place(self, path: _Path) -> str:
        """Return where the weights go that the script writes to `path`."""
        path = workspace.located(os.fsdecode(path))
        if self._is_scratch(path):
            self._make_own(path, keeps_content=False)
            return path
        real = os.path.realpath(path)
        if self._is_scratch(real):
            return path
        if not self._is_real(real) and not self._was_there(real):
            if not os.path.lexists(real):
                self._made.add(real, is_weights=True)
            return path
        moved = self._redirection(path)
        os.makedirs(os.path.dirname(moved), exist_ok=True)
        self._moved.add(path)
        return moved

    def _redirection(self, path: str) -> str:
        return os.path.join(self._outside, path.lstrip(os.sep))

    def _is_scratch(self, path: str) -> bool:
        return any(workspace.is_within(path, folder) for folder in self._scratch)

    def _is_cached(self, path: str) -> bool:
        return path.startswith(self._caches) or _CACHES.search(path) is not None

    def _with(self, change: Callable[[_Path], Any], index: int, name: str) -> Any:
        """Changes the path that a function takes as argument `index` or keyword `name`."""

        def make(original: _Function) -> _Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                if _is_within_folder(kwargs):
                    return original(*args, **kwargs)
                if len(args) > index:
                    if isinstance(args[index], _PATHS):
                        args = (*args[:index], change(args[index]), *args[index + 1 :])
                elif isinstance(kwargs.get(name), _PATHS):
                    kwargs[name] = change(kwargs[name])
                return original(*args, **kwargs)

            return call

        return make

    def _moving(self, original: _Function) -> _Function:
        def move(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(("src", "dst"), args, strict=False)), **kwargs}
            source, target = given.get("src"), given.get("dst")
            is_ours = self._is_copying or _is_within_folder(kwargs)
            if is_ours or not (isinstance(source, _PATHS) and isinstance(target, _PATHS)):
                return original(*args, **kwargs)
            source, target = os.fsdecode(source), os.fsdecode(target)
            found = self._found(source)
            if found is not source or self._is_replaced_by_weights(target):
                self._refuse_loss(workspace.located(found), "move")
                target = self.place(target)
            try:
                return original(found, target)
            except OSError as error:
                ends = (workspace.located(found), workspace.located(target))
                if error.errno != errno.EXDEV or not any(map(self._is_scratch, ends)):
                    raise
            # The view may lie on another disk than what it is a view of.
            with self._copying():
                shutil.move(found, target)
            return None

        return move

    def _is_replaced_by_weights(self, path: str) -> bool:
        path = workspace.located(path)
        if self._is_scratch(path) or not self._is_weights(path):
            return False
        return self._is_real(path) or self._was_there(path)

    def _found(self, path: _Path) -> Any:
        """Return where a file lies that this rank or another may have redirected."""
        place = workspace.located(os.fsdecode(path))
        if self._is_scratch(place):
            return path
        moved = self._redirection(place)
        # A folder there may only hold what was redirected.
        is_it = place in self._moved or not os.path.isdir(moved)
        return moved if is_it and os.path.lexists(moved) else path

    def _mapping(self, original: _Function) -> _Function:
        def from_file(filename: Any, shared: Any = None, *args: Any, **kwargs: Any) -> Any:
            if shared:
                self._opening(os.fsdecode(filename), os.O_RDWR)
            return original(filename, shared, *args, **kwargs)

        return from_file

    def _safetensors(self, module: ModuleType) -> None:
        self._patches.replace(module, "save_file", self._with(self.place, 1, "filename"))
        self._patches.replace(module, "load_file", self._with(self._found, 0, "filename"))

    def _distributed(self, module: ModuleType) -> None:
        replace = self._patches.replace
        replace(module.FileSystemWriter, "__init__", self._with(self.place, 1, "path"))
        replace(module.FileSystemReader, "__init__", self._with(self._found, 1, "path"))
        # Told again where to, before each checkpoint.
        replace(module._FileSystemWriter, "reset", self._with(self.place, 1, "checkpoint_id"))
        replace(module.FileSystemReader, "reset", self._with(self._found, 1, "checkpoint_id"))

    def _watch(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook: sees every file that Python itself is about to touch."""
        if self._is_copying:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, _PATHS) and flags & _WRITES:
                self._opening(os.fsdecode(path), flags)
        elif event == "os.mkdir":
            path = workspace.located(os.fsdecode(args[0]))
            is_known = self._is_scratch(path) or _COMPILERS in path
            if not is_known and not os.path.lexists(path):
                self._made.add_folder(path)
        elif event in ("os.remove", "shutil.rmtree"):
            self._losing(args[0], args[1], "delete")
        elif event == "os.rename":
            source, target, source_folder, target_folder = args
            self._losing(source, source_folder, "move")
            self._losing(target, target_folder, "replace")
            if _is_named(source, source_folder) and _is_named(target, target_folder):
                ends = (workspace.located(os.fsdecode(path)) for path in (source, target))
                self._renaming(*ends)
        elif event in ("os.link", "os.symlink"):
            source, target, folder = args[0], args[1], args[-1]
            if event == "os.link" and _is_named(source, args[2]):
                # Writing to one name changes what the other is of.
                self._make_own(workspace.located(os.fsdecode(source)), keeps_content=True)
            if _is_named(target, folder):
                self._making(workspace.located(os.fsdecode(target)))
        elif event in _CHANGES:
            verb, index = _CHANGES[event]
            if _is_named(args[0], None if index is None else args[index]):
                self._changing(workspace.located(os.fsdecode(args[0])), verb)

    def _losing(self, path: Any, folder: int | None, verb: str) -> None:
        # Files in a tree are named within its folder: the tree is judged as a whole.
        if _is_named(path, folder):
            self._refuse_loss(workspace.located(os.fsdecode(path)), verb)

    def _opening(self, path: str, flags: int) -> None:
        path = workspace.located(path)
        if os.path.isdir(path):
            return  # in place of a file of no name in it yet, whose own opening comes next
        self._make_own(path, keeps_content=not flags & os.O_TRUNC)
        self._refuse_change(os.path.realpath(path), "write to")
        if flags & os.O_TRUNC:
            self._refuse_loss(path, "overwrite")
        if flags & os.O_CREAT:
            self._making(os.path.realpath(path))

    def _changing(self, path: str, verb: str) -> None:
        self._make_own(path, keeps_content=True)
        self._refuse_change(os.path.realpath(path), verb)
        if verb == "truncate":
            self._refuse_loss(path, verb)

    def _making(self, path: str) -> None:
        if self._is_new(path):
            self._made.add(path)

    def _is_new(self, path: str) -> bool:
        return not self._is_left_alone(path) and not os.path.lexists(path)

    def _is_left_alone(self, path: str) -> bool:
        """Whether what is made there may stay, or does not stay anyway."""
        return self._is_scratch(path) or self._is_cached(path)

    def _renaming(self, source: str, target: str) -> None:
        """Move this run's marks to new names; a name that an older file takes loses its mark."""
        sources = [source]
        if os.path.isdir(source) and not os.path.islink(source):
            sources = list(_files(source))
        for path in sources:
            new = target + path[len(source) :]
            if self._is_old(path):
                self._made.discard(new)
            elif not self._is_left_alone(new) and not self._is_old(new):
                self._made.move(path, new)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Mark what this thread does meanwhile as not the script's."""
        before, self._own_work.is_on = self._is_copying, True
        try:
            yield
        finally:
            self._own_work.is_on = before

    @property
    def _is_copying(self) -> bool:
        return getattr(self._own_work, "is_on", False)

    def _make_own(self, path: str, *, keeps_content: bool) -> None:
        with self._copying():
            workspace.before_write(path, self._view, keeps_content=keeps_content)

    def _refuse_change(self, path: str, verb: str) -> None:
        """Nothing changes in the real folder, except in folders that the view links whole."""
        if self._is_real(path):
            raise CompareError(
                f"the script would {verb} {path} itself, not its copy: name it from the folder "
                "that the script is started in, not by an absolute path, or give it another folder"
            )

    def _is_real(self, path: str) -> bool:
        """Whether the view has a file of its own in place of `path`."""
        if self._source is None or not workspace.is_within(path, self._source):
            return False
        if self._is_scratch(path) or self._is_of_tools(path):
            return False
        inner = os.path.relpath(path, self._source).split(os.sep)
        folders = (os.path.join(self._view, *inner[:end]) for end in range(1, len(inner)))
        return not any(os.path.islink(folder) for folder in folders)

    def _is_of_tools(self, path: str) -> bool:
        # Libraries lock what they only read.
        is_shared = path.endswith(".lock") or "__pycache__" in path.split(os.sep)
        return is_shared or path.startswith(self._tools_own)

    def _refuse_loss(self, path: str, verb: str) -> None:
        self._refuse_change(path, verb)
        if self._is_scratch(path) or not self._holds_weights(path):
            return
        path = os.path.realpath(path)
        raise CompareError(
            f"the script would {verb} {path}, which was there before the comparison: give it "
            "another folder for its output, or one below the folder it is started in"
        )

    def _holds_weights(self, path: str) -> bool:
        """Whether something would be lost with a file or folder that was there before."""
        return any(map(self._is_precious, _files(path) if os.path.isdir(path) else [path]))

    def _is_precious(self, path: str) -> bool:
        return self._is_old(path) and (
            self._is_weights(path)
            or any(
                self._is_old(file) and self._is_weights(file) for file in weights.described(path)
            )
        )

    def _is_weights(self, path: str) -> bool:
        names = (path, os.path.realpath(path))
        if any(map(self._is_cached, names)):
            return path.endswith(weights.TORCH)  # libraries write their caches anew
        return any(map(weights.could_be, names))

    def _is_old(self, path: str) -> bool:
        """Whether a file was there before the comparison."""
        if path in self._made or not os.path.isfile(path):
            return False
        return os.stat(path).st_mtime < self._began

    def _was_there(self, path: str) -> bool:
        return self._holds_weights(path) if os.path.isdir(path) else self._is_old(path)


def _is_named(path: Any, folder: int | None) -> bool:
    """Whether `path` is one, and no name within an open folder."""
    return isinstance(path, _PATHS) and folder in (None, _NO_FOLDER)


def _is_within_folder(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in _FOLDERS)


def _files(folder: str) -> Iterator[str]:
    for top, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(top, name)


def _caches() -> tuple[str, ...]:
    """How paths begin that libraries keep for the user, wherever that is."""
    environment = config.child_environment()
    named = [environment.get(name, "") for name in _CACHE_VARIABLES]
    found = [os.path.join(os.path.realpath(folder), "") for folder in named if folder]
    with contextlib.suppress(RuntimeError):  # no home
        found.append(os.path.join(config.cache_dir().resolve(), ""))
        found.append(os.path.join(Path.home().resolve(), "."))
    return tuple(found)


def _tools_own(source: str) -> tuple[str, ...]:
    """How paths in `source` begin that libraries keep for themselves: caches, temporary files."""
    found = [os.path.join(config.temporary_dir().resolve(), ""), *_caches()]
    profile = config.profile_path()
    if profile is not None:
        found.append(str(profile.resolve()))
    return tuple(prefix for prefix in found if workspace.is_within(prefix, source))
