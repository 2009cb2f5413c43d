"""The forecast of a report: closed forms of known latencies and bandwidths, and what it refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch_core.report import page as report_page
from deepytorch_core.report import scaling as report_scaling

ALPHA_US, BETA_US = 23.0, 0.0007  # of a message, and of a byte: 11.4 Gbit/s
SIZES = (70_001, 5_000_003)
CALLS = (3, 2)  # in a step
STEPS = 40


def ring_us(ranks: int, num_bytes: float, halves: int = 2) -> float:
    """Return the time of all_reduce round a ring; of all_gather or reduce_scatter, half of it."""
    hops = halves * (ranks - 1)
    return hops * ALPHA_US + hops / ranks * num_bytes * BETA_US


def by_node_us(nodes: int, num_bytes: float) -> float:
    """Time all_reduce in which nodes meet, and exchange shards unless the meeting carries them."""
    others = nodes - 1
    if num_bytes * others <= 64 << 10:
        return others * ALPHA_US + others * num_bytes * BETA_US
    messages = 2 if nodes == 2 else 3 * others
    return messages * ALPHA_US + 2 * others / nodes * num_bytes * BETA_US


def row(op: str, calls: int, num_bytes: int, time_us: float, **changes: Any) -> dict[str, Any]:
    """Return a row of a group of all ranks, given bytes and time of one call."""
    values = {"group": "0", "op": op, "algorithm": f"of {num_bytes}", "reason": "measured"}
    sums = {"calls": calls, "bytes": calls * num_bytes, "time_us": calls * time_us}
    return {**values, **sums, **changes}


def course(step_ms: float, exposed_ms: float, **spent_ms: float) -> dict[str, Any]:
    """Return a course of steps that take so long, part of it exposed; one is not timed."""
    spent = {"exposed": exposed_ms, "waited": 0.0, "data": 0.0, "tuning": 0.0, **spent_ms}
    timed = STEPS - 1
    found = {f"{name}_s": timed * ms / 1e3 for name, ms in spent.items()}
    return {"seconds": timed * step_ms / 1e3, "steps": STEPS, "timed_steps": timed, **found}


def saved(ranks: int = 4, **changes: Any) -> dict[str, Any]:
    """A run whose all_reduces of two sizes take as long as a ring's."""
    rows = [
        row("all_reduce", STEPS * calls, size, ring_us(ranks, size))
        for calls, size in zip(CALLS, SIZES, strict=True)
    ]
    values = {
        "active": True,
        "options": {},
        "native_calls": sum(record["calls"] for record in rows),
        "delegated_calls": 0,
        "rows": rows,
        "decisions": [],
        "course": course(40.0, 2.0),
        "groups": {"0": ranks},
        "nodes": 1,
    }
    return {**values, **changes}


def plan(op: str, ranks: int, num_bytes: int, **times_us: float) -> dict[str, Any]:
    """Return what the tuner measured; the fastest stays."""
    chosen = min(times_us, key=times_us.__getitem__)
    return {
        "op": op,
        "ranks": ranks,
        "device": "",
        "measured_bytes": num_bytes,
        "algorithm": chosen,
        "candidates": [{"algorithm": name, "median_us": us} for name, us in times_us.items()],
    }


def communication_ms(ranks: int) -> float:
    each = zip(CALLS, SIZES, strict=True)
    return sum(calls * ring_us(ranks, size) for calls, size in each) / 1e3


def steps_of(report: dict[str, Any]) -> dict[int, float]:
    found = report_scaling.forecast(report)
    assert found["known"], found
    return {point[found["unit"]]: point["step_ms"] for point in found["forecast"]}


def reason_of(report: dict[str, Any]) -> str:
    found = report_scaling.forecast(report)
    assert not found["known"]
    return str(found["reason"])


def test_a_ring_of_ranks_follows_the_closed_form() -> None:
    found = report_scaling.forecast(saved())
    today_ms = communication_ms(4)
    hidden_share = 1 - 2.0 / today_ms
    assert (found["unit"], found["today"], found["step_ms"]) == ("ranks", 4, 40.0)
    assert found["communication_ms"] == pytest.approx(today_ms, abs=1e-4)
    assert found["hidden_share"] == pytest.approx(hidden_share, abs=1e-4)
    (model,) = found["models"]
    assert model["alpha_us"] == pytest.approx(ALPHA_US, rel=1e-6)
    assert model["beta_us"] == pytest.approx(BETA_US, rel=1e-6)
    assert (model["fitted_to"], model["error"]) == ("the operations' mean times", 0)
    assert [point["ranks"] for point in found["forecast"]] == [2, 4, 8, 16, 64]
    for point in found["forecast"]:
        exposed_ms = (1 - hidden_share) * communication_ms(point["ranks"])
        assert point["exposed_ms"] == pytest.approx(exposed_ms, abs=1e-3)
        assert point["step_ms"] == pytest.approx(38.0 + exposed_ms, abs=1e-3)
        assert point["efficiency"] == pytest.approx(40.0 / (38.0 + exposed_ms), abs=1e-3)
        assert point["extrapolated"] == (point["ranks"] > 4)


def test_what_is_hidden_stays_so_until_it_exceeds_computing() -> None:
    """Nothing is exposed today: 64 ranks have more communication than a step of computing."""
    step_ms = (communication_ms(16) + communication_ms(64)) / 2
    steps = steps_of(saved(course=course(step_ms, 0.0)))
    for ranks in (2, 4, 8, 16):
        assert steps[ranks] == pytest.approx(step_ms, abs=1e-3)
    assert steps[64] == pytest.approx(communication_ms(64), abs=1e-3)
    # Data that is waited for is no computing, which could hide anything.
    data_ms = step_ms - communication_ms(8)
    steps = steps_of(saved(course=course(step_ms, 0.0, data=data_ms)))
    assert steps[8] == pytest.approx(step_ms, abs=1e-3)
    assert steps[16] == pytest.approx(data_ms + communication_ms(16), abs=1e-3)


def test_communication_that_nothing_hides_is_added_in_full() -> None:
    today_ms = communication_ms(4)
    steps = steps_of(saved(course=course(today_ms + 10.0, today_ms)))
    for ranks, step_ms in steps.items():
        assert step_ms == pytest.approx(10.0 + communication_ms(ranks), abs=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_more_ranks_never_take_less(seed: int) -> None:
    draw = random.Random(seed)
    ranks, nodes = draw.choice([(2, 1), (3, 1), (8, 1), (16, 2), (24, 3)])
    alpha_us, beta_us = 10 ** draw.uniform(0, 3), 10 ** draw.uniform(-5, -2)
    rows = []
    for op in draw.sample(["all_reduce", "all_gather", "reduce_scatter", "broadcast"], 3):
        for size in (draw.randint(1, 1000), draw.randint(10**5, 10**7)):
            time_us = (alpha_us + beta_us * size) * draw.uniform(0.9, 1.1)
            rows.append(row(op, STEPS * draw.randint(1, 30), size, time_us))
    step_ms = draw.uniform(1.0, 300.0)
    spent = {"data": draw.uniform(0, 0.2), "waited": draw.uniform(0, 0.2)}
    timed = course(
        step_ms,
        step_ms * draw.uniform(0, 0.8),
        **{name: share * step_ms for name, share in spent.items()},
    )
    found = report_scaling.forecast(
        saved(ranks, rows=rows, course=timed, nodes=nodes, groups={"0": ranks})
    )
    assert found["known"], found
    steps = [point["step_ms"] for point in found["forecast"]]
    assert steps == sorted(steps)
    assert all(point["exposed_ms"] >= 0 for point in found["forecast"])
    assert found["forecast"][-1]["efficiency"] <= 1


def test_nodes_are_forecast_where_there_are_several() -> None:
    """Native operations go by node; the stock backend's go round all ranks, two to a node."""
    rows = [row("all_reduce", STEPS, size, by_node_us(2, size)) for size in SIZES]
    rows.append(row("all_reduce", STEPS, 1_000_000, 0.0, algorithm="delegate"))
    decisions = [
        plan("all_reduce", 4, size, delegate=ring_us(4, size), by_nodes=1e9) for size in SIZES
    ]
    # Not one of them is about this: another group's size, a GPU, a choice made in Python.
    decisions += [plan("all_reduce", 2, size, delegate=1.0) for size in SIZES]
    decisions += [{**plan("all_reduce", 4, 1, delegate=1.0), "device": "NVIDIA H200"}]
    decisions += [{"what": "buckets", "chosen": "1 MiB", "reason": "", "times_ms": {}}]

    def expected_ms(nodes: int) -> float:
        native_us = sum(by_node_us(nodes, size) for size in SIZES)
        return (native_us + ring_us(2 * nodes, 1_000_000)) / 1e3

    today_ms = expected_ms(2)
    timed = course(today_ms + 5.0, today_ms)
    found = report_scaling.forecast(saved(4, rows=rows, decisions=decisions, nodes=2, course=timed))
    assert (found["unit"], found["today"], found["ranks_per_node"]) == ("nodes", 2, 2)
    assert {model["carrier"]: model["schedule"] for model in found["models"]} == {
        "native": "hierarchical",
        "stock": "flat ring",
    }
    for point in found["forecast"]:
        assert point["step_ms"] == pytest.approx(5.0 + expected_ms(point["nodes"]), abs=1e-3)
    assert "today on 2 nodes of 2 ranks" in next(report_scaling.lines(found))


def test_the_parts_of_gathers_and_scatters_shrink_with_more_ranks() -> None:
    """FSDP: the model, and not a rank's shard of it, stays as large as it is."""
    model_bytes = 4 * 1_000_003
    rows = [
        row(op, STEPS, size // 4, ring_us(4, size, halves=1))
        for op, size in (("all_gather", model_bytes), ("reduce_scatter", 4 * 20_001))
    ]
    exposed_ms = sum(record["time_us"] for record in rows) / STEPS / 1e3
    steps = steps_of(saved(rows=rows, course=course(30.0, exposed_ms)))
    both_us = ring_us(16, model_bytes, halves=1) + ring_us(16, 4 * 20_001, halves=1)
    assert steps[16] == pytest.approx(30.0 - exposed_ms + both_us / 1e3, abs=1e-3)


def test_the_tuners_times_say_how_it_grows_and_the_run_how_long_it_takes() -> None:
    """Three times as long beside computing as when the tuner looked."""
    decisions = [
        plan("all_reduce", 4, size, pipelined=ring_us(4, size), delegate=1e9) for size in SIZES
    ]
    today_ms = 2.5 * 3 * ring_us(4, 600_000) / 1e3
    rows = [row("all_reduce", 5 * STEPS // 2, 600_000, 3 * ring_us(4, 600_000))]
    report = saved(rows=rows, decisions=decisions, course=course(20.0, today_ms))
    found = report_scaling.forecast(report)
    assert found["models"][0]["fitted_to"] == "the tuner's times"
    assert found["communication_ms"] == pytest.approx(today_ms, abs=1e-4)
    expected_ms = 20.0 - today_ms + 2.5 * 3 * ring_us(64, 600_000) / 1e3
    assert steps_of(report)[64] == pytest.approx(expected_ms, abs=1e-3)


def test_stock_operations_take_what_was_exposed_at_least() -> None:
    """Nothing but the tuner timed them: in the run twice as much was exposed."""
    rows = [row("all_reduce", STEPS, size, 0.0, algorithm="delegate") for size in SIZES]
    decisions = [plan("all_reduce", 4, size, delegate=ring_us(4, size)) for size in SIZES]
    quiet_ms = {n: sum(ring_us(n, size) for size in SIZES) / 1e3 for n in (4, 16)}
    timed = course(50.0, 2 * quiet_ms[4])
    steps = steps_of(saved(rows=rows, decisions=decisions, course=timed))
    assert steps[16] == pytest.approx(50.0 + 2 * (quiet_ms[16] - quiet_ms[4]), abs=1e-3)


def test_what_does_not_grow_is_taken_as_today() -> None:
    """Waiting, the start of operations, other operations and groups; not what was once done."""
    plain = saved()
    today_ms = communication_ms(4)
    more = [
        row("broadcast", STEPS, 1000, 200.0),
        row("all_reduce", STEPS, 1000, 300.0, group="pairs"),
        row("all_gather", STEPS // 4, 10**9, 1e6),  # not of a step
        row("barrier", STEPS, 0, 0.0, group="alone"),
    ]
    timed = course(40.0, today_ms + 0.5 + 3.0 + 1.0, waited=1.0, tuning=0.0)
    waiting = [{"group": "unknown", "operations": 3, "waited_us": 1e9}]
    report = saved(rows=plain["rows"] + more, course=timed, waiting=waiting)
    report["groups"] = {"0": 4, "pairs": 2, "alone": 1}
    found = report_scaling.forecast(report)
    assert found["as_today"] == ["all_reduce of fewer ranks", "broadcast"]
    assert (found["waited_ms"], found["besides_ms"]) == pytest.approx((1.0, 3.0), abs=1e-3)
    for ranks, step_ms in steps_of(report).items():
        expected_ms = 40.0 - today_ms + communication_ms(ranks)
        assert step_ms == pytest.approx(expected_ms, abs=1e-3)
    words = list(report_scaling.lines(found))[1]
    assert "as today: all_reduce of fewer ranks, broadcast, waiting for other ranks (1.0 ms)" in (
        words
    )


def test_waiting_for_others_is_no_communication() -> None:
    """Half of the operations' time was waiting: the model is of the other half."""
    rows = [{**record, "time_us": 2 * record["time_us"]} for record in saved()["rows"]]
    waited_us = sum(record["time_us"] for record in rows) / 2
    waiting = [{"group": "0", "operations": STEPS * sum(CALLS), "waited_us": waited_us}]
    waited_ms = communication_ms(4)
    timed = course(40.0, 2.0 + waited_ms, waited=waited_ms)
    found = report_scaling.forecast(saved(rows=rows, waiting=waiting, course=timed))
    assert found["models"][0]["alpha_us"] == pytest.approx(ALPHA_US, rel=1e-6)
    assert found["communication_ms"] == pytest.approx(communication_ms(4), abs=1e-3)
    assert found["exposed_ms"] == pytest.approx(2.0, abs=1e-3)


def test_measuring_plans_is_no_part_of_a_step() -> None:
    found = report_scaling.forecast(saved(course=course(45.0, 7.0, tuning=5.0)))
    assert (found["step_ms"], found["exposed_ms"]) == (40.0, 2.0)
    assert found["forecast"] == report_scaling.forecast(saved())["forecast"]


ONE_SIZE = [row("all_reduce", STEPS, 1 << 20, 900.0)]
SMALL_SLOW = [row("all_reduce", STEPS, 100, 900.0), row("all_reduce", STEPS, 9000, 9.0)]
STOCK = [row("all_reduce", STEPS, 1 << 20, 0.0, algorithm="delegate", reason="sparse")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"course": {}}, "let an optimizer take two steps or more"),
        ({"course": {"seconds": 0.0, "timed_steps": 0, "steps": 1}}, "no step was timed"),
        ({"groups": {}}, "save one with this version"),
        ({"groups": {"0": 1}}, "report on a run of two or more"),
        ({"groups": {}, "rows": []}, "report on a run of two or more"),
        (
            {"memory": {"devices": [{"device": "cuda:0"}]}},
            "what of them is exposed is not measured",
        ),
        ({"rows": []}, "nothing that was seen grows"),
        ({"rows": [row("broadcast", STEPS, 4, 1.0)]}, "nothing that was seen grows"),
        (
            {"rows": ONE_SIZE},
            "the native all_reduce was timed at one size, or at some less than 2 times apart",
        ),
        ({"rows": STOCK}, "nothing timed the stock all_reduce (sparse)"),
        ({"rows": SMALL_SLOW}, "don't follow a latency and a bandwidth"),
    ],
)
def test_where_too_little_is_known_it_says_what_to_do(changes: dict[str, Any], words: str) -> None:
    report = saved(**changes)
    assert words in reason_of(report)
    (line,) = report_scaling.lines(report_scaling.forecast(report))
    assert line.startswith("will it scale: not known: ")


def test_recent_times_keep_apart_what_the_sums_mix() -> None:
    """Sizes have one row together, and no time where the stock backend carried them out."""
    mean = sum(SIZES) // 2
    measured_us = sum(ring_us(4, size) for size in SIZES) / 2
    for carrier in ("native", "stock"):
        algorithm = "delegate" if carrier == "stock" else "pipelined"
        rows = [
            row(
                "all_reduce",
                2 * STEPS,
                mean,
                0.0 if carrier == "stock" else measured_us,
                algorithm=algorithm,
            )
        ]
        common = {"group": "0", "op": "all_reduce", "native": carrier == "native"}
        recent = [
            {**common, "bytes": size, "calls": STEPS, "median_us": ring_us(4, size)}
            for size in SIZES
        ]
        # None of these is of it: another group, too few, the other backend's.
        recent += [
            {**common, "group": "pairs", "bytes": 9, "calls": STEPS, "median_us": 1e6},
            {**common, "bytes": 99, "calls": 2, "median_us": 1e6},
            {**common, "native": carrier == "stock", "bytes": 9, "calls": 9, "median_us": 1e6},
        ]
        exposed_ms = 2 * measured_us / 1e3
        report = saved(rows=rows, recent=recent, course=course(60.0, exposed_ms))
        report["groups"]["pairs"] = 2
        found = report_scaling.forecast(report)
        (model,) = found["models"]
        assert (model["carrier"], model["sizes"]) == (carrier, 2)
        assert model["beta_us"] == pytest.approx(BETA_US, rel=1e-6)
        more_ms = 2 * (ring_us(16, mean) - ring_us(4, mean)) / 1e3
        assert steps_of(report)[16] == pytest.approx(60.0 + more_ms, abs=1e-3)


def test_a_second_size_may_come_from_the_tuner() -> None:
    decisions = [plan("all_reduce", 4, 1000, one_shot=ring_us(4, 1000))]
    rows = [row("all_reduce", STEPS, SIZES[1], ring_us(4, SIZES[1]))]
    found = report_scaling.forecast(saved(rows=rows, decisions=decisions))
    assert found["models"][0]["fitted_to"] == "the tuner's and the operations' own times"
    assert found["models"][0]["alpha_us"] == pytest.approx(ALPHA_US, rel=1e-3)


def test_the_command_says_it_as_text_as_json_and_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(saved()))
    runner = CliRunner()
    text = runner.invoke(cli.app, ["report", str(path)])
    assert text.exit_code == 0, text.output
    found = report_scaling.forecast(saved())
    step_ms = {point["ranks"]: point["step_ms"] for point in found["forecast"]}
    assert (
        f"will it scale: step 40.0 ms today on 4 ranks, 2.0 ms of it exposed communication "
        f"({found['hidden_share']:.0%} of {found['communication_ms']:.1f} ms hidden); "
        f"on 2 ranks {step_ms[2]:.1f} ms (" in text.output
    )
    assert f"on 64 ranks {step_ms[64]:.1f} ms (" in text.output
    assert "alpha 23.0 us and 11.4 Gbit/s, fitted to the operations' mean times" in text.output
    plain = runner.invoke(cli.app, ["report", str(path), "--json"])
    assert json.loads(plain.output)[str(path)] == {**saved(), "will_it_scale": found}


def test_the_page_has_the_slowest_ranks_forecast(tmp_path: Path) -> None:
    slow = saved(course=course(50.0, 2.0))
    report_page.write(tmp_path / "page.html", {"a": saved(), "b": slow, "c": saved(course={})})
    page = (tmp_path / "page.html").read_text()
    section = page[page.index("<h2>Will it scale?") : page.index("<h2>What was decided")]
    assert "Step 50.0 ms today on 4 ranks" in section
    assert section.count("extrapolated") == 3
    report_page.write(tmp_path / "page.html", {"c": saved(course={})})
    assert "Not known: no step was timed" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("changes", [{"course": 3}, {"groups": [4]}, {"rows": [{"calls": 1}]}])
@pytest.mark.parametrize("how", [[], ["--json"]])
def test_what_is_no_report_is_refused(
    tmp_path: Path, changes: dict[str, Any], how: list[str]
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(saved(**changes)))
    result = CliRunner().invoke(cli.app, ["report", str(path), *how])
    assert isinstance(result.exception, ValueError)
    assert f"{path} holds no report" in str(result.exception)
