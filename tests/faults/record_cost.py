"""Measures the cost of the flight record, as a share of the operations that it records.

    python tests/faults/record_cost.py --json build/record.jsonl

Two ranks of one group; short blocks of operations that are recorded and that are not take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch_core.base import provenance
from deepytorch_core.testing import spawn_ranks

SIZES = (256, 4096, 65536, 1 << 20)
BLOCK_S = 0.005
PAIRS = 1000


def measure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """For each size the times of neighbouring blocks, recorded : not recorded."""
    from deepytorch_core import _core

    found = []
    for size in SIZES:
        value = torch.ones(size // 4)

        def block(recorded: bool, calls: int, value: torch.Tensor = value) -> float:
            _core.pause_flight_record(not recorded)
            begin = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(value, op=dist.ReduceOp.AVG)
            return time.perf_counter() - begin

        block(True, 100)
        took = torch.tensor(block(True, 100) / 100)
        dist.all_reduce(took, op=dist.ReduceOp.AVG)
        calls = max(10, int(BLOCK_S / took.item()))
        ratios, times = [], []
        for pair in range(PAIRS):
            order = (True, False) if pair % 2 else (False, True)
            seconds = {recorded: block(recorded, calls) for recorded in order}
            ratios.append(seconds[True] / seconds[False])
            times.append(seconds[False] / calls)
        quartiles = statistics.quantiles(ratios, n=4)
        found.append(
            {
                "bytes": size,
                "time_us": round(statistics.median(times) * 1e6, 2),
                "ratio": round(quartiles[1], 4),
                "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
                "pairs": PAIRS,
                "calls": calls,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line per size to FILE")
    options = parser.parse_args()
    environment = {"DEEPYTORCH_TUNE": "off", "DEEPYTORCH_COLLECTIVES": "native"}
    rows = spawn_ranks(measure, 2, backend="deepytorch", env=environment, timeout_s=600)[0]
    for row in rows:
        low, high = row["ratio_quartiles"]
        sys.stdout.write(
            f"{row['bytes']:>8} B  {row['time_us']:>9} us  {100 * (row['ratio'] - 1):+.2f}%  "
            f"({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})\n"
        )
        if options.json:
            told = {"bench": "flight record", "world_size": 2, **row}
            provenance.write_record(options.json, {**told, **provenance.provenance()})


if __name__ == "__main__":
    main()
