"""Loops with `accelerator.accumulate` share passes of the trunk, and see what stock shows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import deepytorch
from deepytorch.integrations.common import contract
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch.integrations.padding_free import merged_passes
from deepytorch.integrations.seams import accelerator as seam
from deepytorch.integrations.seams import accumulated_batches
from deepytorch.integrations.transformers import pack_batches
from deepytorch_core.base import config
from deepytorch_core.base.config import Options
from deepytorch_core.base.patching import original_of
from deepytorch_core.testing import rank_store, spawn_ranks

ROWS, VOCABULARY = 23, 61


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    options = Options(tokens_per_step=1 << 20, log="error")
    monkeypatch.setattr(config, "_current", options)
    monkeypatch.setattr(merged_passes, "WATCHED_STEPS", 0)
    forget()
    yield
    forget()


def forget() -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{number}": number for number in range(4, VOCABULARY)}
    special = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, "[CLS]": 3}
    made = Tokenizer(WordLevel({**special, **words}, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, cls_token="[CLS]")


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(6, 18, (ROWS,), generator=generator).tolist()
    made = [
        torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
    return Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in made])


def loader(collate: Any = None, *, workers: int = 0) -> DataLoader[Any]:
    collate = collate or DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return DataLoader(rows(), batch_size=2, shuffle=True, collate_fn=collate, num_workers=workers)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=VOCABULARY)).double()


def trained(
    model: Any,
    *,
    steps: int,
    is_ours: bool,
    batches: DataLoader[Any] | None = None,
    clips_always: bool = False,
    evaluates: bool = False,
    most: int = 1000,
) -> tuple[list[Any], list[torch.Tensor], Any]:
    """Train two epochs in a loop as Accelerate's pages have it; returns all that it sees."""
    forget()
    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
    changes = contract.Changes()
    if is_ours:
        accumulated_batches.install(accelerator, changes)
    torch.manual_seed(7)
    batches = batches or loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    others = accelerator.prepare(loader())
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    if is_ours:
        assert pack_batches(accelerator.unwrap_model(model), "on", loaders=[batches])
    seen: list[Any] = []
    for _ in range(2):
        for number, batch in enumerate(batches):
            if number == most:
                break
            ids = batch["input_ids"].tolist()
            ends = accelerator.gradient_state.end_of_dataloader, batches.end_of_dataloader
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if clips_always or accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            seen.append((ids, ends, accelerator.sync_gradients, torch.rand(2).tolist()))
            seen.append(loss.item())
            if evaluates and accelerator.sync_gradients:
                with torch.no_grad():
                    seen += [model(**inputs).loss.item() for inputs in others]
    weights = [
        parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()
    ]
    forward = padding_free.forward_of(accelerator.unwrap_model(model)) if is_ours else None
    changes.undo()
    return seen, weights, forward


def compare(**how: Any) -> Any:
    """Compare a loop with stock's; returns what packs, with its shared passes."""
    model = llama()
    make = how.pop("batches", lambda: None)
    expected = trained(copy.deepcopy(model), is_ours=False, batches=make(), **how)
    found = trained(model, is_ours=True, batches=make(), **how)
    assert len(found[0]) == len(expected[0])
    for mine, stock in zip(found[0], expected[0], strict=True):
        # The library computes losses in float32.
        assert mine == (pytest.approx(stock, rel=1e-6) if isinstance(stock, float) else stock)
    for mine, stock in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-6, atol=1e-8)
    return found[2]


@pytest.mark.parametrize("steps", [2, 3, 5, 8])
def test_steps_are_those_of_micro_batches_apart(steps: int) -> None:
    forward = compare(steps=steps)
    # From the second step on: the first one shows whose the loader is.
    assert forward.merged.num_shared == 2 * -(-12 // steps) - 1


@pytest.mark.parametrize(
    "how", [{"most": 5}, {"evaluates": True}], ids=["left early", "evaluated between steps"]
)
def test_what_comes_between_steps_changes_nothing(how: dict[str, Any]) -> None:
    assert compare(steps=4, **how).merged.num_shared > 0


def test_worker_processes_load_as_before() -> None:
    assert compare(steps=4, batches=lambda: loader(workers=1)).merged.num_shared > 0


def test_gradients_that_are_clipped_between_micro_batches_are_there() -> None:
    merged = compare(steps=4, clips_always=True).merged
    assert merged.is_over
    assert merged.num_shared <= 1


def own(features: list[Any]) -> Any:
    """A collate function that nobody knows."""
    found = DataCollatorWithPadding(tokenizer())(features)
    return {**found, "labels": found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)}


def masked() -> DataLoader[Any]:
    return loader(DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.9))


@pytest.mark.parametrize(
    "make", [lambda: loader(own), masked], ids=["unknown", "draws random numbers"]
)
def test_batches_whose_loading_may_be_seen_are_not_fetched_before(make: Any) -> None:
    forward = compare(steps=4, batches=make)
    assert forward.merged is None or forward.merged.num_shared == 0


def test_one_micro_batch_a_step_is_as_before() -> None:
    assert compare(steps=1).merged is None


def test_it_comes_where_a_number_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens, is_there in (("auto", False), (4096, True)):
        options = Options(tokens_per_step=tokens, compile="off", kernels="off", log="error")
        monkeypatch.setattr(config, "_current", options)
        forget()
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        seam.apply_unasked(accelerator)
        (shard,) = [accelerator.prepare(loader())]
        iterate = DataLoaderShard.__iter__
        assert (original_of(iterate) is not iterate) == is_there
        with accelerator.accumulate(llama()):
            assert next(iter(shard))["input_ids"].shape[0] == 2
        seam.undo(accelerator)


def of_ranks(rank: int, world_size: int) -> int:
    deepytorch.deactivate()  # importing an adapter has activated it
    store = rank_store("accumulated")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    config._current = Options(tokens_per_step=1 << 20, log="error")
    merged_passes.WATCHED_STEPS = 0
    forward = compare(steps=3)
    is_ddp = AcceleratorState().num_processes == world_size
    dist.destroy_process_group()
    return int(forward.merged.num_shared) if is_ddp else 0


def test_ranks_add_up_what_they_would_apart() -> None:
    assert all(shared > 0 for shared in spawn_ranks(of_ranks, 2))
