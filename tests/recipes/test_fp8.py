# SPDX-License-Identifier: Apache-2.0
"""precision=fp8, which torchao emulates on the CPU."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import AutoModelForCausalLM

from deepytorch.recipes import llama_sft
from deepytorch.recipes.base.config import RecipeError, load_config
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.runner import fp8

CPU = Process(rank=0, world_size=1, device=torch.device("cpu"))
TINY = ["hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2", "max_length=64"]


@pytest.fixture(scope="module", autouse=True)
def torchao() -> Iterator[None]:
    """From where `make venv` puts it, for this file alone: other packages act on it being there."""
    folder = str(Path(sys.prefix) / "fp8")
    sys.path.insert(0, folder)
    importlib.import_module("torchao.float8")
    yield
    sys.path.remove(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        del sys.modules[name]


def options(*words: str) -> llama_sft.Config:
    return load_config(llama_sft.Config, llama_sft.DEFAULT_CONFIG, list(words))


def losses(folder: Path, precision: str) -> tuple[list[float], Path]:
    words = [*TINY, "device=cpu", "steps=6", "warmup_steps=1", "sample_tokens=2"]
    words += [f"precision={precision}", f"output_dir={folder / precision}"]
    assert llama_sft.main(words) == 0
    (run,) = (path for path in (folder / precision).iterdir() if (path / "tensorboard").exists())
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return [event.value for event in events.Scalars("train/loss")], run


def test_it_trains_nearly_as_bf16_does_and_saves_the_same_model(tmp_path: Path) -> None:
    eight, run = losses(tmp_path, "fp8")
    sixteen, _ = losses(tmp_path, "bf16")
    assert eight != sixteen
    assert eight == pytest.approx(sixteen, rel=0.02)
    assert eight[-1] < eight[0]
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint")
    assert {type(layer) for layer in model.modules() if hasattr(layer, "in_features")} == {
        nn.Linear
    }


def test_the_output_layer_and_odd_sizes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 17), nn.Linear(32, 16))
    model.get_output_embeddings = lambda: model[2]  # type: ignore[assignment]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fp8.convert(model, options("precision=fp8"), CPU)
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", "Linear", "Linear"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RecipeError, match="no linear layer with both sides a multiple of 16"):
        fp8.convert(nn.Linear(3, 5), options("precision=fp8"), CPU)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RecipeError, match=r"pip install 'deepytorch-train\[fp8\]'"):
        fp8.convert(nn.Linear(16, 16), options("precision=fp8"), CPU)


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_engines_without_it_say_so(engine: str) -> None:
    with pytest.raises(RecipeError, match=f"engine={engine} has no precision=fp8"):
        options("precision=fp8", f"engine={engine}")
