"""hang.starts: who begins operations last, from several ranks' records."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

from deepytorch_core.hang import starts
from deepytorch_core.hang.record import Calls
from deepytorch_core.hang.starts import Starts
from deepytorch_core.report.summary import Report

Begun = tuple[int, float]  # sequence, and when in seconds


def calls(rank: int, begun: Iterable[Begun], *groups: str, op: str = "all_reduce") -> Calls:
    """Return calls of a rank in `groups`, whose operations are of the first of them."""
    by_what = {(groups[0], sequence, op): round(at_s * 1e9) for sequence, at_s in begun}
    return Calls(rank, "job", {}, frozenset(groups), by_what)


def test_the_rank_that_is_late_is_found() -> None:
    chance = random.Random(7)
    by_rank: dict[int, list[Begun]] = {rank: [] for rank in range(3)}
    expected = []
    for number in range(1, 42):
        late = 1 if number % 5 else chance.choice((0, 2))
        times = {rank: number + chance.uniform(0, 1e-4) for rank in range(3)}
        times[late] = number + 0.003 + chance.uniform(0, 1e-3)
        others = max(at for rank, at in times.items() if rank != late)
        if late == 1:
            expected.append(times[late] - others)
        for rank, at in times.items():
            by_rank[rank].append((number, at))
    (found,) = starts.of([calls(rank, begun, "0") for rank, begun in by_rank.items()])
    assert (found.group, found.operations, found.latest) == ("0", 41, 1)
    assert found.times_last == len(expected) == 33
    assert abs(found.lag_us / 1e6 - sorted(expected)[len(expected) // 2]) < 1e-6


def test_only_what_all_of_the_node_began_is_compared() -> None:
    first = calls(0, [(1, 1.0), (2, 2.0), (3, 3.0)], "dp", "tp")
    second = calls(1, [(1, 1.25), (2, 2.5), (4, 4.0)], "dp", "tp")
    third = calls(2, [(1, 9.0)], "tp")
    expected = Starts("dp", 2, latest=1, times_last=2, lag_us=375_000.0)
    assert starts.of([first, second, third]) == (expected,)
    assert starts.of([first, calls(1, [(1, 1.5)], "dp", op="broadcast")]) == ()
    assert starts.of([first, second, calls(2, [(3, 9.0)], "dp")]) == ()
    assert starts.of([first]) == starts.of([]) == ()


def test_of_as_many_who_holds_up_longer_is_named() -> None:
    first = calls(0, [(1, 1.0), (2, 2.5)], "0")
    second = calls(1, [(1, 1.25), (2, 2.0)], "0")
    (found,) = starts.of([first, second])
    assert (found.latest, found.times_last, found.lag_us) == (0, 1, 500_000.0)


def test_a_report_says_it_where_it_is_no_chance() -> None:
    def lines(*found: Starts) -> list[str]:
        report = Report(
            active=True,
            options={},
            rows=(),
            decisions=(),
            native_calls=0,
            delegated_calls=0,
            starts=found,
        )
        assert Report.from_dict(report.to_dict()) == report
        return [line for line in str(report).splitlines() if line.startswith("starts")]

    late = Starts("dp", 200, latest=3, times_last=168, lag_us=3200.0)
    assert lines(late) == [
        "starts: of the newest 200 operations of group dp on GPUs or by the stock backend rank 3 "
        "was the last of this node to begin 84%, 3.200 ms after the one before it"
    ]
    assert not lines(dataclasses.replace(late, times_last=100))
    assert not lines(dataclasses.replace(late, lag_us=99.0))
