"""Some of the faults that `make test-frameworks` plants in jobs of every framework."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import frameworks  # noqa: E402
from framework_jobs import FRAMEWORKS  # noqa: E402


def test_there_are_enough_faults_over_every_framework() -> None:
    found = [(framework, fault.name) for framework, fault in frameworks.cases([])]
    assert len(set(found)) == len(found) >= 60
    assert {framework for framework, _ in found} == FRAMEWORKS.keys()


@pytest.mark.parametrize(
    "name",
    [
        "DDP | killed",
        pytest.param("pipeline | sleeps", marks=pytest.mark.extended),
        "collectives | slow",
        pytest.param("FSDP2 | keeps the GIL in C", marks=pytest.mark.extended),
        pytest.param("Trainer | no host memory", marks=pytest.mark.extended),
        pytest.param("Accelerate | a collective more", marks=pytest.mark.extended),
    ],
)
def test_a_fault_is_named(name: str) -> None:
    ((framework, fault),) = frameworks.cases([name])
    found = frameworks.run(framework, fault)
    assert found["named"], found
    assert (found["took_s"] is None) is fault.goes_on
    if fault.name == "killed":
        assert found["took_s"] < frameworks.LIMIT_S / 2, "its death was seen, no time limit"
