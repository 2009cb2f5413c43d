"""GPUs and CPUs run at the clocks that they were made for."""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.doctor import smi
from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.doctor.smi import GpuState


@dataclass(frozen=True)
class Cpu:
    """How a kind of core is clocked, in kHz: what is allowed now, and what it can."""

    governor: str
    driver: str
    allowed_khz: int
    most_khz: int
    count: int


@dataclass(frozen=True)
class ClockFacts:
    """GPUs as nvidia-smi has them, and kinds of cores."""

    gpus: tuple[GpuState, ...]
    cpus: tuple[Cpu, ...]


def gather(machine: Machine) -> ClockFacts:
    kinds: dict[tuple[str, str, int, int], int] = {}
    for cpu in machine.entries("sys/devices/system/cpu"):
        folder = f"sys/devices/system/cpu/{cpu.name}/cpufreq"
        governor = machine.read(f"{folder}/scaling_governor")
        if governor is None:
            continue
        allowed = _number(machine.read(f"{folder}/scaling_max_freq"))
        most = _number(machine.read(f"{folder}/cpuinfo_max_freq"))
        kind = (governor, machine.read(f"{folder}/scaling_driver") or "", allowed, most)
        kinds[kind] = kinds.get(kind, 0) + 1
    return ClockFacts(machine.gpu_states, tuple(Cpu(*kind, count) for kind, count in kinds.items()))


def judge(facts: ClockFacts) -> list[Finding]:
    findings = [finding for gpu in facts.gpus for finding in _gpu(gpu)]
    for cpu in facts.cpus:
        if 0 < cpu.allowed_khz < 0.95 * cpu.most_khz:
            text = f"{cpu.count} cores may run at {cpu.allowed_khz / 1e6:.2f} GHz of "
            text += f"{cpu.most_khz / 1e6:.2f}"
            command = f"sudo cpupower frequency-set -u {cpu.most_khz}"
            findings.append(warn(text, command))
        # With intel_pstate and amd-pstate `powersave` is the usual governor, and fast.
        if cpu.governor == "powersave" and "pstate" not in cpu.driver:
            text = f"{cpu.count} cores stay at their lowest clock (governor powersave)"
            findings.append(warn(text, "sudo cpupower frequency-set -g performance"))
    if findings:
        return findings
    if not facts.gpus and not facts.cpus:
        return [not_here("no GPU, and the machine hides its cores' clocks")]
    parts = [f"{cpu.count} cores: {cpu.governor}" for cpu in facts.cpus]
    hottest = max((gpu.celsius or 0 for gpu in facts.gpus), default=0)
    if facts.gpus:
        parts.append(f"{len(facts.gpus)} GPUs not held down, at most {hottest:.0f} C")
    return [okay(", ".join(parts))]


def _gpu(gpu: GpuState) -> list[Finding]:
    findings = []
    why = [text for bit, text in smi.SLOWDOWNS.items() if gpu.held_down_by & bit]
    if why:
        clock = f"{gpu.clock_mhz:.0f} of {gpu.max_clock_mhz:.0f} MHz" if _known(gpu) else "slowly"
        heat = f", {gpu.celsius:.0f} C" if gpu.celsius is not None else ""
        text = f"GPU {gpu.index} runs {clock}: {', '.join(why)}{heat}"
        remedy = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}   # fans, airflow, power"
        findings.append(fail(text, remedy))
    if gpu.uncorrected_errors:
        text = f"GPU {gpu.index} had {gpu.uncorrected_errors} memory errors that ECC can't correct"
        findings.append(fail(text, f"sudo nvidia-smi -r -i {gpu.index}"))
    return findings


def _known(gpu: GpuState) -> bool:
    return gpu.clock_mhz is not None and gpu.max_clock_mhz is not None


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
