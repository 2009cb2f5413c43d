"""Lets Megatron-core train on the CPU, for tests: it asks for CUDA by name in many places.

    torchrun --nproc-per-node 2 megatron_on_cpu.py SCRIPT [ARGUMENTS]

runs a script that was written for GPUs. What Megatron computes, and every collective, stay as they
are; only where tensors lie changes.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Stream:
    """One that is always done."""

    device = CPU

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class CudaIsCpu(TorchFunctionMode):
    """`device="cuda"` in a call of torch means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        if getattr(func, "__name__", "") == "to":
            args = tuple(CPU if str(arg).startswith("cuda") else arg for arg in args)
        return func(*args, **kwargs)


def install() -> None:
    """From now on, in this process. Before megatron.core is imported; twice is once."""
    cuda: Any = torch.cuda
    if hasattr(cuda, "is_cpu"):
        return
    assert not cuda.is_available()
    cuda.is_cpu = True
    stream = Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *args: None
    cuda.synchronize = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = cuda.default_stream = cuda.Stream = lambda *args, **kwargs: stream
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.Event = lambda *args, **kwargs: stream
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    name_of_type = tensor.type

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Optimizers look for "torch.cuda.FloatTensor"."""
        found = name_of_type(self, *args, **kwargs)
        # The mode above calls this function once more.
        if not isinstance(found, str) or found.startswith("torch.cuda."):
            return found
        return found.replace("torch.", "torch.cuda.")

    tensor.type = type_
    CudaIsCpu().__enter__()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
