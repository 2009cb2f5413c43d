"""Rules of `import deepytorch` by which backend arguments become others, as pure functions.

| asked for | default group | sub-group |
|---|---|---|
| nothing | `cuda:deepytorch`, or `cpu:` without GPUs, as in torch | as the default group |
| `nccl` | `cuda:deepytorch` | `cuda:deepytorch` |
| `gloo` | `cpu:deepytorch` (with GPUs also `cuda:gloo`) | the same if the default group was asked \
for as `gloo`, else left alone |
| `cpu:gloo,cuda:nccl` | each pair by itself | each pair by itself |
| anything else, `deepytorch` too | left alone | left alone |

Launchers choose a default group of `gloo` on machines without GPUs, so it carries the training. A
sub-group of `gloo` beside another default group is made for what only gloo does or for threads of
its own (asynchronous checkpoints, monitored barriers). Its messages are small, so there is nothing
to win.

A pair of another backend's own kind beside ours would share torch's one slot for custom backends
within a group. So such a combination is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.c10d.backend import NAME
from deepytorch_core.c10d.delegates import STOCK_BACKENDS

_BUILT_IN = ("gloo", "nccl", "ucc", "xccl", "mpi")


@dataclass(frozen=True)
class Capabilities:
    """The abilities of this torch and machine; the same on every rank."""

    accelerator: str  # device type that torch was built for: "cpu" (none), "cuda", "xpu", ...
    has_nccl: bool
    has_gloo: bool = True


def parse(config: str) -> dict[str, str]:
    """`"cpu:gloo,cuda:nccl"` as a mapping; empty for a plain name."""
    pairs = (pair.split(":", 1) for pair in config.lower().split(",") if ":" in pair)
    return {device.strip(): backend.strip() for device, backend in pairs}


def join(pairs: Mapping[str, str]) -> str:
    return ",".join(f"{device}:{backend}" for device, backend in pairs.items())


def default_group(asked: str, machine: Capabilities) -> str | None:
    """The backend for `init_process_group(asked)`; None leaves it alone.

    `asked` is torch's reading of the argument: "undefined" when there was none.
    """
    asked = asked.lower()
    if asked == "undefined":
        is_known = machine.accelerator in STOCK_BACKENDS
        return f"{machine.accelerator}:{NAME}" if is_known else None
    if asked == "nccl":
        return f"cuda:{NAME}" if machine.has_nccl else None
    if asked == "gloo":
        if not machine.has_gloo:
            return None
        return f"cpu:{NAME},cuda:gloo" if machine.accelerator == "cuda" else f"cpu:{NAME}"
    return _pairwise(asked, machine)


def sub_group(
    asked: str, machine: Capabilities, *, default_config: str, default_asked: str
) -> str | None:
    """The backend for `new_group(backend=asked)` under a default group of ours.

    Args:
        asked: the argument; that of the default group where there was none.
        default_config: the backends that serve the default group's devices, as pairs.
        default_asked: what the default group had been asked for.
    """
    asked = asked.lower()
    if asked == "undefined":
        return default_config
    if asked == "gloo" and default_asked != "gloo":
        return None
    return default_group(asked, machine)


def upgraded(config: str, machine: Capabilities) -> str | None:
    """Return what a stock group of `config` (device:backend pairs) becomes in place, or None."""
    return _pairwise(config, machine)


def _pairwise(config: str, machine: Capabilities) -> str | None:
    pairs = parse(config)
    available = {"cpu": machine.has_gloo, "cuda": machine.has_nccl}
    ours = {
        device: NAME if STOCK_BACKENDS.get(device) == name and available[device] else name
        for device, name in pairs.items()
    }
    if ours == pairs or why_not_beside(ours):
        return None
    return join(ours)


def why_not_beside(pairs: Mapping[str, str]) -> str | None:
    """The reason why deepytorch can't be one of these pairs, or None."""
    for device, name in pairs.items():
        if name not in _BUILT_IN and name != NAME:
            return f"torch can't hold {name} (for {device}) and deepytorch in one group"
    return None
