"""The native core has kernels for the GPUs that are here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepytorch_core.base import distribution
from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.doctor.torch_facts import Device


@dataclass(frozen=True)
class KernelFacts:
    """`built` is what the core has kernels for, as CMake writes it: "80-real 90a-real 90-virtual";
    "" without any."""

    built: str
    devices: tuple[Device, ...]


def gather(machine: Machine) -> KernelFacts:
    from deepytorch_core import _core

    return KernelFacts(_core.gpu_architectures, machine.torch.devices)


def judge(facts: KernelFacts) -> list[Finding]:
    if not facts.devices:
        has = f"the core has kernels for {facts.built}" if facts.built else "the core has none"
        return [not_here(f"torch sees no GPU ({has})")]
    wanted = sorted({device.capability for device in facts.devices}, key=_number)
    missing = [capability for capability in wanted if not runs(facts.built, capability)]
    architectures = ";".join(capability.replace(".", "") for capability in wanted)
    remedy = (
        f"{distribution.REINSTALL} --no-binary {distribution.NAME} "
        f"--config-settings cmake.define.CMAKE_CUDA_ARCHITECTURES='{architectures}'"
    )
    if not facts.built:
        text = "the native core was built without nvcc: GPU collectives stay NCCL's"
        return [warn(text, remedy)]
    if missing:
        text = f"kernels for {facts.built}, none that runs on compute capability "
        return [fail(text + ", ".join(missing), remedy)]
    return [okay(f"kernels for {facts.built} serve compute capability {', '.join(wanted)}")]


def runs(built: str, capability: str) -> bool:
    """Whether a GPU of `capability` ("8.6") runs something of what was built.

    Machine code runs on the same major version from its minor version on, with a letter only on
    exactly its own; PTX ("virtual") on everything that is newer.
    """
    mine = _number(capability)
    return any(_serves(architecture, mine) for architecture in built.split())


def _serves(architecture: str, mine: tuple[int, int]) -> bool:
    found = re.fullmatch(r"(\d+)(\d)([a-z]?)(?:-(real|virtual))?", architecture)
    if found is None:
        return False
    its = int(found[1]), int(found[2])
    if found[3]:
        return its == mine
    has_code, has_ptx = found[4] != "virtual", found[4] != "real"
    return (has_code and its[0] == mine[0] and its <= mine) or (has_ptx and its <= mine)


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)
