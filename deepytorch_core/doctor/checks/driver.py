"""The driver, the GPUs on PCI and torch's CUDA belong together."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepytorch_core.doctor import pci
from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine

# The oldest driver that runs programs built with a CUDA of this major version, by minor version
# compatibility. The source is the CUDA Toolkit release notes, table of driver versions.
_OLDEST_DRIVER = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}


@dataclass(frozen=True)
class DriverFacts:
    """`num_pci` GPUs of NVIDIA are on the bus; `driver` is the kernel module's version, "" without;
    `cuda` what torch was built with; `error` why CUDA does not start."""

    num_pci: int
    driver: str
    torch: str
    cuda: str
    num_devices: int
    error: str
    visible: str | None


def gather(machine: Machine) -> DriverFacts:
    torch = machine.torch
    text = machine.read("proc/driver/nvidia/version") or ""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return DriverFacts(
        num_pci=len(pci.gpus(machine)),
        driver=found.group(1) if found else "",
        torch=torch.version,
        cuda=torch.cuda,
        num_devices=len(torch.devices),
        error=torch.cuda_error or (torch.error if torch.doing == "starting CUDA" else ""),
        visible=machine.environment.get("CUDA_VISIBLE_DEVICES"),
    )


def judge(facts: DriverFacts) -> list[Finding]:
    if not (facts.num_pci or facts.driver or facts.num_devices):
        return [not_here("no NVIDIA GPU on PCI and no driver")]
    seen = f"{facts.num_pci} NVIDIA GPU{'s' if facts.num_pci != 1 else ''} on PCI"
    if not facts.driver and not facts.num_devices:
        return [fail(f"{seen}, but no driver is loaded", "sudo modprobe nvidia && nvidia-smi")]
    if not facts.torch:
        return [warn(f"{seen}, driver {facts.driver}; torch did not answer", "nvidia-smi")]
    if not facts.cuda:
        remedy = "pip install --force-reinstall torch --index-url " + _index(facts.driver)
        return [fail(f"{seen}, but torch {facts.torch} is built for CPUs only", remedy)]
    major = facts.cuda.partition(".")[0]
    oldest = _OLDEST_DRIVER.get(major)
    if facts.driver and oldest is not None and _number(facts.driver) < oldest:
        text = f"driver {facts.driver} is too old for CUDA {facts.cuda} of torch {facts.torch}"
        remedy = f"install driver {oldest[0]}.{oldest[1]} or newer, or: pip install "
        return [fail(text, remedy + f"--force-reinstall torch --index-url {_index(facts.driver)}")]
    if facts.error:
        return [fail(f"CUDA does not start: {facts.error}", "nvidia-smi   # and dmesg | grep NVRM")]
    if facts.visible is not None and not facts.num_devices:
        text = f"CUDA_VISIBLE_DEVICES={facts.visible!r} hides all GPUs"
        return [fail(text, "unset CUDA_VISIBLE_DEVICES")]
    driver = facts.driver or "of unknown version"
    return [okay(f"driver {driver}, CUDA {facts.cuda}, torch sees {facts.num_devices} of {seen}")]


def _number(version: str) -> tuple[int, int]:
    major, minor = (version.split(".") + ["0"])[:2]
    return int(major), int(minor)


def _index(driver: str) -> str:
    """Return where there is a torch for this driver."""
    is_new = _number(driver) >= _OLDEST_DRIVER["13"]
    return f"https://download.pytorch.org/whl/{'cu130' if is_new else 'cu126'}"
