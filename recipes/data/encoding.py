# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, once: each rank encodes its share, and later runs find the result.

Rendering templates takes much longer than training's own loading. So large data is kept in the
cache, under the digest of all that decides what the tokens are.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.recipes.base.rank_consistency import refuse_unlike
from deepytorch.recipes.base.run import Process, StepProgress, all_of, console, together
from deepytorch.recipes.data import (
    chat,
    training_template,
)
from deepytorch.recipes.data import (
    conversations as _conversations,
)
from deepytorch.recipes.data import (
    template as _template,
)
from deepytorch.recipes.data.chat import Encoded, Encoding, encode_one
from deepytorch.recipes.data.conversations import Conversation
from deepytorch.recipes.data.text import Example
from deepytorch_core.base import config, file_permissions

_LARGE = 2_000  # conversations from which on they are kept, and their encoding is shown
_CODE = (chat, _conversations, _template, training_template)


def encoded_by_all(
    conversations: Sequence[Conversation], tokenizer: Any, options: Encoding, process: Process
) -> list[Encoded]:
    """All conversations as tokens, in their order. Collective.

    Raises RecipeError, on every rank, for one that can't be encoded, or other data on a node.
    """
    digest = _digest(conversations, tokenizer, options)
    refuse_unlike(process, examples=len(conversations), data_and_tokenizer=digest)
    is_large = len(conversations) >= _LARGE
    path = config.cache_dir() / "recipes" / f"encoded-{digest}.pt"
    kept = _read(path) if is_large else None
    if is_large and all(all_of(kept is not None, process)) and kept is not None:
        if process.is_main:
            console.print(f"encoded     found in {path}", highlight=False)
        return kept
    own = conversations[process.rank :: process.world_size]

    def encode_own() -> list[Encoded]:
        found = []
        shown = process.is_main and is_large
        with StepProgress(len(own), enabled=shown, what="encoding") as progress:
            for number, conversation in enumerate(own, 1):
                found.append(encode_one(conversation, tokenizer, options))
                progress.update(number, f"of this rank, one of {process.world_size}")
        return found

    shares = all_of(together(encode_own, process), process)
    every = [
        shares[number % process.world_size][number // process.world_size]
        for number in range(len(conversations))
    ]
    if is_large and dist.get_node_local_rank(fallback_rank=0) == 0:
        _write(path, every)
    return every


def _digest(conversations: Sequence[Conversation], tokenizer: Any, options: Encoding) -> str:
    found = hashlib.sha256()
    for module in _CODE:
        found.update(Path(str(module.__file__)).read_bytes())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    template = training_template.training_template(tokenizer)
    facts = (words, tokenizer.chat_template, template, tokenizer.special_tokens_map)
    found.update(repr((*facts, options.max_length, options.train_on_prompt)).encode())
    for conversation in conversations:
        text = repr(
            (
                conversation.messages,
                conversation.options,
                conversation.num_given,
                conversation.is_text,
            )
        )
        found.update(text.encode(errors="surrogatepass"))
    return found.hexdigest()[:32]


def _write(path: Path, every: Sequence[Encoded]) -> None:
    """Keep them; a disk that is full costs the next run its time, and nothing else."""
    ids = [id_ for encoded in every for id_ in encoded.example.input_ids]
    labels = [label for encoded in every for label in encoded.example.labels]
    numbers = [
        [len(encoded.example.input_ids), int(encoded.is_cut), encoded.num_thoughts]
        for encoded in every
    ]
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = (torch.tensor(field, dtype=torch.int32) for field in (ids, labels, numbers))
        torch.save(dict(zip(("ids", "labels", "numbers"), tensors, strict=True)), partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        console.print(f"encoded     not kept: {error}", highlight=False)


def _read(path: Path) -> list[Encoded] | None:
    try:
        with file_permissions.opened_data(path) as file:
            kept = torch.load(file, weights_only=True)
        ids, labels = kept["ids"].tolist(), kept["labels"].tolist()
        found, start = [], 0
        for length, is_cut, num_thoughts in kept["numbers"].tolist():
            end = start + length
            example = Example(ids[start:end], labels[start:end])
            found.append(Encoded(example, bool(is_cut), num_thoughts))
            start = end
    except Exception:  # missing, damaged, or another's: it is encoded again
        return None
    return found
