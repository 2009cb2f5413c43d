"""Models that draw a random number on the host for each layer, and leave none out: replayed.

What they draw is drawn beside a replay as well, so that the numbers after it are eager's.
"""

from __future__ import annotations

import copy
import random
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core.compile.capture import Capture
from deepytorch_core.testing import needs_gpus

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

DEVICE = "cuda"
STEPS = 8
VOCABULARY = 67


class Layers(nn.Module):
    """LayerDrop as in BART: the number is looked at in a branch."""

    def __init__(self, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.config = types.SimpleNamespace(layerdrop=layerdrop)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            to_drop = False
            if self.training:
                dropout_probability = torch.rand([])
                if dropout_probability < self.layerdrop:
                    to_drop = True
            if not to_drop:
                x = x + torch.tanh(layer(x))
        return x.square().mean()


class OfConfig(Layers):
    """As in Wav2Vec2: drawn in any case, and kept as a tensor; `layerdrop` is the settings'."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            dropout_probability = torch.rand([])
            skip_the_layer = self.training and dropout_probability < self.config.layerdrop
            if not skip_the_layer:
                x = x + torch.tanh(layer(x))
        return x.square().mean()


def captured(model: nn.Module) -> Capture:
    found = Capture(model, is_on=lambda: True)
    found.install()
    return found


def train(model: Any, changes: dict[int, float] | None = None) -> tuple[list[float], list[Tensor]]:
    """Losses, and where the host's random numbers are after each step."""
    torch.manual_seed(3)
    random.seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, states = [], []
    for number in range(STEPS):
        if changes is not None and number in changes:
            model.layerdrop = model.config.layerdrop = changes[number]
        x = torch.randn(9, 6).to(DEVICE)  # from the generator that layers are drawn by
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        states.append(torch.get_rng_state())
    return losses, states


def trains_alike(model: nn.Module, changes: dict[int, float] | None = None) -> Capture:
    """Losses are those of a twin without graphs, and random numbers bit for bit."""
    model.to(DEVICE).train()
    twin = copy.deepcopy(model)
    found = captured(model)
    losses, states = train(model, changes)
    expected, theirs = train(twin, changes)
    assert losses == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert all(map(torch.equal, states, theirs))
    return found


@pytest.mark.parametrize("kind", [Layers, OfConfig])
def test_numbers_that_leave_out_no_layer_are_drawn_beside_replays(kind: type[Layers]) -> None:
    found = trains_alike(kind())
    assert (found.failure, found.num_captured, found.has_replays) == (None, 1, True)


@pytest.mark.parametrize("kind", [Layers, OfConfig])
def test_layers_that_are_left_out_at_random_are_not_replayed(kind: type[Layers]) -> None:
    found = trains_alike(kind(0.4))
    assert not found.has_replays
    assert found.problem == "it draws random numbers on the host"


@pytest.mark.parametrize("kind", [Layers, OfConfig])
def test_a_layerdrop_that_changes_is_seen(kind: type[Layers]) -> None:
    found = trains_alike(kind(), {4: 0.5, 6: 0.0})
    assert (found.failure, found.num_captured, found.has_replays) == (None, 2, True)


_kept: list[Tensor] = []


def _in_a_branch(x: Tensor, drawn: Tensor) -> Tensor:
    return -x if drawn < 0.5 else x


def _as_a_number(x: Tensor, drawn: Tensor) -> Tensor:
    return x * drawn.item()


def _by_its_memory(x: Tensor, drawn: Tensor) -> Tensor:
    return x * float(drawn.numpy())


def _by_a_tensor(x: Tensor, drawn: Tensor) -> Tensor:
    return -x if drawn < torch.tensor(0.0) else x


def _the_other_way_round(x: Tensor, drawn: Tensor) -> Tensor:
    return x if drawn > 0.0 else -x


def _kept_elsewhere(x: Tensor, drawn: Tensor) -> Tensor:
    _kept[:] = [drawn]
    return x


def _beside_pythons_own(x: Tensor, drawn: Tensor) -> Tensor:
    return x if drawn < 0.0 else x * random.choice([1.0, 2.0])


def _beside_others(x: Tensor, drawn: Tensor) -> Tensor:
    return x * torch.rand(3).sum().item() if not drawn < 0.0 else x


@pytest.mark.parametrize(
    "use",
    [
        _in_a_branch,
        _as_a_number,
        _by_its_memory,
        _by_a_tensor,
        _the_other_way_round,
        _kept_elsewhere,
        _beside_pythons_own,
        _beside_others,
    ],
)
def test_numbers_that_may_matter_are_left_to_the_pass(use: Any) -> None:
    class Uses(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(use(x, torch.rand([])))

    found = trains_alike(Uses())
    assert not found.has_replays
    assert found.problem == "it draws random numbers on the host"


TINY: dict[str, dict[str, Any]] = {
    "Bart": {"vocab_size": VOCABULARY, "d_model": 16},
    "MBart": {"vocab_size": VOCABULARY, "d_model": 16},
    "Marian": {"vocab_size": VOCABULARY, "d_model": 16, "decoder_start_token_id": 1},
    "Pegasus": {"vocab_size": VOCABULARY, "d_model": 16},
    "M2M100": {"vocab_size": VOCABULARY, "d_model": 16},
    "Blenderbot": {"vocab_size": VOCABULARY, "d_model": 16},
    "Whisper": {"vocab_size": VOCABULARY, "d_model": 16, "num_mel_bins": 8},
}
"""Models that draw for their layers in transformers before 5.2x; later ones ask for 0 first."""


def tiny(family: str) -> Any:
    import transformers

    layers = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    if family == "Whisper":
        layers |= {"max_source_positions": 12, "max_target_positions": 64}
    else:
        layers["max_position_embeddings"] = 64
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    drop = {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    special["decoder_start_token_id"] = 2
    config = getattr(transformers, f"{family}Config")(
        **{**layers, **off, **drop, **special, **TINY[family], "use_cache": False}
    )
    kind = {"Marian": "MTModel"}.get(family, "ForConditionalGeneration")
    stock: Any = getattr(transformers, f"{family}{kind}")

    class OfFamily(stock):  # type: ignore[misc]
        """Takes what `train` gives, and makes a batch of it."""

        def forward(self, x: Tensor) -> Tensor:
            ids = (x.flatten()[:48].view(2, 24) * 1000).long().abs() % (VOCABULARY - 3) + 3
            inputs = {"input_ids": ids}
            if self.main_input_name == "input_features":
                inputs = {"input_features": x.flatten()[:24].repeat(16).view(2, 8, 24)}
            return super().forward(**inputs, labels=ids).loss  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return OfFamily(config)


@pytest.mark.parametrize("family", TINY)
def test_models_of_transformers_are_replayed_with_what_they_draw(family: str) -> None:
    found = trains_alike(tiny(family))
    assert (found.failure, found.num_captured, found.has_replays) == (None, 1, True)
