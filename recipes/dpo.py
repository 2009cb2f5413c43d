# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization of a chat model: answers that are preferred get likelier.

    torchrun --nproc-per-node 2 -m deepytorch.recipes.dpo steps=40
    torchrun --nproc-per-node 8 -m deepytorch.recipes.dpo \\
        model=Qwen/Qwen3-8B data=pairs.jsonl max_length=2048 batch_size=2

Without ``model=`` and ``data=`` a small Qwen3 learns to tell docstrings of the standard library
from those of something else. How likely the untrained model finds each answer is computed once,
before the first step, so no second model is kept. Options: configs/dpo.yaml.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, StepProgress, all_of, console, together
from deepytorch.recipes.data.batches import EndlessBatches, hold_out, in_batches
from deepytorch.recipes.data.chat import Conversation, print_masked
from deepytorch.recipes.data.conversations import Message
from deepytorch.recipes.data.encoding import encoded_by_all
from deepytorch.recipes.data.pairs import Pair, read_pairs
from deepytorch.recipes.data.settings import DpoOptions as Config
from deepytorch.recipes.data.text import IGNORED_LABEL, Example, collate, standard_library_pairs
from deepytorch.recipes.models.language import load_tokenizer, refuse_beyond_positions
from deepytorch.recipes.qwen_lora import build_model, chat_tokenizer, save_trained, with_adapter
from deepytorch.recipes.runner.loop import run_recipe
from deepytorch.recipes.runner.memory import transformer_flops
from deepytorch.recipes.runner.task import Task
from deepytorch.recipes.runner.trainer import Trainer

_SHORT = 120  # characters of the embedded answers, so that a first run takes a minute


@dataclass(frozen=True)
class PairBatch:
    """Pairs as rows: all chosen answers, then all rejected ones.

    Attributes:
        input_ids: int64 [2 * pairs, longest], as are ``attention_mask`` and ``labels``.
        reference: float32 [2 * pairs], log-likelihoods of the answers before training.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    reference: torch.Tensor

    def to(self, device: torch.device) -> "PairBatch":
        """The same batch on ``device``."""
        fields = (self.input_ids, self.attention_mask, self.labels, self.reference)
        return PairBatch(*(tensor.to(device, non_blocking=True) for tensor in fields))

    def counts(self) -> torch.Tensor:
        """float32 [2]: pairs; tokens without padding."""
        pairs = torch.tensor(len(self.labels) // 2, device=self.labels.device)
        return torch.stack([pairs, self.attention_mask.sum()]).float()


@dataclass(frozen=True)
class EncodedPair:
    """Tokens of both answers with their question, and the pair's row in the references."""

    chosen: Example
    rejected: Example
    row: int


@dataclass(frozen=True)
class PreferenceData:
    """All encoded pairs, how many of them are held out, and the references of all."""

    kept: list[EncodedPair]
    trained: list[EncodedPair]
    reference: torch.Tensor  # float32 [pairs, 2]
    pad_token_id: int
    sample: Conversation

    def batch(self, pairs: Sequence[EncodedPair]) -> PairBatch:
        """The pairs as one batch."""
        examples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        padded = collate(examples, self.pad_token_id)
        reference = self.reference[[pair.row for pair in pairs]].T.flatten()
        return PairBatch(padded.input_ids, padded.attention_mask, padded.labels, reference)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe: 0 done, 1 --compare found a difference, 2 bad options or data."""
    return run_recipe("dpo", Config, prepare, argv)


def prepare(config: Config, process: Process) -> Task[PairBatch]:
    """The data, the model with its adapter, and the loss."""
    model = config.model
    tokenizer = together(lambda: load_tokenizer(model) if model else chat_tokenizer(), process)
    data = prepare_pairs(config, tokenizer, process)
    lengths = [len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in data.trained]
    batches = EndlessBatches(
        len(data.trained),
        lambda index, epoch: data.trained[index],
        data.batch,
        batch_size=config.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.seed,
        lengths=lengths,
        what="pairs",
    )
    held_out = in_batches(data.kept, config.batch_size)

    def make_model() -> Any:
        torch.manual_seed(config.seed)
        model = build_model(config, tokenizer)
        refuse_beyond_positions(model, max(lengths))
        return model if config.method == "full" else with_adapter(model, config)

    def before(trainer: Trainer[PairBatch]) -> None:
        fill_reference(data, trainer)
        shown[:] = [data.batch(few) for few in held_out]

    shown = [data.batch(few) for few in held_out]
    return Task(
        make_model=make_model,
        make_loss=lambda model, ours: preference_loss(model, config.beta),
        batches=batches,
        held_out=shown,
        unit="tokens",
        learning_rate=default_rate(config),
        export=lambda model, run_dir: save_trained(
            model, tokenizer, config, run_dir, sample=data.sample
        ),
        before=before,
        flops_of=transformer_flops,
    )


def default_rate(config: Config) -> float:
    """Small steps: the model answers already, and is only to prefer some answers."""
    if config.model is None:
        return 2e-3 if config.method == "lora" else 1e-3
    return 1e-5 if config.method == "lora" else 1e-6


def prepare_pairs(config: Config, tokenizer: Any, process: Process) -> PreferenceData:
    """Read, shuffle, encode and split ``config.data``; says what was left and held out."""

    def load() -> tuple[list[Pair], list[str]]:
        return (library_pairs(), []) if config.data is None else read_pairs(config.data)

    pairs, unknown = together(load, process)
    random.Random(config.seed).shuffle(pairs)
    whole = Whole(config.max_length)
    both = [conversation for pair in pairs for conversation in (pair.chosen, pair.rejected)]
    found = encoded_by_all(both, tokenizer, whole, process)
    encoded: list[EncodedPair] = []
    sources: list[Pair] = []
    for pair, chosen, rejected in zip(pairs, found[::2], found[1::2], strict=True):
        if not (chosen.is_cut or rejected.is_cut):  # half an answer is another one
            encoded.append(EncodedPair(chosen.example, rejected.example, len(encoded)))
            sources.append(pair)
    if not encoded:
        raise RecipeError(
            f"no pair fits max_length={config.max_length} tokens, of {len(pairs)}: increase it"
        )
    kept, trained, told = hold_out(encoded, config.held_out)
    if process.is_main:
        left_out = len(pairs) - len(encoded)
        console.print(
            f"data        {len(trained)} pairs; {left_out} left out because they are longer than "
            f"max_length={config.max_length}; {told}",
            highlight=False,
        )
        if unknown:
            console.print(f"left out    fields: {', '.join(unknown)}", highlight=False)
        print_masked(trained[0].chosen, tokenizer)
    sample = sources[kept[0].row].chosen if kept else Conversation()
    return PreferenceData(
        kept, trained, torch.zeros(len(encoded), 2), tokenizer.pad_token_id, sample
    )


@dataclass(frozen=True)
class Whole:
    """Encode up to ``max_length`` tokens, with labels on the answers."""

    max_length: int
    train_on_prompt: bool = False


def library_pairs() -> list[Pair]:
    """Docstrings of the standard library, and those of something else for the same question."""
    found = [pair for pair in standard_library_pairs() if len(pair.response) < _SHORT]
    others = found[len(found) // 2 :] + found[: len(found) // 2]
    pairs = []
    for right, wrong in zip(found, others, strict=True):
        asked = Conversation((Message("user", right.instruction),), num_given=1)
        chosen, rejected = (
            replace(asked, messages=(*asked.messages, Message("assistant", pair.response)))
            for pair in (right, wrong)
        )
        pairs.append(Pair(chosen, rejected))
    return pairs


def log_likelihoods(model: Any, batch: PairBatch) -> torch.Tensor:
    """float32 [2 * pairs]: of each row's labels, given what stands before them."""
    logits = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
    ).logits
    labels = batch.labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2),
        labels,
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )
    return -losses.sum(dim=1)


def preference_loss(model: Any, beta: float) -> Callable[[PairBatch, torch.Tensor], torch.Tensor]:
    """DPO's: how far the model prefers the chosen answers more than it did: sum / total."""

    def loss_share(batch: PairBatch, total: torch.Tensor) -> torch.Tensor:
        chosen, rejected = (log_likelihoods(model, batch) - batch.reference).chunk(2)
        return -nn.functional.logsigmoid(beta * (chosen - rejected)).sum() / total

    return loss_share


@torch.no_grad()
def fill_reference(data: PreferenceData, trainer: Trainer[PairBatch]) -> None:
    """Let each rank compute its share of the references, with the model as it begins."""
    process, size = trainer.process, trainer.options.batch_size
    pairs = [*data.kept, *data.trained]
    own = pairs[process.rank :: process.world_size]
    # As many batches on each rank: sharded models compute together.
    per_rank = -(-len(pairs) // process.world_size)
    own = [*own, *pairs[: per_rank - len(own)]]
    wrapped = trainer.engine.wrapped
    wrapped.eval()
    few = in_batches(own, size)
    found: list[tuple[int, float, float]] = []
    with StepProgress(len(few), enabled=process.is_main, what="reference") as progress:
        for number, chosen_few in enumerate(few, 1):
            with trainer.autocast():
                scores = log_likelihoods(wrapped, data.batch(chosen_few).to(process.device))
            rows = [pair.row for pair in chosen_few]
            found += zip(rows, *scores.cpu().reshape(2, -1).tolist(), strict=True)
            progress.update(number, "answers before training")
    wrapped.train()
    for share in all_of(found, process):
        for row, chosen, rejected in share:
            data.reference[row] = torch.tensor([chosen, rejected])


if __name__ == "__main__":
    sys.exit(main())
