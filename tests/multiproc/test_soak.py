"""The soak counts what was checked: a collective once, whoever takes part in it."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from deepytorch_core.testing import spawn_ranks
from fault_matrix import page
from soak import __main__ as command
from soak import job, watch
from soak.operations import draw
from soak.watch import Held

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


def test_a_round_tells_its_speed_and_what_its_second_half_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 10_000))
    sizes = iter((5 << 20, 12 << 20))  # in the middle, at the end
    monkeypatch.setattr(watch.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(watch, "resident_bytes", lambda: next(sizes))
    looking = watch.Watch(20.0, torch.device("cpu"))  # tenths of two seconds
    descriptor = -1
    for number in range(1, 21):  # two looks at the clock make a tenth
        looking.look(50 * number)
        if len(looking._per_s) == 7 and descriptor < 0:
            descriptor = os.memfd_create("left")
    try:
        found = looking.held()
    finally:
        os.close(descriptor)
    assert len(found.per_s) == 10
    assert found.grown_bytes == 7 << 20
    assert found.gpu_grown_bytes == 0
    assert len(found.left) == 1
    assert "memfd" in found.left[0]


def test_too_short_a_round_tells_of_no_growth() -> None:
    looking = watch.Watch(3600.0, torch.device("cpu"))
    looking.look(50)
    assert looking.held() == Held([], [], 0, 0)


def test_the_page_tells_of_the_second_half() -> None:
    held = [
        {"per_s": [80.0, 75.0, 78.0], "left": [], "grown_bytes": 3 << 19, "gpu_grown_bytes": 0},
        {"per_s": [80.0, 75.0, 78.0], "left": [], "grown_bytes": -5, "gpu_grown_bytes": 2 << 20},
    ]
    record = {
        **{"collectives": {"barrier": 7}, "participations": {"barrier": 14}, "held": held},
        **{"cycles": 0, "bytes_per_cycle": [], "failures": []},
    }
    assert page._of_soak(record) == (
        "7 random collectives of 1 kinds, each of two or more ranks and counted once (14 "
        "participations, with groups of one rank); 75 to 80 a second in each tenth of the time, "
        "the last 78; in its second half a rank grew by at most 1.5 MiB, its GPU's memory by 2.0 "
        "MiB; 0 failures"
    )


def test_more_ranks_than_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda", "--ranks", "99"])
    assert "NCCL takes one rank per GPU" in capsys.readouterr().err
