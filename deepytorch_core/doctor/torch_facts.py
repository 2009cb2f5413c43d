"""Asks torch about itself and the GPUs, in a process of its own.

A copy between GPUs can hang for good where the platform is set up wrongly, and loading a broken
torch can end the process. So neither happens in ours: the child (`torch_probe`) writes a line for
each thing that it found, and is ended when its time is over. The step that it was at is known then.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base import config


@dataclass(frozen=True)
class Device:
    """A GPU by torch's number; `capability` is "9.0", `uuid` as NVML writes it."""

    index: int
    name: str
    capability: str
    uuid: str = ""


@dataclass(frozen=True)
class GpuPair:
    """Copies from one GPU to another: GB/s directly and by way of the host, and whether the bytes
    were right; `can_access` is what the driver says of peer access."""

    source: int
    target: int
    can_access: bool
    direct_gbps: float
    host_gbps: float
    is_right: bool


@dataclass(frozen=True)
class TorchFacts:
    """All that the child said.

    Attributes:
        version: torch's.
        cuda: the version that torch was built with, "" without; `nccl` likewise.
        running_nccl: the version that the loaded NCCL says it is.
        loaded_nccls: files of NCCL that loading torch brought into the process.
        adapter: the file of the adapter for this torch, "" when it is not there.
        adapter_tag: the folder that it has or would have.
        cuda_error: why CUDA does not start.
        doing: what the child had begun when its time was over, "" when it ended in time.
        stuck_s: how long it had been at that.
        error: why it said no more, "" when it ended well.
    """

    version: str = ""
    cuda: str = ""
    nccl: str = ""
    running_nccl: str = ""
    loaded_nccls: tuple[str, ...] = ()
    adapter: str = ""
    adapter_tag: str = ""
    adapter_error: str = ""
    cuda_error: str = ""
    devices: tuple[Device, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    doing: str = ""
    stuck_s: float = 0.0
    error: str = ""


def ask(limit_s: float) -> TorchFacts:
    """Run the child for at most `limit_s` seconds."""
    command = [sys.executable, "-m", "deepytorch_core.doctor.torch_probe"]
    # The child measures the machine as it is; what the job's variables mean is judged elsewhere.
    environment = config.child_environment(DEEPYTORCH_LOG="error")
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return TorchFacts(error=f"no process could be started: {error}")
        in_time = True
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            in_time = False
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)  # one that the driver holds can't be waited for
        output.seek(0)
        errors.seek(0)
        said = output.read().decode(errors="replace")
        wrong = errors.read().decode(errors="replace").strip().splitlines()
    ended_well = in_time and child.returncode == 0
    return parse(
        said,
        error="" if ended_well else _why(child.returncode, wrong, limit_s, in_time=in_time),
        in_time=in_time,
    )


def _why(status: int | None, wrong: list[str], limit_s: float, *, in_time: bool) -> str:
    if not in_time:
        return f"no answer within {limit_s:g} s"
    return wrong[-1] if wrong else f"the process ended with status {status}"


def parse(said: str, *, error: str, in_time: bool) -> TorchFacts:
    """The child's lines, each a JSON object with fields of `TorchFacts`, read at once."""
    now = time.monotonic()
    facts: dict[str, Any] = {"error": error}
    pairs = []
    begun_at = now
    for line in said.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # cut off in the middle, or somebody else's print
        if not isinstance(found, dict):
            continue
        begun_at = found.pop("begun_at", begun_at)
        if "pair" in found:
            pairs.append(GpuPair(**found["pair"]))
        elif "devices" in found:
            facts["devices"] = tuple(Device(**device) for device in found["devices"])
        else:
            facts.update(found)
    if in_time:
        facts["doing"] = ""
    facts["stuck_s"] = 0.0 if in_time else now - begun_at
    facts["loaded_nccls"] = tuple(facts.get("loaded_nccls", ()))
    return TorchFacts(**facts, pairs=tuple(pairs))
