"""All ranks come to the same decision, whoever is late, missing or unable. Ranks are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from deepytorch_core.base import agreement
from deepytorch_core.base.agreement import agree, numbered

Prepare = Callable[[], str | None]


def ready() -> str | None:
    return None


def decide(prepares: dict[int, Prepare], size: int, limit_s: float = 60) -> dict[int, str | None]:
    """Return what each of the ranks that take part is told."""
    store = HashStore()
    if limit_s < 1:  # who is late is another matter
        for rank in prepares:
            store.set(f"here/{rank}", "1")
    with ThreadPoolExecutor(size) as pool:
        answers = {
            rank: pool.submit(
                agree, store, rank=rank, size=size, prepare=prepare, here_limit_s=limit_s
            )
            for rank, prepare in prepares.items()
        }
        return {rank: answer.result(60) for rank, answer in answers.items()}


def test_all_ready() -> None:
    assert decide(dict.fromkeys(range(4), ready), 4) == dict.fromkeys(range(4))


def test_one_rank_alone_needs_nobody() -> None:
    assert decide({0: ready}, 1) == {0: None}
    assert decide({0: lambda: "no compiler"}, 1) == {0: "no compiler"}


@pytest.mark.parametrize("unable", [0, 2])
def test_one_unable_rank_keeps_all_from_it_and_is_named(unable: int) -> None:
    prepares: dict[int, Prepare] = dict.fromkeys(range(3), ready)
    prepares[unable] = lambda: "no C++ compiler"
    assert decide(prepares, 3) == dict.fromkeys(range(3), f"rank {unable}: no C++ compiler")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_never_comes_is_named_and_nobody_hangs(missing: int) -> None:
    prepares: dict[int, Prepare] = {rank: ready for rank in range(3) if rank != missing}
    answers = decide(prepares, 3, limit_s=0.3)
    assert set(answers.values()) == {f"rank {missing} did not activate it within 0.3 s"}


def test_whom_they_wait_for_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    for missing in (0, 2):
        decide({rank: ready for rank in range(4) if rank != missing}, 4, limit_s=0.3)
        said = capfd.readouterr().err.splitlines()
        assert [line for line in said if "waiting for" in line] == [
            f"deepytorch: waiting for rank {missing} to activate deepytorch; torch's own "
            "collectives are kept if not"
        ]


def test_a_rank_that_comes_after_the_others_gave_up_gives_up_too() -> None:
    store = HashStore()

    def come(rank: int) -> str | None:
        return agree(store, rank=rank, size=2, prepare=ready, here_limit_s=0.2)

    given_up = come(1)
    assert given_up == "rank 0 did not activate it within 0.2 s"
    assert come(0) == given_up


def test_a_rank_that_takes_long_to_prepare_is_waited_for() -> None:
    may_go = threading.Event()
    store = HashStore()

    def slow() -> str | None:
        may_go.wait(60)
        return None

    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(agree, store, rank=1, size=2, prepare=slow, here_limit_s=60)
        early = pool.submit(agree, store, rank=0, size=2, prepare=ready, here_limit_s=60)
        store.get("ready/0")
        assert not early.done()
        may_go.set()
        assert (early.result(60), late.result(60)) == (None, None)


def test_what_a_rank_did_elsewhere_before_does_not_count() -> None:
    numbered(HashStore(), "decision", 0)  # a world of its own, say
    shared = HashStore()
    for _ in range(2):
        first, second = (numbered(shared, "decision", rank) for rank in range(2))
        first.set("here", "1")
        assert second.get("here") == b"1"
    assert not numbered(shared, "decision", 0).check(["here"])


def gather_with(late_s: float, **changes: Any) -> list[list[str]]:
    """Return what each of two ranks gathers, of which the second comes late."""
    store = HashStore()
    changes = {"here_limit_s": 60.0, "what": "deciding on kernels"} | changes

    def gathered(rank: int) -> list[str]:
        time.sleep(rank * late_s)
        return agreement.gather(store, rank=rank, size=2, value=f"of {rank}", **changes)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(gathered, range(2)))


def test_a_long_wait_for_what_all_gather_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agreement, "TELL_S", 0.1)
    everything = [["of 0", "of 1"]] * 2
    assert gather_with(0.5) == everything
    assert capfd.readouterr().err == (
        "deepytorch: deciding on kernels waits for rank 1, 0.1 s by now, up to 60 s\n"
    )
    assert gather_with(0.5, what="") == everything
    monkeypatch.undo()
    assert gather_with(0.5) == everything
    assert capfd.readouterr().err == ""
    with pytest.raises(RuntimeError, match="rank 1 did not come within 0.05 s"):
        gather_with(0.5, here_limit_s=0.05)
