"""`torchrun -m deepytorch.examples.ddp_benchmark`: its lines, its models, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepytorch.examples import ddp_benchmark, vision_models
from deepytorch_core.testing import run_program

MODULE = "deepytorch.examples.ddp_benchmark"
QUICK = ["--image-size", "32", "--batch-size", "2", "--steps", "4", "--warmup", "2"]
# `make venv` puts torchvision and timm here.
VISION = Path(sys.prefix) / "vision"
PERCENTILES = " ".join(rf"p{p}: \d+\.\d{{3}}s \d+/s" for p in (50, 75, 90, 95))


def run(*arguments: str, ranks: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    path = os.environ.get("PYTHONPATH", "")  # noqa: TID251
    return run_program(
        [*launcher, MODULE, "--device", "cpu", *arguments],
        env={
            **os.environ,  # noqa: TID251
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{VISION}{os.pathsep}{path}",
            **env,
        },
        timeout=110,
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arguments", "heading", "env"),
    [
        (["--model", "resnet18"], "torchvision resnet18 in fp32", {}),
        (
            ["--model", "timm/mobilenetv3_small_050", "--precision", "amp", "--bucket-cap-mb", "1"],
            "timm mobilenetv3_small_050 in amp",
            {"DEEPYTORCH_ENABLED": "0"},
        ),
    ],
    ids=["torchvision", "timm, stock"],
)
def test_a_line_without_ddp_then_one_for_each_number_of_ranks(
    arguments: list[str], heading: str, env: dict[str, str]
) -> None:
    done = run(*arguments, *QUICK, ranks=2, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    backend = "gloo" if env else "deepytorch"
    assert lines[0] == f"PyTorch {torch.__version__}, backend {backend}"
    assert lines[1] == f"{heading}, batch size 2, 32 x 32 pixels, 4 steps"
    assert len(lines) == 6
    for line, start in zip(
        lines[2:5],
        ("1 ranks -- no ddp: ", "1 ranks -- 1M/1R: ", "2 ranks -- 1M/2R: "),
        strict=True,
    ):
        assert re.fullmatch(start + PERCENTILES, line), line
    if env:
        assert lines[5] == "deepytorch not active: 0 native and 0 delegated collectives"
    else:
        assert re.match(r"deepytorch active: [1-9]\d* native and 0 delegated", lines[5]), lines[5]


@pytest.mark.extended
def test_one_process_has_one_line() -> None:
    done = run("--model", "resnet18", "--precision", "bf16", *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch("1 ranks -- no ddp: " + PERCENTILES, done.stdout.splitlines()[2])


class Library:
    """One that has the models named."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def list_models(self, module: Any = None) -> list[str]:
        return list(self.names)

    def get_model_weights(self, name: str) -> Any:
        return SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: self))

    crop_size = (299,)

    def get_pretrained_cfg(self, name: str) -> Any:
        return SimpleNamespace(input_size=(3, 256, 256))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Library]:
    found = {"torchvision": Library("resnet50", "inception_v3"), "timm": Library("resnet50", "vit")}
    monkeypatch.setattr(vision_models, "_installed", found.get)
    return found


@pytest.mark.parametrize(
    ("wanted", "library", "image_size"),
    [
        ("resnet50", "torchvision", 299),
        ("torchvision/resnet50", "torchvision", 299),
        ("timm/resnet50", "timm", 256),
        ("vit", "timm", 256),
    ],
)
def test_torchvision_comes_first(
    wanted: str, library: str, image_size: int, libraries: dict[str, Library]
) -> None:
    network = vision_models.load(wanted)
    assert (network.library, network.image_size) == (library, image_size)
    assert vision_models.load(wanted, 32).image_size == 32


def test_all_names_say_their_library(
    libraries: dict[str, Library], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ddp_benchmark.main(["--model", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "torchvision/resnet50",
        "torchvision/inception_v3",
        "timm/resnet50",
        "timm/vit",
    ]


def test_an_unknown_model_is_one_line(
    libraries: dict[str, Library], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ddp_benchmark.main(["--model", "resnet51"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: no model 'resnet51' (did you mean resnet50?)")
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.parametrize(
    ("wanted", "missing", "said"),
    [
        ("resnet51", (), "no model 'resnet51' (did you mean resnet50?); --model list prints"),
        ("timm/vit", ("timm",), "no model 'timm/vit'; not installed: pip install timm"),
        ("vit", ("torchvision", "timm"), "no model 'vit'; not installed: pip install torchvision"),
    ],
)
def test_what_can_not_be_had_says_why(
    wanted: str, missing: tuple[str, ...], said: str, libraries: dict[str, Library]
) -> None:
    for library in missing:
        del libraries[library]
    with pytest.raises(vision_models.UnknownModelError, match=re.escape(said)) as error:
        vision_models.load(wanted)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ranks_per_machine", "world_size", "expected"),
    [
        (2, 2, [1, 2]),
        (4, 4, [1, 2, 4]),
        (6, 6, [1, 2, 4, 6]),
        (8, 32, [1, 2, 4, 8, 16, 32]),
        (8, 24, [1, 2, 4, 8, 16, 24]),
        (1, 2, [1, 2]),
    ],
)
def test_the_numbers_of_ranks(ranks_per_machine: int, world_size: int, expected: list[int]) -> None:
    assert ddp_benchmark.sizes(ranks_per_machine, world_size) == expected


@pytest.mark.parametrize(
    "arguments",
    [["--precision", "fp8"], ["--steps", "0"], ["--batch-size", "-1"], ["--device", "x"]],
)
def test_a_wrong_argument_ends_it(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        ddp_benchmark.parse(arguments)
    assert error.value.code == 2
