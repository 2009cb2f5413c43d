"""Models trained without padding give the loss and gradients of padded ones, and run stock else."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.utils.data import DataLoader

from deepytorch.integrations.common import contract
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import packing_probe
from deepytorch_core.base import decisions
from deepytorch_core.data import PaddingFreeCollator, plan

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, **SLIDING)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=8)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=6)),
    "gemma": lambda: hf.GemmaForCausalLM(
        hf.GemmaConfig(**{**GROUPED, "num_key_value_heads": 1}, head_dim=8)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8)
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, **EXPERTS)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SHAPE, **NO_DROPOUT)),
    "roberta": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(**{**SHAPE, "pad_token_id": 1, "bos_token_id": 0}, **NO_DROPOUT)
    ),
    "bert tokens": lambda: hf.BertForTokenClassification(hf.BertConfig(**SHAPE, **NO_DROPOUT)),
}
CAUSAL = {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "gpt_neox", "mixtral"}


pytestmark = pytest.mark.usefixtures("one_thread")


def build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().train()


def batch_of(
    name: str = "llama", *, left: bool = False, lengths: tuple[int, ...] = (17, 3, 0, 9, 1)
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    width = max(lengths) + 2
    ids = torch.randint(4, VOCABULARY, (len(lengths), width), generator=generator)
    columns = torch.arange(width).flip(0) if left else torch.arange(width)
    mask = (columns[None, :] < torch.tensor(lengths)[:, None]).long()
    labels = ids % 2 if name == "bert tokens" else ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[mask == 0] = -100
    if name in CAUSAL:
        labels[:, 1:][mask[:, :-1] == 0] = -100  # nothing is predicted from padding
    ids[mask == 0] = 1 if name == "roberta" else 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def grads(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_training(model: Any, stock: Any, batch: dict[str, Any], **more: Any) -> Any:
    ours, theirs = model(**batch, **more), stock(**batch, **more)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    ours.loss.backward()
    theirs.loss.backward()
    mine, expected = grads(model), grads(stock)
    assert mine.keys() == expected.keys()
    for name, grad in mine.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    real = batch["attention_mask"] != 0
    assert ours.logits.shape == theirs.logits.shape
    torch.testing.assert_close(ours.logits[real], theirs.logits[real], rtol=1e-4, atol=1e-5)
    return ours


class Watch:
    """How many tokens the first layer with weights saw at its last call."""

    __module__ = "deepytorch.tests"  # another's hook would keep the padding

    def __init__(self, model: Any) -> None:
        self.num_tokens = 0
        model.get_input_embeddings().register_forward_hook(self)

    def __call__(self, module: Any, args: Any, output: Tensor) -> None:
        self.num_tokens = output.shape[:2].numel()


@pytest.mark.parametrize("name", MODELS)
def test_padding_free_training_is_padded_training(name: str) -> None:
    stock = build(name)
    model = copy.deepcopy(stock)
    assert padding_free.attach(model, "on", adapter="test")
    watch = Watch(model)
    for left in (False, True):
        batch = batch_of(name, left=left)
        assert_same_training(model, stock, batch)
        assert watch.num_tokens == 30
        # As a Trainer normalises: by tokens of all ranks and accumulated batches.
        assert_same_training(model, stock, batch, num_items_in_batch=torch.tensor(123))
    given = batch_of(name) | {"position_ids": torch.arange(19).expand(5, 19) + 2}
    if name.startswith("bert"):
        given["token_type_ids"] = batch_of(name)["input_ids"] % 2
    assert_same_training(model, stock, given)
    padded = batch_of(name, lengths=(6, 6))
    full, fewer = ({k: v[:, :n].contiguous() for k, v in padded.items()} for n in (6, 5))
    assert_same_training(model, stock, full)
    assert watch.num_tokens == 12
    # With tokens that fill the row up to few sizes.
    assert padding_free.use_few_shapes(model, 4, max_length=40)
    assert_same_training(model, stock, batch_of(name))
    assert watch.num_tokens == 256  # five rows of 40 tokens, rounded up
    assert_same_training(model, stock, full)
    # One shape without padding is as good as few, but causal models can't be replayed with it.
    assert watch.num_tokens == (12 if "bert" in name else 256)
    assert_same_training(model, stock, fewer)
    assert watch.num_tokens == 256


def test_padding_free_models_run_stock_when_they_do_not_train() -> None:
    stock = build("llama").eval()
    model = copy.deepcopy(stock)
    attention = model.config._attn_implementation
    assert padding_free.attach(model, "on", adapter="test")
    seen: list[str] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda *_: seen.append(model.config._attn_implementation)
    )
    batch = batch_of()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, stock(**batch).logits)
        planned = {**batch, "deepytorch_packing": plan(batch["attention_mask"])}
        assert torch.equal(model(**planned).logits, stock(**batch).logits)
        inputs = {name: batch[name][:2] for name in ("input_ids", "attention_mask")}
        ours = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert torch.equal(ours, stock.generate(**inputs, max_new_tokens=4, do_sample=False))
    assert set(seen) == {attention}


def test_padding_free_models_generate_stock_while_they_train() -> None:
    stock, model = build("llama"), build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    inputs = {name: batch_of()[name][:2] for name in ("input_ids", "attention_mask")}
    ours = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(ours, stock.generate(**inputs, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(("name", "shifted"), [("bert", False), ("llama", True)])
def test_padding_free_finds_out_which_label_belongs_to_a_token(name: str, shifted: bool) -> None:
    """Also where all labels are as likely, so that no loss tells."""
    model = build(name).bfloat16()
    for parameter in model.get_output_embeddings().parameters():
        parameter.data.zero_()
    assert padding_free.attach(model, "on", adapter="test")
    collate = DataLoader([0], collate_fn=lambda _: batch_of(name))
    padding_free.plan_batches(model, [collate])
    assert collate.collate_fn.shifted == shifted  # type: ignore[attr-defined]


def test_padding_free_output_is_unpacked_when_it_is_read() -> None:
    stock, model = build("llama"), build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    real = batch["attention_mask"] != 0
    output, padded = (
        network(**batch, output_hidden_states=True, use_cache=False) for network in (model, stock)
    )
    assert isinstance(output, type(padded))
    assert list(output.keys()) == list(padded.keys())
    waiting = vars(output)["_pending"]
    assert output["loss"] is output.loss is output[0]
    assert set(waiting) == {"logits", "hidden_states"}
    leaves, spec = torch.utils._pytree.tree_flatten(output)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    for read in (output, again, pickle.loads(pickle.dumps(output)), copy.copy(output)):
        torch.testing.assert_close(read.logits[real], padded.logits[real])
        assert (read[1][~real] == 0).all()
        assert read.get("logits") is read["logits"] is read.to_tuple()[1] is read[:2][1]
        assert dict(read.items())["logits"] is list(read.values())[1] is read.logits
        for ours, theirs in zip(read.hidden_states, padded.hidden_states, strict=True):
            torch.testing.assert_close(ours[real], theirs[real])
    assert not waiting
    # A walk through all fields, as DeepSpeed's for its hooks, makes none of them.
    seen: list[Tensor] = []
    through = model(**batch)
    for value in through.values():
        if value.grad_fn is not None:
            value.register_hook(seen.append)
    assert "logits" in vars(through)["_pending"]
    through.logits[real].sum().backward()
    assert seen[0].shape == padded.logits.shape
    output.logits = None
    assert output.logits is None
    assert "logits=" in repr(again)
    # A loop that computes the loss itself, and one that wants a tuple.
    labels = batch.pop("labels")
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss, padded.loss)
    (logits,) = model(**batch, use_cache=False, return_dict=False)
    torch.testing.assert_close(logits[real], padded.logits[real])


def test_padding_free_losses_where_no_label_is_trained_are_the_padded_ones() -> None:
    stock, model = build("llama"), build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    batch["labels"].fill_(-100)
    assert model(**batch).loss.isnan()
    assert stock(**batch).loss.isnan()
    assert_same_training(model, stock, batch, num_items_in_batch=torch.tensor(7))


def mask_of(kind: str, mask: Tensor) -> Tensor:
    if kind == "holes":
        mask = mask.clone()
        mask[0, 4] = 0
        return mask
    return mask.to(getattr(torch, kind))


@pytest.mark.parametrize("kind", ["bool", "uint8", "float32", "bfloat16", "holes"])
def test_padding_masks_of_any_kind_are_right(kind: str) -> None:
    stock, model = build("llama"), build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    batch["attention_mask"] = mask_of(kind, batch["attention_mask"])
    batch["labels"][0, 4:6] = -100
    assert_same_training(model, stock, batch)


def train_on_padding(batch: dict[str, Any]) -> None:
    batch["labels"] = batch["input_ids"].clone()


def left_without_prompt(batch: dict[str, Any]) -> None:
    batch.update(batch_of(left=True))
    batch["labels"] = torch.where(batch["attention_mask"] == 1, 5, -100)


def four_dimensions(batch: dict[str, Any]) -> None:
    causal = torch.ones(19, 19).tril().bool()[None, None]
    batch["attention_mask"] = causal & (batch["attention_mask"] != 0)[:, None, None]


def nothing_real(batch: dict[str, Any]) -> None:
    batch["attention_mask"].zero_()


def cached(batch: dict[str, Any]) -> None:
    batch["use_cache"] = True


def last_logits(batch: dict[str, Any]) -> None:
    batch["logits_to_keep"] = 3
    del batch["labels"]


def last_logits_by_place(batch: dict[str, Any]) -> None:
    batch["logits_to_keep"] = torch.tensor([3, 5])
    del batch["labels"]


def another_loss(batch: dict[str, Any]) -> None:
    batch["label_smoothing"] = 0.0  # whatever it may be: the model's loss gets it


def another_output(batch: dict[str, Any]) -> None:
    batch["return_scores"] = True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (train_on_padding, "labels train on padding: set them to -100 where"),
        (left_without_prompt, "labels train on padding: set them to -100 where"),
        (four_dimensions, r"attention_mask isn't a tensor of shape \(5, 19\)"),
        (nothing_real, "the batch has no tokens"),
        (cached, "the model is called with use_cache=True"),
        (last_logits, "the model is called with logits_to_keep"),
        (last_logits_by_place, "the model is called with logits_to_keep"),
        (another_loss, "the model is called with label_smoothing"),
        (another_output, "the model is called with return_scores=True"),
    ],
)
def test_a_batch_that_can_not_be_packed_stays_padded(
    change: Callable[[dict[str, Any]], None], said: str
) -> None:
    stock, model, strict = build("llama"), build("llama"), build("llama")
    assert padding_free.attach(model, "auto", adapter="test")
    assert padding_free.attach(strict, "on", adapter="test")
    batch: dict[str, Any] = batch_of()
    change(batch)
    ours, theirs = model(**batch), stock(**batch)
    assert torch.equal(ours.logits, theirs.logits)
    assert "labels" not in batch or torch.equal(ours.loss, theirs.loss)
    assert decisions.made()[-1]["chosen"] == "batch stays padded"
    with pytest.raises(contract.IntegrationError, match=f"padding_free=on: {said}.*auto or off"):
        strict(**batch)
    # Neither has forgotten how to train.
    assert_same_training(strict, stock, batch_of())


def test_a_sequence_beyond_the_positions_of_a_padding_free_model_is_one_error() -> None:
    model = build("bert")
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of("bert", lengths=(65, 3))
    with pytest.raises(contract.IntegrationError, match="65 tokens is longer than the 64 positi"):
        model(**batch)
    # Padding beyond them is no reason to fail any more, and rotary positions have no end.
    model(**batch_of("bert", lengths=(64, 3)))
    stock, model = build("llama"), build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    assert_same_training(model, stock, batch_of(lengths=(80, 3)))


def test_padding_free_input_that_is_packed_already_is_not_packed_twice() -> None:
    stock, model = build("llama"), build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    rows = [{"input_ids": list(range(5, 5 + length))} for length in (7, 2, 11)]
    packed = PaddingFreeCollator()(rows)
    ids = torch.zeros(3, 11, dtype=torch.int64)
    for row, example in zip(ids, rows, strict=True):
        row[: len(example["input_ids"])] = torch.tensor(example["input_ids"])
    padded = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    expected = stock(**padded, labels=torch.where(ids == 0, -100, ids))
    for how, training in ((model, True), (model, False), (stock, True)):
        # With a cache transformers itself doesn't see that a row is packed.
        output = how.train(training)(**packed, use_cache=None if how is model else False)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output.logits[0], expected.logits[ids != 0])


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "softcap": (
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**GROUPED, head_dim=8)),
        "attention without padding has no softcap, which Gemma2Attention needs",
    ),
    "own attention": (
        lambda: hf.BloomForCausalLM(
            hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
        ),
        "BloomForCausalLM has an attention of its own",
    ),
    "no attention": (
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)
        ),
        "doesn't use transformers' attention interface",
    ),
    "chunks": (
        lambda: hf.Llama4ForCausalLM(
            hf.Llama4TextConfig(
                **GROUPED,
                head_dim=8,
                num_local_experts=2,
                intermediate_size_mlp=48,
                attention_chunk_size=4096,
            )
        ),
        "masks more than causality and a sliding window",
    ),
    "labels of places": (
        lambda: hf.BertForQuestionAnswering(hf.BertConfig(**SHAPE)),
        "its output has no logits for each token",
    ),
    "labels of sentences": (
        lambda: hf.BertForNextSentencePrediction(hf.BertConfig(**SHAPE)),
        "it takes no labels of each token",
    ),
    "no id for padding": (
        lambda: hf.LlamaForSequenceClassification(
            hf.LlamaConfig(**{**GROUPED, "pad_token_id": None})
        ),
        "no id for padding",
    ),
    "few positions": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**{**SHAPE, "max_position_embeddings": 8})),
        "its 8 positions are too few to try it out",
    ),
    "length-dependent positions": (
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **GROUPED,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            )
        ),
        r"its position encoding \(dynamic\) depends on the padded length",
    ),
    "encoder and decoder": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        ),
        "it is an encoder and a decoder",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_model_that_needs_its_padding_keeps_it_and_says_why(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = UNSUPPORTED[case]
    torch.manual_seed(0)
    model = make().train()
    before, modes = copy.deepcopy(vars(model.config)), [m.training for m in model.modules()]
    assert not padding_free.attach(model, "auto", adapter="test")
    lines = capsys.readouterr().err.splitlines()
    name, _, reason = decisions.made()[-1]["reason"].partition(": ")
    expected = f"deepytorch: padding-free: {name} keeps its padding: {reason}"
    assert [line for line in lines if line.startswith("deepytorch")] == [expected]
    with pytest.raises(contract.IntegrationError, match=f"^test: padding_free=on: .*{said}"):
        padding_free.attach(model, "on", adapter="test")
    assert vars(model.config) == before
    assert [module.training for module in model.modules()] == modes
    assert not model._forward_pre_hooks


def test_what_is_no_transformers_model_is_left_alone() -> None:
    model = torch.nn.Linear(2, 2)
    assert not padding_free.attach(model, "auto", adapter="test")
    assert not padding_free.detach(model)
    assert not padding_free.use_few_shapes(model, 4, max_length=8)
    with pytest.raises(contract.IntegrationError, match="there is no transformers model"):
        padding_free.attach(model, "on", adapter="test")


class Noise:
    """As NEFTune's: scaled by the tokens of a row."""

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        return output + 5 / output.size(1) ** 0.5


def test_what_looks_into_the_model_keeps_the_padding() -> None:
    stock = build("llama")
    model = copy.deepcopy(stock)
    assert padding_free.attach(model, "auto", adapter="test")
    for network in (model, stock):
        network.get_input_embeddings().register_forward_hook(Noise())
    assert_same_training(model, stock, batch_of())
    assert "Noise is a hook on model.embed_tokens" in str(decisions.made()[-1]["reason"])


def test_another_attention_that_is_chosen_later_is_packed_over() -> None:
    stock = build("llama")
    model = copy.deepcopy(stock)
    assert padding_free.attach(model, "on", adapter="test")
    watch = Watch(model)
    for name in ("eager", "sdpa", "sdpa"):
        for network in (model, stock):
            network.set_attn_implementation(name)
        assert_same_training(model, stock, batch_of())
        assert watch.num_tokens == 30
    for network in (model, stock):
        network.set_attn_implementation("eager")
        network.eval()
    shown = [network(**batch_of(), output_attentions=True).attentions for network in (model, stock)]
    torch.testing.assert_close(shown[0], shown[1])


def test_a_loss_that_takes_padding_is_refused() -> None:
    model = build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    real = (batch["attention_mask"] != 0).unsqueeze(-1)
    model(**batch).logits.mul(real).square().sum().backward()
    with pytest.raises(RuntimeError, match="the loss takes what the model gives at padding"):
        model(**batch).logits.exp().sum().backward()


def test_an_output_can_be_made_anew_from_its_fields() -> None:
    model = build("llama")
    assert padding_free.attach(model, "on", adapter="test")
    batch = batch_of()
    size = (*batch["input_ids"].shape, model.config.vocab_size)
    for made in (dataclasses.replace, type(model(**batch)).copy, lambda output: output | {}):
        assert tuple(made(model(**batch)).logits.shape) == size


def test_positions_that_depend_on_the_padded_length_keep_it() -> None:
    model = build("llama")
    vars(model.config)["rope_parameters"] = {"full_attention": {"rope_type": "dynamic"}}
    assert not padding_free.attach(model, "auto", adapter="test")
    assert "depends on the padded length" in str(decisions.made()[-1]["reason"])
    older = SimpleNamespace(rope_scaling={"type": "longrope"})
    assert "longrope" in list(packing_probe._ropes(SimpleNamespace(config=older, modules=list)))


def rounding_by_shape(model: Any, amount: float) -> Any:
    """The model in bfloat16, as deep ones on GPUs: other shapes, other kernels and roundings."""

    def other(module: Any, args: Any, output: Tensor) -> Tensor:
        seed = int(torch.tensor(output.shape).prod())
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
        return output * (1 + amount * noise).to(output.dtype)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(other)
    return model.bfloat16()


def test_padding_free_allows_for_the_noise_that_a_model_has_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = rounding_by_shape(build("llama"), 1.2).eval()
    with torch.no_grad():
        batch = packing_probe._batch(call)
        logits = call(**batch).logits
        noise = packing_probe._own_noise(call, call, batch, logits) / float(logits.abs().max())
    assert 0.06 < noise < 0.2
    assert packing_probe.probe(call, call, precision=torch.bfloat16)

    packed = packing_probe._run_packed

    def of_its_neighbour(*args: Any) -> Any:
        row, packing = packed(*args)
        row.logits = row.logits.roll(1, dims=1)
        return row, packing

    monkeypatch.setattr(packing_probe, "_run_packed", of_its_neighbour)
    with pytest.raises(packing_probe.Unsupported, match="logits of a packed row differ"):
        packing_probe.probe(call, call, precision=torch.bfloat16)
