"""torch is a version that deepytorch knows, and loads."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.doctor.torch_facts import TorchFacts

OLDEST, FIRST_UNKNOWN = (2, 11), (2, 16)
"""Versions that deepytorch is made for: from the first to below the second."""


@dataclass(frozen=True)
class TorchInstallFacts:
    """The words of torch's child process, and the installed version by its metadata."""

    torch: TorchFacts
    installed: str


def gather(machine: Machine) -> TorchInstallFacts:
    return TorchInstallFacts(machine.torch, machine.distributions.get("torch", ""))


def judge(facts: TorchInstallFacts) -> list[Finding]:
    version = facts.torch.version or facts.installed
    known = f"torch>={_text(OLDEST)},<{_text(FIRST_UNKNOWN)}"
    install = f"pip install '{known}'"
    if not version:
        return [fail(f"torch is not installed ({facts.torch.error})", install)]
    if not facts.torch.version:
        if facts.torch.doing:
            return [warn(f"torch {version} did not load: {facts.torch.error}", _AGAIN)]
        remedy = f"pip install --force-reinstall 'torch=={version.partition('+')[0]}'"
        return [fail(f"torch {version} can't be loaded: {facts.torch.error}", remedy)]
    number = _number(version)
    if number < OLDEST:
        return [fail(f"torch {version} is too old for deepytorch ({known})", install)]
    if number >= FIRST_UNKNOWN:
        return [warn(f"torch {version} is newer than what is tested ({known})", install)]
    return [okay(f"torch {version}, built for {_target(facts.torch.cuda)}")]


_AGAIN = 'time python -c "import torch"   # slow disks: keep the environment on a local one'


def _number(version: str) -> tuple[int, int]:
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return (0, 0)


def _target(cuda: str) -> str:
    return f"CUDA {cuda}" if cuda else "CPUs"


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
