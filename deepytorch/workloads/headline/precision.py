"""The precision of rows of image models: what weights are, autocast, the gradient scaler."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class Precision:
    """A row's: "fp32"; "bf16", the whole model; "amp" or "fp16", mixed by autocast.

    Mixed is float16 with a scaler on GPUs, bfloat16 on CPUs. Models that are not trained are then
    float16 on GPUs, else as the one that is trained.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.dtype = torch.bfloat16 if name == "bf16" else torch.float32
        self.is_mixed = name in ("amp", "fp16")
        self._kind = device.type
        self._autocast = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.frozen_dtype = (
            self._autocast if self.is_mixed and device.type == "cuda" else self.dtype
        )
        # The scale is less than the usual 65536, with which the first gradients overflow. After an
        # overflow torch's fused SGD, of the tuned arms, goes on with a momentum that was never
        # filled.
        is_used = self.is_mixed and device.type == "cuda"
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=is_used)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._kind, dtype=self._autocast, enabled=self.is_mixed)
