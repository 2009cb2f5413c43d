"""Tests what padding-free training leaves behind, and models that people change otherwise, too."""

from __future__ import annotations

import copy
import io
import random
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import deepytorch
from deepytorch.integrations.common import contract
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import packed_attention
from deepytorch.integrations.padding_free.keys import BATCH_KEY
from deepytorch.integrations.padding_free.packed_forward import PlanningCollate
from deepytorch_core.base import decisions

LONGEST = 20


pytestmark = pytest.mark.usefixtures("one_thread")


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **more}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape, **heads)).train()


def example(index: int) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(1, LONGEST, (1,), generator=generator))
    return torch.randint(4, 97, (length,), generator=generator).tolist()


def padded(examples: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, examples)) + 1
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in examples])
    mask = (ids != 0).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask == 1, ids, -100),
    }


def batch(seed: int = 0, rows: int = 4) -> dict[str, Any]:
    return padded([example(100 * seed + row) for row in range(rows)])


def state_of(thing: Any) -> dict[str, Any]:
    values = vars(thing).items()
    return {name: dict(value) if isinstance(value, dict) else value for name, value in values}


def test_padding_free_undo_leaves_model_loader_and_configuration_as_found() -> None:
    model = llama()
    loader = DataLoader([example(index) for index in range(8)], batch_size=4, collate_fn=padded)
    found = state_of(model), state_of(model.config), state_of(loader)
    for _ in range(2):  # a second time changes nothing
        assert padding_free.attach(model, "on", adapter="test", loaders=[loader])
    assert len(model._forward_pre_hooks) == 1
    assert isinstance(loader.collate_fn, PlanningCollate)
    assert loader.collate_fn.collate is padded
    model(**next(iter(loader))).loss.backward()
    model.zero_grad()
    assert padding_free.detach(model)
    assert not padding_free.detach(model)
    assert (state_of(model), state_of(model.config), state_of(loader)) == found
    assert padding_free.attach(model, "auto", adapter="test")
    padding_free.detach(model)


def test_padding_free_loaders_plan_on_the_cpu_and_only_add_to_a_batch() -> None:
    model, stock = llama(), llama()
    plain = DataLoader([example(index) for index in range(8)], batch_size=4, collate_fn=padded)
    loader = DataLoader(
        [example(index) for index in range(8)],
        batch_size=4,
        collate_fn=padded,
        num_workers=1,
        persistent_workers=True,
    )
    padding_free.attach(model, "on", adapter="test", loaders=[loader])
    for ours, theirs in zip(loader, plain, strict=True):
        packing = ours[BATCH_KEY]
        assert list(ours) == [*theirs, BATCH_KEY]
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
        assert packing.num_tokens == theirs["attention_mask"].sum()
        torch.testing.assert_close(model(**ours).loss, stock(**theirs).loss)
    padding_free.detach(model)
    assert all(BATCH_KEY not in ours for ours in loader)
    # A value that is no padded batch passes through.
    for other in ([1, 2], {"pixels": torch.ones(2)}, {"input_ids": [1], "attention_mask": [1]}):
        assert PlanningCollate(lambda given: given, True)(other) is other
        assert BATCH_KEY not in other


class Refuses(LlamaForCausalLM):
    """Gives something else for a packed row, and draws meanwhile."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if kwargs.get("cu_seq_lens_q") is not None:
            output.logits = output.logits + 1 + torch.rand(1)
        return output


class Draws(LlamaForCausalLM):
    """Draws by every generator there is, as layers that are dropped and noise do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.drawn = float(torch.rand(1)) + random.random() + np.random.rand()
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [Draws, LlamaForCausalLM, Refuses], ids=lambda kind: kind.__name__)
def test_what_is_drawn_after_a_model_was_looked_at_is_stocks(kind: Any) -> None:
    def numbers() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())

    model = kind(llama().config)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = numbers()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    assert padding_free.attach(model, "auto", adapter="test") == (kind is not Refuses)
    assert numbers() == expected


def hide_tokens(batch: dict[str, Any]) -> None:
    hidden = torch.arange(batch["attention_mask"].shape[1]) % 3 == 1
    batch["attention_mask"] = batch["attention_mask"].masked_fill(hidden, 0)


def hide_in_place(batch: dict[str, Any]) -> None:
    batch["attention_mask"][:, 0] = 0


def no_labels_for_the_first(batch: dict[str, Any]) -> None:
    batch["labels"][0, 3] = -100


def labels_everywhere(batch: dict[str, Any]) -> None:
    batch["labels"] = batch["input_ids"].clone()


def no_padding(batch: dict[str, Any]) -> None:
    batch["attention_mask"].fill_(1)


def other_way_round(batch: dict[str, Any]) -> None:
    for name in ("input_ids", "attention_mask", "labels"):
        batch[name] = batch[name].flip(1)


def cut(batch: dict[str, Any]) -> None:
    for name in ("input_ids", "attention_mask", "labels"):
        batch[name] = batch[name][:, :5]


CHANGES = (
    hide_tokens,
    hide_in_place,
    no_labels_for_the_first,
    labels_everywhere,
    no_padding,
    other_way_round,
    cut,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("first", [0, 20], ids=["at once", "late"])
def test_a_padding_free_batch_that_the_loop_changes_is_planned_anew(
    change: Callable[[dict[str, Any]], None], first: int
) -> None:
    model, stock = llama(), llama()
    padding_free.attach(model, "auto", adapter="test")
    collate = PlanningCollate(padded, True)
    for number in range(first + 2):
        ours = collate([example(index) for index in range(4)])
        theirs = padded([example(index) for index in range(4)])
        if number >= first:
            change(ours)
            change(theirs)
            torch.testing.assert_close(model(**ours).loss, stock(**theirs).loss)
        else:
            model(**ours)


def test_copies_of_padding_free_models_stand_alone() -> None:
    model = llama()
    padding_free.attach(model, "on", adapter="test")
    average = copy.deepcopy(model).eval()
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=False)
    seen = batch()
    with torch.no_grad():
        expected = llama().eval()(**seen).logits
        assert torch.equal(average(**seen).logits, expected)
        assert torch.equal(loaded.eval()(**seen).logits, expected)
    torch.testing.assert_close(loaded.train()(**seen).loss, model(**seen).loss)
    # The configuration carries our attention's name into models that are built from it.
    sister = LlamaForCausalLM(model.config)
    sister.load_state_dict(model.state_dict())
    assert torch.equal(sister.eval()(**seen).logits, expected)
    assert "deepytorch" not in model.config.to_json_string()


@pytest.mark.parametrize("reentrant", [True, False])
def test_padding_free_activation_checkpoints_recompute_the_packed_row(reentrant: bool) -> None:
    stock, model = llama(), llama()
    padding_free.attach(model, "on", adapter="test")
    for network in (stock, model):
        network.gradient_checkpointing_enable({"use_reentrant": reentrant})
        network.enable_input_require_grads()
    seen = batch()
    ours, theirs = model(**seen).loss, stock(**seen).loss
    # Between the two halves of a step the model may evaluate.
    with torch.no_grad():
        model.eval()(**seen)
    model.train()
    ours.backward()
    theirs.backward()
    for mine, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("named", ["eager", "sdpa"])
def test_padding_free_takes_over_from_any_attention(named: str) -> None:
    stock = llama(attn_implementation=named)
    model = copy.deepcopy(stock)
    assert model.config._attn_implementation == named
    padding_free.attach(model, "auto", adapter="test")
    unpackable = {**batch(), "output_hidden_states": True, "use_cache": True}
    torch.testing.assert_close(model(**unpackable).logits, stock(**unpackable).logits)
    torch.testing.assert_close(model(**batch()).loss, stock(**batch()).loss)
    padding_free.detach(model)
    assert model.config._attn_implementation == named


def test_padding_free_adapters_of_peft_train_like_padded_ones() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])))
    stock, model = models
    assert padding_free.attach(model, "on", adapter="test")
    for _ in range(2):
        losses = [network(**batch()).loss for network in models]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for network, loss in zip(models, losses, strict=True):
            loss.backward()
            for parameter in network.parameters():
                if parameter.grad is not None:
                    parameter.data -= parameter.grad
                    parameter.grad = None
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    refused = peft.get_peft_model(llama(), prompts)
    assert not padding_free.attach(refused, "auto", adapter="test")


def test_padding_free_in_mixed_precision_computes_in_it() -> None:
    stock, model = llama(), llama()
    padding_free.attach(model, "on", adapter="test", precision=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = model(**batch()), stock(**batch())
    real = batch()["attention_mask"] != 0
    assert ours.logits.dtype == theirs.logits.dtype == torch.bfloat16
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], rtol=5e-2, atol=5e-2)
    low = llama().bfloat16()
    assert padding_free.attach(low, "on", adapter="test")
    assert low(**batch()).loss.isfinite()


def test_padding_free_attention_dropout_is_not_forgotten() -> None:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = BertForMaskedLM(
        BertConfig(vocab_size=97, num_attention_heads=4, hidden_dropout_prob=0.0, **config)
    ).train()
    assert padding_free.attach(model, "on", adapter="test")
    first, second = (model(**batch()).loss for _ in range(2))
    assert first != second
    model.eval()
    assert model(**batch()).loss == model(**batch()).loss


@pytest.mark.parametrize("how", ["in place", "blocks"])
def test_padding_free_batches_compile_four_times_at_most(how: str) -> None:
    stock, model = (llama(num_hidden_layers=1) for _ in range(2))
    padding_free.attach(model, "on", adapter="test")
    torch._dynamo.reset()
    counters.clear()
    if how == "in place":
        model.compile(backend="eager")
    else:
        padding_free.use_few_shapes(model, 4, max_length=LONGEST)
        for layer in model.model.layers:
            layer.compile(backend="eager", dynamic=False)
    shapes = set()
    with torch.no_grad():
        for step in range(200):
            seen = batch(step, rows=4 if step % 10 else 3)  # an epoch's last batch is smaller
            loss = model(**seen).loss
            shapes.add(seen["input_ids"].shape)
            if step % 40 == 0:
                torch.testing.assert_close(loss, stock(**seen).loss, rtol=1e-5, atol=1e-6)
    assert len(shapes) > 20
    assert 1 <= counters["stats"]["unique_graphs"] <= 4
    assert not counters["graph_break"]


def test_padding_free_can_be_off() -> None:
    model = llama()
    assert not padding_free.attach(model, "off", adapter="test")
    assert not model._forward_pre_hooks


def test_the_report_shows_what_padding_free_was_decided() -> None:
    padding_free.attach(llama(), "auto", adapter="test")
    chosen = decisions.made()[-1]
    assert (chosen["what"], chosen["chosen"]) == ("padding-free", "packed")
    assert "padding-free: packed, LlamaForCausalLM gives the same" in str(deepytorch.report())


def test_padding_free_needs_parameters_with_values() -> None:
    with torch.device("meta"):
        model = llama()
    assert not padding_free.attach(model, "auto", adapter="test")
    with pytest.raises(contract.IntegrationError, match="its parameters have no values yet"):
        padding_free.attach(model, "on", adapter="test")


def test_the_padding_free_example_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = Path(__file__).parents[2] / "docs" / "examples"
    runpy.run_path(str(examples / "padding_free.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "trains without padding: True" in said
    loss = float(said.partition("loss ")[2].split()[0])
    assert loss < 4  # of 5.5 at the start


def test_padding_free_models_train_in_threads_side_by_side() -> None:
    """Keep the kind of one model's pass from the other's, which differs meanwhile."""
    model, other = llama(), llama(attn_implementation="eager")
    for network in (model, other):
        padding_free.attach(network, "on", adapter="test")
    inside, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert done.wait(60)

    wait.__module__ = "torch"  # else its batches stay padded
    model.model.layers[0].register_forward_pre_hook(wait)
    seen: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: seen.append(model(**batch()).loss))
    thread.start()
    assert inside.wait(60)
    try:
        with torch.no_grad():
            evaluated = other.eval()(**batch()).loss
        trained = other.train()(**batch()).loss
    finally:
        done.set()
        thread.join()
    expected = llama()(**batch()).loss
    for loss in (evaluated, trained, *seen):
        torch.testing.assert_close(loss, expected)
    assert len(seen) == 1


def test_padding_free_checkpoints_of_the_model_recompute_rows_of_the_same_size() -> None:
    stock, model = llama(), llama()
    padding_free.attach(model, "on", adapter="test")
    attached = padding_free._attachment(model)
    assert attached is not None
    attached.forward.shapes.use_few(4)  # from the thirteenth batch on
    model(**batch())
    for step in range(1, 15):
        for network in (stock, model):
            given = batch(step)
            loss = checkpoint(lambda m, g: m(**g).loss, network, given, use_reentrant=False)
            loss.backward()
    for mine, expected in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_free_models_keep_the_name_of_their_attention(attention: str) -> None:
    first = llama()
    first.set_attn_implementation(attention)
    second = LlamaForCausalLM(first.config).train()
    lookups = packed_attention._lookups
    before = lookups._num_users  # models of other tests
    for network in (first, second):
        assert padding_free.attach(network, "on", adapter="test")
        network(**batch()).loss.backward()
        assert network.config._attn_implementation == attention
        assert copy.deepcopy(network).config._attn_implementation == attention
    assert lookups._num_users == before + 2
    for network in (first, second):
        assert padding_free.detach(network)
    assert lookups._num_users == before
    is_stock = AttentionInterface.get_interface is packed_attention._stock_attention_of
    assert is_stock == (not before)
    assert ("__getitem__" in vars(AttentionMaskInterface)) == bool(before)


def test_a_teacher_gets_the_batch_of_a_padding_free_student() -> None:
    """With the plan in it, as keywords."""
    student, teacher = llama(), llama(num_hidden_layers=1).eval()
    loader = DataLoader([example(row) for row in range(4)], batch_size=4, collate_fn=padded)
    padding_free.attach(student, "on", adapter="test", loaders=[loader])
    (planned,) = loader
    assert BATCH_KEY in planned
    expected = teacher(**padded([example(row) for row in range(4)]))
    for network in (teacher, torch.compile(teacher, backend="eager")):
        torch.testing.assert_close(network(**planned).logits, expected.logits)
