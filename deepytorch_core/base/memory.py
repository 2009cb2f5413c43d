"""How much memory this process has used: its own, and on its GPUs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

_FIELDS = {"VmHWM": "host_peak_bytes", "VmRSS": "host_bytes"}


def used() -> dict[str, Any]:
    """In bytes: of the process now and at most, of registered memory, and of each of its GPUs.

    What the system does not tell is left out. Of a GPU: what torch allocated and reserved at most,
    and what the device has. Makes nothing happen: a GPU that was not used stays so.
    """
    found: dict[str, Any] = dict(_of_process())
    core = sys.modules.get("deepytorch_core._core")
    if core is not None:
        found["registered_bytes"] = int(core.registered_memory()["reserved_bytes"])
    found["devices"] = [_of_gpu(index) for index in gpus()]
    return found


def gpus() -> list[int]:
    """The GPUs that this process has memory of torch's on."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # None while torch is being imported
    if cuda is None or not cuda.is_initialized():
        return []
    return [index for index in range(cuda.device_count()) if cuda.max_memory_allocated(index)]


def peak_bytes() -> int | None:
    """Most at once: allocated on its GPUs, else the process's own; None if that is not known."""
    devices = gpus()
    if devices:
        return sum(int(_of_gpu(index)["peak_bytes"]) for index in devices)
    return _of_process().get("host_peak_bytes")


def _of_gpu(index: int) -> dict[str, Any]:
    cuda = sys.modules["torch"].cuda
    return {
        "device": f"cuda:{index}",
        "peak_bytes": int(cuda.max_memory_allocated(index)),
        "reserved_bytes": int(cuda.max_memory_reserved(index)),
        "total_bytes": int(cuda.get_device_properties(index).total_memory),
    }


def _of_process() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in _FIELDS:
                found[_FIELDS[name]] = int(value.split()[0]) << 10
    return found
