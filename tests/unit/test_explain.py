"""`deepytorch explain` without ranks: questions, answers, and what is printed of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch_core.bench.job import BenchError, Nodes
from deepytorch_core.report import explain
from deepytorch_core.report.explain_nodes import BetweenNodes, Phase
from deepytorch_core.report.explain_stages import Stages
from deepytorch_core.testing.emulation import EmulationError, namespaces


def plan(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "op": "all_reduce",
        "ranks": 2,
        "oversubscribed": False,
        "device": "",
        "first_bytes": 2097152,
        "last_bytes": 8388607,
        "measured_bytes": 4194304,
        "algorithm": "pipelined",
        "chunk_bytes": 131072,
        "channels": 0,
        "threads": 0,
        "delegated": 0,
        "reason": "fastest measured, chunks of 128 KiB",
        "source": "measured now",
        "candidates": [
            times("pipelined", 131072, 1000.0),
            times("pipelined", 65536, 1250.0),
            times("delegate", 0, 2500.0),
        ],
    }
    return values | changes


def times(
    algorithm: str, chunk_bytes: int, median_us: float, *, channels: int = 0
) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "chunk_bytes": chunk_bytes,
        "channels": channels,
        "threads": 512 if channels else 0,
        "delegated": 0,
        "median_us": median_us,
        "spread_us": (median_us - 10, median_us + 10),
    }


def call(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "op": "all_reduce",
        "algorithm": "pipelined",
        "reason": "fastest measured, chunks of 128 KiB",
    }
    return values | changes


QUESTION = explain.PlanQuestion(op="all_reduce", bytes=4 << 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "allreduce"}, "unknown operation 'allreduce'; known: all_reduce, all_gather"),
        ({"bytes": 0}, "give one from 1 to 1G"),
        ({"dtype": "float31"}, "unknown dtype 'float31'; known: float32"),
        ({"world_size": 1}, "--world-size must be at least 2, not 1"),
        ({"tune": "maybe"}, "unknown tune 'maybe'; known: auto, off, force"),
        (
            {"nodes": Nodes(ranks_per_node=(2, 1))},
            "--world-size 2 is not what the nodes have, 2 + 1",
        ),
    ],
)
def test_a_wrong_question_lists_what_is_valid(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError) as raised:
        explain.PlanQuestion(**({"op": "all_reduce", "bytes": 4096} | changes))
    assert message in str(raised.value)


def test_the_plan_of_the_size_is_found() -> None:
    other = plan(first_bytes=16385, last_bytes=131071, chunk_bytes=16384)
    found = explain.answer(QUESTION, [other, plan(op="broadcast"), plan()], [call()])
    assert (found.algorithm, found.chunk_bytes) == ("pipelined", 131072)
    assert found.source == "measured now"
    assert [candidate.speedup for candidate in found.candidates] == [2.5, 2.0, 1.0]
    assert [candidate.chosen for candidate in found.candidates] == [True, False, False]


GPU_PLAN = plan(
    device="NVIDIA H200, 132 SMs, over NVLink",
    ranks=4,
    algorithm="two_shot",
    chunk_bytes=0,
    channels=16,
    threads=512,
    reason="fastest in the profile, 16 x 512 threads",
    source="profile /home/user/profile.json",
    candidates=[
        times("two_shot", 0, 50.0, channels=32),
        times("two_shot", 0, 40.0, channels=16),
        times("delegate", 0, 60.0),
    ],
)


def test_what_gpus_decide_is_not_what_the_host_does() -> None:
    row = call(algorithm="one_shot", reason="small: one barrier")
    assert explain.answer(QUESTION, [GPU_PLAN], [row]).source == "rule of thumb"
    small = GPU_PLAN | {"first_bytes": 1, "last_bytes": 2}
    (found,) = explain.device_answers(QUESTION, [small, GPU_PLAN])
    assert (found.algorithm, found.ranks, found.buffer_bytes) == ("two_shot", 4, 4 << 20)
    assert [candidate.chosen for candidate in found.candidates] == [False, True, False]
    assert [candidate.speedup for candidate in found.candidates] == [1.2, 1.5, 1.0]
    # A part is that of the group the times are of.
    question = explain.PlanQuestion(op="all_gather", bytes=16 << 20, world_size=2)
    (found,) = explain.device_answers(question, [GPU_PLAN | {"op": "all_gather"}])
    assert found.buffer_bytes == 4 << 20


def test_slots_and_workers_of_cpu_reduce_are_told() -> None:
    from deepytorch.cli.explain import _cells

    tried = times("cpu_reduce", 1 << 20, 40.0, channels=3) | {"threads": 4}
    staged = GPU_PLAN | {
        "device": "NVIDIA GeForce RTX 4090, 128 SMs, without peer access",
        "algorithm": "cpu_reduce",
        "chunk_bytes": 1 << 20,
        "channels": 3,
        "threads": 4,
        "candidates": [tried, times("delegate", 0, 60.0)],
    }
    (found,) = explain.device_answers(QUESTION, [staged])
    assert found.candidates[0].chosen
    assert _cells(found.candidates[0], "NCCL")[1:3] == ["cpu_reduce", "3 slots of 1M, 4 workers"]
    divided = staged | {"delegated": 40, "candidates": [tried, tried | {"delegated": 40}]}
    (found,) = explain.device_answers(QUESTION, [divided])
    assert [candidate.chosen for candidate in found.candidates] == [False, True]
    assert _cells(found.candidates[1], "NCCL")[2] == "3 slots of 1M, 4 workers, 40% by NCCL"


def test_tables_of_gpus_come_from_the_profile(tmp_path: Path) -> None:
    from deepytorch_core import _core

    def time(algorithm: str, median_us: float, **grid: int) -> dict[str, Any]:
        spread = [median_us - 0.5, median_us + 0.5]
        values = {"algorithm": algorithm, "chunk_bytes": 0, "median_us": median_us}
        return {**values, "spread_us": spread, **grid}

    times = [time("two_shot", 97.5, channels=16, threads=512), time("delegate", 100.0)]
    row = {"collective": "all_reduce", "bytes": 268435456, "times": times}
    shape = {"deepytorch": _core.__version__, "ranks": 4, "oversubscribed": False}
    group = {"machine": "a GPU", **shape, "on_device": True, "measured": [row]}
    host = {"machine": "a CPU", **shape, "measured": []}
    old = group | {"deepytorch": "0"}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": 1, "groups": [host, old, group]}))
    (found,) = _core.device_plans(str(path))
    assert (found["device"], found["ranks"], found["measured_bytes"]) == ("a GPU", 4, 256 << 20)
    assert found["algorithm"] == "delegate"  # two_shot is faster by less than 3%
    assert found["first_bytes"] == 128 << 20
    assert found["last_bytes"] > 1 << 40
    assert found["candidates"][0]["channels"] == 16
    assert _core.device_plans(str(tmp_path / "none.json")) == []


def test_sizes_of_shared_buffers_are_one_ranks_share() -> None:
    question = explain.PlanQuestion(op="all_gather", bytes=8 << 20, world_size=2)
    found = explain.answer(question, [plan(op="all_gather")], [call(op="all_gather")])
    assert found.buffer_bytes == 4 << 20
    assert found.candidates


def test_without_times_it_is_the_rule_of_thumb() -> None:
    row = call(algorithm="one_shot", reason="small: one barrier")
    for plans in ([], [plan(algorithm=None, source="rule of thumb", candidates=[])]):
        found = explain.answer(QUESTION, plans, [row])
        assert found.source == "rule of thumb"
        assert found.algorithm == "one_shot"
        assert found.candidates == ()


def test_without_gloo_there_is_nothing_to_compare_with() -> None:
    alone = plan(candidates=[times("pipelined", 131072, 1000.0)])
    (candidate,) = explain.answer(QUESTION, [alone], [call()]).candidates
    assert candidate.speedup is None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[explain.PlanQuestion]:
    questions: list[explain.PlanQuestion] = []

    def ask(question: explain.PlanQuestion) -> explain.Answer:
        questions.append(question)
        devices = explain.device_answers(question, [GPU_PLAN])
        return dataclasses.replace(explain.answer(question, [plan()], [call()]), devices=devices)

    monkeypatch.setattr(explain, "ask", ask)
    return questions


def test_the_command_prints_candidates_and_the_choice(asked: list[explain.PlanQuestion]) -> None:
    result = CliRunner().invoke(cli.app, ["explain", "all_reduce", "4M", "--world-size", "2"])
    assert result.exit_code == 0, result.output
    for text in (
        "all_reduce of 4M, float32, 2 ranks",
        "pipelined, chunks of 128K",
        "measured now",
        "fastest measured",
        "against gloo",
        "1250.0",
        "2.50x",
        "on 4 GPUs: NVIDIA H200, 132 SMs, over NVLink",
        "against NCCL",
        "1.50x",
        "4M of bfloat16 for each buffer",
    ):
        assert text in result.output
    lines = [line for line in result.output.splitlines() if line.lstrip().startswith("*")]
    assert ["128K" in line for line in lines] == [True, False]
    assert "16 x 512" in lines[1]
    assert asked == [explain.PlanQuestion(op="all_reduce", bytes=4 << 20, tune="off")]


def test_the_command_measures_and_prints_json(asked: list[explain.PlanQuestion]) -> None:
    arguments = ["explain", "all_reduce", "4M", "--measure", "--json", "--dtype", "bfloat16"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["candidates"][0]["chosen"] is True
    assert found["source"] == "measured now"
    assert asked[0].tune == "force"
    assert asked[0].dtype == "bfloat16"
    assert asked[0].world_size >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce", "4M"], "known: all_reduce"),
        (["all_reduce", "4X"], "is no size: write bytes or 4K, 1M, 2G"),
        (["all_reduce", "4M", "--link", "1gbit"], "--link is for emulated nodes: give --nodes too"),
        (["all_reduce", "4M", "--order", "cyclic"], "--order is for emulated nodes"),
        (["all_reduce", "4M", "--nodes", "2", "--link", "fast"], "'fast' is no rate"),
        (["all_reduce", "4M", "--nodes", "2", "--order", "odd"], "known: block, cyclic, random"),
        (["all_reduce", "4M", "--nodes", "2", "--world-size", "3"], "leave it out"),
        (["all_reduce", "4M", "--nodes", "2", "--ranks-per-node", "1,2,3"], "not fit --nodes 2"),
        (["all_reduce", "4M", "--nodes", "1"], "--world-size must be at least 2, not 1"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["explain", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)


GROUP = {
    "group": "default",
    "nodes": [[0, 2], [1, 3]],
    "sockets": 4,
    "plans": [
        {
            "op": "all_reduce",
            "algorithm": "hierarchical",
            "way": "direct",
            "rails": [[0, 1], [2, 3]],
            "pieces": 8,
            "piece_bytes": 524288,
            "under_way": 7,
            "sent_bytes": 4194304,
            "phases": [
                {"where": "within nodes", "what": "ranks add up their share", "bytes": 262144},
                {"where": "between nodes", "what": "ranks of a rail swap sums", "bytes": 1023},
            ],
        }
    ],
}


def test_a_plan_between_nodes_is_that_of_the_operation_and_algorithm() -> None:
    idle = GROUP | {"group": "other", "plans": []}
    found = BetweenNodes.of("all_reduce", "hierarchical", [idle, GROUP])
    assert found is not None
    assert (found.nodes, found.rails, found.sockets) == (((0, 2), (1, 3)), ((0, 1), (2, 3)), 4)
    assert found.phases[1] == Phase("between nodes", "ranks of a rail swap sums", 1023)
    assert BetweenNodes.of("all_reduce", "delegate", [GROUP]) is None
    assert BetweenNodes.of("broadcast", "hierarchical", [GROUP]) is None


def test_the_command_prints_a_plan_between_nodes_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions: list[explain.PlanQuestion] = []

    def ask(question: explain.PlanQuestion) -> explain.Answer:
        questions.append(question)
        assert question.nodes is not None
        network = {"link_mbit": 1000.0, "flow_cap_mbit": None, "delay_ms": 0.0}
        return dataclasses.replace(
            explain.answer(question, [plan(algorithm="hierarchical")], [call()]),
            algorithm="hierarchical",
            emulated={**question.nodes.to_dict(), **network},
            between_nodes=BetweenNodes.of("all_reduce", "hierarchical", [GROUP]),
            stages=Stages.of("all_reduce", 4 << 20, (2, 2)),
        )

    monkeypatch.setattr(explain, "ask", ask)
    nodes = ["--nodes", "2", "--ranks-per-node", "2", "--link", "1gbit", "--order", "cyclic"]
    result = CliRunner().invoke(cli.app, ["explain", "all_reduce", "4M", *nodes])
    assert result.exit_code == 0, result.output
    (question,) = questions
    assert question.world_size == 4
    assert question.nodes == Nodes(ranks_per_node=(2, 2), link="1gbit", order="cyclic")
    words = " ".join(result.output.split())
    for text in (
        "all_reduce of 4M, float32, 4 ranks",
        "network emulated 2 nodes of 2 ranks, 1000 Mbit/s, cyclic order",
        "nodes ranks 0 2; ranks 1 3",
        "rails ranks 0-1, ranks 2-3",
        "sockets 4 between two ranks of a rail",
        "from node to node straight to each",
        "pieces 8 of up to 512K, 7 of them under way between nodes at a time",
        "over the network a node sends up to 4M",
        "1. within nodes ranks add up their share, 256K at a time",
        "2. between nodes ranks of a rail swap sums, 1023 bytes at a time",
        "on GPUs of such nodes plan NCCL in stages where",
        "over the network a node sends 4M, in one ring 6M",
        "2. between nodes all_reduce of ranks in the same place, 2M",
    ):
        assert text in words, text
    result = CliRunner().invoke(cli.app, ["explain", "all_reduce", "4M", *nodes, "--json"])
    found = json.loads(result.output)
    assert found["emulated"]["order"] == "cyclic"
    assert found["between_nodes"]["phases"][0]["where"] == "within nodes"


@pytest.mark.parametrize(
    ("op", "phases", "sent", "ring"),
    [
        ("all_gather", [("between", 4), ("within", 8)], 8, 12),
        ("reduce_scatter", [("within", 8), ("between", 4)], 8, 12),
        ("all_reduce", [("within", 16), ("between", 4), ("within", 16)], 16, 24),
    ],
)
def test_stages_of_gpus_send_less_than_a_ring(
    op: str, phases: list[tuple[str, int]], sent: int, ring: int
) -> None:
    # 2 nodes of 4 ranks; a ring of 8 sends 7/8.
    stages = Stages.of(op, 16 << 20, (4, 4))
    assert [(phase.where.split()[0], phase.bytes >> 20) for phase in stages.phases] == phases
    assert (stages.sent_bytes >> 20, stages.why_not) == (sent, "")
    assert stages.ring_bytes == (2 if op == "all_reduce" else 1) * 14 << 20
    assert Stages.of(op, 16 << 20, (2, 2)).ring_bytes >> 20 == ring


def test_stages_of_an_all_to_all_send_as_much() -> None:
    stages = Stages.of("all_to_all", 16 << 20, (4, 4))
    assert [(phase.where.split()[0], phase.bytes >> 20) for phase in stages.phases] == [
        ("within", 16),
        ("between", 16),
    ]
    assert stages.sent_bytes == stages.ring_bytes == 32 << 20  # half of what four ranks have


@pytest.mark.parametrize(
    ("op", "num_bytes", "nodes", "said"),
    [
        ("broadcast", 16 << 20, (2, 2), "all_gather, reduce_scatter and all_to_all"),
        ("all_reduce", 16 << 20, (4, 2), "equally many ranks"),
        ("all_reduce", 16 << 20, (1, 1), "nothing can be done within nodes"),
        ("all_reduce", (4 << 20) - 1, (2, 2), "4 MiB or more in all"),
    ],
)
def test_why_gpus_have_no_stages(
    op: str, num_bytes: int, nodes: tuple[int, ...], said: str
) -> None:
    stages = Stages.of(op, num_bytes, nodes)
    assert said in stages.why_not
    assert stages.phases == ()


def test_long_lists_of_ranks_are_cut() -> None:
    from deepytorch.cli.explain import _listed

    assert _listed(range(8), "-") == "0-1-2-3-4-5-6-7"
    assert _listed(range(64), "-") == "0-1-2-3-4-5-...-63"


def test_nodes_that_cannot_be_emulated_are_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise EmulationError("emulated nodes need the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN")

    monkeypatch.setattr(namespaces, "create", refuse)
    result = CliRunner().invoke(cli.app, ["explain", "all_reduce", "4M", "--nodes", "2"])
    assert result.exit_code != 0
    assert "CAP_NET_ADMIN" in str(result.exception)


def test_nodes_have_no_place_in_what_is_compiled() -> None:
    result = CliRunner().invoke(cli.app, ["explain", "compile", "--nodes", "2"])
    assert result.exit_code == 2
    assert "--nodes is for collectives" in result.output
