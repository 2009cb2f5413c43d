"""Scripts in the form that their frameworks publish, which know nothing of deepytorch.

Each runs as it is, with `import deepytorch` before it, and as `deepytorch run` starts it: the
losses are the same, and the report says that something was switched on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.testing import run_script

PROGRAMS = Path(__file__).parent / "programs"
# What the arms have before the script, and after it.
ARMS = {
    "neither": "runpy.run_path(sys.argv[0], run_name='__main__')",
    "import": "import deepytorch\nrunpy.run_path(sys.argv[0], run_name='__main__')",
    "run": "from deepytorch.cli import runner\nrunner.main(sys.argv)",
}
WRAPPER = """
import json, os, runpy, sys
sys.argv = sys.argv[1:]
{arm}
found = {{"modules": sorted(name for name in sys.modules if name.startswith("deepytorch."))}}
if "deepytorch" in sys.modules:
    import deepytorch
    from deepytorch.integrations import _seams
    found |= {{"decisions": deepytorch.report().decisions, "met": _seams.met()}}
    deepytorch.deactivate()
    from deepytorch_core import patching
    found["left"] = [f"{{one.owner}}.{{one.name}}" for one in patching.replaced()]
print("\\ndid:", json.dumps(found, default=str), flush=True)
"""
# Nothing waits for the run to be long, and nothing is measured.
AT_ONCE = {"DEEPYTORCH_PATIENCE": "off", "DEEPYTORCH_COMPILE": "aot-eager"}
# To pack is tried by a process that imports transformers anew.
NO_HELPER = {"DEEPYTORCH_PADDING_FREE": "off"}
PRELOAD = ("torch._dynamo", "deepytorch_core.compile", "torch.distributed.fsdp")
# Replaced for good, as they do nothing while no region of ours is captured.
STAYS = {
    "deepspeed.initialize",  # by the installed package alone, for its own section
    "torch._dynamo.utils.warn_once",
    "torch._dynamo.variables.misc.RandomVariable.is_supported_random_obj",
    "torch.nn.modules.module.Module._replicate_for_data_parallel",
}
# Its ranks, what it is met as, and what is compiled in it.
CASES: dict[str, tuple[int, str, set[str]]] = {
    "plain": (1, "plain", {"compile of Model"}),
    "notebook": (1, "plain", {"compile of Net"}),
    "parts": (1, "plain", {"compile of Sequential"}),
    "ddp": (2, "ddp", {"compile of Sequential"}),
    "fsdp": (2, "fsdp", {"compile of Sequential"}),
    "fsdp2": (2, "fsdp", {"compile of FSDPSequential"}),
    "with_accelerate": (1, "accelerate", {"compile of Sequential"}),
    "trainer": (1, "accelerate", {"compile of LlamaForCausalLM"}),
    "with_deepspeed": (2, "deepspeed", {"compile of Sequential"}),
}
EXTENDED = {"fsdp", "fsdp2", "parts", "with_accelerate", "with_deepspeed"}


def outcome(
    name: str, arm: str, folder: Path, **variables: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """Losses of all ranks, and what each of them did."""
    wrapper = folder / f"{arm}.py"
    wrapper.write_text(WRAPPER.format(arm=ARMS[arm]))
    preload = [*PRELOAD, *(["transformers.trainer"] if name == "trainer" else [])]
    printed, _ = run_script(
        wrapper,
        PROGRAMS / f"{name}.py",
        *([folder / "out"] if name == "trainer" else []),
        world_size=CASES[name][0],
        variables={
            **AT_ONCE,
            "DEEPYTORCH_PROFILE": str(folder / "profile.json"),
            "DS_ACCELERATOR": "cpu",
            "ACCELERATE_USE_CPU": "true",
            **(NO_HELPER if name == "trainer" else {}),
            **variables,
        },
        preload=preload,
    )
    losses = re.findall(r".*step \d+ loss .*", printed)
    did = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("did: ")]
    assert losses
    assert len(did) == CASES[name][0]
    return losses, did


def numbers(lines: list[str]) -> list[float]:
    return [float(one) for line in lines for one in re.findall(r"\d+\.\d+", line)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.extended] * (one in EXTENDED)) for one in CASES],
)
def test_a_script_trains_as_it_does_and_compute_is_on(name: str, tmp_path: Path) -> None:
    _, met, compiled = CASES[name]
    stock, (nothing, *_) = outcome(name, "neither", tmp_path)
    assert nothing["modules"] == []
    ours, did = outcome(name, "import", tmp_path)
    assert numbers(ours) == pytest.approx(numbers(stock), abs=2e-4)
    for one in did:
        assert met in one["met"]
        chosen = {made["what"]: made["chosen"] for made in one["decisions"] if "what" in made}
        assert compiled <= set(chosen), chosen
        assert {chosen[what] for what in compiled} <= {"aot-eager", "packed"}
        assert set(one["left"]) <= STAYS


@pytest.mark.parametrize("name", ["plain", pytest.param("ddp", marks=pytest.mark.extended)])
def test_run_switches_on_what_import_does(name: str, tmp_path: Path) -> None:
    stock, _ = outcome(name, "neither", tmp_path)
    ours, did = outcome(name, "run", tmp_path)
    assert numbers(ours) == pytest.approx(numbers(stock), abs=2e-4)
    assert all(CASES[name][1] in one["met"] for one in did)


@pytest.mark.extended
def test_a_trainers_batches_are_packed(tmp_path: Path) -> None:
    stock, _ = outcome("trainer", "neither", tmp_path)
    ours, (did,) = outcome("trainer", "import", tmp_path, DEEPYTORCH_PADDING_FREE="auto")
    assert numbers(ours) == pytest.approx(numbers(stock), abs=2e-4)
    chosen = {made["what"]: made["chosen"] for made in did["decisions"] if "what" in made}
    assert chosen["padding-free"] == "packed"


def test_every_part_has_its_switch(tmp_path: Path) -> None:
    off = {"DEEPYTORCH_COMPILE": "off", "DEEPYTORCH_PADDING_FREE": "off"}
    stock, _ = outcome("plain", "neither", tmp_path)
    ours, (did,) = outcome("plain", "import", tmp_path, **off, DEEPYTORCH_KERNELS="off")
    assert ours == stock
    assert (did["met"], did["decisions"]) == ([], [])
    ours, (did,) = outcome("plain", "import", tmp_path, DEEPYTORCH_ENABLED="0")
    assert ours == stock
    assert (did["met"], did["decisions"]) == ([], [])
