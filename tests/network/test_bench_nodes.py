"""`bench collectives` over emulated nodes."""

from __future__ import annotations

from deepytorch_core.bench import launch
from deepytorch_core.bench.job import Job, Nodes
from deepytorch_core.bench.record import COLLECTIVE_FIELDS, describe_emulated


def test_ranks_run_on_the_nodes_and_the_records_say_so() -> None:
    nodes = Nodes(ranks_per_node=(2, 1), order="cyclic", link="500mbit", delay="1ms")
    job = Job(
        ops=("all_reduce", "barrier"),
        sizes=(4096, 262144),
        dtypes=("float32",),
        world_size=3,
        nodes=nodes,
        budget_s=0.01,
    )
    small, large, barrier = launch.run(job)
    for record in (small, large, barrier):
        assert set(record) == set(COLLECTIVE_FIELDS)
        assert record["wrong"] == record["baseline_wrong"] == 0
        emulated = dict(record["emulated"])
        assert emulated.pop("congestion_control") in ("cubic", "reno")
        assert emulated == {
            "nodes": 2,
            "ranks_per_node": [2, 1],
            "order": "cyclic",
            "link_mbit": 500.0,
            "flow_cap_mbit": None,
            "delay_ms": 1.0,
        }
    # Nothing crosses the border faster than the delay and the rate allow.
    assert small["baseline_time_us"] > 1000
    assert large["baseline_time_us"] > 262144 * 8 / 500
    assert describe_emulated(small["emulated"]) == (
        "emulated 2 nodes of 2+1 ranks, 500 Mbit/s, 1 ms each way, cyclic order"
    )
