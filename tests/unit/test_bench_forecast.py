"""The cost model: counts of steps and bytes, the fit, and what is said about both."""

from __future__ import annotations

import pytest

from deepytorch_core.bench import forecast
from deepytorch_core.bench.forecast import FLAT, HIERARCHICAL, TREE, Model, Point, Shape
from deepytorch_core.bench.job import BenchError
from deepytorch_core.network.link import Link
from deepytorch_core.testing.emulation import seats

TRUE = Model(alpha_us=70.0, beta_us=0.008)  # 1 Gbit/s
MIB = 1 << 20


def shape(nodes: int, ranks: int, order: str = "block") -> Shape:
    return Shape.of(seats([ranks] * nodes, order))


def test_shapes_count_the_edges_of_the_ring_that_leave_a_node():
    assert shape(2, 4) == Shape(nodes=2, ranks=8, leaving=1)
    assert shape(2, 4, "cyclic") == Shape(nodes=2, ranks=8, leaving=4)
    assert Shape.of(seats([3, 1])) == Shape(nodes=2, ranks=4, leaving=1)
    assert 1 <= shape(4, 8, "random").leaving <= 8


def test_volumes_are_the_documented_ones():
    # 2 nodes of 4 ranks: flat 2 * 7/8, hierarchical 2 * 1/2.
    flat = forecast.volume(FLAT, "all_reduce", 1000, shape(2, 4))
    level = forecast.volume(HIERARCHICAL, "all_reduce", 1000, shape(2, 4))
    assert (flat, level) == (1750, 1000)
    assert flat / level == 1.75
    assert forecast.volume(FLAT, "all_gather", 1000, shape(2, 2)) == 750
    assert forecast.volume(HIERARCHICAL, "reduce_scatter", 1000, shape(4, 2)) == 750
    assert forecast.volume(FLAT, "all_reduce", 1000, shape(2, 4, "cyclic")) == 7000
    assert forecast.steps(FLAT, "all_reduce", shape(2, 4)) == 14
    assert forecast.steps(TREE, "all_reduce", shape(16, 8)) == 8
    assert forecast.steps(HIERARCHICAL, "all_gather", shape(8, 1)) == 1
    assert forecast.steps(HIERARCHICAL, "all_reduce", shape(16, 1)) == 30


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
    one = forecast.fit([Point(FLAT, "all_reduce", MIB, shape(2, 1), 9000.0)])
    assert one.time_us(FLAT, "all_reduce", MIB, shape(2, 1)) == pytest.approx(9000.0)


def test_one_outlier_does_not_bend_the_model():
    sizes = (4096, 65536, MIB, 4 * MIB, 16 * MIB)
    found = forecast.of_run(measured(2, 2, noise=(7.0, 1.0, 1.0, 1.0, 1.0), sizes=sizes))
    assert found.models["all_reduce", FLAT].beta_us == pytest.approx(TRUE.beta_us)


def test_our_own_algorithm_has_a_model_of_its_own():
    rows = [
        {**row, "algorithm": "hierarchical", "time_us": 100 + row["bytes"] * 0.0081}
        for row in measured(2, 4)
    ]
    found = forecast.of_run(rows)
    assert set(found.models) == {("all_reduce", FLAT), ("all_reduce", HIERARCHICAL)}
    assert found.models["all_reduce", HIERARCHICAL].beta_us == pytest.approx(0.0081)


def test_the_record_holds_models_checks_and_the_table():
    record = forecast.of_run(measured(2, 4)).to_record((2, 64))
    assert record["bench"] == "forecast"
    assert len(record["checked"]) == 3
    assert {row["nodes"] for row in record["forecast"]} == {2, 64}
    assert set(record["forecast"][0]["time_us"]) == {FLAT, TREE, HIERARCHICAL}


def test_a_probe_alone_allows_a_forecast_that_is_not_checked():
    link = Link((8e9,) * 4, 1e-4, 0.1, 4.0)
    found = forecast.of_link(link, [("all_gather", MIB), ("barrier", 0)], ranks_per_node=8)
    assert found.time_us(HIERARCHICAL, "all_gather", MIB, 2) == pytest.approx(50 + MIB / 2 / 1e3)
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
