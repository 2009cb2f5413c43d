"""Make texts, token streams and tokenizers on the spot, the same each time."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 0
MEDIAN_TOKENS = 150
"""Rows of chat data have this median; lengths are lognormal, as those of instructions are."""
_SPREAD = 0.9
_SYLLABLES = tuple(a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u"))
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>")


def words(count: int, seed: int = SEED, *, different: int = 5_000) -> list[str]:
    """Make up words, `different` ones, that come as often as words of a language do."""
    vocabulary = random.Random(SEED)  # one for all texts, so that tokenizers know their words
    known = ["".join(vocabulary.choices(_SYLLABLES, k=1 + n % 4)) for n in range(different)]
    weights = [1.0 / (rank + 1) for rank in range(different)]
    return random.Random(seed).choices(known, weights, k=count)


def lines(count: int, words_each: int, seed: int = SEED) -> Iterator[str]:
    """Yield lines of about `words_each` words."""
    generator = random.Random(seed)
    stream = iter(words(2 * count * words_each, seed))
    for _ in range(count):
        length = generator.randint(max(1, words_each // 2), words_each * 3 // 2)
        yield " ".join(next(stream) for _ in range(length))


def lengths(count: int, longest: int, seed: int = SEED) -> list[int]:
    """Draw lognormal numbers of words, at most `longest`."""
    generator = random.Random(seed)
    drawn = (generator.lognormvariate(math.log(MEDIAN_TOKENS), _SPREAD) for _ in range(count))
    return [max(8, min(longest, round(length))) for length in drawn]


def ragged(count: int, longest: int, seed: int = SEED) -> Iterator[str]:
    """Yield texts of as many words as `lengths` has: about a token each, by `tokenizer`."""
    sizes = lengths(count, longest, seed)
    stream = iter(words(sum(sizes), seed))
    for size in sizes:
        yield " ".join(next(stream) for _ in range(size))


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def write_tokens(path: Path, count: int, vocabulary: int) -> None:
    """Write random tokens as 16-bit numbers, as nanoGPT's data has them."""
    import numpy

    generator = numpy.random.default_rng(SEED)
    generator.integers(0, vocabulary, count, dtype=numpy.uint16).tofile(path)


def tokenizer(folder: Path, *, vocabulary: int, longest: int, is_bert: bool = False) -> Any:
    """Train a tokenizer on made-up text and save it in `folder`; the one of transformers.

    Args:
        folder: where it is saved, with its configuration.
        vocabulary: entries at most.
        longest: tokens that the model takes.
        is_bert: whether sequences are wrapped in [CLS] and [SEP].
    """
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=vocabulary, special_tokens=list(SPECIAL))
    made.train_from_iterator(lines(2_000, 50), trainer)
    if is_bert:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B [SEP]",
            special_tokens=[("[CLS]", SPECIAL.index("[CLS]")), ("[SEP]", SPECIAL.index("[SEP]"))],
        )
    whole = fast(
        tokenizer_object=made,
        model_max_length=longest,
        unk_token="[UNK]",
        pad_token="[PAD]",
        mask_token="[MASK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    whole.save_pretrained(folder)
    return whole
