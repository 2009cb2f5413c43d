"""Token balance in transformers' Trainer: its loss counts all ranks' tokens, so stock is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deepytorch
from deepytorch_core.data import TokenBalancedBatchSampler
from deepytorch_core.testing import rank_store, spawn_ranks

NUM_SAMPLES, PADDING, STEPS, ACCUMULATION = 36, 0, 4, 2
LENGTHS = [4 + (index * 7919) % 23 for index in range(NUM_SAMPLES)]


class Sequences(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(3, 50, (LENGTHS[index],), generator=generator)


def padded(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PADDING)
    mask = ids.ne(PADDING)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


class Counting(Trainer):
    """Counts the tokens that this rank computes in each optimizer step."""

    tokens: list[int]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens = [*getattr(self, "tokens", []), int(inputs["attention_mask"].sum())]
        return super().training_step(model, inputs, *args, **kwargs)


class Balanced(Counting):
    def get_train_dataloader(self) -> DataLoader[Any]:
        order = RandomSampler(self.train_dataset)
        batches = TokenBalancedBatchSampler(
            LENGTHS,
            sampler=BatchSampler(order, self.args.train_batch_size, False),
            normalization="global_tokens",
            accumulation=self.args.gradient_accumulation_steps,
        )
        dataset = self.train_dataset
        return self.accelerator.prepare(
            DataLoader(dataset, batch_sampler=batches, collate_fn=self.data_collator)
        )


@contextlib.contextmanager
def process_state(name: str, rank: int, world_size: int) -> Iterator[None]:
    deepytorch.deactivate()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    original = dist.init_process_group
    dist.init_process_group = lambda backend, **_: original(
        backend, store=rank_store(name), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        dist.init_process_group = original


def train(rank: int, world_size: int, folder: Path) -> dict[str, tuple[Any, list[int]]]:
    found = {}
    for kind in (Balanced, Counting):
        with process_state(kind.__name__, rank, world_size):
            torch.manual_seed(0)
            sizes = LlamaConfig(
                vocab_size=50,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                pad_token_id=PADDING,
            )
            trainer = kind(
                model=LlamaForCausalLM(sizes),
                args=TrainingArguments(
                    output_dir=str(folder),
                    use_cpu=True,
                    bf16=False,
                    per_device_train_batch_size=2,
                    gradient_accumulation_steps=ACCUMULATION,
                    max_steps=STEPS,
                    optim="sgd",
                    learning_rate=0.1,
                    logging_strategy="no",
                    save_strategy="no",
                    report_to=[],
                    disable_tqdm=True,
                    seed=1,
                ),
                train_dataset=Sequences(),
                data_collator=padded,
            )
            trainer.train()
            weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
            found[kind.__name__] = (weights, trainer.tokens)
            if kind is Balanced:
                dist.destroy_process_group()
    return found


def test_balance_in_a_trainer_gives_stocks_weights_from_evener_steps(tmp_path: Path) -> None:
    ranks = spawn_ranks(train, 2, tmp_path)
    for rank in ranks:
        (ours, _), (stock, _) = rank["Balanced"], rank["Counting"]
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        assert len(rank["Balanced"][1]) == len(rank["Counting"][1]) == STEPS * ACCUMULATION

    def waited(kind: str) -> int:
        steps = [
            [
                sum(rank[kind][1][start : start + ACCUMULATION])
                for start in range(0, STEPS * ACCUMULATION, ACCUMULATION)
            ]
            for rank in ranks
        ]
        totals = [sum(step) for step in zip(*steps, strict=True)]
        expected.setdefault("tokens", totals)
        assert totals == expected["tokens"], "every step has the samples of the stock one"
        return sum(max(step) for step in zip(*steps, strict=True))

    expected: dict[str, list[int]] = {}
    assert waited("Balanced") < waited("Counting")
