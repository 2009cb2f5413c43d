"""Every transformers architecture that packing takes trains as it does on padded batches.

    python tests/suites/packing_sweep.py [NAME ...] [--least 120]

For each class that gives a loss of token labels a small model of its default configuration is made,
its weights moved off their start. `deepytorch.integrations` finds out on a twin what it may do;
that is then tried on the model. The batches are random text with special ids in it, alone and with
every per-token argument that a packed row may bring. Loss and gradients must be those of the padded
batch, or the padding stays. Ends with 1 if one differs, or if fewer are packed than `--least`.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from deepytorch.integrations.padding_free import packing_contents, packing_probe, packing_twin
from deepytorch.integrations.padding_free.packed_forward import Conventions, PackedForward

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
)
NOISE = 2e-4


def architectures() -> Iterator[tuple[type, type]]:
    """(class, class of its configuration), each once."""
    seen = set()
    for mapping in MAPPINGS:
        for config, found in getattr(modeling_auto, mapping).items():
            for kind in found if isinstance(found, tuple) else (found,):
                if kind not in seen:
                    seen.add(kind)
                    yield kind, config


def tried(kind: type, config: type) -> str | None:
    """None if the architecture is packed and trains alike; else why it keeps its padding.

    Raises AssertionError where it is packed and trains otherwise.
    """
    try:
        twin = packing_twin.Twin(kind.__module__, kind.__qualname__, config(), frozenset(), None)
        found = packing_twin.examine(twin)
    except packing_probe.Unsupported as reason:
        return str(reason)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    model = packing_twin._made(twin)
    for batch in batches(model, found):
        compare(model, found, batch)
    return None


def batches(model: Any, found: Conventions) -> Iterator[dict[str, torch.Tensor]]:
    """As trainings may have them, with what a packed row may bring."""
    for seed, padding_side in enumerate(("right", "left")):
        generator = torch.Generator().manual_seed(seed)
        plain = packing_probe._batch(model)
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = torch.randint(0, vocabulary, plain["input_ids"].shape, generator=generator)
        plain["input_ids"] = torch.where(plain["attention_mask"] != 0, ids, plain["input_ids"])
        if padding_side == "left":
            plain = {name: tensor.flip(1) for name, tensor in plain.items()}
            first = plain["attention_mask"].argmax(dim=1, keepdim=True)
            plain["labels"].scatter_(1, first, -100)  # else it is predicted from padding
        special = packing_contents.special(model, plain, model)
        yield special
        for name in found.per_token:
            yield {**special, name: packing_contents._entries(name, model, plain)}


def compare(model: Any, found: Conventions, batch: dict[str, torch.Tensor]) -> None:
    """Loss and gradients of both ways."""
    packed = copy.deepcopy(model)
    forward = PackedForward(packed, packed, found, is_asked=False)
    undo = forward.install(packed)
    results = []
    for network in (model, packed):
        network.zero_grad()
        loss = network(**batch).loss
        loss.backward()
        gradients = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
        results.append((float(loss), torch.cat(gradients)))
    undo()
    (expected, gradient), (loss, other) = results
    assert forward.num_tokens is not None, "the batch stayed padded"
    assert abs(loss - expected) <= NOISE * max(1.0, abs(expected)), f"loss {loss}, not {expected}"
    off = float((gradient - other).norm() / gradient.norm().clamp(min=1e-6))
    assert off <= 20 * NOISE, f"gradients off by {off:.1%}"


def main() -> int:
    """The sweep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="of classes; all if none is given")
    parser.add_argument("--least", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    packed, padded, wrong = 0, 0, 0
    for kind, config in architectures():
        if given.names and kind.__name__ not in given.names:
            continue
        try:
            why = tried(kind, config)
        except Exception as error:
            wrong += 1
            print(f"WRONG   {kind.__name__}: {type(error).__name__}: {error}"[:200], flush=True)
            continue
        packed, padded = packed + (why is None), padded + (why is not None)
        print(
            f"{'packed ' if why is None else 'padded '} {kind.__name__}"
            + (f": {why}" if why else "")[:160],
            flush=True,
        )
    print(f"{packed} packed, {padded} keep their padding, {wrong} differ")
    return int(bool(wrong) or packed < given.least)


if __name__ == "__main__":
    sys.exit(main())
