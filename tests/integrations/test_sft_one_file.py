"""The recipe to copy trains one's own lines to a model that transformers loads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from deepytorch.recipes.data.text import byte_tokenizer
from deepytorch_core.base import config
from deepytorch_core.testing import RankError, run_program, run_script

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "sft_one_file.py"
LINES: list[dict[str, Any]] = [
    {"text": "one two three four"},
    {"prompt": "count: ", "completion": "one two three"},
    {
        "messages": [
            {"role": "user", "content": "count"},
            {"role": "assistant", "content": "one two three four five"},
        ]
    },
]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings = LlamaConfig(**shape, num_attention_heads=4, vocab_size=len(tokenizer))
    LlamaForCausalLM(settings).save_pretrained(folder / "model")
    lines = "".join(json.dumps(record) + "\n" for record in LINES * 16)
    (folder / "data.jsonl").write_text(lines, encoding="utf-8")
    return folder


# This runs a script as one process that nothing has launched.
ALONE = """
import os, runpy, sys
del os.environ["TORCHELASTIC_RUN_ID"]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def words(files: Path, out: Path, *more: str) -> list[str]:
    given = [f"--model={files / 'model'}", f"--data={files / 'data.jsonl'}", f"--out={out}"]
    how = ["--rows=4", "--accumulate=2", "--lr=0.01", "--log-every=1", "--held-out=0.1"]
    return [*given, *how, *more]


@pytest.fixture(scope="module")
def run(files: Path, deepspeeds_ranks: dict[str, Any]) -> Callable[..., None]:
    """Run the script on ranks that have imported all that it uses."""
    (files / "alone.py").write_text(ALONE)
    given = {name: deepspeeds_ranks[name] for name in ("env", "preload")}
    variables = {"CUDA_VISIBLE_DEVICES": ""}

    def started(out: Path, *more: str, ranks: int = 1) -> None:
        script = [files / "alone.py", SCRIPT] if ranks == 1 else [SCRIPT]
        given_words = words(files, out, *more)
        run_script(*script, *given_words, world_size=ranks, variables=variables, **given)

    return started


def launched(files: Path, out: Path, *more: str) -> None:
    """Run the script on two ranks as its documentation says."""
    launcher = ["-m", "deepytorch.cli", "run", "--nproc-per-node=2"]
    done = run_program(
        [sys.executable, *launcher, SCRIPT, *words(files, out, *more)],
        env=config.child_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )
    assert done.returncode == 0, done.stderr


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_it_trains_and_goes_on_from_its_checkpoint(
    run: Callable[..., None], tmp_path: Path
) -> None:
    run(tmp_path / "whole", "--epochs=2", "--save-every=5")
    whole = metrics(tmp_path / "whole")
    assert whole[-1]["loss"] < 0.8 * whole[0]["loss"]
    assert whole[-1]["held_out_loss"] < whole[0]["loss"]
    # As if the run had ended after the last checkpoint.
    run(tmp_path / "whole", "--epochs=2", "--save-every=5")
    repeated = metrics(tmp_path / "whole")[len(whole) :]
    assert 0 < len(repeated) < len(whole)
    for mine, theirs in zip(repeated, whole[-len(repeated) :], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    asked = tokenizer("count: ", return_tensors="pt", add_special_tokens=False)
    assert model.generate(**asked, max_new_tokens=3).shape[1] > asked["input_ids"].shape[1]


@pytest.fixture(scope="module")
def alone(files: Path, run: Callable[..., None]) -> list[dict[str, float]]:
    """Train on one rank with the rows of two in each step: the same order, so the same losses."""
    run(files / "alone", "--epochs=1", "--rows=8")
    return metrics(files / "alone")


@pytest.mark.parametrize(
    "how", ["copies", "sharded", pytest.param("launched", marks=pytest.mark.extended)]
)
def test_ranks_train_as_one_does(
    how: str,
    alone: list[dict[str, float]],
    files: Path,
    run: Callable[..., None],
    tmp_path: Path,
) -> None:
    if how == "launched":
        launched(files, tmp_path / "several", "--epochs=1")
    else:
        sharding = ["--shard"] * (how == "sharded")
        run(tmp_path / "several", "--epochs=1", *sharding, ranks=2)
    expected, found = alone, metrics(tmp_path / "several")
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
    assert found[-1]["held_out_loss"] == pytest.approx(expected[-1]["held_out_loss"], rel=5e-3)
    AutoModelForCausalLM.from_pretrained(tmp_path / "several")


def test_a_line_that_is_wrong_is_named(run: Callable[..., None], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "right"}\n{"txt": "wrong"}\n', encoding="utf-8")
    with pytest.raises(RankError, match=re.escape(f"status {wrong}:2: KeyError: 'text'")):
        run(tmp_path / "out", f"--data={wrong}")
