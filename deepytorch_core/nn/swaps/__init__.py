"""One file for each place where kernels are swapped, with those that need nothing but torch."""

import importlib

_FILES = ("cross_entropy", "rms_norm", "swiglu", "lora", "fused_optimizer", "fused_adam")


def load() -> None:
    """Fill the registries of `deepytorch_core.nn.kernels`."""
    for name in _FILES:
        importlib.import_module(f"{__name__}.{name}")
