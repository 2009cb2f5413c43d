"""Scripts in the form that their frameworks publish, which know nothing of deepytorch.

Each runs as it is, with `import deepytorch` before it, and as `deepytorch run` starts it: the
losses are the same, and the report says that something was switched on.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    """A program's ranks, what it is met as, what is compiled in it and what is left to stock."""

    ranks: int
    met: str | None
    compiled: set[str]
    stock: set[str] = frozenset()


CASES = {
    "plain": Case(1, "plain", {"Model"}),
    "notebook": Case(1, "plain", {"Net"}),
    "parts": Case(1, "plain", {"Sequential"}),
    "ddp": Case(2, "ddp", {"Sequential"}),
    "fsdp": Case(2, "fsdp", {"Sequential"}),
    "fsdp2": Case(2, "fsdp", {"FSDPSequential"}),
    "with_accelerate": Case(1, "accelerate", {"Sequential"}),
    "trainer": Case(1, "accelerate", {"LlamaForCausalLM"}),
    "with_deepspeed": Case(2, "deepspeed", {"Sequential"}),
    "loops": Case(1, "plain", set()),
    "methods": Case(1, "plain", set()),
    "texts": Case(1, "plain", set()),
    "groups": Case(2, "plain", set()),
    "zero": Case(2, "deepspeed", set()),
    "hogwild": Case(1, "plain", set()),
}
EXTENDED = {"fsdp", "fsdp2", "parts", "with_accelerate", "with_deepspeed"}


class Outcome(NamedTuple):
    """What all ranks printed of losses and else, what deepytorch said, and what each rank did."""

    losses: list[str]
    printed: list[str]
    said: list[str]
    did: list[dict[str, Any]]


def outcome(name: str, arm: str, folder: Path, **variables: str) -> Outcome:
    wrapper = folder / f"{arm}.py"
    wrapper.write_text(WRAPPER.format(arm=ARMS[arm]))
    preload = [*PRELOAD, *(["transformers.trainer"] if name == "trainer" else [])]
    printed, warned = run_script(
        wrapper,
        PROGRAMS / f"{name}.py",
        *([folder / "out"] if name == "trainer" else []),
        world_size=CASES[name].ranks,
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
    did = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("did: ")]
    lines = [line for line in printed.splitlines() if line and not line.startswith("did: ")]
    losses = [line for line in lines if re.search(r"step \d+ loss ", line)]
    warnings = [line for line in warned.splitlines() if not line.startswith("deepytorch: ")]
    said = [line for line in warned.splitlines() if line.startswith("deepytorch: ")]
    assert losses
    assert len(did) == CASES[name].ranks
    # Times, process numbers and addresses differ from run to run.
    others = [re.sub(r"\b(0x)?[\da-f]*\d[\da-f]*\b", "N", line) for line in lines + warnings]
    return Outcome(losses, others, said, did)


def numbers(lines: list[str]) -> list[float]:
    return [float(one) for line in lines for one in re.findall(r"\d+\.\d+", line)]


def assert_same(ours: Outcome, stock: Outcome) -> None:
    """Check that losses are equal, and that deepytorch prints nothing but its own lines."""
    assert numbers(ours.losses) == pytest.approx(numbers(stock.losses), abs=2e-4)
    assert ours.printed == stock.printed


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.extended] * (one in EXTENDED)) for one in CASES],
)
def test_a_script_trains_as_it_does_and_compute_is_on(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    stock = outcome(name, "neither", tmp_path)
    assert stock.did[0]["modules"] == []
    ours = outcome(name, "import", tmp_path)
    assert_same(ours, stock)
    for one in ours.did:
        assert one["met"] == [case.met] * (case.met is not None)
        made = [each for each in one["decisions"] if "what" in each]
        chosen = {each["what"].removeprefix("compile of "): each["chosen"] for each in made}
        assert case.compiled <= set(chosen), chosen
        assert {chosen[what] for what in case.compiled} <= {"aot-eager", "packed"}
        assert {chosen[what] for what in case.stock} <= {"stock"}
        assert set(one["left"]) <= STAYS


@pytest.mark.parametrize("name", ["plain", pytest.param("ddp", marks=pytest.mark.extended)])
def test_run_switches_on_what_import_does(name: str, tmp_path: Path) -> None:
    ours = outcome(name, "run", tmp_path)
    assert_same(ours, outcome(name, "neither", tmp_path))
    assert all(CASES[name].met in one["met"] for one in ours.did)


@pytest.mark.extended
def test_a_trainers_batches_are_packed(tmp_path: Path) -> None:
    ours = outcome("trainer", "import", tmp_path, DEEPYTORCH_PADDING_FREE="auto")
    assert_same(ours, outcome("trainer", "neither", tmp_path))
    (did,) = ours.did
    chosen = {made["what"]: made["chosen"] for made in did["decisions"] if "what" in made}
    assert chosen["padding-free"] == "packed"


def test_every_part_has_its_switch(tmp_path: Path) -> None:
    off = {"DEEPYTORCH_COMPILE": "off", "DEEPYTORCH_PADDING_FREE": "off"}
    stock = outcome("plain", "neither", tmp_path)
    for switch in ({**off, "DEEPYTORCH_KERNELS": "off"}, {"DEEPYTORCH_ENABLED": "0"}):
        ours = outcome("plain", "import", tmp_path, **switch)
        assert (ours.losses, ours.printed, ours.said) == (stock.losses, stock.printed, [])
        assert [(one["met"], one["decisions"]) for one in ours.did] == [([], [])]
