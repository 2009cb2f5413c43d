"""`bench ddp`: blocks, percentiles, how losses compare, and the lines it prints."""

import math

import pytest

from deepytorch.cli import bench, bench_table
from deepytorch_core.bench import ddp, percentiles


@pytest.mark.parametrize(
    ("steps", "num_pairs", "repetitions"), [(5, 5, 1), (10, 5, 2), (40, 10, 4), (41, 11, 4)]
)
def test_at_least_five_blocks_and_the_steps_asked_for(steps, num_pairs, repetitions):
    schedule = ddp.schedule(steps)
    assert schedule.num_pairs == num_pairs
    assert schedule.repetitions == (repetitions, repetitions)


def test_percentiles():
    times = [float(value) for value in range(101)]
    assert percentiles.percentiles(times) == {"p50": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0}
    assert set(percentiles.percentiles([7.0]).values()) == {7.0}


def test_equal_losses_do_not_differ():
    assert ddp.loss_difference([1.0, 0.0], [1.0, 0.0]) == 0.0


def test_the_largest_relative_difference_counts():
    assert ddp.loss_difference([1.0, 2.0, -4.0], [1.0, 1.0, -3.0]) == 0.5


@pytest.mark.parametrize("pair", [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)])
def test_a_loss_that_is_no_number_differs(pair):
    assert ddp.loss_difference([pair[0], 1.0], [pair[1], 1.0]) == math.inf


def test_a_model_has_about_the_parameters_asked_for():
    model = ddp.build_model(ddp.layer_width(1 << 20))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(1 << 20, rel=0.02)


def record(**changes):
    times = {"p50": 73000.0, "p75": 80000.0}
    fields = {
        "model": "mlp",
        "parameters": 1000,
        "dtype": "float32",
        "batch_size": 32,
        "world_size": 8,
        "device": "cuda",
        "registered": False,
        "algorithm": "pipelined",
        "bytes_per_step": 4000,
        "steps": 10,
        "num_blocks": 5,
        "step_time_us": times,
        "samples_per_s": {"p50": 440.0, "p75": 400.0},
        "baseline": "nccl",
        "baseline_step_time_us": {"p50": 91000.0, "p75": 95000.0},
        "baseline_samples_per_s": {"p50": 351.0, "p75": 337.0},
        "speedup": 1.25,
        "speedup_spread": [1.2, 1.3],
        "improvement_percent": 25.0,
        "loss_difference": 0.0,
    }
    return {**fields, **changes}


def test_the_lines_have_acspeeds_form():
    _, baseline, ours, improvement = bench.ddp_lines(record())
    assert baseline.endswith("8 GPUs -- 1M/8G: p50: 0.091s 351/s p75: 0.095s 337/s")
    assert ours.endswith("8 GPUs -- 1M/8G: p50: 0.073s 440/s p75: 0.080s 400/s")
    assert improvement == (
        "improvement +25.0% (quartiles +20.0% to +30.0%), losses equal bit for bit"
    )


def test_the_lines_of_cpu_ranks():
    lines = bench.ddp_lines(record(device="cpu", registered=True, loss_difference=1e-6))
    assert "registered memory" in lines[0]
    assert "8 ranks -- 1M/8R: p50:" in lines[2]
    assert lines[3].endswith("relative difference 1e-06")


def test_the_summary_names_worst_and_median():
    def row(op, num_bytes, speedup):
        return {"op": op, "bytes": num_bytes, "dtype": "float32", "speedup": speedup}

    rows = [row("all_reduce", 1024, 9.0), row("barrier", 0, 3.0), row("all_reduce", 4096, 2.0)]
    assert bench_table.summary([*rows, row("all_reduce", 8192, 4.0)]) == [
        "all_reduce: worst 2.00x (4K float32), median 4.00x of 3",
        "barrier: worst 3.00x (no data), median 3.00x of 1",
    ]
