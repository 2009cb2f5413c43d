"""What nvidia-smi says of the GPUs: power state, clocks, temperature, why clocks are held down."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

_LIMIT_S = 5.0

# Reasons for lower clocks, as bits of `clocks_throttle_reasons.active` (nvml.h).
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
POWER_CAP = 0x04

_FIELDS = (
    "index",
    "pci.bus_id",
    "pstate",
    "temperature.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "power.draw",
    "power.limit",
    "persistence_mode",
    "ecc.errors.uncorrected.volatile.total",
)


@dataclass(frozen=True)
class GpuState:
    """A GPU now; None is what the driver does not say. Clocks in MHz, power in W."""

    index: int
    pci: str
    power_state: str
    celsius: float | None
    clock_mhz: float | None
    max_clock_mhz: float | None
    held_down_by: int
    watts: float | None
    limit_watts: float | None
    is_persistent: bool
    uncorrected_errors: int


def ask() -> tuple[GpuState, ...]:
    """The GPUs in nvidia-smi's order; none without it, or when it gives no answer in time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse(done.stdout) if done.returncode == 0 else ()


def parse(text: str) -> tuple[GpuState, ...]:
    """The lines of the query, one GPU each; lines that are none are left out."""
    states = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS) or not cells[0].isdecimal():
            continue
        states.append(
            GpuState(
                index=int(cells[0]),
                pci=_pci(cells[1]),
                power_state=cells[2],
                celsius=_number(cells[3]),
                clock_mhz=_number(cells[4]),
                max_clock_mhz=_number(cells[5]),
                held_down_by=_bits(cells[6]),
                watts=_number(cells[7]),
                limit_watts=_number(cells[8]),
                is_persistent=cells[9] == "Enabled",
                uncorrected_errors=int(_number(cells[10]) or 0),
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
