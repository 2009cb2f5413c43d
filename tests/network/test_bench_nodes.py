"""`bench collectives` over emulated nodes."""

from __future__ import annotations

from deepytorch_core.bench import launch
from deepytorch_core.bench.collectives_apart import ApartJob
from deepytorch_core.bench.job import Job, Nodes
from deepytorch_core.bench.record import COLLECTIVE_FIELDS, describe_emulated


def test_ranks_run_on_the_nodes_and_the_records_say_so() -> None:
    nodes = Nodes(ranks_per_node=(1, 1), order="cyclic", link="500mbit", delay="1ms")
    job = Job(
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
        "emulated 2 nodes of 1 ranks, 500 Mbit/s, 1 ms each way, cyclic order"
    )


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
