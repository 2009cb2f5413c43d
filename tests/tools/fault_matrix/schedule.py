"""In which order cases run, and which at the same time."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from fault_matrix.cases import FAULTS, Case
from fault_matrix.runner import Result, run


def run_all(
    chosen: Sequence[Case],
    *,
    repeat: int = 1,
    jobs: int = 1,
    limit_s: float | None = None,
    run_one: Callable[[Case, int | None], Result] = run,
) -> Iterator[list[Result]]:
    """Runs the cases, `repeat` times each; yields the results of one when it is through.

    Args:
        chosen: the cases. With one job they run in this order; what must run alone comes last with
            several.
        repeat: how often each.
        jobs: how many at the same time; each has ranks of its own.
        limit_s: no case begins later than so many seconds from now; None: all do.
        run_one: takes a case and a slot, see `runner.run`.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s

    def repeated(case: Case, slot: int | None) -> list[Result]:
        if deadline is not None and time.monotonic() > deadline:
            return []
        return [run_one(case, slot) for _ in range(repeat)]

    if jobs > 1:
        slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(jobs):
            slots.put(slot)

        def in_slot(case: Case) -> list[Result]:
            slot = slots.get()
            try:
                return repeated(case, slot)
            finally:
                slots.put(slot)

        together = [case for case in chosen if not FAULTS[case.fault].alone]
        with ThreadPoolExecutor(jobs) as pool:
            waiting = [pool.submit(in_slot, case) for case in together]
            yield from filter(None, (done.result() for done in as_completed(waiting)))
        chosen = [case for case in chosen if FAULTS[case.fault].alone]
    yield from filter(None, (repeated(case, None) for case in chosen))
