"""Micro-batches of a step share passes of the trunk, and train as they would apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import deepytorch
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import merged_passes
from deepytorch.integrations.padding_free.merged_passes import WHAT
from deepytorch.integrations.seams import arm as seams
from deepytorch.integrations.transformers import pack_batches
from deepytorch_core.base import config, decisions
from deepytorch_core.base.config import Options
from deepytorch_core.base.patching import Patches
from deepytorch_core.testing import rank_store, spawn_ranks

WIDTH, ROWS, VOCABULARY = 16, 23, 61
LARGE = 1 << 20


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(merged_passes, "WATCHED_STEPS", 0)
    patches = Patches()
    patches.replace(Trainer, "get_batch_samples", seams._gathering)
    yield
    patches.undo()


def llama(**more: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more, vocab_size=VOCABULARY))


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def mistral() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, vocab_size=VOCABULARY))


def gpt2() -> Any:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
    chances = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **chances, vocab_size=VOCABULARY))


def bert() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    chances = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    return BertForMaskedLM(BertConfig(**sizes, **chances, **heads, vocab_size=VOCABULARY))


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "up_proj"])
    return peft.get_peft_model(llama(), adapters)


def rows(count: int = ROWS) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 14, (count,), generator=generator).tolist()
    made = [
        torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
    return [{"input_ids": ids} for ids in made]


def collated(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(feature["input_ids"]) for feature in features)
    ids = torch.zeros(len(features), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, feature in enumerate(features):
        ids[number, : len(feature["input_ids"])] = torch.tensor(feature["input_ids"])
        mask[number, : len(feature["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.seen += [logs["loss"], logs.get("grad_norm") or 0.0]


def trained(model: Any, folder: Path, *, kind: Any = Trainer, **more: Any) -> Any:
    callbacks = more.pop("callbacks", [])
    given = {"gradient_accumulation_steps": 4, "num_train_epochs": 2, **more}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=0.02,
        optim="sgd",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **given,
    )
    losses = Losses()
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=rows(),
        data_collator=collated,
        callbacks=[losses, *callbacks],
    )
    trainer.train()
    return losses.seen, {name: parameter.detach() for name, parameter in model.named_parameters()}


def counted(model: Any) -> list[int]:
    """The tokens of each pass of the trunk."""
    trunk = getattr(model, "get_base_model", lambda: model)().base_model
    seen: list[int] = []
    forward = type(trunk).forward

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is trunk:
            seen.append((args[0] if args else kwargs["input_ids"]).numel())
        return forward(self, *args, **kwargs)

    type(trunk).forward = count
    return seen


def merged(model: Any, budget: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_current", Options(tokens_per_step=budget, log="error"))
    assert pack_batches(model)


def both(
    make: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    budget: int = LARGE,
    **how: Any,
) -> list[int]:
    """Train a model stock and with shared passes; returns the tokens of the trunk's passes."""
    torch.manual_seed(0)
    model = make().double()
    expected = trained(copy.deepcopy(model), tmp_path, **how)
    merged(model, budget, monkeypatch)
    trunk = getattr(model, "get_base_model", lambda: model)().base_model
    monkeypatch.setattr(type(trunk), "forward", type(trunk).forward)
    passes = counted(model)
    found = trained(model, tmp_path, **how)
    # The library computes losses in float32.
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-6, atol=1e-8, msg=name)
    return passes


MODELS = [
    *(gpt2, bert, with_adapters),
    *(pytest.param(make, marks=pytest.mark.extended) for make in (llama, tied, mistral)),
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_steps_are_those_of_micro_batches_apart(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = both(make, tmp_path, monkeypatch)
    # 23 rows are 12 micro-batches of two: three steps of four in each of two epochs.
    assert len(passes) == 6
    assert sum(passes) == 2 * sum(len(row["input_ids"]) for row in rows())


@pytest.mark.parametrize(
    ("accumulated", "number"),
    [
        pytest.param(3, 8, marks=pytest.mark.extended),
        (5, 6),
        pytest.param(8, 4, marks=pytest.mark.extended),
        (12, 2),
    ],
)
def test_the_last_step_of_an_epoch_may_be_shorter(
    accumulated: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = both(llama, tmp_path, monkeypatch, gradient_accumulation_steps=accumulated)
    assert len(passes) == number


def test_a_budget_bounds_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = both(llama, tmp_path, monkeypatch, budget=40)
    assert max(passes) <= 40
    assert 6 < len(passes) < 24


def test_without_memory_for_a_pass_no_step_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, failed = merged_passes._Group.take, []

    def take(group: Any, output: Any) -> Any:
        if group.num_tokens > 40:
            failed.append(group.num_tokens)
            raise torch.OutOfMemoryError("no memory")
        return stock(group, output)

    monkeypatch.setattr(merged_passes._Group, "take", take)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    passes = both(llama, tmp_path, monkeypatch)
    assert len(failed) in (1, 2)  # halved once, or twice
    assert len(passes) < 24, "later steps share smaller passes"


def test_checkpointed_blocks_share_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = {"gradient_checkpointing": True}
    passes = both(
        llama,
        tmp_path,
        monkeypatch,
        **again,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    assert len(passes) == 6


class Doubled(Trainer):
    """Calls its model twice for a micro-batch, once with other rows."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        other = {name: tensor.flip(0) for name, tensor in inputs.items()}
        return loss + 0.5 * super().compute_loss(model, other, *args, **kwargs)


class Weighted(Trainer):
    """Has a loss of its own, of the logits."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (
            outputs.loss * 1.5
            + 1e-3 * outputs.logits[inputs["attention_mask"] == 1].square().mean()
        )


class Replaced(Trainer):
    """Trains on other tensors than the loader has made."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**inputs, "input_ids": inputs["input_ids"].clamp(max=VOCABULARY - 2)}
        return super().compute_loss(model, inputs, *args, **kwargs)


class Written(Trainer):
    """Writes to what the loader has made, within the step."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["input_ids"].clamp_(max=VOCABULARY // 2)
        return super().compute_loss(model, inputs, *args, **kwargs)


class Masked(Trainer):
    """Gives one micro-batch in four a mask that can't be packed, the last of a step among them."""

    number = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        Masked.number += 1
        if Masked.number % 4 == 0:
            inputs = {**inputs, "attention_mask": 2 * inputs["attention_mask"]}
        return super().compute_loss(model, inputs, *args, **kwargs)


class Stepping(Trainer):
    """Has a training step of its own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(Doubled, marks=pytest.mark.extended),
        *(Weighted, Replaced, Written, Masked, Stepping),
    ],
)
def test_losses_of_ones_own_stay_what_they_are(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masked, "number", 0)  # 24 micro-batches later it begins anew, as it did
    both(llama, tmp_path, monkeypatch, kind=kind)


class Sometimes(Trainer):
    """Calls its model once more for some micro-batches, before its own pass or after it."""

    number = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        Sometimes.number += 1
        other = {name: tensor.flip(0) for name, tensor in inputs.items()}
        before = super().compute_loss(model, other) if Sometimes.number % 25 == 3 else 0.0
        loss = super().compute_loss(model, inputs, *args, **kwargs) + before
        return loss + super().compute_loss(model, other) if Sometimes.number % 25 == 8 else loss


@pytest.mark.parametrize("watched", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_calls_that_were_not_expected_lose_no_gradient(
    watched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_passes, "WATCHED_STEPS", watched)
    monkeypatch.setattr(Sometimes, "number", 0)
    how = {"num_train_epochs": 5, "callbacks": [Restarts()]}
    passes = both(llama, tmp_path, monkeypatch, kind=Sometimes, **how)
    assert max(passes) > 30


class Restarts(TrainerCallback):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Have both trainings count from the same number."""
        Sometimes.number = 0


def test_a_model_that_is_called_twice_is_seen_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_passes, "WATCHED_STEPS", 2)
    passes = both(llama, tmp_path, monkeypatch, kind=Doubled)
    assert len(passes) == 48


class Hidden(Trainer):
    """Asks for hidden states, which have no parts."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs, output_hidden_states=True).loss


def test_a_trunk_that_returns_more_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = both(llama, tmp_path, monkeypatch, kind=Hidden)
    assert len(passes) == 25


class Watching(TrainerCallback):
    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """See what gradients there are."""


def test_who_looks_on_between_micro_batches_sees_passes_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = both(llama, tmp_path, monkeypatch, callbacks=[Watching()])
    assert len(passes) == 24


def test_a_mean_of_means_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PerBatch(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    passes = both(llama, tmp_path, monkeypatch, kind=PerBatch)
    assert len(passes) == 6


@pytest.mark.parametrize("budget", ["off", "auto"])
def test_a_cpu_shares_nothing_by_itself(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    merged(model, budget, monkeypatch)
    trained(model, tmp_path, num_train_epochs=1)
    forward = padding_free.forward_of(model)
    assert forward is not None
    assert forward.merged is None


def of_two(rank: int, world_size: int, budget: int | str, folder: Path) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    deepytorch.deactivate()  # importing an adapter has activated it
    dist.init_process_group("gloo", store=rank_store("merged"), rank=rank, world_size=world_size)
    before = config._current
    config._current = Options(tokens_per_step=budget, log="error")
    patches = Patches()
    patches.replace(Trainer, "get_batch_samples", seams._gathering)
    try:
        torch.manual_seed(0)
        model = tied().double()
        assert pack_batches(model, "on")
        merged_passes.WATCHED_STEPS = 1
        seen, weights = trained(model, folder)
        forward = padding_free.forward_of(model)
        merged = None if forward is None else forward.merged
        return seen, weights, 0 if merged is None else merged.num_shared
    finally:
        patches.undo()
        config._current = before
        dist.destroy_process_group()


def under_deepspeed(rank: int, world_size: int, budget: int | str, stage: int, folder: Path) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    before = config._current
    config._current = Options(tokens_per_step=budget, log="error")
    patches = Patches()
    patches.replace(Trainer, "get_batch_samples", seams._gathering)
    asked = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
    }
    try:
        torch.manual_seed(0)
        model = tied()
        assert pack_batches(model, "on")
        merged_passes.WATCHED_STEPS = 1
        seen, weights = trained(model, folder, deepspeed=asked)
        forward = padding_free.forward_of(model)
        merged = None if forward is None else forward.merged
        made = {record["reason"] for record in decisions.made() if record["what"] == WHAT}
        return seen, weights, 0 if merged is None else merged.num_shared, made
    finally:
        patches.undo()
        config._current = before


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeed_counts_the_micro_batches_itself(
    stage: int, tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    apart = spawn_ranks(under_deepspeed, 2, "off", stage, tmp_path, **deepspeeds_ranks)
    shared = spawn_ranks(under_deepspeed, 2, LARGE, stage, tmp_path, **deepspeeds_ranks)
    assert [result[2] for result in shared] == ([3, 3] if stage < 2 else [0, 0])
    if stage == 2:
        assert "ZeRO-2 communicates in each pass" in str(shared[0][3])
    for mine, theirs in zip(shared, apart, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-4)
        for name, weight in theirs[1].items():
            torch.testing.assert_close(mine[1][name], weight, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("zero", "reason"),
    [
        ({"stage": 1}, None),
        ({"stage": 0, "offload_optimizer": {"device": "none"}}, None),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "in the host's memory"),
        ({"stage": 2}, "ZeRO-2 communicates in each pass"),
        ({"stage": 3}, "ZeRO-3 communicates in each pass"),
    ],
)
def test_deepspeeds_ways_that_can_not_wait_are_named(
    zero: dict[str, Any], reason: str | None
) -> None:
    given = HfDeepSpeedConfig({"zero_optimization": zero})
    plugin = SimpleNamespace(zero_stage=zero["stage"], hf_ds_config=given)
    accelerator = SimpleNamespace(
        distributed_type="DistributedType.DEEPSPEED", state=SimpleNamespace(deepspeed_plugin=plugin)
    )
    found = merged_passes.why_not_in(accelerator)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_ranks_add_up_what_they_would_have_added_up(tmp_path: Path) -> None:
    apart = spawn_ranks(of_two, 2, "off", tmp_path)
    shared = spawn_ranks(of_two, 2, LARGE, tmp_path)
    assert [result[2] for result in apart] == [0, 0]
    # There are four steps, the first of which is watched.
    assert [result[2] for result in shared] == [3, 3]
    for mine, theirs in zip(shared, apart, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-6)
        for name, weight in theirs[1].items():
            torch.testing.assert_close(mine[1][name], weight, rtol=1e-6, atol=1e-8, msg=name)
