"""`bench ddp`: blocks, percentiles, how losses compare, the lines it prints, what it refuses."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from deepytorch.cli import app, bench_ddp, bench_table
from deepytorch.examples import vision_models
from deepytorch.workloads.headline import ddp as vision
from deepytorch.workloads.headline import vision as builder
from deepytorch.workloads.headline.precision import Precision
from deepytorch_core.bench import ddp, launch, percentiles
from deepytorch_core.bench.job import BenchError, Nodes
from deepytorch_core.bench.record import DDP_FIELDS


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
        "wrong": 0,
        "emulated": None,
    }
    return {**fields, **changes}


def test_the_lines_have_acspeeds_form():
    _, baseline, ours, improvement = bench_ddp.ddp_lines(record())
    assert baseline.endswith("8 GPUs -- 1M/8G: p50: 0.091s 351/s p75: 0.095s 337/s")
    assert ours.endswith("8 GPUs -- 1M/8G: p50: 0.073s 440/s p75: 0.080s 400/s")
    assert improvement == (
        "improvement +25.0% (quartiles +20.0% to +30.0%), losses equal bit for bit"
    )
    differing = bench_ddp.ddp_lines(record(wrong=1, loss_difference=0.5))
    assert differing[-1] == "improvement not claimed, losses relative difference 0.5"


def test_the_lines_of_cpu_ranks():
    lines = bench_ddp.ddp_lines(record(device="cpu", registered=True, loss_difference=1e-6))
    assert "registered memory" in lines[0]
    assert "8 ranks -- 1M/8R: p50:" in lines[2]
    assert lines[3].endswith("relative difference 1e-06")


def test_the_summary_names_worst_and_median():
    def row(op, num_bytes, speedup):
        fields = {"op": op, "bytes": num_bytes, "dtype": "float32", "speedup": speedup}
        return {**fields, "wrong": int(speedup < 1)}  # what is wrong is not claimed

    rows = [row("all_reduce", 1024, 9.0), row("barrier", 0, 3.0), row("all_reduce", 4096, 2.0)]
    rows += [row("all_reduce", 2048, 0.5), row("broadcast", 1024, 0.5)]
    assert bench_table.summary([*rows, row("all_reduce", 8192, 4.0)]) == [
        "all_reduce: worst 2.00x (4K float32), median 4.00x of 3",
        "barrier: worst 3.00x (no data), median 3.00x of 1",
    ]


EMULATED = {
    **{"nodes": 2, "ranks_per_node": [4, 4], "order": "block", "link_mbit": 24000.0},
    **{"flow_cap_mbit": None, "delay_ms": 0.0, "separate_processes": True},
}


def of_vision(**changes):
    fields = {"model": "resnet50", "precision": "amp", "image_size": 224, "part": "collectives"}
    return record(**{**fields, "loss_difference": 1e-3, **changes})


def test_the_lines_of_a_vision_model():
    rows = [of_vision(), of_vision(part="all", speedup=1.5, improvement_percent=50.0)]
    lines = bench_ddp.vision_lines(rows)
    assert lines[0].startswith("resnet50 in amp, 1,000 parameters, 224 x 224 pixels, ")
    assert lines[0].endswith("10 steps of 32 samples in 5 rounds")
    assert lines[1:] == [
        "plain            8 GPUs -- 1M/8G: p50: 0.091s 351/s p75: 0.095s 337/s",
        "ours-collectives 8 GPUs -- 1M/8G: p50: 0.073s 440/s p75: 0.080s 400/s",
        "ours             8 GPUs -- 1M/8G: p50: 0.073s 440/s p75: 0.080s 400/s",
        "collectives and buckets: 1.25x (quartiles 1.20 to 1.30), +25.0 %",
        "all: 1.50x (quartiles 1.20 to 1.30), +50.0 %",
        "losses differ by at most 0.1 %, dropout off",
    ]
    assert "all: not claimed" in bench_ddp.vision_lines([of_vision(part="all", wrong=1)])


@pytest.mark.parametrize(
    ("counts", "layout"), [([4, 4], "2M/4G"), ([1] * 8, "8M/1G"), ([5, 3], "2M/5+3G")]
)
def test_the_layout_is_that_of_the_emulated_nodes(counts, layout):
    emulated = {**EMULATED, "nodes": len(counts), "ranks_per_node": counts}
    lines = bench_ddp.vision_lines([of_vision(emulated=emulated)])
    assert lines[1].startswith(f"emulated {len(counts)} nodes of ")
    assert f"8 GPUs -- {layout}: p50:" in lines[2]


@pytest.mark.parametrize(
    ("differences", "said"),
    [((0.0, 0.0), "equal bit for bit"), ((0.0, None), "a loss is not a number")],
)
def test_the_line_of_the_losses(differences, said):
    rows = [of_vision(loss_difference=difference) for difference in differences]
    assert said in bench_ddp.vision_lines(rows)[-1]


def job(**changes):
    return vision.VisionJob(**{"model": "resnet18", "world_size": 2, **changes})


def test_a_vision_job_comes_back_from_json_with_its_row():
    nodes = Nodes(ranks_per_node=(1, 1), link="24gbit")
    vision_job = job(
        model="timm/resnet18", precision="bf16", image_size=32, batch_size=3, nodes=nodes
    )
    back = vision.VisionJob.from_json(vision_job.to_json())
    assert back == vision_job
    assert (back.row.precision, back.micro_batch) == ("bf16", 3)
    assert back.shape["image"] == 32
    assert back.row.more["model"] == "timm/resnet18"
    environment = dataclasses.replace(back, arm="ours-collectives").environment(1, [])
    assert (environment["DEEPYTORCH_COMPILE"], environment["GROUP_RANK"]) == ("off", "1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp8"}, "unknown precision 'fp8'; known: fp32, amp, bf16"),
        ({"compress": "fp8"}, "unknown --compress 'fp8': expected bf16, or leave it out"),
        ({"compress": "bf16", "precision": "bf16"}, "in bfloat16 as they are: leave --compress"),
        ({"world_size": 1}, "one rank reduces nothing: --world-size 1"),
        ({"image_size": 0}, "--image-size must be at least 1"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"device": "cuda"}, "with --device cuda is compared with nccl: leave --baseline out"),
    ],
)
def test_what_a_vision_job_refuses(changes, message):
    with pytest.raises(BenchError, match=message):
        job(**changes)


@pytest.fixture
def no_launch(monkeypatch):
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("it was measured"))


@pytest.fixture
def resnets(monkeypatch):
    """torchvision and timm without either: each has a resnet18, timm alone a vit."""

    def load(wanted, image_size=None):
        prefix, _, name = wanted.rpartition("/")
        if name not in ("resnet18", "vit"):
            raise vision_models.UnknownModelError(f"no model {wanted!r}; --model list prints all")
        library = prefix or ("timm" if name == "vit" else "torchvision")
        return vision_models.VisionModel(name, library, image_size or 224, torch.nn.Linear)

    monkeypatch.setattr(vision_models, "load", load)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--precision amp", "--precision is of vision models: give --model resnet50, or leave"),
        ("--image-size 32", "--image-size is of vision models"),
        ("--nodes 2", "--nodes is of vision models"),
        ("--compress bf16", "--compress is of vision models"),
        ("--model resnet18 --parameters 4M", "--parameters is of --model mlp: resnet18 has its"),
        ("--model resnet18 --link 24gbit", "--link is for emulated nodes: give --nodes too"),
        ("--model resnet18 --nodes 2 --world-size 3", "is not what the nodes have, 1 + 1"),
        ("--model resnet18 --rounds 0", "--rounds must be at least 1"),
        ("--model resnet18 --steps 3", "--steps must be at least 4 in 2 rounds, not 3"),
        ("--model resnet18 --image-size -1", "--image-size must be 0 or more"),
        ("--model resnet18 --baseline nccl", "use --baseline gloo"),
        ("--model resnet18 --precision fp8", "unknown precision 'fp8'"),
        ("--model resnet17", "no model 'resnet17'; --model list prints all"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    no_launch, resnets, arguments, message
):
    result = CliRunner().invoke(app, ["bench", "ddp", *arguments.split()])
    assert isinstance(result.exception, BenchError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("given", "name"),
    [("resnet18", "resnet18"), ("timm/resnet18", "timm/resnet18"), ("vit", "timm/vit")],
)
def test_a_model_has_one_name(resnets, given, name):
    assert vision.known(given, 0) == (name, 224)
    assert vision.known(given, 32) == (name, 32)


class Turns:
    """In place of `launch.run`: every arm's step takes what is said of it."""

    def __init__(self, times, losses):
        self.times, self.losses, self.jobs = times, losses, []

    def __call__(self, job):
        self.jobs.append(job)
        yield {
            "arm": job.arm,
            "step_time_us": [self.times[job.arm]] * job.steps,
            "units": 64,
            "losses": self.losses.get(job.arm, [2.0, 1.0]),
            "parameters": 1000,
            "algorithm": "pipelined" if "ours" in job.arm else "unknown",
            "registered": "ours" in job.arm,
            "choices": {"SGD": "fused"} if job.arm == "ours" else {},
            **{"baseline_settings": {}, "machine": {}, "versions": {}, "commit": "c"},
        }


TIMES = {"plain": 3000.0, "ours-collectives": 2000.0, "ours": 1000.0}
TIMES = {**TIMES, "plain-bf16": 2500.0, "ours-bf16": 600.0}


def test_the_arms_of_a_vision_model_take_turns_and_give_a_record_each(
    monkeypatch, resnets, tmp_path
):
    turns = Turns(TIMES, {})
    monkeypatch.setattr(launch, "run", turns)
    file = tmp_path / "out.jsonl"
    command = ["bench", "ddp", "--model", "resnet18", "--precision", "bf16", "--steps", "5"]
    result = CliRunner().invoke(app, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    arms = ["plain", "ours-collectives", "ours"]
    assert [started.arm for started in turns.jobs] == [*arms, *reversed(arms)]
    assert {(started.batch_size, started.image_size, started.steps) for started in turns.jobs} == {
        (32, 224, 3)
    }
    part, everything = map(json.loads, file.read_text().splitlines())
    for row in (part, everything):
        assert set(row) == {*DDP_FIELDS, "command"}
        assert (row["steps"], row["num_blocks"], row["wrong"]) == (6, 2, 0)
        assert (row["dtype"], row["bytes_per_step"]) == ("bfloat16", 2000)
        assert row["baseline_samples_per_s"]["p50"] == 10666.67
        assert (row["registered"], row["loss_check"]) == (True, "exact")
    assert (part["part"], part["speedup"], part["choices"]) == ("collectives", 1.5, {})
    assert (everything["part"], everything["speedup"]) == ("all", 3.0)
    assert (everything["step_time_us"]["p95"], everything["choices"]) == (1000.0, {"SGD": "fused"})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compressed_arms_are_further_comparisons(monkeypatch, resnets, tmp_path, device):
    turns = Turns(TIMES, {"ours-bf16": [2.0, 1.01]})
    monkeypatch.setattr(launch, "run", turns)
    file = tmp_path / "out.jsonl"
    command = ["bench", "ddp", "--model", "resnet18", "--compress", "bf16", "--rounds", "1"]
    result = CliRunner().invoke(app, [*command, "--device", device, "--json", str(file)])
    assert result.exit_code == 0, result.output
    stock = ["plain-bf16"] if device == "cuda" else []  # torch's hook refuses gloo
    assert [started.arm for started in turns.jobs] == [
        *("plain", "ours-collectives", "ours"),
        *(*stock, "ours-bf16"),
    ]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["part"], row["speedup"], row["bytes_per_step"]) for row in rows] == [
        ("collectives", 1.5, 4000),
        ("all", 3.0, 4000),
        *([("stock-bf16", 1.2, 2000)] if stock else []),
        ("all-bf16", 5.0, 2000),
    ]
    # A rank of stock's is without deepytorch, whatever it sends.
    for started in turns.jobs:
        switched_off = started.environment(0, []).get("DEEPYTORCH_ENABLED") == "0"
        assert switched_off is started.arm.startswith("plain")
    assert "all, gradients sent as bf16: 5.00x" in result.stdout


@pytest.mark.parametrize("loss", [1.1, math.nan])
def test_differing_losses_of_a_vision_model_end_with_status_1(monkeypatch, resnets, loss, tmp_path):
    monkeypatch.setattr(launch, "run", Turns(TIMES, {"ours": [2.0, loss]}))
    file = tmp_path / "out.jsonl"
    command = ["bench", "ddp", "--model", "resnet18", "--json", str(file)]
    assert CliRunner().invoke(app, command).exit_code == 1
    assert [json.loads(line)["wrong"] for line in file.read_text().splitlines()] == [0, 1]


@pytest.mark.parametrize(
    ("name", "dtype", "mixed"),
    [
        ("fp32", torch.float32, None),
        ("bf16", torch.bfloat16, None),
        ("amp", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.bfloat16),
    ],
)
def test_a_rows_precision_is_what_is_computed_in(name, dtype, mixed):
    precision = Precision(name, torch.device("cpu"))
    weight = torch.ones(2, 2, dtype=precision.dtype)
    assert (weight.dtype, precision.is_mixed) == (dtype, mixed is not None)
    with precision.autocast():
        assert (weight @ weight).dtype == (mixed or dtype)
    assert not precision.scaler.is_enabled()


class Outputs(NamedTuple):
    """As GoogLeNet's."""

    logits: torch.Tensor
    aux_logits: torch.Tensor


def test_auxiliary_classifiers_count_and_dropout_does_not():
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.9)

        def forward(self, x):
            return self.drop(x)

    network = Network()
    builder._switch_dropout_off(network)
    x, y = torch.eye(2), torch.tensor([0, 1])
    alone = builder._cross_entropy(network, {"x": x, "y": y})
    assert alone == torch.nn.functional.cross_entropy(x, y)
    both = builder._cross_entropy(lambda x: Outputs(x, x.clone()), {"x": x, "y": y})
    assert both.item() == pytest.approx(1.3 * alone.item())
    of_transformers = builder._cross_entropy(lambda x: SimpleNamespace(logits=x), {"x": x, "y": y})
    assert of_transformers == alone
