"""The child of `torch_facts`: `python -m deepytorch_core.doctor.torch_probe` writes JSON lines.

What may hang or crash is announced first (`doing`), so that the parent can say what it was.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_BYTES = 32 << 20
_COPIES = 4


def main() -> None:
    """Write all that can be found, the dangerous last."""
    _say(doing="loading torch")
    import torch

    _say(version=str(torch.__version__), cuda=torch.version.cuda or "", doing="asking torch")
    _say(loaded_nccls=_loaded("libnccl.so"), **_nccl(torch))
    _say(**_adapter())
    if torch.version.cuda is None:
        return
    _say(doing="starting CUDA")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        _say(cuda_error=str(error).strip().splitlines()[0])
        return
    num_devices = torch.cuda.device_count()
    devices = []
    for index in range(num_devices):
        major, minor = torch.cuda.get_device_capability(index)
        facts = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": facts.name,
                "capability": f"{major}.{minor}",
                "uuid": f"GPU-{facts.uuid}",
            }
        )
    _say(devices=devices)
    _copies(torch, num_devices)


def _copies(torch: Any, num_devices: int) -> None:
    """Every ordered pair of GPUs: bytes copied directly, and by way of pinned host memory."""
    if num_devices < 2:
        return
    host = torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    buffers, to_host, from_host = [], [], []
    for index in range(num_devices):
        _say(doing=f"copying between the host and GPU {index}")
        data = torch.randint(0, 256, (_BYTES,), dtype=torch.uint8, device=f"cuda:{index}")
        buffers.append(data)
        to_host.append(_rate(torch, data, host))
        from_host.append(_rate(torch, host, torch.empty_like(data)))
    for source in range(num_devices):
        for target in range(num_devices):
            if source == target:
                continue
            _say(doing=f"copying from GPU {source} to GPU {target}")
            data = buffers[source]
            arrived = torch.zeros(_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
            pair = {
                "source": source,
                "target": target,
                "can_access": bool(torch.cuda.can_device_access_peer(source, target)),
                "direct_gbps": _rate(torch, data, arrived),
                # Both halves at the same time, chunk by chunk, as such algorithms work.
                "host_gbps": min(to_host[source], from_host[target]),
                "is_right": bool(torch.equal(arrived.cpu(), data.cpu())),
            }
            _say(pair=pair)


def _rate(torch: Any, source: Any, target: Any) -> float:
    """GB/s of copies of `_BYTES`, the best of some: the first one sets up the way."""
    best = float("inf")
    for _ in range(_COPIES):
        _wait(torch)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(torch)
        best = min(best, time.perf_counter() - start)
    return float(_BYTES / best / 1e9)


def _wait(torch: Any) -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _nccl(torch: Any) -> dict[str, str]:
    """The version that torch was built with, and the one that runs."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return {}
    # Versions of torch differ: a tuple, or a number as NCCL has it.
    built = torch.cuda.nccl.version()
    if isinstance(built, int):
        built = (built // 10000, built // 100 % 100, built % 100)
    return {"nccl": ".".join(map(str, built)), "running_nccl": _running_nccl()}


def _running_nccl() -> str:
    import ctypes

    for path in _loaded("libnccl.so"):
        try:
            number = ctypes.c_int()
            if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
                value = number.value
                return f"{value // 10000}.{value // 100 % 100}.{value % 100}"
        except (OSError, AttributeError):
            continue
    return ""


def _loaded(name: str) -> list[str]:
    """Files of that name that are mapped into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if name in line.rpartition("/")[2]})


def _adapter() -> dict[str, str]:
    from deepytorch_core.base.errors import AdapterError
    from deepytorch_core.c10d import adapter

    try:
        sources = adapter.Sources.find()
        path = adapter.find(sources)
        return {"adapter_tag": adapter.tag(sources), "adapter": str(path) if path else ""}
    except (AdapterError, ImportError, OSError, RuntimeError) as error:
        return {"adapter_error": str(error)}


def _say(**found: Any) -> None:
    """One line; what is begun comes with the time, by the clock that all processes share."""
    if "doing" in found:
        found["begun_at"] = time.monotonic()
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
