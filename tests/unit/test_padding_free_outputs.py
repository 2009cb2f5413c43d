"""Tests of outputs besides logits and a loss: the padded batch's, or an error in its place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from trl.trainer import utils
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from deepytorch.integrations.common import contract
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch_core.base import decisions

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LENGTHS = (17, 3, 9, 1)
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


pytestmark = pytest.mark.usefixtures("one_thread")


def batch_of(*, left: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = max(LENGTHS) + 2
    ids = torch.randint(4, VOCABULARY, (len(LENGTHS), width), generator=generator)
    columns = torch.arange(width).flip(0) if left else torch.arange(width)
    mask = (columns[None, :] < torch.tensor(LENGTHS)[:, None]).long()
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    labels[mask == 0] = -100
    labels[:, 1:][mask[:, :-1] == 0] = -100  # nothing is predicted from padding
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


@dataclass
class ScoredOutput(CausalLMOutputWithPast):
    scores: Tensor | None = None


class Scored(hf.LlamaForCausalLM):
    """Gives scores besides, made of the logits."""

    score: Callable[[Any, Tensor], Tensor | None]

    @can_return_tuple
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        scores = type(self).score(self, output.logits)
        return ScoredOutput(loss=output.loss, logits=output.logits, scores=scores)


def scored(score: Callable[[Any, Tensor], Tensor | None]) -> Any:
    torch.manual_seed(0)
    return type("Scored", (Scored,), {"score": score})(hf.LlamaConfig(**SHAPE)).train()


def of_sequences(model: Any, logits: Tensor) -> Tensor:
    return logits.mean(dim=(1, 2))


def of_tokens(model: Any, logits: Tensor) -> Tensor:
    return logits.mean(dim=2)


def test_a_model_that_gives_one_value_for_a_sequence_keeps_its_padding() -> None:
    assert not padding_free.attach(scored(of_sequences), "auto", adapter="test")
    assert str(decisions.made()[-1]["reason"]).endswith("a packed row gives another scores")


def test_what_only_a_training_model_gives_for_a_sequence_is_an_error_when_it_is_read() -> None:
    model = scored(lambda self, logits: of_sequences(self, logits) if self.training else None)
    assert padding_free.attach(model, "auto", adapter="test")
    output = model(**batch_of())
    assert output.loss.isfinite()
    said = r"padding_free: scores of the model's output .*: set padding_free=off"
    for read in (lambda: output.scores, lambda: output["scores"], lambda: list(output.values())):
        with pytest.raises(contract.IntegrationError, match=said):
            read()
    with pytest.raises(contract.IntegrationError, match="scores of the model's output"):
        model(**batch_of(), return_dict=False)


def test_values_of_tokens_come_back_and_a_loss_that_takes_them_at_padding_is_refused() -> None:
    model = scored(of_tokens)
    stock = copy.deepcopy(model)
    assert padding_free.attach(model, "auto", adapter="test")
    batch = batch_of()
    mask = batch["attention_mask"]
    ours, theirs = ((network(**batch).scores * mask).square().sum() for network in (model, stock))
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    with pytest.raises(RuntimeError, match="the loss takes what the model gives at padding"):
        model(**batch).scores.exp().mean().backward()


def have_same_gradients(*pairs: tuple[Any, Any]) -> None:
    """Models get the same gradients from the fields of their outputs."""
    for _, output in pairs:
        (output.log_probs.sum(dim=1).square().sum() + output.entropy.sum()).backward()
    (model, _), (stock, _) = pairs
    for mine, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("left", [False, True])
def test_trls_fused_head_gives_the_log_probabilities_of_the_padded_batch(left: bool) -> None:
    torch.manual_seed(0)
    models = [hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for network in models:
        add_fused_lm_head(network, temperature=0.7, outputs=FIELDS)
    stock, model = models
    assert padding_free.attach(model, "on", adapter="test")  # so it is packed, or an error
    batch = batch_of(left=left)
    ours, theirs = (network(**batch, fused_lm_head=True) for network in (model, stock))
    assert isinstance(ours, FusedCausalLMOutput)
    assert set(ours) == set(theirs) == {"loss", "label_mask", *FIELDS}
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, msg=name)
    have_same_gradients((model, ours), (stock, theirs))


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_fused_head_scores_all_positions_of_a_row_where_most_have_a_label(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(utils, "_use_triton", lambda device: True)  # as on a GPU
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).train()
    add_fused_lm_head(model, outputs=FIELDS)
    stock = copy.deepcopy(model)
    add_fused_lm_head(stock, outputs=FIELDS)
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    ids = batch["input_ids"]
    batch["labels"] = torch.where(torch.rand(ids.shape) < share, -100, ids)
    batch["labels"][batch["attention_mask"] == 0] = -100
    with Counted() as ours:
        found = model(**batch, fused_lm_head=True)
    with Counted() as theirs:
        expected = stock(**batch, fused_lm_head=True)
    is_all = share < 0.2
    assert theirs.num_selections >= 2
    assert ours.num_selections == (0 if is_all else theirs.num_selections)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    have_same_gradients((model, found), (stock, expected))
    assert utils._use_triton(torch.device("cpu"))  # other models' heads go as they went


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts selections by a mask, whose size a GPU would have to tell."""

    num_selections = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            self.num_selections += any(
                index is not None and index.dtype == torch.bool for index in args[1]
            )
        return func(*args, **(kwargs or {}))


class OtherHead:
    """A head that takes TRL's keyword and gives the log-probability of each whole sequence."""

    def __init__(self, model: Any) -> None:
        self.stock = model.forward

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        output = self.stock(*args, **kwargs)
        if fused_lm_head:
            output = FusedCausalLMOutput(loss=output.loss, log_probs=output.logits.mean(dim=(1, 2)))
        return output


def test_another_head_of_the_same_name_gets_its_padding() -> None:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).train()
    stock = copy.deepcopy(model)
    for network in (model, stock):
        network.forward = OtherHead(network)
    assert padding_free.attach(model, "auto", adapter="test")
    batch = batch_of()
    ours, theirs = (network(**batch, fused_lm_head=True).log_probs for network in (model, stock))
    assert torch.equal(ours, theirs)
    assert decisions.made()[-1]["reason"] == "the model is called with fused_lm_head=True"


def mixture(**more: Any) -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, **experts, **more)).train()


@pytest.mark.parametrize("asked", [{}, {"output_hidden_states": True}, {"use_cache": False}])
def test_a_tuple_of_a_mixture_of_experts_is_the_padded_one(asked: dict[str, Any]) -> None:
    stock, model = mixture(), mixture()
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    real = batch["attention_mask"] != 0
    ours, theirs = (network(**batch, return_dict=False, **asked) for network in (model, stock))
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        if isinstance(expected, hf.Cache):
            with pytest.raises(contract.IntegrationError, match=r"layers of the past_key_values"):
                _ = mine.layers
            continue
        leaves = [torch.utils._pytree.tree_leaves(outputs) for outputs in (mine, expected)]
        for packed, padded in zip(*leaves, strict=True):
            assert packed.shape == padded.shape
            if padded.dim() == 2:  # of the router, [batch * width, experts]
                torch.testing.assert_close(packed[real.flatten()], padded[real.flatten()])
            elif padded.dim() == 3:
                torch.testing.assert_close(packed[real], padded[real])
            else:
                torch.testing.assert_close(packed, padded)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_who_looks_at_outputs_without_gradients_leaves_others_theirs(without: Any) -> None:
    """A metric first, then a loss of logits."""
    stock, model = (scored(of_tokens) for _ in range(2))
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    real = batch["attention_mask"] != 0
    for network in (stock, model):
        output = network(**batch)
        with without():
            output.logits.argmax(-1)
        (output.logits[real].square().mean() + output.loss).backward()
    for mine, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_outputs_may_be_changed_in_place() -> None:
    stock, model = (scored(of_tokens) for _ in range(2))
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    real = batch["attention_mask"] != 0
    for network in (stock, model):
        logits = network(**batch).logits
        logits.div_(2)
        logits[:, 1] += 1
        logits[real].square().mean().backward()
    for mine, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_outputs_that_a_packed_loss_went_without_is_refused() -> None:
    model = scored(of_tokens)
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    output = model(**batch, output_hidden_states=True)
    for wait in (lambda: output.logits.register_hook(print), output.logits.retain_grad):
        with pytest.raises(RuntimeError, match="from a row without padding"):
            wait()
    # A loss of its own has one.
    del batch["labels"]
    logits = model(**batch).logits
    logits.retain_grad()
    logits[:, 0].square().sum().backward()
    assert logits.grad is not None
