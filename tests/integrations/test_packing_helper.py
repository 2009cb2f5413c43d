"""The process that tries a model's twin, beside a training that doesn't wait for it."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import packing_helper, packing_twin, packing_watch
from deepytorch.integrations.padding_free.packing_helper import Helper
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.testing import spawn_ranks

ENOUGH_S = 120.0


def llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape, num_attention_heads=4)).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def helped(twin: bytes) -> dict[str, Any]:
    helper = Helper(config.child_environment(**packing_watch._OF_HELPER), is_awaited=True)
    helper.ask(twin)
    helper.wait()
    assert helper.answer is not None
    return helper.answer


# A helper answers in the test of a training below, too: rows are packed by that.
@pytest.mark.extended
def test_a_helper_answers_what_a_twin_shows() -> None:
    model = llama()
    found = helped(pickle.dumps(packing_twin.describe(model, model)))["conventions"]
    assert found["shifted"]
    assert found["first_position"] is None


def answer_of(rank: int, world_size: int, twin: bytes) -> dict[str, Any]:
    """Return what a helper's program writes, in a process that has imported what it uses."""
    asked, told = os.pipe(), os.pipe()
    os.write(asked[1], twin)
    os.close(asked[1])
    os.dup2(asked[0], sys.stdin.fileno())
    os.dup2(told[1], sys.stdout.fileno())
    os.close(told[1])
    packing_helper.main(0)
    found: dict[str, Any] = json.loads(os.read(told[0], 4096))
    return found


def test_a_helper_that_fails_says_so(deepspeeds_ranks: dict[str, Any]) -> None:
    (answer,) = spawn_ranks(answer_of, 1, pickle.dumps("no twin"), **deepspeeds_ranks)
    assert "its twin fails" in answer["reason"]
    helper = Helper({"PATH": ""}, is_awaited=True)
    helper.ask(b"")
    helper.close()
    helper.wait()
    assert helper.answer is not None
    assert "could not be tried out" in helper.answer["reason"]


def test_a_training_goes_on_and_is_packed_once_the_helper_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(config, "_current", Options(profile=str(tmp_path / "profile.json")))
    monkeypatch.setattr(decisions, "_made", [])
    monkeypatch.setattr(packing_watch.PackingWatch, "_least_run_s", 0.0)
    model, stock = llama(), llama()
    padding_free.watch(model)
    expected = stock(**batch()).loss.item()
    steps, began = 0, time.monotonic()
    while not decisions.made() and time.monotonic() - began < ENOUGH_S:
        assert model(**batch()).loss.item() == pytest.approx(expected, rel=1e-5)
        steps += 1
    assert [decision["chosen"] for decision in decisions.made()] == ["packed"]
    assert steps > packing_watch._WATCHED
    assert model(**batch()).loss.item() == pytest.approx(expected, rel=1e-5)
    assert padding_free.detach(model)


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Helper]:
    """Those that are started from now on, at once."""
    monkeypatch.setattr(config, "_current", Options(profile=str(tmp_path / "profile.json")))
    monkeypatch.setattr(packing_watch.PackingWatch, "_least_run_s", 0.0)
    started: list[Helper] = []

    def start(*args: Any, **kwargs: Any) -> Helper:
        started.append(Helper(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(packing_watch, "Helper", start)
    return started


def test_a_model_that_goes_ends_its_helper(helpers: list[Helper]) -> None:
    model = llama()
    padding_free.watch(model)
    for _ in range(packing_watch._WATCHED + 1):
        model(**batch())
    (helper,) = helpers
    padding_free.detach(model)
    helper.wait()
    assert helper._process.poll() is not None


def test_a_helper_that_ended_before_it_was_asked_is_started_again() -> None:
    helper = Helper(config.child_environment(**packing_watch._OF_HELPER), is_awaited=True)
    first = helper._process
    helper.close()
    helper.wait()
    helper.ask(b"")
    assert helper._process is not first
    helper.close()
    helper.wait()
    assert helper.answer is not None


def test_a_model_that_is_never_trained_ends_its_helper(helpers: list[Helper]) -> None:
    model = llama()
    padding_free.watch(model)
    (helper,) = helpers
    padding_free.detach(model)
    helper.wait()
    assert helper._process.poll() is not None


def test_a_helper_that_nobody_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = os.pipe()
    monkeypatch.setattr(packing_helper, "_LIMIT_S", 0.05)
    monkeypatch.setattr(sys, "stdin", os.fdopen(asked[0], "rb"))
    assert packing_helper._is_asked() is False
    os.write(asked[1], b"something")
    assert packing_helper._is_asked() is True
    os.close(asked[1])
