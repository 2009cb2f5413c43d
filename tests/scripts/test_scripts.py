"""Scripts in the form that their frameworks publish, which know nothing of deepytorch.

Each runs as it is, with `import deepytorch` before it, and as `deepytorch run` starts it. The
losses must be the same, and the report must say that something was switched on.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deepytorch_core.testing import run_script

PROGRAMS = Path(__file__).parent / "programs"
# Programs find there what `make venv` keeps apart.
TRAINERS = Path(sys.prefix) / "trainers"
VISION = Path(sys.prefix) / "vision"
NEEDS = Path(__file__).parent / "composer_needs.py"
FOLDERS = {
    "with_ignite": [str(TRAINERS)],
    "with_composer": [str(TRAINERS), str(VISION)],
}
# Code of the arms before the script, and after it.
ARMS = {
    "neither": "runpy.run_path(sys.argv[0], run_name='__main__')",
    "import": "import deepytorch\nrunpy.run_path(sys.argv[0], run_name='__main__')",
    "run": "from deepytorch.cli import runner\nrunner.main(sys.argv)",
}
WRAPPER = """
import json, os, runpy, sys
sys.argv = sys.argv[1:]
sys.path += {folders}
{first}
{arm}
found = {{"modules": sorted(name for name in sys.modules if name.startswith("deepytorch."))}}
if "deepytorch" in sys.modules:
    import deepytorch
    from deepytorch.integrations.seams import arm as _seams
    found |= {{"decisions": deepytorch.report().decisions, "met": _seams.met()}}
    deepytorch.deactivate()
    from deepytorch_core.base import patching
    found["left"] = [f"{{patch.owner}}.{{patch.name}}" for patch in patching.replaced()]
print("\\ndid:", json.dumps(found, default=str), flush=True)
"""
# Nothing waits for the run to be long, and nothing is measured.
AT_ONCE = {"DEEPYTORCH_PATIENCE": "off", "DEEPYTORCH_COMPILE": "aot-eager"}
OF_TEXTS = ("trainer", "texts", "frameworks")
# To pack is tried by a process that imports transformers anew.
NO_HELPER = {"DEEPYTORCH_PADDING_FREE": "off"}
PRELOAD = ("torch._dynamo", "deepytorch_core.compile", "torch.distributed.fsdp")
# Ranks of programs that import these are forks of a process that has, and so of most tests' one.
OF_LIBRARIES = {"trainer", "frameworks", "texts", "zero", "with_deepspeed"}
# Replaced for good, as they do nothing while no region of ours is captured.
STAYS = {
    "deepspeed.initialize",  # by the installed package alone, for its own section
    "torch._dynamo.utils.warn_once",
    "torch._dynamo.variables.misc.RandomVariable.is_supported_random_obj",
    "torch.nn.modules.module.Module._replicate_for_data_parallel",
}


class Case(NamedTuple):
    """A program's ranks, what it is met as, and which of its models are compiled.

    Those in `stock` are left alone. Those in `given_up` are compiled until something changes them,
    of which a line is said.
    """

    ranks: int
    met: str
    compiled: set[str]
    stock: frozenset[str] | set[str] = frozenset()
    given_up: frozenset[str] | set[str] = frozenset()


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
    "loops": Case(
        1,
        "plain",
        {
            *("Accumulated", "Averaged", "Recurrent", "Halved", "Grouped", "Quasi", "Normed"),
            *("FakeQuantized", "Resumed", "Summed", "Validated"),
        },
        # Stock keeps recomputed parts, sparse gradients, and what the script has compiled.
        {"Recomputed", "Bag", "OptimizedModule"},
    ),
    "methods": Case(
        1,
        "plain",
        {
            *("Generator", "Discriminator", "Query", "Student", "Policy", "ManyHeads"),
            *("Dataclassed", "RankingLoss", "TwoTowers", "Candidate"),
        },
    ),
    "unusual": Case(
        1,
        "plain",
        {
            *("Critic", "Learner", "Private", "Stepping", "Sharpness", "Thawed", "Hooked"),
            *("Copied", "Fed", "Exported", "Twice", "Skipped"),
        },
        given_up={"Thawed", "Hooked", "Skipped"},
    ),
    "frameworks": Case(1, "accelerate", {"Local", "LlamaForCausalLM"}),
    "texts": Case(1, "plain", {"LlamaForCausalLM"}),
    "groups": Case(
        2,
        "ddp plain",
        {"Accumulated", "Stage", "Local", "Uneven", "Sharded", "Unused"},
        {"Parallel"},  # its layers have hooks
    ),
    "zero": Case(
        2,
        "deepspeed",
        {"Dense", "Divided", "Generator", "Discriminator"},
        {"Sharded"},  # its layers have hooks
    ),
    "hogwild": Case(1, "plain", {"Shared"}),
    "with_ignite": Case(1, "plain", {"Stepped", "Supervised"}),
    "with_composer": Case(1, "plain", {"ComposerClassifier"}),
}
EXTENDED = {
    *("fsdp", "fsdp2", "parts", "with_accelerate", "with_deepspeed"),
    *("frameworks", "texts", "with_composer", "hogwild", "unusual"),
    *("zero", "methods", "ddp", "with_ignite"),
}
# Ranks say the first, and the end of WRAPPER has deepytorch say the second.
USUAL = ("the step waits while", "collectives of ", "group(s) made with deepytorch keep it")
# A line has fewer characters.
MOST_SAID = 1000


class Outcome(NamedTuple):
    """All ranks have printed this, deepytorch's lines apart, and told what they did."""

    losses: list[str]
    printed: list[str]
    warnings: list[str]
    said: list[str]
    did: list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcome(deepspeeds_ranks: dict[str, Any]) -> Callable[..., Outcome]:
    """Run a program in an arm; several tests ask for what short ones do in stock."""
    libraries = {name: deepspeeds_ranks[name] for name in ("env", "preload")}
    stock: dict[str, Outcome] = {}

    def once(name: str, arm: str, folder: Path, **variables: str) -> Outcome:
        if arm != "neither" or name in OF_TEXTS:
            return run(libraries, name, arm, folder, **variables)
        if name not in stock:
            stock[name] = run(libraries, name, arm, folder)
        return stock[name]

    return once


def run(libraries: dict[str, Any], name: str, arm: str, folder: Path, **variables: str) -> Outcome:
    wrapper = folder / f"{arm}.py"
    first = NEEDS.read_text() if name == "with_composer" else ""
    folders = FOLDERS.get(name, [])
    wrapper.write_text(WRAPPER.format(arm=ARMS[arm], folders=folders, first=first))
    ranks = libraries if name in OF_LIBRARIES else {"preload": PRELOAD}
    printed, warned = run_script(
        wrapper,
        PROGRAMS / f"{name}.py",
        *([folder / "out"] if name in OF_TEXTS else []),
        world_size=CASES[name].ranks,
        variables={
            **AT_ONCE,
            "DEEPYTORCH_PROFILE": str(folder / "profile.json"),
            "DS_ACCELERATOR": "cpu",
            "ACCELERATE_USE_CPU": "true",
            **(NO_HELPER if name in OF_TEXTS else {}),
            **variables,
        },
        **ranks,
    )
    did = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("did: ")]
    lines = [line for line in printed.splitlines() if line and not line.startswith("did: ")]
    losses = [line for line in lines if re.search(r"step \d+ loss ", line)]
    said = [line for line in warned.splitlines() if line.startswith("deepytorch: ")]
    assert losses
    assert len(did) == CASES[name].ranks
    # A compiler has Python forget of which warnings it has told.
    warnings = sorted({as_ever(line) for line in warned.splitlines() if line not in said})
    return Outcome(losses, [as_ever(line) for line in lines], warnings, said, did)


def as_ever(line: str) -> str:
    """Take out times, process numbers and addresses, which differ from run to run."""
    return re.sub(r"0x[\da-f]+|\d[\d.]*(e[+-]?\d+)?", "N", line)


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def assert_same(ours: Outcome, stock: Outcome, case: Case) -> None:
    """Check that losses are equal, and that deepytorch prints nothing but lines of its own."""
    assert numbers(ours.losses) == pytest.approx(numbers(stock.losses), abs=2e-4)
    assert (ours.printed, ours.warnings) == (stock.printed, stock.warnings)
    expected = (*USUAL, *case.stock, *case.given_up)
    assert [line for line in ours.said if not any(phrase in line for phrase in expected)] == []
    assert max(map(len, ours.said), default=0) < MOST_SAID


@pytest.mark.parametrize(
    "name",
    [pytest.param(case, marks=[pytest.mark.extended] * (case in EXTENDED)) for case in CASES],
)
def test_a_script_trains_as_it_does_and_compute_is_on(
    name: str, outcome: Callable[..., Outcome], tmp_path: Path
) -> None:
    case = CASES[name]
    stock = outcome(name, "neither", tmp_path)
    assert stock.did[0]["modules"] == []
    ours = outcome(name, "import", tmp_path)
    assert_same(ours, stock, case)
    for did in ours.did:
        assert did["met"] == case.met.split()
        made = [each for each in did["decisions"] if "what" in each]
        chosen = {each["what"].removeprefix("compile of "): each["chosen"] for each in made}
        assert case.compiled | case.stock <= set(chosen), chosen
        assert {chosen[what] for what in case.compiled} <= {"aot-eager", "packed"}
        assert {chosen[what] for what in case.stock} <= {"eager", "stock"}
        assert set(did["left"]) <= STAYS


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("ddp", "hogwild", "methods")),
    ],
)
def test_run_switches_on_what_import_does(
    name: str, outcome: Callable[..., Outcome], tmp_path: Path
) -> None:
    ours = outcome(name, "run", tmp_path)
    assert_same(ours, outcome(name, "neither", tmp_path), CASES[name])
    assert all(did["met"] == CASES[name].met.split() for did in ours.did)


@pytest.mark.extended
def test_a_trainers_batches_are_packed(outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    ours = outcome("trainer", "import", tmp_path, DEEPYTORCH_PADDING_FREE="auto")
    assert_same(ours, outcome("trainer", "neither", tmp_path), CASES["trainer"])
    (did,) = ours.did
    chosen = {made["what"]: made["chosen"] for made in did["decisions"] if "what" in made}
    assert chosen["padding-free"] == "packed"


def test_every_part_has_its_switch(outcome: Callable[..., Outcome], tmp_path: Path) -> None:
    off = {"DEEPYTORCH_COMPILE": "off", "DEEPYTORCH_PADDING_FREE": "off"}
    stock = outcome("plain", "neither", tmp_path)
    for switch in ({**off, "DEEPYTORCH_KERNELS": "off"}, {"DEEPYTORCH_ENABLED": "0"}):
        ours = outcome("plain", "import", tmp_path, **switch)
        assert ours[:4] == stock[:4]
        assert [(did["met"], did["decisions"]) for did in ours.did] == [([], [])]
