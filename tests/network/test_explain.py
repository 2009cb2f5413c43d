"""`deepytorch explain --nodes`: what is said of a plan is what goes over the links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch_core.report import explain
from deepytorch_core.report.explain_nodes import BetweenNodes
from deepytorch_core.testing import spawn_ranks
from deepytorch_core.testing.emulation import Network, Placement, Setting, seats

MIB = 1 << 20


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["explain", *arguments])
    assert result.exit_code == 0, str(result.exception)
    return result.output


def test_the_plan_between_nodes_is_shown() -> None:
    nodes = ["--nodes", "2", "--ranks-per-node", "2", "--link", "500mbit", "--order", "cyclic"]
    found = json.loads(invoke("all_reduce", "1M", *nodes, "--json"))
    assert (found["algorithm"], found["world_size"]) == ("hierarchical", 4)
    assert found["emulated"]["ranks_per_node"] == [2, 2]
    assert found["emulated"]["link_mbit"] == 500
    plan = found["between_nodes"]
    assert plan["nodes"] == [[0, 2], [1, 3]]
    assert plan["rails"] == [[0, 1], [2, 3]]
    assert plan["sockets"] == 4
    assert plan["pieces"] * plan["piece_bytes"] >= MIB
    assert plan["sent_bytes"] == MIB
    places = [phase["where"] for phase in plan["phases"]]
    assert places == ["within nodes", "between nodes", "within nodes"]
    # Half of a piece is each rail's.
    assert plan["phases"][1]["bytes"] == plan["piece_bytes"] // 2


def test_candidates_are_measured_on_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH_NUM_SOCKETS", "3")
    output = invoke("all_gather", "1M", "--nodes", "2", "--link", "200mbit", "--measure")
    words = " ".join(output.split())
    assert "known from measured now" in words
    assert "network emulated 2 nodes of 1 rank, 200 Mbit/s" in words
    rows = [line.split() for line in output.splitlines() if " hierarchical " in line]
    (chosen,) = [line.split() for line in output.splitlines() if line.lstrip().startswith("*")]
    assert rows
    assert {"gloo", "hierarchical"} & set(chosen)
    # Half a MiB crosses in 21 ms at best.
    assert all(float(row[-3]) > 0.8 * MIB / 2 * 8 / 200 for row in rows)
    if "hierarchical" in chosen:
        assert "3 between two ranks of a rail" in words
        assert "1. between nodes" in words


def sent_bytes() -> int:
    """By this node's interface, since it is there."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (row,) = [line.split() for line in lines if line.strip().startswith("eth0:")]
    return int(row[9])


def run_each(
    rank: int, world_size: int, ops: list[str], num_bytes: int
) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """Return for each operation the bytes that this rank's node sent, and what is said of it."""
    found = []
    for op in ops:
        explain.run_once(rank, world_size, explain.PlanQuestion(op="all_reduce", bytes=4096))
        dist.barrier()
        before = sent_bytes()
        question = explain.PlanQuestion(op=op, bytes=num_bytes, world_size=world_size)
        _, _, groups = explain.run_once(rank, world_size, question)
        dist.barrier()
        found.append((op, sent_bytes() - before, groups))
    return found


@pytest.mark.parametrize(
    ("ranks_per_node", "ops", "num_bytes"),
    [
        ((2, 2), explain.OPERATIONS, 4 * MIB),
        ((2, 1), explain.OPERATIONS, 3 * MIB),
        pytest.param((1, 1, 1), explain.OPERATIONS, 3 * MIB, marks=pytest.mark.extended),
        # Round a ring.
        ((1,) * 9, ("all_reduce",), 4 * MIB),
        # By the leaders.
        ((2, 2), explain.OPERATIONS[:5], 60 << 10),
    ],
)
def test_nodes_send_what_the_plan_says(
    ranks_per_node: tuple[int, ...], ops: tuple[str, ...], num_bytes: int
) -> None:
    places = seats(ranks_per_node)
    with Network(len(ranks_per_node), Setting(rate_bps=2e9)) as network:
        results = spawn_ranks(
            run_each,
            len(places),
            list(ops),
            num_bytes,
            backend="deepytorch",
            placement=Placement(network, places),
        )
    for each in zip(*results, strict=True):
        op, _, groups = each[0]
        algorithm = "node_one_shot" if num_bytes < MIB else "hierarchical"
        plan = BetweenNodes.of(op, algorithm, groups)
        assert plan is not None, (op, groups)
        most = max(sent for _, sent, _ in each)
        # Headers, acknowledgements and the barrier come on top.
        assert plan.sent_bytes < most < 1.1 * plan.sent_bytes + 40_000, op
        assert all(BetweenNodes.of(op, algorithm, said) == plan for _, _, said in each)
        assert sorted(rank for ranks in plan.nodes for rank in ranks) == list(range(len(places)))
