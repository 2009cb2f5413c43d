"""The workloads of the headline table, as data: shapes, batches, and the arms that train them.

`deepytorch bench train --workload W` trains a row in several arms, each in fresh processes that
take turns:

* plain: the framework's own published example, unchanged;
* tuned-*: what its documentation teaches today, the variants that suit the row; the fastest counts;
* ours: plain with deepytorch switched on and nothing else;
* ours-collectives, ours-compute: ours with the other half of it switched off;
* plain-bf16, ours-bf16: DDP's gradients sent as bfloat16, by torch's hook and by ours.

`full` is the true shape with random weights; layers are cut where the machine is too small, which
is printed and recorded. `tiny` is the same code on a CPU in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

SCALES = ("full", "tiny")
PLAIN, OURS, COLLECTIVES, COMPUTE = "plain", "ours", "ours-collectives", "ours-compute"
PLAIN_BF16, OURS_BF16 = "plain-bf16", "ours-bf16"
SWITCH = "DEEPYTORCH_ENABLED"
_STOCK = {SWITCH: "0"}
ENVIRONMENT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        OURS: {},
        OURS_BF16: {},
        COLLECTIVES: {
            "DEEPYTORCH_COMPILE": "off",
            "DEEPYTORCH_KERNELS": "off",
            "DEEPYTORCH_PADDING_FREE": "off",
        },
        COMPUTE: {"DEEPYTORCH_COLLECTIVES": "stock"},
    }
)
"""The variables that an arm's processes have set; every other arm is without deepytorch."""

Shape = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class WorkloadRow:
    """One workload.

    `builder` is the module here that makes it; `claim` the modelled product's speed-up over plain,
    None where it has none. `lengths` says how long sequences are: "instructions" (median 150, a
    tail to the longest), "full", or "half" (half of the tokens are padding).
    """

    name: str
    title: str
    builder: str
    full: Shape
    tiny: Shape
    micro_batch: int
    world_size: int = 4
    claim: float | None = None
    tuned: tuple[str, ...] = ()
    unit: str = "tokens"
    lengths: str = "full"
    precision: str = "bf16"
    zero_stage: int = 0
    fsdp2: bool = False
    offload: bool = False
    recompute: bool = False
    dropout: float = 0.0
    more: Mapping[str, str] = field(default_factory=dict)

    def shape(self, scale: str) -> Shape:
        return self.full if scale == "full" else self.tiny


_TINY_TEXT = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2}
_TINY_TEXT = {**_TINY_TEXT, "vocabulary": 512, "length": 96}

_ALL = (
    WorkloadRow(
        name="llama2-13b-zero2",
        title="Llama 2 13B, ZeRO-2, micro-batch 4",
        builder="language",
        full={
            **{"layers": 40, "hidden": 5120, "ffn": 13824, "heads": 40, "kv_heads": 40},
            **{"vocabulary": 32000, "length": 1024},
        },
        tiny=_TINY_TEXT,
        micro_batch=4,
        claim=1.48,
        tuned=("compile", "flatten"),
        lengths="instructions",
        zero_stage=2,
        more={"family": "Llama"},
    ),
    WorkloadRow(
        name="qwen2-14b-zero2",
        title="Qwen2 14B, ZeRO-2, micro-batch 4",
        builder="language",
        full={
            **{"layers": 48, "hidden": 5120, "ffn": 13824, "heads": 40, "kv_heads": 8},
            **{"vocabulary": 152064, "length": 1024},
        },
        tiny=_TINY_TEXT,
        micro_batch=4,
        claim=1.21,
        tuned=("compile", "flatten"),
        lengths="instructions",
        zero_stage=2,
        more={"family": "Qwen2"},
    ),
    WorkloadRow(
        name="llama-65b-zero3-offload",
        title="LLaMA 65B, ZeRO-3, parameters offloaded, recompute, micro-batch 8",
        builder="language",
        # A quarter of its 80 layers: what one host's memory holds; every layer is alike.
        full={
            **{"layers": 20, "all_layers": 80, "hidden": 8192, "ffn": 22016, "heads": 64},
            **{"kv_heads": 64, "vocabulary": 32000, "length": 1024},
        },
        tiny=_TINY_TEXT,
        micro_batch=8,
        claim=1.30,
        tuned=("flatten",),
        lengths="instructions",
        zero_stage=3,
        offload=True,
        recompute=True,
        more={"family": "Llama"},
    ),
    *(
        WorkloadRow(
            name=name,
            title=f"Llama 1.1B, {framework}, sequences of different lengths, "
            f"micro-batch {micro_batch}",
            builder="language",
            full={
                **{"layers": 16, "hidden": 2048, "ffn": 5632, "heads": 16, "kv_heads": 16},
                **{"vocabulary": 32000, "length": 1024},
            },
            tiny=_TINY_TEXT,
            micro_batch=micro_batch,
            tuned=tuned,
            lengths="instructions",
            zero_stage=stage,
            fsdp2=framework == "FSDP2",
            more={"family": "Llama"},
        )
        for name, framework, stage, micro_batch, tuned in (
            ("llama-1b-varlen", "DDP", 0, 4, ("compile", "flatten")),
            # Computes little for the gradients it reduces.
            ("llama-1b-small-batch", "DDP", 0, 1, ("compile", "flatten")),
            ("llama-1b-fsdp2", "FSDP2", 0, 4, ("compile", "flatten")),
            ("llama-1b-zero2", "ZeRO-2", 2, 4, ("compile", "flatten")),
            ("llama-1b-zero3", "ZeRO-3", 3, 4, ("flatten",)),
        )
    ),
    *(
        WorkloadRow(
            name=name,
            title=title,
            builder="language",
            full={
                **{"layers": 12, "hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 12},
                **{"vocabulary": 30522, "length": 512},
            },
            tiny=_TINY_TEXT,
            micro_batch=32,
            claim=claim,
            tuned=("compile",),
            lengths=lengths,
            precision="fp16",
            more={"family": "Bert"},
        )
        for name, title, claim, lengths in (
            ("bert-amp", "BERT base, AMP, micro-batch 32", 1.42, "full"),
            ("bert-amp-half", "BERT base, AMP, micro-batch 32, half padding", None, "half"),
        )
    ),
    WorkloadRow(
        name="resnet50-amp",
        title="ResNet-50, AMP, micro-batch 512",
        builder="vision",
        full={"image": 224, "classes": 1000},
        tiny={"image": 32, "classes": 10},
        micro_batch=512,
        claim=1.89,
        tuned=("channels_last", "channels_last-compile"),
        unit="images",
        precision="fp16",
        more={"family": "resnet", "model": "torchvision/resnet50"},
    ),
    *(
        WorkloadRow(
            name=f"sd21-dreambooth{suffix}",
            title=f"Stable Diffusion 2.1 DreamBooth{words}, 512 px, AMP, batch 5",
            builder="vision",
            full={"image": 64, "width": 320, "text": 1024, "length": 77, "vocabulary": 49408},
            tiny={"image": 8, "width": 32, "text": 32, "length": 8, "vocabulary": 512},
            micro_batch=5,
            world_size=1,
            claim=1.22,
            tuned=("channels_last", "channels_last-compile"),
            unit="images",
            precision="fp16",
            more={"family": family},
        )
        for suffix, words, family in (
            # The pipeline's UNet on latents that were encoded before, in every arm.
            ("", "", "unet"),
            ("-loop", " with its encoders", "pipeline"),
        )
    ),
)
ROWS: Mapping[str, WorkloadRow] = MappingProxyType({row.name: row for row in _ALL})


def arms_of(row: WorkloadRow, *, split: bool) -> tuple[str, ...]:
    """The arms of a row in the order of the first round; every other round goes backwards."""
    tuned = tuple(f"tuned-{variant}" for variant in row.tuned)
    return (PLAIN, *tuned, OURS, *((COLLECTIVES, COMPUTE) if split else ()))


def environment(arm: str) -> Mapping[str, str]:
    """The variables that make an arm's processes what it is called."""
    return ENVIRONMENT.get(arm, _STOCK)
