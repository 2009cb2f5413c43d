"""The command: see the package's docstring."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepytorch_core.base import provenance
from deepytorch_core.testing.pool import close_idle_workers
from fault_matrix import schedule
from fault_matrix.cases import cases
from fault_matrix.page import write_page
from fault_matrix.runner import Result, names_in_shm, run


def main(arguments: Sequence[str]) -> int:
    """0 if every case that could run came out as the table promises."""
    parser = argparse.ArgumentParser(prog="python -m fault_matrix")
    parser.add_argument("patterns", nargs="*", default=["*"], help='such as "SIGKILL | shm | *"')
    parser.add_argument("--device", choices=["cpu", "cuda"], help="only paths there")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--limit-s", type=float, metavar="S", help="begin none after S seconds")
    parser.add_argument("--list", action="store_true", help="name the cases, run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line per case to FILE")
    parser.add_argument("--repeat", type=int, metavar="N", help="N times each; times are summed up")
    parser.add_argument("--stock", action="store_true", help="gloo or NCCL alone, not judged")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="make PAGE of --json's lines")
    parser.add_argument(
        "--beside",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="for --write: records of another machine, of soak or of planted hangs",
    )
    options = parser.parse_args(arguments)
    try:
        chosen = cases(options.patterns, options.device)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        sys.stdout.writelines(f"{case}\n" for case in chosen)
        return 0
    if options.write and not options.json:
        parser.error("--write needs --json: the page is made of the records")
    if options.write and options.repeat:
        parser.error("--write makes a page of single runs: leave --repeat out")
    if options.stock and options.json:
        parser.error("--json is for records of what is promised: leave --stock out")
    shared = names_in_shm()
    num_bad = num_run = 0
    for results in schedule.run_all(
        chosen,
        repeat=options.repeat or 1,
        jobs=options.jobs,
        limit_s=options.limit_s,
        run_one=functools.partial(run, stock=options.stock),
    ):
        num_run += 1
        num_bad += any(result.wrong for result in results)
        told = repeated(results) if options.repeat else results[0].to_dict()
        shown = [result for result in results if result.wrong or not options.repeat]
        summed = [f"{results[0].case}: {told}"] if options.repeat else []
        lines = [*map(_line, shown), *summed]
        sys.stdout.writelines(f"{num_run}/{len(chosen)} {line}\n" for line in lines)
        sys.stdout.flush()
        if options.json:
            provenance.write_record(options.json, {**told, **provenance.provenance()})
    close_idle_workers()
    if options.write:
        others = [each for file in options.beside for each in provenance.read_records(file)]
        write_page(options.write, [*others, *provenance.read_records(options.json)])
    left = sorted(names_in_shm() - shared)
    if left:
        sys.stdout.write(f"left in /dev/shm: {', '.join(left)}\n")
    if num_run < len(chosen):
        sys.stdout.write(f"{len(chosen) - num_run} cases were not begun: the time was up\n")
    sys.stdout.write(f"{num_run} cases, {num_bad} not as promised\n")
    return 0 if options.stock else int(bool(num_bad or left or num_run < len(chosen)))


def repeated(results: Sequence[Result]) -> dict[str, Any]:
    """For records: how long the last survivor took to be told, over several runs of a case."""
    told = [max(result.took_s) for result in results if result.took_s]
    return {
        "bench": "faults",
        **dataclasses.asdict(results[0].case),
        "runs": len(results),
        "skipped": results[0].skipped,
        "as_promised": sum(not result.wrong and not result.skipped for result in results),
        "median_s": statistics.median(told) if told else None,
        "most_s": max(told, default=None),
    }


def _line(result: Result) -> str:
    if result.skipped:
        return f"skipped {result.case}: {result.skipped}"
    state = "WRONG  " if result.wrong else "ok     "
    text = f"{state} {result.case}: {result.outcome} {result.took_s} {result.message[:150]}"
    return "\n        ".join([text, *result.wrong])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
