"""The cost model: counts of steps and bytes, the fit, and what is said about both."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from deepytorch_core.base.provenance import read_records
from deepytorch_core.bench import forecast
from deepytorch_core.bench.forecast import FLAT, HIERARCHICAL, TREE, Counts, JobShape, Model, Point
from deepytorch_core.bench.job import BenchError
from deepytorch_core.network.link import Link
from deepytorch_core.testing.emulation import Setting, seats

BURST = 15000  # of an emulated link of 1 Gbit/s
TRUE = Model(alpha_us=70.0, beta_us=0.008, burst_bytes=BURST)
KIB, MIB = 1 << 10, 1 << 20
RECORD = Path(__file__).parents[2] / "docs" / "results" / "network-cpu-2-cores.jsonl"


def shape(nodes: int, ranks: int, order: str = "block") -> JobShape:
    return JobShape.of(seats([ranks] * nodes, order))


def test_shapes_count_the_edges_of_the_ring_that_leave_a_node():
    assert shape(2, 4) == JobShape(nodes=2, ranks=8, leaving=1)
    assert shape(2, 4, "cyclic") == JobShape(nodes=2, ranks=8, leaving=4)
    assert JobShape.of(seats([3, 1])) == JobShape(nodes=2, ranks=4, leaving=1)
    assert 1 <= shape(4, 8, "random").leaving <= 8


def volume(schedule: str, op: str, num_bytes: int, of: JobShape) -> float:
    return forecast.counts(schedule, op, num_bytes, of).volume


def test_volumes_are_the_documented_ones():
    # 2 nodes of 4 ranks: flat 2 * 7/8, hierarchical 2 * 1/2.
    size = 1000 * KIB
    flat = volume(FLAT, "all_reduce", size, shape(2, 4))
    level = volume(HIERARCHICAL, "all_reduce", size, shape(2, 4))
    assert (flat, level) == (1750 * KIB, size)
    assert flat / level == 1.75
    assert volume(FLAT, "all_gather", size, shape(2, 2)) == 750 * KIB
    assert volume(HIERARCHICAL, "reduce_scatter", size, shape(4, 2)) == 750 * KIB
    assert volume(FLAT, "all_reduce", size, shape(2, 4, "cyclic")) == 7 * size
    assert volume(TREE, "all_reduce", size, shape(4, 2)) == 1500 * KIB


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 9, 64])
def test_a_direct_exchange_is_one_round_of_a_message_to_each_other_node(nodes):
    """The closed forms of the table in forecast.py."""
    n, others, of = 16 * MIB, nodes - 1, shape(nodes, 3)
    once = n * others / nodes
    for op in ("all_gather", "reduce_scatter"):
        # The meeting of the nodes, then the exchange.
        assert forecast.counts(HIERARCHICAL, op, n, of) == Counts(2, 2 * others, once)
        ring = 3 * nodes - 1
        expected = Counts(ring, ring, pytest.approx(n * ring / (ring + 1)))
        assert forecast.counts(FLAT, op, n, of) == expected
    if nodes == 2:
        expected = Counts(2, 2, n)  # each node's sum goes to the other, once
    elif nodes <= 8:
        expected = Counts(3, 3 * others, 2 * once)
    else:
        expected = Counts(1 + 2 * others, 3 * others, 2 * once)  # a ring after the meeting
    assert forecast.counts(HIERARCHICAL, "all_reduce", n, of) == expected
    hops = 2 * math.log2(nodes)
    assert forecast.counts(TREE, "all_reduce", n, of) == Counts(hops, hops, 2 * once)
    hops = 2 * (3 * nodes - 1)
    expected = Counts(hops, hops, pytest.approx(2 * n * (3 * nodes - 1) / (3 * nodes)))
    assert forecast.counts(FLAT, "all_reduce", n, of) == expected


def test_small_messages_travel_in_the_meeting():
    def small(op: str, num_bytes: int, nodes: int) -> Counts:
        return forecast.counts(HIERARCHICAL, op, num_bytes, shape(nodes, 1))

    # A sum is of whole messages there, which all nodes say to one; blocks are said once.
    for op in ("all_reduce", "reduce_scatter"):
        assert small(op, 64 * KIB, 2) == Counts(1, 1, 64 * KIB)
        assert small(op, 16 * KIB, 5) == Counts(1, 4, 64 * KIB)
        assert small(op, 64 * KIB, 3).rounds > 1
    assert small("all_gather", 64 * KIB, 4) == Counts(1, 3, 48 * KIB)
    assert small("all_gather", 64 * KIB + 4, 4).rounds == 2


def test_a_round_shares_its_way_and_every_message_costs_its_rank():
    model = Model(alpha_us=100.0, beta_us=0.01, latency_us=1000.0, burst_bytes=20000)
    n, of = MIB, shape(4, 1)
    on_link = (2 * n * 3 / 4 - 20000) * 0.01
    expected = 3 * 1000 + 3 * 3 * 100 + on_link
    assert model.time_us(HIERARCHICAL, "all_reduce", n, of) == pytest.approx(expected)
    expected = 6 * 1000 + 6 * 100 + on_link
    assert model.time_us(FLAT, "all_reduce", n, of) == pytest.approx(expected)
    # The idle link lets so many bytes through at once: they take no time on it.
    assert model.time_us(HIERARCHICAL, "all_gather", 20000, of) == pytest.approx(1000 + 3 * 100)


def measured(
    nodes: int, ranks: int, *, scale: float = 1.0, noise=(1.0,), sizes=(4096, MIB, 16 * MIB)
):
    return [
        {
            "op": "all_reduce",
            "bytes": size,
            "algorithm": "delegate",
            "baseline": "gloo",
            "time_us": 1.0,
            "baseline_time_us": scale
            * noise[index % len(noise)]
            * TRUE.time_us(FLAT, "all_reduce", size, shape(nodes, ranks)),
            "emulated": {
                "nodes": nodes,
                "ranks_per_node": [ranks] * nodes,
                "order": "block",
                "link_mbit": 1000.0,
                "flow_cap_mbit": None,
                "delay_ms": 0.0,
            },
        }
        for index, size in enumerate(sizes)
    ]


def test_a_fit_finds_the_model_and_predicts_other_numbers_of_nodes():
    found = forecast.of_run(measured(2, 4), earlier=measured(4, 4))
    model = found.models["all_reduce", FLAT]
    assert model.alpha_us == pytest.approx(TRUE.alpha_us)
    assert model.beta_us == pytest.approx(TRUE.beta_us)
    assert max(abs(error) for _, error in found.errors()) < 1e-9
    expected = TRUE.time_us(FLAT, "all_reduce", MIB, shape(512, 4))
    assert found.time_us(FLAT, "all_reduce", MIB, 512) == pytest.approx(expected)
    assert found.time_us(HIERARCHICAL, "all_reduce", 16 * MIB, 2) < found.time_us(
        FLAT, "all_reduce", 16 * MIB, 2
    )


@pytest.mark.parametrize("op", forecast.OPERATIONS)
@pytest.mark.parametrize("delay_ms", [0.0, 1.5])
def test_two_nodes_of_ours_predict_four_and_sixteen(op: str, delay_ms: float):
    true = Model(130.0, 0.0085, latency_us=1e3 * delay_ms, burst_bytes=BURST)

    def rows(nodes: int):
        return [
            {
                **row,
                "op": op,
                "algorithm": "hierarchical",
                "time_us": true.time_us(HIERARCHICAL, op, row["bytes"], shape(nodes, 1)),
                "emulated": {**row["emulated"], "delay_ms": delay_ms},
            }
            for row in measured(nodes, 1, sizes=(65536, 262144, MIB + 12, 16 * MIB))
        ]

    found = forecast.of_run(rows(2), earlier=[*rows(4), *rows(16)])
    ours = [error for point, error in found.errors() if point.schedule == HIERARCHICAL]
    assert len(ours) == 12
    assert max(map(abs, ours)) < 1e-6


def test_the_recorded_two_nodes_predict_the_recorded_four():
    """Ours from 256 KiB on, within a fifth; docs/network.md says what misses."""
    records = read_records(RECORD)

    def rows(nodes: int):
        return [
            row
            for row in records
            if row.get("bench") != "forecast"
            and row["emulated"]["ranks_per_node"] == [1] * nodes
            and row["emulated"]["link_mbit"] == 1000
        ]

    found = forecast.of_run(rows(2), earlier=rows(4))
    of_four = [(point, error) for point, error in found.errors() if point.shape.nodes == 4]
    ours = {
        (point.op, point.num_bytes): round(error, 2)
        for point, error in of_four
        if point.schedule == HIERARCHICAL
    }
    assert len(of_four) == 2 * len(ours) == 30
    assert {
        at: error for at, error in ours.items() if at[1] >= 256 * KIB and abs(error) > 0.2
    } == {}


def test_the_burst_is_that_of_the_emulated_link():
    assert Setting(rate_bps=1e9).burst_bytes == BURST
    assert Setting(rate_bps=24e9).burst_bytes == 180_000  # 60 us
    assert Setting().burst_bytes == 0


def test_points_of_other_node_counts_show_how_far_off_the_model_is():
    found = forecast.of_run(measured(2, 4), earlier=measured(4, 4, scale=1.25))
    text = "\n".join(forecast.lines(found, (2, 4)))
    against = "predicted against measured: all_reduce, flat ring"
    assert f"{against}, 2 nodes: 4K +0%, 1M +0%, 16M +0%" in text
    assert f"{against}, 4 nodes: 4K -20%, 1M -20%, 16M -20%" in text
    other = [{**row, "emulated": {**row["emulated"], "link_mbit": 500.0}} for row in measured(4, 4)]
    assert len(forecast.of_run(measured(2, 4), earlier=other).points) == 3, "another link"


def test_a_fit_to_noise_has_no_negative_parts():
    for noise in ((1.2, 0.8), (0.5, 1.5, 1.0), (1.0, 1.0, 0.5)):
        model = forecast.of_run(measured(2, 2, noise=noise)).models["all_reduce", FLAT]
        assert min(model.alpha_us, model.beta_us) >= 0
        assert max(model.alpha_us, model.beta_us) > 0
    fitted = forecast.fit([Point(FLAT, "all_reduce", MIB, shape(2, 1), 9000.0)])
    assert fitted.time_us(FLAT, "all_reduce", MIB, shape(2, 1)) == pytest.approx(9000.0)


def test_one_outlier_does_not_bend_the_model():
    sizes = (4096, 65536, MIB, 4 * MIB, 16 * MIB)
    found = forecast.of_run(measured(2, 2, noise=(7.0, 1.0, 1.0, 1.0, 1.0), sizes=sizes))
    assert found.models["all_reduce", FLAT].beta_us == pytest.approx(TRUE.beta_us)


def test_our_own_algorithm_has_a_model_of_its_own():
    slower = Model(120.0, 0.0081, burst_bytes=BURST)
    rows = [
        {
            **row,
            "algorithm": "hierarchical",
            "time_us": slower.time_us(HIERARCHICAL, "all_reduce", row["bytes"], shape(2, 4)),
        }
        for row in measured(2, 4)
    ]
    found = forecast.of_run(rows)
    assert set(found.models) == {("all_reduce", FLAT), ("all_reduce", HIERARCHICAL)}
    assert found.models["all_reduce", HIERARCHICAL].beta_us == pytest.approx(0.0081)
    assert found.models["all_reduce", FLAT].beta_us == pytest.approx(0.008)


def test_the_record_holds_models_checks_and_the_table():
    record = forecast.of_run(measured(2, 4)).to_record((2, 64))
    assert record["bench"] == "forecast"
    assert len(record["checked"]) == 3
    (model,) = record["models"]
    assert (model["latency_us"], model["burst_bytes"]) == (0.0, BURST)
    assert model["alpha_us"] == pytest.approx(TRUE.alpha_us)
    assert {row["nodes"] for row in record["forecast"]} == {2, 64}
    assert set(record["forecast"][0]["time_us"]) == {FLAT, TREE, HIERARCHICAL}


def test_a_probe_alone_allows_a_forecast_that_is_not_checked():
    link = Link((8e9,) * 4, 1e-4, 0.1, 4.0)
    found = forecast.of_link(link, [("all_gather", MIB), ("barrier", 0)], ranks_per_node=8)
    # Half a round trip for each of the meeting and the exchange.
    expected = 2 * 50 + MIB / 2 / 1e3
    assert found.time_us(HIERARCHICAL, "all_gather", MIB, 2) == pytest.approx(expected)
    lines = list(forecast.lines(found, (2,)))
    assert lines[-1].startswith("predicted against measured: nothing")
    assert any("all_gather" in line and " - " in line for line in lines), "no tree"


def test_without_several_nodes_there_is_nothing_to_fit():
    with pytest.raises(BenchError, match="--forecast needs a measured link: give --nodes 2"):
        forecast.of_run([{**measured(2, 1)[0], "emulated": None}])


@pytest.mark.parametrize("text", ["", "1,2", "two", "2;4", "5000"])
def test_what_are_no_numbers_of_nodes(text):
    with pytest.raises(BenchError, match="--forecast"):
        forecast.parse_nodes(text)


def test_numbers_of_nodes():
    assert forecast.parse_nodes("8, 2,4,2") == (2, 4, 8)
