"""Run a function right after a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Calls `action(module)` once `name` is imported: now if it already is, else later.

    `undo` takes the hook away if it has not run yet.
    """

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action
        self._searching = False

    def install(self) -> None:
        module = sys.modules.get(self._name)
        if module is None:
            sys.meta_path.insert(0, self)
        else:
            self._action(module)

    def undo(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = _find_elsewhere(self, fullname, path, target)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenCall(spec.loader, self)
        return spec

    def run(self, module: ModuleType) -> None:
        self.undo()
        self._action(module)


def _find_elsewhere(
    hook: ImportHook, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        if finder is hook or not hasattr(finder, "find_spec"):
            continue
        spec = finder.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


def awaited() -> list[str]:
    """Modules whose import something of ours waits for, in the order of their names."""
    return sorted({finder._name for finder in sys.meta_path if isinstance(finder, ImportHook)})


class _ThenCall(Loader):
    """The real loader, followed by the hook; leaves no trace in the module."""

    def __init__(self, loader: Loader, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook.run(module)
