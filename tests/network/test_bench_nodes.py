"""`bench collectives` and `bench ddp` over emulated nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from deepytorch.workloads import TrainJob, rounds
from deepytorch_core.bench import launch
from deepytorch_core.bench.collectives_apart import ApartJob
from deepytorch_core.bench.job import CollectivesJob, Nodes
from deepytorch_core.bench.record import (
    COLLECTIVE_FIELDS,
    DDP_FIELDS,
    TRAIN_FIELDS,
    describe_emulated,
)
from deepytorch_core.testing import run_program

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_ranks_run_on_the_nodes_and_the_records_say_so() -> None:
    nodes = Nodes(ranks_per_node=(1, 1), order="cyclic", link="500mbit", delay="1ms")
    job = CollectivesJob(
        ops=("all_reduce",),
        sizes=(4096, 262144),
        dtypes=("float32",),
        world_size=2,
        nodes=nodes,
        budget_s=0.01,
    )
    small, large = launch.run(job)
    for record in (small, large):
        assert set(record) == set(COLLECTIVE_FIELDS)
        assert record["wrong"] == record["baseline_wrong"] == 0
        emulated = dict(record["emulated"])
        assert emulated.pop("congestion_control") in ("cubic", "reno")
        assert emulated == {
            "nodes": 2,
            "ranks_per_node": [1, 1],
            "order": "cyclic",
            "link_mbit": 500.0,
            "flow_cap_mbit": None,
            "delay_ms": 1.0,
            "separate_processes": False,
        }
    # Nothing crosses the border faster than the delay and the rate allow.
    assert small["baseline_time_us"] > 1000
    assert large["baseline_time_us"] > 0.8 * 262144 * 8 / 500
    assert describe_emulated(small["emulated"]) == (
        "emulated 2 nodes of 1 rank, 500 Mbit/s, 1 ms each way, cyclic order"
    )


def test_sums_of_nodes_in_16_bits_are_right() -> None:
    """They are rounded on each node, and again."""
    job = CollectivesJob(
        ops=("all_reduce", "reduce_scatter"),
        sizes=(4096, 1 << 20),
        dtypes=("bfloat16",),
        world_size=4,
        nodes=Nodes(ranks_per_node=(2, 2)),
        budget_s=0.01,
    )
    for record in launch.run(job):
        assert record["wrong"] == record["baseline_wrong"] == 0, record
        assert record["algorithm"] not in ("delegate", "unknown")


def test_arms_in_processes_of_their_own_take_turns() -> None:
    """As on GPUs, where NCCL reads its settings once in a process."""
    nodes = Nodes(ranks_per_node=(1, 1), link="500mbit")
    job = ApartJob(
        ops=("all_reduce", "barrier"),
        sizes=(262144,),
        dtypes=("float32",),
        world_size=2,
        nodes=nodes,
        budget_s=0.01,
    )
    records = list(launch.run(job))
    assert [record["op"] for record in records] == ["all_reduce", "barrier"]
    for record in records:
        assert set(record) == set(COLLECTIVE_FIELDS)
        assert record["wrong"] == record["baseline_wrong"] == 0
        assert record["num_blocks"] >= 8
        assert record["emulated"]["separate_processes"]
        assert record["algorithm"] != "unknown"
    for arm in ("time_us", "baseline_time_us"):
        assert records[0][arm] > 0.8 * 262144 * 8 / 500, (
            "an idle link lets a little through at once"
        )


@pytest.mark.extended
def test_a_vision_model_trains_over_the_nodes(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    small = "--model timm/test_resnet --image-size 64 --batch-size 4 --steps 4 --rounds 1"
    network = "--nodes 2 --ranks-per-node 1 --link 500mbit --compress bf16"
    command = [sys.executable, "-m", "deepytorch.cli", "bench", "ddp", *small.split()]
    path = os.environ.get("PYTHONPATH", "")  # noqa: TID251
    done = run_program(
        [*command, *network.split(), "--json", str(file)],
        env={
            **os.environ,  # noqa: TID251
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{Path(sys.prefix) / 'vision'}{os.pathsep}{path}",
            "DEEPYTORCH_COMPILE": "off",
        },
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("emulated 2 nodes of 1 rank, 500 Mbit/s")
    assert all(" 2 ranks -- 2M/1R: p50: " in line for line in lines[2:6])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    parts = {row["part"]: row for row in rows}
    assert list(parts) == ["collectives", "all", "all-bf16"]  # gloo has no such hook
    for row in rows:
        assert set(row) == {*DDP_FIELDS, "command"}
        assert (row["emulated"]["nodes"], row["world_size"], row["wrong"]) == (2, 2, 0)
        # Nothing crosses the border faster than the rate allows.
        plain_bytes = 4 * row["parameters"]
        assert row["bytes_per_step"] == plain_bytes / (2 if row["part"] == "all-bf16" else 1)
        assert row["baseline_step_time_us"]["p50"] > 0.8 * plain_bytes * 8 / 500
        assert row["step_time_us"]["p50"] > 0.8 * row["bytes_per_step"] * 8 / 500
    losses = {part: row["loss_check"] for part, row in parts.items()}
    assert (losses["collectives"], losses["all-bf16"]) == ("exact", "statistical")


@pytest.mark.extended
@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed-zero2"])
def test_a_framework_trains_over_the_nodes(framework: str) -> None:
    nodes = Nodes(ranks_per_node=(1, 1), link="100mbit")
    small = {"parameters": 65536, "batch_size": 2, "steps": 5}
    job = TrainJob(framework=framework, world_size=2, nodes=nodes, **small)
    record = rounds.compare(job, rounds=1, say=print)
    assert set(record) == set(TRAIN_FIELDS)
    assert (record["emulated"]["nodes"], record["emulated"]["link_mbit"]) == (2, 100.0)
    assert record["wrong"] == 0
    assert record["native_calls"] > 0
    # Half of the weights cross the border at least once, and nothing does faster than the rate.
    for arm in ("step_time_us", "baseline_step_time_us"):
        assert record[arm] > 0.8 * record["parameters"] / 2 * 32 / 100
