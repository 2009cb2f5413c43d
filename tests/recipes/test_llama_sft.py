# SPDX-License-Identifier: Apache-2.0
"""The recipe llama_sft: on two ranks, alone, and with --compare under torchrun, as users do it."""

import io
import json
import math
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepytorch.recipes import llama_sft
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import runs
from deepytorch.recipes.data.text import byte_tokenizer
from deepytorch.recipes.llama_sft import Config, build_model, main
from deepytorch.recipes.models.language import load_model, load_tokenizer, save_checkpoint
from deepytorch_core.testing import run_program, run_script

MODULE = ["-m", "deepytorch.recipes.llama_sft"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = [
    *("device=cpu", "hidden_size=32", "intermediate_size=64", "num_layers=2", "num_heads=2"),
    *("max_length=128", "sample_tokens=4", "learning_rate=1e-2", "warmup_steps=2"),
]
TINY_MODEL = Config(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)


def run(*words, launcher=(), status=0):
    done = run_program([sys.executable, *launcher, *MODULE, *words], timeout=100)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def run_dir_of(output_dir, name="llama_sft"):
    return runs(str(output_dir), name)[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run directory and the output of a short stock run on two ranks."""
    output_dir = tmp_path_factory.mktemp("runs")
    words = [*TINY, "backend=stock", "steps=12", "accumulation=2", f"output_dir={output_dir}"]
    printed, _ = run_script(llama_sft.__file__, *words)
    return run_dir_of(output_dir), printed


def test_loss_falls_and_scalars_are_recorded(trained):
    run_dir, _ = trained
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert len(losses) == 12
    assert losses[0] == pytest.approx(math.log(259), abs=0.2)  # untrained: all bytes are equal
    assert losses[-1] < losses[0] - 0.5
    rates = [event.value for event in events.Scalars("train/learning_rate")]
    assert max(rates) == pytest.approx(1e-2)
    assert rates[-1] < 1e-3
    for name in ("tokens_per_s", "step_time_s"):
        assert all(event.value > 0 for event in events.Scalars(f"train/{name}"))


def test_one_rank_prints_progress_and_a_sample(trained):
    _, output = trained
    assert output.count("step 12/12") == 1
    assert output.count("sample: the answer") == 1
    assert "truncated to max_length=128" in output


def test_checkpoint_loads_in_plain_transformers(trained):
    run_dir, _ = trained
    assert (run_dir / "checkpoint" / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "checkpoint")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer("Return the name of the file as a text.")["input_ids"]])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < math.log(259) - 0.5  # these are the trained weights


def test_saved_model_gives_the_same_logits(tmp_path):
    tokenizer = byte_tokenizer()
    model = build_model(TINY_MODEL, tokenizer)
    save_checkpoint(model, tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = "def f(x): →"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_checkpoint_and_alpaca_data_train_alone(trained, tmp_path, capsys):
    run_dir, _ = trained
    data = tmp_path / "data.json"
    data.write_text(
        json.dumps([{"instruction": f"Add 1 to {i}.", "output": str(i + 1)} for i in range(20)])
    )
    words = [f"model={run_dir / 'checkpoint'}", f"data={data}", f"output_dir={tmp_path / 'runs'}"]
    assert main([*words, "device=cpu", "steps=2", "precision=bf16", "sample_tokens=2"]) == 0
    assert "18 examples" in capsys.readouterr().out  # of 20; a tenth is held out
    assert (run_dir_of(tmp_path / "runs") / "checkpoint" / "tokenizer.json").is_file()


def test_text_that_the_output_cannot_show_is_replaced(tmp_path, monkeypatch):
    data = tmp_path / "data.json"
    data.write_text(json.dumps(2 * [{"instruction": "1 \u2013 1", "output": "none"}]))
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["--dry-run", *TINY, f"data={data}", "held_out=1", "batch_size=1"]) == 0
    output.flush()
    assert b"1 ? 1" in output.buffer.getvalue()


def compared(*words):
    printed, _ = run_script(llama_sft.__file__, "--compare", *words)
    return printed


def compared_by_torchrun(*words):
    return run("--compare", *words, launcher=TORCHRUN).stdout


@pytest.mark.parametrize(
    "start", [compared, pytest.param(compared_by_torchrun, marks=pytest.mark.extended)]
)
def test_compare_finds_equal_losses(tmp_path, start):
    printed = start(*TINY, "steps=16", "rounding_arm=true", f"output_dir={tmp_path}")
    run_dir = run_dir_of(tmp_path)
    result = json.loads((run_dir / "compare.json").read_text())
    assert result["loss_difference"] <= 1e-4
    assert result["world_size"] == 2
    assert result["step_ratio"] > 0
    assert result["order"][:2] == [["stock", "ours"], ["ours", "stock"]]
    assert result["arms"]["stock"]["backend"] == "gloo"
    assert result["arms"]["ours"]["backend"] == "deepytorch"
    assert result["arms"]["again"]["backend"] == "gloo"
    assert 0 < result["drift"]["again"]["size"] < 1e-3
    for arm in result["arms"].values():
        assert len(arm["losses"]) == len(arm["step_time_s"]) == len(arm["num_tokens"]) == 16
        assert arm["losses"][-1] < arm["losses"][0] - 0.3
        assert arm["tokens_per_s"] > 0
    assert result["native_calls"] > 0
    assert {"machine", "versions", "commit", "config", "delegated_calls"} <= result.keys()
    for written in ("compare.png", "checkpoint/model.safetensors", "tensorboard/stock"):
        assert (run_dir / written).exists()
        assert str(run_dir) in printed
    assert "stock/ours" in printed


def test_wrong_model_is_one_sentence(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot load the tokenizer of model=.*absent"):
        load_tokenizer(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\nsize 9\n", b"", b"\x08" + 7 * b"\0" + b"{"],
    ids=["pointer", "empty", "cut"],
)
def test_a_damaged_file_of_a_model_is_named(tmp_path, content):
    tokenizer = byte_tokenizer()
    save_checkpoint(build_model(TINY_MODEL, tokenizer), tokenizer, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as failure:
        load_model(str(tmp_path), tokenizer)
    assert f"{path} is no whole safetensors file" in str(failure.value)
    assert "git lfs pull" in str(failure.value)


def test_model_smaller_than_its_tokenizer_is_refused(tmp_path):
    tokenizer = byte_tokenizer()
    save_checkpoint(build_model(TINY_MODEL, tokenizer), tokenizer, tmp_path)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(RecipeError, match="has 259 embeddings but its tokenizer 260 tokens"):
        load_model(str(tmp_path), tokenizer)
