"""Helpers compile a model whose training waits for no compiler: few sizes, and later ones."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.compile import ahead, capture, cost_model, policies
from deepytorch_core.compile.ahead import Ahead, HelperJob
from deepytorch_core.compile.region import CompiledRegion
from deepytorch_core.compile.regions import Region

CPU = torch.device("cpu")
# A helper that has done each job without looking at it.
_ANSWERS_AT_ONCE = """
import struct, sys
jobs, answers = sys.stdin.buffer, sys.stdout.buffer
while len(size := jobs.read(8)) == 8:
    jobs.read(struct.unpack("!q", size)[0])
    answers.write(struct.pack("!q", 0))
    answers.flush()
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Sized(nn.Module):
    """Equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class FewSizes:
    """Batches that have one of a few sizes from some step on."""

    num_tokens = state = None
    is_shared = False

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.num_asked = 0

    def use_few(self, is_on: bool, by: str) -> None:
        (self.users.add if is_on else self.users.discard)(by)

    @property
    def are_few(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 2


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let the training wait for no compiler, and have lasted long enough."""
    monkeypatch.setattr(config, "_current", Options(profile=str(tmp_path / "p"), log="error"))
    monkeypatch.setattr(policies, "automatic", lambda device: [policies.get("aot-eager")])
    monkeypatch.setattr(ahead, "_num_helpers", lambda: 1)
    monkeypatch.setattr(ahead, "why_not", lambda device: None)
    monkeypatch.setattr(ahead, "_HELPER", _ANSWERS_AT_ONCE)
    monkeypatch.setattr(cost_model, "least_run_s", lambda cost: 0.0)
    monkeypatch.setattr(decisions, "_made", [])
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train_sized(model: nn.Module, sizes: Callable[[int], int], most: int = 400) -> list[float]:
    """Losses, until all is decided; of sizes by the number of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: Any = engine.compilation_of(model)
    losses = []
    for number in range(most):
        torch.manual_seed(number)
        loss = model(torch.randn(sizes(number), 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if found is not None and found.is_settled:
            break
        if found is not None and found.is_waiting:
            time.sleep(0.02)
    return losses


def test_who_is_patient_compiles_few_sizes_by_helpers_alone() -> None:
    torch.manual_seed(0)
    stock = Sized()
    model = copy.deepcopy(stock)
    deepytorch.compile(model)
    sizes: Any = FewSizes()
    capture.register_sizes(model, sizes)
    found: Any = engine.compilation_of(model)
    ours = train_sized(model, lambda number: 2 + number % 3)
    assert found.is_settled
    assert sizes.num_asked > 2
    assert ours == pytest.approx(train_sized(stock, lambda number: 2 + number % 3, len(ours)))
    (decision,) = [made for made in decisions.made() if made["what"] == "compile of Sized"]
    assert "aot-eager" in decision["times_ms"]
    engine.undo(model)


def helped() -> tuple[Sized, CompiledRegion, Ahead]:
    """A model whose layers helpers compile for each size that comes again."""
    model = Sized()
    region = CompiledRegion(
        Region("layers.0", tuple(model.layers)),
        [policies.get("aot-eager")],
        budget_s=100.0,
        is_on=lambda _: True,
    )
    region.install()
    helpers = Ahead(CPU, "aot-eager", budget_s=100.0)
    region.send_later(helpers)
    return model, region, helpers


def test_a_size_that_comes_later_is_compiled_by_helpers_and_runs_eagerly_meanwhile() -> None:
    model, region, helpers = helped()
    x = torch.randn(3, 8)
    expected = model(x)
    assert region.num_unready == 4  # nothing is captured for what comes once
    for _ in range(200):
        torch.testing.assert_close(model(x), expected)
        if region.told.chosen:
            break
        time.sleep(0.02)
    assert region.told.chosen["aot-eager"]
    assert not region.is_waiting
    for rows in range(4, 20):  # never the same
        model(torch.randn(rows, 8))
    assert region.told.num_compiles <= 4  # those of the first layer and of later ones, taken over
    helpers.close()
    region.remove()


def test_steps_are_eager_while_helpers_compile_what_they_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, region, helpers = helped()
    end = HelperJob.end

    def end_late(job: HelperJob, problem: str) -> None:
        while len(unready) <= 20:
            time.sleep(0.01)
        end(job, problem)

    monkeypatch.setattr(HelperJob, "end", end_late)
    x = torch.randn(3, 8)
    unready: list[int] = []
    captured: list[int] = []  # calls of what Dynamo has captured
    for _ in range(400):
        before, calls = region.num_unready, region._num_calls
        model(x).sum().backward()
        unready.append(region.num_unready - before)
        captured.append(region._num_calls - calls)
        if not region.is_awaited and not region.is_waiting:
            break
        time.sleep(0.02)
    assert not region.is_awaited
    # The size comes once, is captured when it comes again, and has compiled code in the end.
    assert unready[0] == 4
    assert unready[2:20] == [4] * 18
    assert unready[-1] == 0
    assert captured[:20] == [0, 4] + [0] * 18
    assert captured[-1] == 4
    assert all(len(graph.inputs) == 0 for graph in region._left)
    assert region.told.chosen["aot-eager"]
    helpers.close()
    region.remove()


@pytest.mark.parametrize("patience", [pytest.param("auto", marks=pytest.mark.extended), "off"])
def test_layers_share_code_that_is_taken_over_while_their_model_returns_a_cache(
    patience: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = Options(profile=str(tmp_path / "cached"), log="error", patience=patience)
    monkeypatch.setattr(config, "_current", options)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 4, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=8, **sizes, **heads))
    deepytorch.compile(model)
    found: Any = engine.compilation_of(model)
    made = []
    for _ in range(400):
        ids = torch.randint(0, 32, (2, 5))
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        assert output.past_key_values is not None
        made.append(found.num_made)
        if found.is_settled:
            break
        time.sleep(0.02 if found.is_waiting else 0.0)
    assert found.is_settled
    assert 0 < max(made) <= 2  # one for the helpers, one that is taken over
    (decision,) = [entry for entry in decisions.made() if entry["what"].startswith("compile of")]
    assert "dropped" not in decision
    engine.undo(model)
