"""Asks nvidia-smi for the GPUs' power state, clocks, temperature, and why clocks are held down."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

_LIMIT_S = 4.0

# Reasons for lower clocks, by their bits (nvml.h).
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
# The reasons have a new name since driver 535; which one is known depends on the driver.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_FIELDS = (
    "index",
    "pci.bus_id",
    "pstate",
    "temperature.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "ecc.errors.uncorrected.volatile.total",
)


@dataclass(frozen=True)
class GpuState:
    """A GPU now; None is what the driver does not say. Clocks in MHz."""

    index: int
    pci: str
    power_state: str
    celsius: float | None
    clock_mhz: float | None
    max_clock_mhz: float | None
    held_down_by: int
    uncorrected_errors: int


def ask() -> tuple[GpuState, ...]:
    """The GPUs in nvidia-smi's order; none without it, or when it gives no answer in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    for reasons in _REASONS:
        query = f"--query-gpu={','.join((*_FIELDS, reasons))}"
        command = [program, query, "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        except (OSError, subprocess.SubprocessError):
            return ()
        if done.returncode == 0:
            return parse(done.stdout)
    return ()


def parse(text: str) -> tuple[GpuState, ...]:
    """The lines of the query, one GPU each; lines that are none are left out."""
    states = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS) + 1 or not cells[0].isdecimal():
            continue
        states.append(
            GpuState(
                index=int(cells[0]),
                pci=_pci(cells[1]),
                power_state=cells[2],
                celsius=_number(cells[3]),
                clock_mhz=_number(cells[4]),
                max_clock_mhz=_number(cells[5]),
                uncorrected_errors=int(_number(cells[6]) or 0),
                held_down_by=_bits(cells[7]),
            )
        )
    return tuple(states)


def _pci(text: str) -> str:
    """As sysfs writes it: "00000000:3B:00.0" is "0000:3b:00.0"."""
    return text.lower()[-12:]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]", "[Not Supported]"


def _bits(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
