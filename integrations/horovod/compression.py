"""Compression of what is reduced: less to move, for less precision."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """The base of a compressor of your own; both methods are static."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is sent in place of `tensor`, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received `tensor` as it was before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in another type."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Sends floating-point tensors in half precision."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16: float32's range, fewer digits."""

    dtype = torch.bfloat16


class Compression:
    """The compressors; pass one of these classes as `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
