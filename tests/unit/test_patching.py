"""Replaced functions: marked, refused twice, put back; and the hook that waits for an import."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import MARK, Patches


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(value: int) -> Any:
        return 2 * original(value)

    return replacement


@pytest.fixture
def module() -> ModuleType:
    module = ModuleType("some_module")

    def increment(value: int) -> int:
        """Adds one."""
        return value + 1

    module.increment = increment  # type: ignore[attr-defined]
    return module


def test_replace_and_undo(module: Any) -> None:
    original = module.increment
    patches = Patches()
    patches.replace(module, "increment", doubled)
    assert module.increment(1) == 4
    assert module.increment.__doc__ == "Adds one."
    assert getattr(module.increment, MARK) is original
    patches.undo()
    assert module.increment is original


def test_replacing_twice_is_once(module: Any) -> None:
    for patches in (Patches(), Patches()):
        patches.replace(module, "increment", doubled)
    assert module.increment(1) == 4


def test_a_name_that_is_not_there_is_skipped(module: Any) -> None:
    Patches().replace(module, "decrement", doubled)
    assert not hasattr(module, "decrement")


def test_methods_of_a_class_keep_their_kind() -> None:
    class Counter:
        def count(self, value: int) -> int:
            return value + 1

        @staticmethod
        def of(value: int) -> int:
            return value + 2

    held = dict(vars(Counter))
    patches = Patches()
    patches.replace(
        Counter, "count", lambda original: lambda self, value: 2 * original(self, value)
    )
    patches.replace(Counter, "of", doubled)
    assert Counter().count(1) == 4
    assert Counter.of(1) == Counter().of(1) == 6
    patches.undo()
    assert {name: vars(Counter)[name] for name in ("count", "of")} == {
        name: held[name] for name in ("count", "of")
    }


def test_under_somebody_elses_wrapper_ours_only_passes_on(module: Any) -> None:
    patches = Patches()
    patches.replace(module, "increment", doubled)
    ours = module.increment

    @functools.wraps(ours)
    def theirs(value: int) -> Any:
        return ours(value) + 100

    module.increment = theirs
    patches.undo()
    assert module.increment is theirs
    assert theirs(1) == 102
    # And coming back works, although their wrapper carries a copy of our mark.
    again = Patches()
    again.replace(module, "increment", doubled)
    assert module.increment(1) == 204
    again.undo()
    assert module.increment(1) == 102


def test_static_methods_of_a_class() -> None:
    class Function:
        @staticmethod
        def forward(value: int) -> int:
            return value + 1

    patches = Patches()
    patches.replace(Function, "forward", doubled)
    assert Function.forward(1) == Function().forward(1) == 4
    patches.undo()
    assert Function.forward(1) == Function().forward(1) == 2


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "module_for_the_import_hook"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_hook_acts_right_after_the_import_and_leaves_no_trace(importable: str) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    ImportHook(importable, lambda module: seen.append(module.value)).install()
    assert seen == []
    assert importable not in sys.modules
    module = importlib.import_module(importable)
    assert seen == [1]
    assert sys.meta_path == finders
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_hook_acts_at_once_when_imported_already(importable: str) -> None:
    importlib.import_module(importable)
    seen: list[int] = []
    ImportHook(importable, lambda module: seen.append(module.value)).install()
    assert seen == [1]


def test_hook_can_be_taken_away(importable: str) -> None:
    seen: list[int] = []
    hook = ImportHook(importable, lambda module: seen.append(module.value))
    hook.install()
    hook.undo()
    importlib.import_module(importable)
    assert seen == []


def test_hook_does_not_mind_a_missing_module() -> None:
    hook = ImportHook("no_such_module_anywhere", lambda module: None)
    hook.install()
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_module_anywhere")
    finally:
        hook.undo()
