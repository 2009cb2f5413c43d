"""Tests what is asked of rendezvous stores, torch's and programs' own. Ranks are threads."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from deepytorch_core.base import stores
from deepytorch_core.base.agreement import agree, gather, numbered

ROOT = Path(__file__).parents[2]
# A store need not have these. Only the module that knows what to do without asks for them.
OPTIONAL = {
    *("compare_set", "multi_get", "multi_set", "num_keys", "delete_key", "list_keys"),
    *("queue_push", "queue_pop", "queue_len", "has_extended_api"),
}
# Programs of their own, over stores that they make.
OWN_PROGRAMS = ("deepytorch_core/bench/", "deepytorch/workloads/")


class Five(Store):
    """As the documentation of many a project shows it: what gloo needs, and two functions more."""

    def __init__(self, below: Store) -> None:
        super().__init__()
        self.below: Any = below

    def set(self, key: str, value: Any) -> None:
        self.below.set(key, value)

    def get(self, key: str) -> bytes:
        return self.below.get(key)

    def add(self, key: str, number: int) -> int:
        return self.below.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self.below.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        self.below.wait(keys, timeout)


class Stubs(Five):
    """With a body for everything, as a class that is to be completed some day."""

    def compare_set(self, *_: Any) -> bytes:
        raise NotImplementedError("compare_set")

    def multi_get(self, *_: Any) -> list[bytes]:
        raise OSError("multi_get")

    def delete_key(self, key: str) -> bool:
        raise AttributeError(key)

    def clone(self) -> Store:
        raise TypeError("clone")


class OfItsOwn(Store):
    """Over no store of torch's, with errors of its own, and never from two threads at once."""

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self.values = values
        self.busy = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        with self.busy:
            self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self.busy:
            return self.values[key]

    def add(self, key: str, number: int) -> int:
        with self.busy:
            total = int(self.values.get(key, b"0")) + number
            self.values[key] = str(total).encode()
            return total

    def check(self, keys: list[str]) -> bool:
        with self.busy:
            return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise LookupError(keys)
            time.sleep(0.001)


class Bare(Five):
    """Exactly what gloo needs."""

    add = Store.add  # type: ignore[assignment]
    check = Store.check  # type: ignore[assignment]


class Silent(Five):
    """Counts, and keeps the number to itself: gloo does not ask."""

    def add(self, key: str, number: int) -> int:
        super().add(key, number)
        return None  # type: ignore[return-value]


Make = Callable[[int], Any]


@pytest.fixture(params=["hash", "file", "five", "stubs", "own", "prefixed", "mixed"])
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """The store that a rank has; all lead to the same."""
    below = HashStore()
    own, stubs = OfItsOwn({}), Stubs(below)
    makes: dict[str, Make] = {
        "hash": lambda rank: below,
        "file": lambda rank: FileStore(str(tmp_path / "store")),
        "five": lambda rank: Five(below),
        "stubs": lambda rank: Stubs(below),
        "own": lambda rank: own,
        "prefixed": lambda rank: PrefixStore("one", PrefixStore("two", stubs)),
        "mixed": lambda rank: Five(below) if rank == 0 else below,
    }
    return makes[request.param]


def on_ranks(size: int, act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(act, range(size), timeout=60))


def test_the_first_value_stands(store_of: Make) -> None:
    for number in range(10):
        barrier = threading.Barrier(4)

        def come(rank: int, number: int = number, barrier: threading.Barrier = barrier) -> str:
            store = store_of(rank)
            barrier.wait()
            return stores.first(store, f"verdict {number}", f"of rank {rank}")

        said = on_ranks(4, come)
        assert len(set(said)) == 1
        assert said[0] in {f"of rank {rank}" for rank in range(4)}
        assert stores.first(store_of(0), f"verdict {number}", "too late") == said[0]


def test_ranks_agree_and_gather(store_of: Make) -> None:
    kept = [store_of(rank) for rank in range(3)]

    def come(rank: int) -> tuple[str | None, list[str]]:
        own = numbered(kept[rank], "decision", rank)
        reason = agree(
            own,
            rank=rank,
            size=3,
            prepare=lambda: "no compiler" if rank == 2 else None,
            here_limit_s=30,
        )
        other = numbered(kept[rank], "facts", rank)
        return reason, gather(other, rank=rank, size=3, value=f"{rank}!", here_limit_s=30)

    assert on_ranks(3, come) == [("rank 2: no compiler", ["0!", "1!", "2!"])] * 3


def test_who_does_not_come_is_named(store_of: Make) -> None:
    kept = [store_of(rank) for rank in range(2)]
    own = numbered(kept[0], "decision", 0)
    said = agree(own, rank=0, size=2, prepare=lambda: None, here_limit_s=0.2)
    assert said == "rank 1 did not activate it within 0.2 s"
    late = numbered(kept[1], "decision", 1)
    assert agree(late, rank=1, size=2, prepare=lambda: None, here_limit_s=0.2) == said


def test_the_rest_has_something_in_its_place(store_of: Make) -> None:
    kept = store_of(0)
    store = PrefixStore("rest", kept)
    assert stores.lacks(store) == ""
    assert stores.there(store, "one") is None
    store.set("one", "1")
    store.set("two", "2")
    assert stores.there(store, "one") == "1"
    assert stores.texts(store, ["two", "one"]) == ["2", "1"]
    assert stores.wait(store, ["one", "two"], 1)
    assert not stores.wait(store, ["one", "three"], 0.05)
    stores.drop(store, ["one", "never set"])
    again = stores.connection(store)
    assert stores.there(again, "two") == "2"


def test_a_first_that_says_nothing_is_not_waited_for_without_end(store_of: Make) -> None:
    kept = store_of(0)
    store = PrefixStore("dead", kept)
    store.add("verdict/claims", 1)  # and died
    with pytest.raises(RuntimeError, match="was to give verdict did not within 0.1 s"):
        stores.first(store, "verdict", "mine", limit_s=0.1)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [(Bare, "Bare, the job's store, has no add() and no check()"), (Silent, "Silent, the job's")],
)
def test_a_store_that_can_count_nothing_is_told(
    kind: Callable[[Store], Store], missing: str
) -> None:
    kept = kind(HashStore())
    store = PrefixStore("default_pg", kept)
    assert stores.lacks(store).startswith(missing)
    with pytest.raises(RuntimeError, match=missing.partition(",")[0]):
        numbered(store, "decision", 0)


def test_what_a_store_need_not_have_is_asked_for_in_one_place() -> None:
    found = []
    for folder in ("deepytorch_core", "integrations", "deepytorch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name == "deepytorch_core/base/stores.py" or name.startswith(OWN_PROGRAMS):
                continue
            found += [
                f"{name}:{node.lineno}: {node.attr}"
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute) and node.attr in OPTIONAL
            ]
    assert found == []
