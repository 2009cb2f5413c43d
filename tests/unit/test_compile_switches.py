"""Torch's switches, as another process is to have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepytorch_core.testing import run_script

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


def run(program: str, folder: Path) -> str:
    script = folder / "program.py"
    script.write_text(_TELL + program)
    return run_script(script, world_size=1)[0]


@pytest.mark.parametrize(
    "left_out", [pytest.param("older way", marks=pytest.mark.extended), "newer way"]
)
def test_another_process_gets_them(left_out: str, tmp_path: Path) -> None:
    changes = "; ".join(change for name, change in _CHANGES.items() if name != left_out)
    there = run(f"{changes}; print(switches.now())", tmp_path)
    facts = there.replace("torch.bfloat16", "'bf'")
    put = (
        f"values = {facts.strip()}; values['default_dtype'] = torch.bfloat16; "
        "before = switches.now(); switches.resemble(values); "
        "changed = sum(value != values[name] for name, value in before.items()); "
    )
    assert run(put + "print(switches.now()); assert changed >= 6, changed", tmp_path) == there


def test_precision_can_be_asked_for_however_it_was_set(tmp_path: Path) -> None:
    change = _CHANGES["newer way"]
    assert run(f"{change}; print(switches.matmul_precision())", tmp_path).strip() == "tf32"
