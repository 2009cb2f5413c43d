"""Every check finds the faults that are planted in its facts, and is content once they are mended.

The facts are in `data/doctor`. For each check there are facts of a machine as it should be. For
each fault there is what differs, how bad it is, and words of the evidence and of the remedy.
"""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.doctor import registry
from deepytorch_core.doctor.checks import interface, kernels
from deepytorch_core.doctor.finding import State

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
FACTS = Path(__file__).parent / "data" / "doctor"
CASES: dict[Any, Any] = {
    module: case
    for file in sorted(FACTS.glob("*.py"))
    for module, case in runpy.run_path(str(file))["CASES"].items()
}
ROWS = [
    pytest.param(module, good, fault, id=f"{module.__name__.rpartition('.')[2]}-{number}")
    for module, (good, faults) in CASES.items()
    for number, fault in enumerate(faults)
]


@pytest.mark.parametrize(("module", "good", "fault"), ROWS)
def test_a_planted_fault_is_found_and_the_remedy_named(module: Any, good: Any, fault: Any) -> None:
    changes, state, evidence, remedy = fault
    found = module.judge(dataclasses.replace(good, **changes))
    match = [finding for finding in found if evidence in finding.evidence]
    assert match, found
    assert match[0].state == state
    assert remedy in match[0].remedy
    assert all(finding.remedy for finding in found if finding.state in {State.WARN, State.FAIL})


@pytest.mark.parametrize("module", CASES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_is_mended_is_okay(module: Any) -> None:
    (finding,) = module.judge(CASES[module][0])
    assert finding.state == State.OKAY
    assert finding.evidence


def test_every_check_has_planted_faults_and_its_place_on_the_page() -> None:
    names = [check.name for check in registry.CHECKS]
    assert sorted(names) == sorted(module.__name__.rpartition(".")[2] for module in CASES)
    page = PAGE.read_text()
    for check in registry.CHECKS:
        assert f"\n### {check.name}\n" in page, "docs/doctor.md lists every check"
        assert check.about
    headings = [line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")]
    assert headings == names, "in the order in which they are shown"


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("80-real", "8.0", True),
        ("80-real", "8.6", True),
        ("86-real", "8.0", False),
        ("80-real", "9.0", False),
        ("90a-real", "9.0", True),
        ("90a-real", "10.0", False),
        ("90-virtual", "12.0", True),
        ("90-virtual", "8.9", False),
        ("75", "7.5", True),
        ("75", "12.1", True),
        ("100-real", "10.3", True),
        ("native", "9.0", False),
    ],
)
def test_which_kernels_run_where(built: str, capability: str, *, runs: bool) -> None:
    assert kernels.runs(built, capability) == runs


def test_a_job_on_one_node_needs_no_interface() -> None:
    facts = dataclasses.replace(
        next(good for module, (good, _) in CASES.items() if module is interface),
        chosen="",
        error="the route leads back",
        shares_node=True,
    )
    assert [finding.state for finding in interface.judge(facts)] == [State.NOT_HERE]
