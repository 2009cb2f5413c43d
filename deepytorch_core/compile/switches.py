"""Switches of torch that decide what code is made or which kernels run, besides configurations.

Another process that compiles for this one has to have them as they are here. Torch's caches know
nothing of some of them, such as which kernels attention may use. Other values of the rest would
only make the caches miss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def matmul_precision() -> str:
    """How products of float32 matrices are computed on a GPU, by either of torch's ways to say it.

    The older way to ask raises once somebody has used the newer one.
    """
    return str(torch.backends.cuda.matmul.fp32_precision)


def now() -> dict[str, Any]:
    """This process's; what can't be asked for has the value None."""
    return {name: _asked(get) for name, (get, _) in _switches().items()}


def resemble(values: dict[str, Any]) -> None:
    """Make this process's what `now` said in another one."""
    for name, (get, put) in _switches().items():
        # Setting some leaves a trace, even to what they are.
        if values.get(name) is not None and _asked(get) != values[name]:
            put(values[name])


def _asked(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # the older and the newer way to say it, mixed
        return None


def _switches() -> dict[str, _Switch]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    switches: dict[str, _Switch] = {
        # First: it sets the next ones too.
        "float32_matmul_precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "flash_sdp": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "mem_efficient_sdp": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "math_sdp": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "cudnn_sdp": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "math_sdp_in_16_bits": (
            cuda.fp16_bf16_reduction_math_sdp_allowed,
            cuda.allow_fp16_bf16_reduction_math_sdp,
        ),
    }
    attributes = [
        (cuda.matmul, "fp32_precision"),
        (cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        (cuda.matmul, "allow_fp16_accumulation"),
        (cudnn, "allow_tf32"),
        (cudnn, "benchmark"),
        (cudnn, "deterministic"),
        (cudnn, "enabled"),
        (torch.utils.deterministic, "fill_uninitialized_memory"),
    ]
    for of, name in attributes:
        label = f"{getattr(of, '__name__', type(of).__name__)}.{name}"
        get, put = (functools.partial(each, of, name) for each in (getattr, setattr))
        switches[label] = get, put
    return switches
