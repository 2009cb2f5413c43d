"""Token balance in transformers' Trainer: its loss counts all ranks' tokens, so stock is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

import deepytorch
from deepytorch.integrations.transformers import (
    IntegrationError,
    accelerate_trainer,
    trainer_balance,
    undo,
)
from deepytorch_core.base import decisions
from deepytorch_core.data import TokenBalancedBatchSampler
from deepytorch_core.testing import rank_store, spawn_ranks

NUM_SAMPLES, PADDING, STEPS, ACCUMULATION = 36, 0, 4, 2
LENGTHS = [4 + (index * 7919) % 23 for index in range(NUM_SAMPLES)]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": PADDING,
}


def sequences() -> datasets.Dataset:
    def sequence(index: int) -> list[int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(3, 50, (LENGTHS[index],), generator=generator).tolist()

    return datasets.Dataset.from_dict({"input_ids": list(map(sequence, range(NUM_SAMPLES)))})


def padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(sample["input_ids"]) for sample in batch]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    mask = ids.ne(PADDING)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


class Counting(Trainer):
    """Counts the tokens that this rank computes in each optimizer step."""

    tokens: list[int]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens = [*getattr(self, "tokens", []), int(inputs["attention_mask"].sum())]
        return super().training_step(model, inputs, *args, **kwargs)


class Balanced(Counting):
    """As in a loop of one's own: with the sampler, and without the option."""

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


def build(kind: type[Trainer], folder: Path, model: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"save_strategy": "no", "max_steps": STEPS, **more}
    return kind(
        model=model or LlamaForCausalLM(LlamaConfig(**SIZES)),
        args=TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATION,
            optim="sgd",
            learning_rate=0.1,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=1,
            **settings,
        ),
        train_dataset=sequences(),
        data_collator=padded,
    )


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def said() -> list[tuple[str, str]]:
    made = [decision for decision in decisions.made() if decision["what"] == "token balance"]
    return [(decision["chosen"], decision["reason"]) for decision in made]


def train(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in (("own", Balanced), ("stock", Counting), ("option", Counting)):
        with process_state(name, rank, world_size):
            trainer = build(kind, folder / name)
            if name == "option":
                accelerate_trainer(trainer, compile="off", kernels="off")
            decisions._made.clear()
            trainer.train()
            found[name] = (weights(trainer), trainer.tokens, said())
            dist.destroy_process_group()
    return found


def test_balance_in_a_trainer_gives_stocks_weights_from_evener_steps(tmp_path: Path) -> None:
    ranks = spawn_ranks(train, 2, tmp_path)
    for rank in ranks:
        stock, tokens, nothing = rank["stock"]
        assert not nothing
        for arm in ("own", "option"):
            torch.testing.assert_close(rank[arm][0], stock, rtol=1e-5, atol=1e-6)
            assert len(rank[arm][1]) == len(tokens) == STEPS * ACCUMULATION
            ((chosen, reason),) = rank[arm][2]
            assert chosen == "on"
            assert reason.startswith("the heaviest rank has ")

    def waited(arm: str) -> int:
        steps = [
            [
                sum(rank[arm][1][start : start + ACCUMULATION])
                for start in range(0, STEPS * ACCUMULATION, ACCUMULATION)
            ]
            for rank in ranks
        ]
        totals = [sum(step) for step in zip(*steps, strict=True)]
        expected.setdefault("tokens", totals)
        assert totals == expected["tokens"], "every step has the samples of the stock one"
        return sum(max(step) for step in zip(*steps, strict=True))

    expected: dict[str, list[int]] = {}
    assert waited("own") == waited("option") < waited("stock")


def resume(rank: int, world_size: int, folder: Path) -> list[torch.Tensor]:
    """Weights after a whole training, and after one that goes on in the second epoch."""
    found = []
    more = {"max_steps": 2 * STEPS, "save_strategy": "steps", "save_steps": STEPS + 2}
    for checkpoint in (None, str(folder / f"checkpoint-{STEPS + 2}")):
        with process_state(str(checkpoint), rank, world_size):
            trainer = build(Counting, folder, **more)
            accelerate_trainer(trainer, compile="off", kernels="off")
            if rank == 0:  # who looks at the data by himself meets nobody
                assert isinstance(next(iter(trainer.get_train_dataloader())), dict)
            trainer.train(resume_from_checkpoint=checkpoint)
            assert said()[-1][0] == "on"
            found.append(weights(trainer))
            undo(trainer)
            assert not {"get_train_dataloader", "_inner_training_loop"} & vars(trainer).keys()
            dist.destroy_process_group()
    return found


def test_balance_in_a_trainer_goes_on_from_a_checkpoint_inside_an_epoch(tmp_path: Path) -> None:
    for whole, resumed in spawn_ranks(resume, 2, tmp_path):
        torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)


def decline(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Tokens of the ranks' micro-batches and what was said, where samples stay as they are."""
    sizes = SIZES | {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    found: dict[str, Any] = {}
    for name, model, options in (
        ("stock", None, None),
        ("padded", None, {"padding_free": "off"}),
        ("router", MixtralForCausalLM(MixtralConfig(**sizes)), {}),
    ):
        with process_state(name, rank, world_size):
            trainer = build(Counting, folder / name, model)
            if options is not None:
                accelerate_trainer(trainer, compile="off", kernels="off", **options)
            trainer.train()
            found[name] = (trainer.tokens, said()[-1:])
            dist.destroy_process_group()
    return found


def test_balance_in_a_trainer_leaves_samples_where_it_does_not_pay_or_would_matter(
    tmp_path: Path,
) -> None:
    for rank in spawn_ranks(decline, 2, tmp_path):
        stock, _ = rank["stock"]
        padded_tokens, ((padded_choice, padded_reason),) = rank["padded"]
        assert (padded_tokens, padded_choice) == (stock, "off")
        assert "batches are padded" in padded_reason
        router_tokens, ((router_choice, router_reason),) = rank["router"]
        assert (router_tokens, router_choice) == (stock, "off")
        assert "MixtralForCausalLM is not its tokens'" in router_reason


class OwnLoss(Counting):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnOrder(Counting):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SubsetRandomSampler(range(self.args.process_index, NUM_SAMPLES, 2))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from sequences()


def refusals(rank: int, world_size: int, folder: Path) -> list[str]:
    found = []
    for number, (kind, more, settings) in enumerate(
        (
            (OwnLoss, {}, {}),
            (Counting, {}, {"average_tokens_across_devices": False}),
            (Counting, {"compute_loss_func": sum}, {}),
            (Counting, {"accepts": False}, {}),
            (Counting, {"dataset": None}, {}),
            (Counting, {"stream": None}, {}),
            (OwnOrder, {}, {}),
        )
    ):
        with process_state(str(number), rank, world_size):
            trainer = build(kind, folder, **settings)
            if "accepts" in more:
                trainer.model_accepts_loss_kwargs = False
            trainer.compute_loss_func = more.get("compute_loss_func")
            if "dataset" in more:
                trainer.train_dataset = [{"input_ids": [3] * (4 + rank)}] * NUM_SAMPLES
            if "stream" in more:
                trainer.train_dataset = Stream()
            accelerate_trainer(trainer, compile="off", kernels="off", token_balance="on")
            with pytest.raises(IntegrationError) as caught:
                trainer.train()
            found.append(str(caught.value))
            dist.destroy_process_group()
    return found


def test_balance_that_is_asked_for_and_cannot_be_is_an_error(tmp_path: Path) -> None:
    for messages in spawn_ranks(refusals, 2, tmp_path):
        own, averaged, function, refused, differing, stream, order = messages
        for message in messages:
            assert message.startswith("transformers: token_balance=on: ")
            assert message.endswith("; set token_balance=auto or off")
        assert "OwnLoss has a loss of its own" in own
        assert "average_tokens_across_devices is off" in averaged
        assert "Counting has a loss of its own" in function
        assert "LlamaForCausalLM takes no num_items_in_batch" in refused
        assert "data sets differ in length" in differing
        assert "the data set is read in its own order" in stream
        assert "has a sampler of its own" in order


def lengths_of(dataset: Any, *, reads: bool = False) -> Any:
    trainer = SimpleNamespace(train_dataset=dataset, args=SimpleNamespace())
    return trainer_balance._lengths(trainer, SimpleNamespace(dataset=dataset), reads=reads)


def test_balance_in_a_trainer_reads_lengths_from_columns_alone() -> None:
    rows = [[3] * length for length in LENGTHS]
    masks = [[1] * (length - 2) + [0, 0] for length in LENGTHS]
    seen = [length - 2 for length in LENGTHS]
    dataset = datasets.Dataset.from_dict({"input_ids": rows})
    assert lengths_of(dataset) == LENGTHS
    order = [5, 1, 30, 7]
    assert lengths_of(dataset.select(order)) == [LENGTHS[index] for index in order]
    both = datasets.concatenate_datasets([dataset, dataset.select(range(3, 9))])
    assert lengths_of(both) == LENGTHS + LENGTHS[3:9]
    masked = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": masks})
    assert lengths_of(masked.with_format("torch")) == seen
    told = datasets.Dataset.from_dict({"input_ids": rows, "length": seen})
    assert lengths_of(told) == seen
    made = dataset.with_transform(lambda batch: {"input_ids": [[1]] * len(batch["input_ids"])})
    assert lengths_of(made) is None
    assert lengths_of(made, reads=True) == [1] * NUM_SAMPLES
    plain = [
        {"input_ids": row, "attention_mask": mask} for row, mask in zip(rows, masks, strict=True)
    ]
    assert lengths_of(plain) is None
    assert lengths_of(plain, reads=True) == seen
