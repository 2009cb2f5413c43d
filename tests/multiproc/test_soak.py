"""The soak counts what was checked: a collective once, whoever takes part in it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.testing import spawn_ranks
from deepytorch_core.testing.soak import __main__ as command
from deepytorch_core.testing.soak import job
from deepytorch_core.testing.soak.operations import draw
from deepytorch_core.testing.soak.watch import Held

RANKS = 3
ASKED_EVERY = 50  # operations, so a round is a multiple of it


def test_each_collective_counts_once_and_none_of_a_single_rank() -> None:
    seed = random.randrange(1 << 30)
    told = spawn_ranks(
        job.operations, RANKS, seed, 1.0, backend="deepytorch", env={"DEEPYTORCH_TUNE": "off"}
    )
    counts = [each for each, _ in told]
    groups = job._groups(RANKS, seed)
    took_part = [Counter[str]() for _ in range(RANKS)]
    collectives: Counter[str] = Counter()
    number = 0
    while number == 0 or took_part[0].total() < counts[0].participations.total():
        for step in (draw(seed, number + each, groups) for each in range(ASKED_EVERY)):
            for rank in step.members:
                took_part[rank][step.op] += 1
            collectives[step.op] += len(step.members) > 1
        number += ASKED_EVERY
    assert [each.participations for each in counts] == took_part, f"seed {seed}"
    assert sum((each.collectives for each in counts), Counter()) == +collectives, f"seed {seed}"
    assert collectives.total() <= number


def test_cycles_tell_how_much_memory_each_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    count, kept = 50, random.randrange(1000, 9000)
    resident = iter((10_000, 20_000, 20_000 + 45 * kept))  # at the start, a tenth later, at the end
    monkeypatch.setattr(job, "_cycle", lambda *_: None)
    monkeypatch.setattr(job, "resident_bytes", lambda: next(resident))
    assert job.cycles(0, 2, count)["bytes_per_cycle"] == kept


def test_the_record_has_both_figures_and_the_growth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = draw(1, 1, [(0, 1, 2)])
    rounds = []

    def spawn(function: Any, ranks: int, *args: Any, **settings: Any) -> list[Any]:
        if function is job.cycles:
            return [
                {"left": [], "mappings": 0, "bytes_per_cycle": 1e4 * (1 + rank)}
                for rank in range(ranks)
            ]
        told = [job.Counts() for _ in range(ranks)]
        for rank in range(ranks):
            told[rank].add(step, rank)
        told[0].add(draw(1, 1, [(0,)]), 0)
        rounds.append(args)
        return [(each, Held([], [], 0, 0)) for each in told]

    monkeypatch.setattr(command, "spawn_ranks", spawn)
    file = tmp_path / "soak.jsonl"
    arguments = ["--seed", "3", "--ranks", str(RANKS), "--cycles", "20", "--json", str(file)]
    assert command.main(arguments) == 1  # two ranks grew too much
    (record,) = map(json.loads, file.read_text().splitlines())
    assert len(rounds) == 1
    assert record["collectives"] == {step.op: 1}
    assert sum(record["participations"].values()) == RANKS + 1
    assert record["bytes_per_cycle"] == [10000.0, 20000.0, 30000.0]
    assert [each.split(",")[0] for each in record["failures"]] == [
        "20 cycles left 20000 bytes each on rank 1",
        "20 cycles left 30000 bytes each on rank 2",
    ]
    assert "1 collectives of two or more ranks (4 participations)" in capsys.readouterr().out
