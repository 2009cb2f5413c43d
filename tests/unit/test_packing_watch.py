"""Models that nobody asked about: watched first, packed where nothing is lost, exact when read."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from accelerate.utils.operations import ConvertOutputsToFp32
from torch import Tensor

from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import packing_watch
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from packing_tries import Inline

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, own_profile: Path) -> None:
    monkeypatch.setattr(packing_watch, "Helper", Inline)
    config.set_current(Options(profile=str(own_profile), patience="off"))
    monkeypatch.setattr(decisions, "_made", [])


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, **more)).train()


def mixtral() -> Any:
    torch.manual_seed(0)
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, **experts)).train()


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 61, (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate((12, 5, 9, 1)):
        mask[row, length:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def chosen() -> list[tuple[str, str]]:
    made = [decision for decision in decisions.made() if decision["what"] == "padding-free"]
    return [(decision["chosen"], decision["reason"]) for decision in made]


Use = Callable[[Any, dict[str, Tensor]], Tensor]


def trained(model: Any, uses: list[Use], *, ours: bool) -> list[float]:
    """Losses of a few steps, and the weights' sum."""
    if ours:
        padding_free.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step, use in enumerate(uses):
        loss = use(model, batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [
        *losses,
        sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters()),
    ]


def assert_like_stock(make: Callable[[], Any], uses: list[Use]) -> None:
    expected = trained(make(), uses, ours=False)
    assert trained(make(), uses, ours=True) == pytest.approx(expected, rel=1e-4)


def plain(model: Any, given: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**given).loss
    return loss


def test_packed_from_the_second_step_on_where_only_the_loss_is_read() -> None:
    assert_like_stock(llama, [plain] * 5)
    assert chosen() == [("packed", "LlamaForCausalLM: its twin gives the same")]
    model = llama()
    padding_free.watch(model)
    for step in range(3):
        plain(model, batch(step)).backward()
        assert (padding_free._attachment(model) is not None) == (step > 0)


def last_position(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    penalty: Tensor = output.logits[:, -1].pow(2).mean()
    return output.loss + penalty


def detached_scale(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    loss: Tensor = output["loss"] * output["logits"].detach().abs().mean()
    return loss


def hidden_states(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given, output_hidden_states=True)
    penalty: Tensor = output.hidden_states[-1].mean(1).pow(2).mean()
    return output.loss + penalty


def all_fields(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    fields = dict(output.items())
    penalty: Tensor = fields["logits"].float().mean()
    return output.loss + penalty


def tuple_of_fields(model: Any, given: dict[str, Tensor]) -> Tensor:
    loss, logits = model(**given).to_tuple()[:2]
    penalty: Tensor = logits.mean()
    return loss + penalty


def from_own_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten())


def to_the_logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    (gradient,) = torch.autograd.grad(output.loss, output.logits, retain_graph=True)
    return output.loss + gradient.pow(2).sum()


READERS = [
    last_position,
    detached_scale,
    hidden_states,
    all_fields,
    tuple_of_fields,
    from_own_loss,
    to_the_logits,
]


@pytest.mark.parametrize("read", READERS)
def test_who_reads_outputs_in_the_first_step_keeps_the_padding(read: Use) -> None:
    assert_like_stock(llama, [read] * 4)
    ((choice, reason),) = chosen()
    assert choice == "padded"
    assert f"test_packing_watch.{read.__name__} reads" in reason


@pytest.mark.parametrize("read", READERS[:-1])
def test_who_reads_outputs_later_gets_those_of_the_padded_batch(read: Use) -> None:
    assert_like_stock(llama, [plain, plain, read, plain, read])
    assert [choice for choice, _ in chosen()] == ["packed", "padded"]


def router_losses(model: Any, given: dict[str, Tensor]) -> Tensor:
    output = model(**given)
    z_losses: Tensor = sum(logits.logsumexp(-1).pow(2).mean() for logits in output.router_logits)
    return output.loss + z_losses


@pytest.mark.parametrize("first", [plain, router_losses])
def test_router_logits_at_padding_are_stocks(first: Use) -> None:
    assert_like_stock(mixtral, [first, plain, router_losses, plain])


def in_two_segments(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The second half of each text sees the first through the cache."""
    parts = [{name: tensor[:, :6] for name, tensor in given.items()}, dict(given)]
    parts[1] |= {name: given[name][:, 6:] for name in ("input_ids", "labels")}
    first = model(**parts[0], use_cache=True)
    second = model(**parts[1], past_key_values=first.past_key_values)
    loss: Tensor = first.loss + second.loss.nan_to_num()
    return loss


@pytest.mark.parametrize("first", [plain, in_two_segments])
def test_the_cache_is_there_for_who_reads_it(first: Use) -> None:
    make = llama  # returns a cache by default
    assert_like_stock(make, [first, plain, in_two_segments, plain])


def test_outputs_that_mixed_precision_has_converted_tell_who_reads_them() -> None:
    """Accelerate makes another output, with every field in float32."""

    def make() -> Any:
        model = llama()
        forward = ConvertOutputsToFp32(type(model).forward.__get__(model))
        model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
        return model

    for read in (last_position, hidden_states):
        assert_like_stock(make, [plain, plain, read, plain])


def test_a_pass_for_a_reader_uses_no_random_numbers() -> None:
    model = llama()
    padding_free.watch(model)
    for step in range(2):
        plain(model, batch(step))
    before = torch.get_rng_state()
    output = model(**batch(2))
    assert output.logits.shape == (4, 12, 61)
    assert torch.equal(before, torch.get_rng_state())


def test_outputs_look_like_stocks() -> None:
    stock, model = llama(), llama()
    padding_free.watch(model)
    for step in range(3):
        expected, output = (network(**batch(step)) for network in (stock, model))
        assert list(output.keys()) == list(expected.keys())
        assert len(output) == len(expected)
        assert type(output).__name__ == type(expected).__name__
        assert isinstance(output, type(expected))
        assert output.past_key_values.get_seq_length() == 12
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)


def test_gradients_of_gradients_keep_the_padding() -> None:
    def penalty(model: Any, given: dict[str, Tensor]) -> Tensor:
        loss = model(**given).loss
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.1 * sum(gradient.pow(2).sum() for gradient in found)

    def make() -> Any:
        model = llama()
        model.set_attn_implementation("eager")
        return model

    assert_like_stock(make, [penalty] * 3)
    assert "gradients of its gradients" in chosen()[0][1]


def test_dropout_on_the_cpu_draws_what_stock_draws() -> None:
    def make() -> Any:
        return llama(attention_dropout=0.2)

    drawn = []
    for ours in (False, True):
        torch.manual_seed(3)
        trained(make(), [plain] * 3, ours=ours)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]
    assert "draw from the CPU's generator" in chosen()[0][1]


class Counting(hf.LlamaForCausalLM):  # type: ignore[misc]
    """A script's own model."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def of_the_scripts_own() -> Any:
    return Counting(hf.LlamaConfig(**SHAPE)).train()


def with_a_layer_of_its_own() -> Any:
    class Odd(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(1, keepdim=True))

    model = llama()
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Odd(old.in_features, old.out_features, bias=False)
    return model


def with_a_replaced_forward() -> Any:
    model = llama()
    norm = model.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x) - x.mean(1, keepdim=True)
    return model


def with_another_class() -> Any:
    model = llama()
    model.model.norm = hf.models.bert.modeling_bert.BertIntermediate(
        SimpleNamespace(hidden_size=32, intermediate_size=32, hidden_act="gelu")
    )
    return model


def with_a_prefix() -> Any:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(llama(), config).train()


def with_an_invoked_adapter() -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[7, 8])
    return peft.get_peft_model(llama(), config).train()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (of_the_scripts_own, "Counting is a module of the script's own"),
        (with_a_layer_of_its_own, "Odd is a module of the script's own"),
        (with_a_replaced_forward, "replaced the forward of LlamaRMSNorm"),
        (with_another_class, "which its configuration doesn't make"),
        (with_a_prefix, "adapter (PREFIX_TUNING) may look"),
        (with_an_invoked_adapter, "adapter (LORA) may look"),
    ],
)
def test_what_a_twin_would_not_have_keeps_the_padding(make: Any, why: str) -> None:
    model = make()
    padding_free.watch(model)
    for step in range(3):
        model(**batch(step)).loss.backward()
    ((choice, reason),) = chosen()
    assert choice == "padded"
    assert why in reason
    if isinstance(model, Counting):
        assert model.calls == 3


def test_adapters_of_peft_are_packed() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
        return peft.get_peft_model(llama(), config).train()

    assert_like_stock(make, [plain] * 3)
    assert [choice for choice, _ in chosen()] == ["packed"]


def test_what_was_found_is_known_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trained(llama(), [plain] * 3, ours=True)
    monkeypatch.setattr(packing_watch, "Helper", None)
    monkeypatch.setattr(decisions, "_made", [])
    trained(llama(), [plain] * 3, ours=True)
    assert [choice for choice, _ in chosen()] == ["packed"]


def test_saved_and_copied_models_know_nothing_of_it() -> None:
    model = llama()
    padding_free.watch(model)
    for step in range(3):
        plain(model, batch(step)).backward()
        stream = io.BytesIO()
        torch.save(model, stream)
        assert b"deepytorch" not in stream.getvalue().replace(b"__deepytorch_padding_free__", b"")
        other = copy.deepcopy(model)
        expected = model.eval()(**batch()).logits
        torch.testing.assert_close(other(**batch()).logits, expected)
        model.train()


def test_patience_waits_for_a_run_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    config.set_current(dataclasses.replace(config.current(), patience="auto"))
    monkeypatch.setattr(packing_watch.PackingWatch, "_least_run_s", 3600.0)
    trained(llama(), [plain] * 20, ours=True)
    assert chosen() == []
    monkeypatch.setattr(packing_watch.PackingWatch, "_least_run_s", 0.0)
    trained(llama(), [plain] * 20, ours=True)
    assert [choice for choice, _ in chosen()] == ["packed"]


def test_a_run_that_may_be_short_is_watched_for_its_first_calls_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config.set_current(dataclasses.replace(config.current(), patience="auto"))
    monkeypatch.setattr(packing_watch.PackingWatch, "_least_run_s", 3600.0)
    monkeypatch.setattr(packing_watch, "_MOST_BEFORE_HELPER", 10)
    model, steps = llama(), []
    padding_free.watch(model)
    for step in range(30):
        output = model(**batch(step))
        steps.append("_pending" in vars(output))
        output.loss.backward()
        if step == 19:
            monkeypatch.setattr(packing_watch.PackingWatch, "_least_run_s", 0.0)
    assert steps[:20] == [True] * 10 + [False] * 10
    assert steps[20]
    assert [choice for choice, _ in chosen()] == ["packed"]
