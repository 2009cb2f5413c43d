"""Torch's switches, as another process is to have them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

_CHANGES = {
    "older way": "torch.set_float32_matmul_precision('high')",
    "newer way": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "attention": "torch.backends.cuda.enable_flash_sdp(False)",
    "default type": "torch.set_default_dtype(torch.bfloat16)",
    "deterministic": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "sums in 16 bits": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "cudnn": "torch.backends.cudnn.allow_tf32 = False",
}
_TELL = "import torch; from deepytorch_core.compile import switches; "


def run(program: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _TELL + program], check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.parametrize(
    "left_out", [pytest.param("older way", marks=pytest.mark.extended), "newer way"]
)
def test_another_process_gets_them(left_out: str) -> None:
    changes = "; ".join(change for name, change in _CHANGES.items() if name != left_out)
    there = run(f"{changes}; print(switches.now())")
    facts = there.replace("torch.bfloat16", "'bf'")
    put = (
        f"values = {facts.strip()}; values['default_dtype'] = torch.bfloat16; "
        "before = switches.now(); switches.resemble(values); "
        "changed = sum(one != values[name] for name, one in before.items()); "
    )
    assert run(put + "print(switches.now()); assert changed >= 6, changed") == there


def test_precision_can_be_asked_for_however_it_was_set() -> None:
    change = _CHANGES["newer way"]
    assert run(f"{change}; print(switches.matmul_precision())").strip() == "tf32"
