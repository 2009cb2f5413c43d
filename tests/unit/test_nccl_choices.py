"""`bench nccl`: what is measured against what, what is worth choosing, and the table of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepytorch.cli import app
from deepytorch_core.bench import launch, nccl_choices, tables, timing
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.nccl_choices import ChoicesJob, Found, NcclCandidate, NcclTrial
from deepytorch_core.bench.ops import Collective
from deepytorch_core.network import nccl_table

TREE, RING = NcclCandidate("tree", "simple"), NcclCandidate("ring", "ll")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cpu", "baseline": "gloo"}, "measured on GPUs"),
        ({"baseline": "torch-symm"}, "the choices are NCCL's"),
        ({"world_size": 1}, "one rank has nothing to choose"),
        ({"ops": ("all_to_all",)}, "no choices for 'all_to_all'; known: all_reduce, all_gather"),
        ({"sizes": ()}, "--ops and --sizes need a value each"),
    ],
)
def test_a_wrong_job_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        ChoicesJob(**{"world_size": 2, "device": "cuda", "baseline": "nccl", **changes})


class Call:
    """A call that takes `us` microseconds by `clock`."""

    def __init__(self, us: float) -> None:
        self.us = us

    def __call__(self) -> None: ...


def clock(call: timing.Call, repetitions: int) -> list[float]:
    assert isinstance(call, Call)
    return [call.us] * repetitions


class Ranks:
    def barrier(self) -> None: ...

    def maximum(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Fake:
    """Communicators on which trees take half as long from 1 MiB on, and all else as long.

    The first time rings with LL at 64 KiB do so too.
    """

    def __init__(self) -> None:
        self.open: list[NcclCandidate] = []
        self.lucky = True

    def own(self, op: Collective, num_bytes: int) -> Call:
        return Call(num_bytes / 100)

    @contextlib.contextmanager
    def choosing(self, candidate: NcclCandidate) -> Iterator[Callable[[Collective, int], Call]]:
        self.open.append(candidate)
        assert len(self.open) == 1, "a communicator holds memory: one at a time"

        def bind(op: Collective, num_bytes: int) -> Call:
            is_faster = candidate == TREE and num_bytes >= 1 << 20
            if candidate == RING and num_bytes == 1 << 16 and op.name == "all_reduce":
                is_faster, self.lucky = self.lucky, False
            return Call(self.own(op, num_bytes).us / (2 if is_faster else 1))

        yield bind
        self.open.clear()


def test_every_candidate_is_measured_and_the_best_ones_become_the_table(tmp_path: Path) -> None:
    sizes = (1 << 16, 1 << 20, 1 << 22)
    cases = [(op, size) for op in ("all_reduce", "all_gather") for size in sizes]
    found, chosen = nccl_choices.settle(cases, Fake(), clock, Ranks())
    assert len(found) == 3 * (2 + 1) * 3  # sizes, algorithms of both operations, protocols
    assert {measured.trial.op for measured in found if measured.trial.candidate == TREE} == {
        "all_reduce"
    }
    assert [measured.trial.num_bytes >> 16 for measured in nccl_choices.best(found)] == [16, 64, 1]
    result = nccl_choices.record(found, chosen, nodes=2, ranks=4)  # without the lucky one
    expected = {
        **{"collective": "all_reduce", "algorithm": "tree", "protocol": "simple"},
        **{"nodes": 2, "ranks": 4, "channels": 0},
    }
    assert result["choices"] == [
        {**expected, "first_bytes": 1 << 20, "last_bytes": (1 << 22) - 1},
        {**expected, "first_bytes": 1 << 22, "last_bytes": (1 << 23) - 1},
    ]
    table = [nccl_table.Entry(**choice) for choice in result["choices"]]
    nccl_table.write(tmp_path / "table.json", table)
    assert nccl_table.read(tmp_path / "table.json") == table
    origin = {"machine": {"name": "m"}, "versions": {"torch": "2"}, "commit": "c"}
    shown = tables.render({"f.jsonl": [{**result, **origin}]}).splitlines()
    assert shown[-8].startswith("| all_reduce | 4 | 64K | 655 us | ring ll 2.00x (2.00-2.00) | no")
    assert shown[-7].endswith("| 10,486 us | tree simple 2.00x (2.00-2.00) | yes |")
    text = list(nccl_choices.lines(result))
    assert len(text) == len(cases)
    assert text[0].endswith(": NCCL chooses")
    assert text[1].startswith("all_reduce        1M  NCCL    10485.8 us  tree ll 1.00x, ")
    assert text[1].endswith(
        "tree simple 2.00x, ring ll 1.00x, ring ll128 1.00x, ring simple 1.00x: tree simple"
    )


@pytest.mark.parametrize(
    ("speedup", "spread", "is_chosen"),
    [
        (1.5, (1.2, 1.6), True),
        (1.02, (1.01, 1.03), False),  # not worth another choice than NCCL's
        (1.5, (0.9, 1.6), False),  # noise
    ],
)
def test_only_what_is_faster_beyond_the_noise_is_chosen(
    speedup: float, spread: tuple[float, float], is_chosen: bool
) -> None:
    comparison = timing.TimeComparison(1.0, speedup, speedup, spread, 8)
    found = [Found(NcclTrial("all_reduce", 1024, TREE), comparison)]
    assert bool(nccl_choices.best(found)) == is_chosen


def test_the_fastest_is_chosen_in_any_order() -> None:
    found = [
        Found(
            NcclTrial("all_reduce", 1024, candidate),
            timing.TimeComparison(1.0, gain, gain, (gain, gain), 8),
        )
        for candidate, gain in ((TREE, 1.2), (RING, 1.4))
    ]
    for order in (found, found[::-1]):
        (best,) = nccl_choices.best(order)
        assert best.trial.candidate == RING


def test_the_command_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, chosen = nccl_choices.settle([("all_reduce", 1 << 20)], Fake(), clock, Ranks())
    jobs: list[ChoicesJob] = []

    def run(job: ChoicesJob) -> Iterator[dict[str, Any]]:
        jobs.append(job)
        yield nccl_choices.record(found, chosen, nodes=2, ranks=4)

    monkeypatch.setattr(launch, "run", run)
    table, record = tmp_path / "table.json", tmp_path / "out.jsonl"
    options = ["--nodes", "2", "--ranks-per-node", "2", "--link", "24gbit", "--sizes", "1M"]
    places = ["--write", str(table), "--json", str(record)]
    done = CliRunner().invoke(app, ["bench", "nccl", *options, *places])
    assert done.exit_code == 0, done.output
    assert jobs[0].world_size == 4
    assert jobs[0].sizes == (1 << 20,)
    assert "tree simple 2.00x" in done.output
    assert [entry.algorithm for entry in nccl_table.read(table)] == ["tree"]
    assert '"bench": "nccl"' in record.read_text()
    done = CliRunner().invoke(app, ["bench", "nccl", *options, "--world-size", "3"])
    assert "--world-size 3 is not what the nodes have, 2 + 2" in str(done.exception)
