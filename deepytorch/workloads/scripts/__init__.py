"""List public training scripts that `deepytorch bench scripts` runs as they are.

The scripts are not here: they are read from checkouts. A row says where a script is from and how
its documentation calls it. It also makes data and models of random weights for the script, without
a network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from deepytorch.workloads.scripts import hugging_face, own_models, trl, vision
from deepytorch.workloads.scripts.script import Script
from deepytorch_core.bench.job import BenchError

_LEAST = 0.98
_GOALS: Mapping[str, float] = {
    **{"trl-sft-llama-1b": 6.4, "trl-sft-llama-1b-lora": 3.0, "trl-dpo-llama-1b": 2.0},
    # Tokens per second over stock's: 15,500, 85,000 and 70,000 on one H200.
    **{"trl-sft-llama-8b-lora": 8.8, "trl-sft-llama-1b-packing": 3.7},
    **{"trl-sft-llama-1b-accumulated": 12.0},
    **{"run-mlm-bert": 1.6, "run-mlm-bert-bf16": 1.6},
    **{"run-clm-gpt2": 1.5, "run-clm-gpt2-bf16": 1.5},
    **{"run-glue-bert": 1.3, "run-glue-bert-bf16": 1.3},
    **{"nanogpt": 1.31, "diffusers-dreambooth-sd21": 1.7, "diffusers-unconditional": 1.7},
    **{"timm-resnet50": 1.5, "timm-convnext-tiny": 1.5, "timm-vit-base-patch16-224": 1.5},
    **{"accelerate-cv-resnet50d": 1.5, "lightning-transformer": 1.5},
}
"""Maps rows to the speed-up over stock that they are to reach. The others are to be no slower."""

SCRIPTS: Mapping[str, Script] = {
    script.name: dataclasses.replace(script, goal=_GOALS.get(script.name, _LEAST))
    for script in (
        *own_models.SCRIPTS,
        *trl.SCRIPTS,
        *hugging_face.SCRIPTS,
        *vision.SCRIPTS,
    )
}
"""Maps names to rows."""


def chosen(
    names: Sequence[str], registry: Mapping[str, Script] | None = None
) -> tuple[Script, ...]:
    """Return the rows of these names, or all. Raises BenchError for an unknown name."""
    known = SCRIPTS if registry is None else registry
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(f"--only {unknown[0]}: expected {', '.join(known)}")
    return tuple(known[name] for name in names or known)
