"""`bench ddp` with real ranks: a tiny model of both arms, and a vision model in processes apart."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from deepytorch_core.bench import launch
from deepytorch_core.bench.job import DdpJob
from deepytorch_core.bench.record import DDP_FIELDS
from deepytorch_core.testing import run_program

pytestmark = pytest.mark.usefixtures("forked_ranks")

TINY = {"parameters": 4096, "batch_size": 2, "steps": 5}
# `make venv` puts torchvision and timm here.
VISION = Path(sys.prefix) / "vision"


def test_both_arms_train_the_same():
    world_size = 3
    (record,) = launch.run(DdpJob(**TINY, world_size=world_size))
    assert set(record) == set(DDP_FIELDS)
    assert record["wrong"] == 0
    assert record["algorithm"] != "delegate"
    assert record["registered"]  # as after `import deepytorch`
    assert record["steps"] == 5
    assert record["num_blocks"] == 5
    # Weights and biases, four bytes each.
    assert record["bytes_per_step"] == 4 * record["parameters"]
    assert 0 < record["step_time_us"]["p50"] <= record["step_time_us"]["p95"]
    low, high = record["speedup_spread"]
    assert 0 < low <= record["speedup"] <= high
    if world_size == 2:  # a sum of two does not depend on the order
        assert record["loss"] == record["baseline_loss"]
        assert record["loss_check"] == "exact"


@pytest.mark.extended
def test_gloo_against_itself():
    (record,) = launch.run(DdpJob(**TINY, world_size=2, ours="gloo"))
    assert record["algorithm"] == "gloo"
    assert not record["registered"]
    assert record["loss_check"] == "exact"


# With smaller images or batches BatchNorm has so few values that it magnifies rounding.
SMALL = "--model timm/test_resnet --image-size 64 --batch-size 4 --steps 4 --rounds 1"


# Its parts are tested by the arms above and by tests of vision models; this is their command.
@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("more", "compiling"),
    [
        ("--precision amp", "off"),
        ("", "auto"),  # half a minute of compiling
        ("--precision bf16", "off"),
    ],
)
def test_a_vision_model_trains_alike_in_all_arms(more: str, compiling: str, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    path = os.environ.get("PYTHONPATH", "")  # noqa: TID251
    done = run_program(
        [
            *(sys.executable, "-m", "deepytorch.cli", "bench", "ddp", *SMALL.split()),
            *(*more.split(), "--json", str(file)),
        ],
        env={
            **os.environ,  # noqa: TID251
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{VISION}{os.pathsep}{path}",
            "DEEPYTORCH_COMPILE": compiling,
        },
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    part, everything = map(json.loads, file.read_text().splitlines())
    for row in (part, everything):
        assert set(row) == {*DDP_FIELDS, "command"}
        assert row["model"] == "timm/test_resnet"
        assert row["algorithm"] not in ("delegate", "unknown")
        assert row["registered"]
        assert (row["steps"], row["num_blocks"]) == (4, 1)
        assert row["wrong"] == 0
    assert part["part"] == "collectives"
    assert set(part["choices"].values()) == {"stock"}
    if "bf16" not in more:  # a sum of two does not depend on the order
        assert part["loss_difference"] == 0
    assert everything["part"] == "all"
    tried = {"memory format of ResNet", "SGD"}
    tried |= {"compile of ResNet"} if compiling == "auto" else set()
    assert everything["choices"].keys() >= tried
    lines = done.stdout.splitlines()
    for arm, line in zip(("plain", "ours-collectives", "ours"), lines[1:4], strict=True):
        assert re.fullmatch(rf"{arm} +2 ranks -- 1M/2R: p50: .* p95: \d+\.\d{{3}}s \d+/s", line)
    assert lines[4].startswith("collectives and buckets: ")
    assert lines[5].startswith("all: ")
