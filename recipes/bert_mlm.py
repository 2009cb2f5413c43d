# SPDX-License-Identifier: Apache-2.0
"""Masked language modelling with a BERT-class model.

    torchrun --nproc-per-node 2 -m deepytorch.recipes.bert_mlm steps=100
    torchrun --nproc-per-node 8 -m deepytorch.recipes.bert_mlm \\
        model=google-bert/bert-base-uncased data=corpus.txt precision=fp16 max_length=512

Without ``model=`` and ``data=`` it trains a small BERT on the standard library's docstrings.
Options: configs/bert_mlm.yaml.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from deepytorch.integrations.transformers import BATCH_KEY
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, console
from deepytorch.recipes.data.batches import EndlessBatches, hold_out, in_batches
from deepytorch.recipes.data.instructions import packs_batches
from deepytorch.recipes.data.settings import BertOptions as Config
from deepytorch.recipes.data.text import (
    IGNORED_LABEL,
    Example,
    TextBatch,
    byte_tokenizer,
    collate,
    standard_library_pairs,
)
from deepytorch.recipes.models.language import (
    load_tokenizer,
    load_with,
    refuse_beyond_positions,
    save_checkpoint,
)
from deepytorch.recipes.runner.loop import run_recipe
from deepytorch.recipes.runner.memory import transformer_flops
from deepytorch.recipes.runner.task import Task

_MASKED = 0.15  # of the tokens are to be guessed, as in BERT's paper:
_HIDDEN, _REPLACED = 0.8, 0.1  # of them hidden, replaced by another; the rest stays


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe: 0 done, 1 --compare found a difference, 2 bad options or data."""
    return run_recipe("bert_mlm", Config, prepare, argv)


def prepare(config: Config, process: Process) -> Task[TextBatch]:
    """The data, the model and the loss."""
    tokenizer = load_tokenizer(config.model, causal=False) if config.model else masking_tokenizer()
    if tokenizer.mask_token_id is None:
        raise RecipeError(f"model={config.model} has no mask token: it is no masked model")
    texts = read_texts(config.data)
    random.Random(config.seed).shuffle(texts)
    pieces = encode_texts(texts, tokenizer, config.max_length)
    kept, trained, told = hold_out(pieces, config.held_out)
    if process.is_main:
        losses = [piece.num_lost for piece in trained if piece.num_lost]
        summary = (
            f"{len(trained)} texts, {sum(len(piece.ids) for piece in trained):,} tokens; "
            f"{len(losses)} cut to max_length={config.max_length}, {sum(losses):,} tokens lost"
        )
        if len(pieces) < len(texts):
            summary += f"; {len(texts) - len(pieces)} left out because only special tokens remain"
        console.print(f"data        {summary}; {told}", highlight=False)

    def draw(index: int, epoch: int) -> Example:
        # Other tokens are hidden in every epoch, and a resumed run hides the same.
        return mask(trained[index].ids, tokenizer, random.Random(f"{config.seed} {index} {epoch}"))

    pad = tokenizer.pad_token_id
    batches = EndlessBatches(
        len(trained),
        draw,
        lambda chosen: collate(chosen, pad, shifted=False),
        batch_size=config.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.seed,
        lengths=[len(piece.ids) for piece in trained],
    )
    hidden = [
        mask(piece.ids, tokenizer, random.Random(number)) for number, piece in enumerate(kept)
    ]
    held_out = [collate(few, pad, shifted=False) for few in in_batches(hidden, config.batch_size)]

    def make_model() -> Any:
        torch.manual_seed(config.seed)
        model = build_model(config, tokenizer)
        refuse_beyond_positions(model, max(len(piece.ids) for piece in pieces))
        return model

    def export(model: Any, run_dir: Path) -> None:
        save_checkpoint(model, tokenizer, run_dir / "checkpoint")
        say_guesses(model, tokenizer, (kept or trained)[0].ids, run_dir / "sample.txt")
        console.print(f"checkpoint  {run_dir / 'checkpoint'}", highlight=False)

    return Task(
        make_model=make_model,
        make_loss=lambda model, ours: masked_loss(model, config.padding_free if ours else "off"),
        batches=batches,
        repacked=config.padding_free != "off",
        held_out=held_out,
        unit="tokens",
        learning_rate=5e-5 if config.model else 3e-3,
        export=export,
        flops_of=transformer_flops,
    )


def masked_loss(
    wrapped: Any, padding_free: str
) -> Callable[[TextBatch, torch.Tensor], torch.Tensor]:
    """Cross-entropy of the hidden tokens: sum / total."""
    packs = packs_batches(wrapped, padding_free)

    def loss_share(batch: TextBatch, total: torch.Tensor) -> torch.Tensor:
        plan = {BATCH_KEY: batch.packing} if packs else {}
        loss: torch.Tensor = wrapped(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=batch.labels,
            **plan,
        ).loss
        return loss * batch.counts()[0] / total  # the model's own is the mean of this batch

    return loss_share


def mask(ids: Sequence[int], tokenizer: Any, chance: random.Random) -> Example:
    """Hide some tokens, never special ones; labels are the hidden tokens alone."""
    special = set(tokenizer.all_special_ids)
    places = [place for place, token in enumerate(ids) if token not in special]
    given, labels = list(ids), [IGNORED_LABEL] * len(ids)
    num_masked = max(1, round(_MASKED * len(places))) if places else 0
    for place in chance.sample(places, num_masked):
        labels[place] = ids[place]
        fate = chance.random()
        if fate < _HIDDEN:
            given[place] = tokenizer.mask_token_id
        elif fate < _HIDDEN + _REPLACED:
            given[place] = ids[chance.choice(places)]
    return Example(given, labels)


def masking_tokenizer() -> Any:
    """The byte tokenizer with a mask token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    return tokenizer


@dataclass(frozen=True)
class Piece:
    """A text's tokens, and how many more it had."""

    ids: list[int]
    num_lost: int


def encode_texts(texts: Sequence[str], tokenizer: Any, max_length: int) -> list[Piece]:
    """Each text cut to ``max_length`` tokens, without those that have no token to hide.

    Raises RecipeError when nothing is left.
    """
    special = set(tokenizer.all_special_ids)
    pieces: list[Piece] = []
    for text in texts:
        ids = whole = tokenizer(text, verbose=False)["input_ids"]
        if len(whole) > max_length:
            # Only the tokenizer knows which special tokens stand behind a text that was cut. It
            # cuts nothing where they alone are too many.
            ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"][:max_length]
        if not special.issuperset(ids):
            pieces.append(Piece(ids, len(whole) - len(ids)))
    if not pieces:
        raise RecipeError(
            f"no text has a token to hide within max_length={max_length}: all that is left are "
            "special tokens, such as those for unknown words. Increase max_length, or take data "
            "that the model's tokenizer knows"
        )
    return pieces


def read_texts(data: str | None) -> list[str]:
    """The lines of a text file that are not empty, or the embedded docstrings.

    Lines end at a line feed alone: a text may hold the other characters that Python ends them at.
    """
    if data is None:
        return [pair.response for pair in standard_library_pairs()]
    try:
        with Path(data).open(encoding="utf-8-sig", newline="\n") as file:
            lines = [line.rstrip("\r\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read data={data}: {error}") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise RecipeError(f"data={data} has no text")
    return texts


def build_model(config: Config, tokenizer: Any) -> Any:
    """The checkpoint in ``config.model``, or a small BERT with random weights."""
    if config.model:
        return load_with(AutoModelForMaskedLM, config.model, tokenizer)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=4 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_length,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@torch.no_grad()
def say_guesses(model: Any, tokenizer: Any, ids: Sequence[int], path: Path) -> None:
    """Print, and write to ``path``, a text with hidden tokens and what the model puts there."""
    example = mask(ids, tokenizer, random.Random(0))
    model.eval()
    given = torch.tensor([example.input_ids], device=model.device)
    guesses = model(input_ids=given).logits[0].argmax(dim=-1).tolist()
    model.train()
    hidden = [place for place, label in enumerate(example.labels) if label != IGNORED_LABEL]
    filled = list(example.input_ids)
    for place in hidden:
        filled[place] = guesses[place]
    right = sum(guesses[place] == ids[place] for place in hidden)
    text = (
        f"hidden:  {tokenizer.decode(example.input_ids)}\n"
        f"guessed: {tokenizer.decode(filled)}\n"
        f"{right} of {len(hidden)} hidden tokens are right\n"
    )
    path.write_text(text, encoding="utf-8")
    console.print(text, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
