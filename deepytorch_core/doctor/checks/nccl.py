"""There is one NCCL, and it is the one torch was built with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine

_PACKAGE = "nvidia-nccl-"
_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/local/lib")


@dataclass(frozen=True)
class NcclFacts:
    """`packages`: NCCLs that pip installed; `loaded`: files in a process that loaded torch;
    `others`: files on the library path that would win over pip's; `system`: those of the system."""

    packages: Mapping[str, str]
    loaded: tuple[str, ...]
    others: tuple[str, ...]
    system: tuple[str, ...]
    built: str
    running: str
    cuda: str


def gather(machine: Machine) -> NcclFacts:
    packages = {
        name: version
        for name, version in machine.distributions.items()
        if name.startswith(_PACKAGE)
    }
    path = machine.environment.get("LD_LIBRARY_PATH", "")
    preload = machine.environment.get("LD_PRELOAD", "").replace(":", " ").split()
    others = [name for name in preload if "libnccl.so" in name]
    for folder in filter(None, path.split(":")):
        others += [str(file) for file in machine.entries(folder.lstrip("/")) if _is_nccl(file.name)]
    system = [
        str(file)
        for folder in _FOLDERS
        for file in machine.entries(folder)
        if file.name == "libnccl.so.2"
    ]
    torch = machine.torch
    return NcclFacts(
        packages=packages,
        loaded=torch.loaded_nccls,
        others=tuple(others),
        system=tuple(system),
        built=torch.nccl,
        running=torch.running_nccl,
        cuda=torch.cuda,
    )


def judge(facts: NcclFacts) -> list[Finding]:
    findings = []
    if len(facts.packages) > 1:
        # They share a folder (nvidia/nccl/lib): what was installed last has overwritten the other.
        names = sorted(facts.packages)
        keep = f"{_PACKAGE}cu{facts.cuda.partition('.')[0]}" if facts.cuda else names[-1]
        keep = keep if keep in facts.packages else names[-1]
        version = facts.built or facts.packages[keep]
        remedy = f"pip uninstall -y {' '.join(names)} && pip install {keep}=={version}"
        listed = ", ".join(f"{name} {facts.packages[name]}" for name in names)
        findings.append(fail(f"two NCCLs are installed in one folder: {listed}", remedy))
    if len(facts.loaded) > 1:
        text = f"a process with torch loads {len(facts.loaded)} NCCLs: {', '.join(facts.loaded)}"
        findings.append(fail(text, "unset LD_LIBRARY_PATH LD_PRELOAD   # and install one of them"))
    if facts.others:
        text = f"the library path puts another NCCL before torch's: {', '.join(facts.others)}"
        findings.append(warn(text, "unset LD_LIBRARY_PATH LD_PRELOAD"))
    if facts.built and facts.running and _minor(facts.built) != _minor(facts.running):
        text = f"torch was built with NCCL {facts.built} and runs with {facts.running}"
        name = next(iter(sorted(facts.packages)), f"{_PACKAGE}cu12")
        findings.append(warn(text, f"pip install {name}=={facts.built}"))
    if findings:
        return findings
    if not facts.built and not facts.packages:
        return [not_here("this torch has no NCCL, and none is installed")]
    listed = ", ".join(f"{name} {version}" for name, version in sorted(facts.packages.items()))
    text = f"NCCL {facts.running or facts.built or 'not asked'} ({listed or 'part of torch'})"
    if facts.system:
        text += f"; the system's {facts.system[0]} is not used"
    return [okay(text)]


def _is_nccl(name: str) -> bool:
    return name.startswith("libnccl.so")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
