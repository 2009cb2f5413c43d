"""A few cases of the fault matrix; `make test-faults` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepytorch_core.testing.faults import __main__ as command
from deepytorch_core.testing.faults import inject, runner
from deepytorch_core.testing.faults.cases import CASES, FAULTS, OUTCOMES, PATHS, PHASES, Case, cases
from deepytorch_core.testing.faults.job import Told
from deepytorch_core.testing.faults.runner import judge, run

# What no other test has: deaths before and while the stock backend works, and a rank that can't
# make its part of it.
CHEAP = [
    Case("SIGKILL", "delegated", "init"),
    Case("SIGKILL", "delegated", "collective"),
    Case("no descriptors", "shm", "init"),
]


@pytest.mark.parametrize("case", CHEAP, ids=str)
def test_case(case: Case) -> None:
    result = run(case)
    assert not result.skipped
    assert not result.wrong, "\n".join(result.wrong)


def test_the_table_is_consistent() -> None:
    for fault in FAULTS.values():
        assert set(fault.paths) <= set(PATHS)
        assert set(fault.phases) <= set(PHASES)
        assert {fault.outcome_in(phase) for phase in fault.phases} <= set(OUTCOMES)
    from_outside = {name for name in FAULTS if name not in inject.INJECT}
    assert from_outside == set(runner._ACT)
    assert set(inject.INJECT) <= set(FAULTS)
    assert {case.fault for case in CASES} == set(FAULTS)


def test_cases_are_chosen_by_pattern() -> None:
    assert cases(["SIGKILL | shm | *"]) == [Case("SIGKILL", "shm", phase) for phase in PHASES]
    assert len(cases(["*", "SIGKILL | shm | init"])) == len(CASES)
    with pytest.raises(ValueError, match="no case matches 'nothing'"):
        cases(["nothing"])


KILLED = Case("SIGKILL", "shm", "collective")
SAYS = "DistBackendError: all_reduce: rank 1 (pid 3) died"


@pytest.mark.parametrize(
    ("told", "wrong"),
    [
        ([Told(SAYS, 0.1), Told(SAYS, 0.2)], ""),
        ([Told(SAYS), Told()], "1 of 2 ranks got an error"),
        ([Told(), Told()], "error was promised: recovers"),
        ([Told("RuntimeError: oops"), Told("RuntimeError: oops")], "it says none of"),
        ([Told("WrongDataError: 3"), Told("WrongDataError: 3")], "WrongDataError: 3"),
        ([Told(SAYS, 99.0), Told(SAYS)], "took 99.0 s"),
        ([Told(SAYS, destroy_s=50.0), Told(SAYS)], "destroy_process_group took 50.0 s"),
        ([Told(SAYS, left=["1 threads"]), Told(SAYS)], "left over: 1 threads"),
        ([Told(SAYS, again="it hangs"), Told(SAYS)], "no group could be made again: it hangs"),
    ],
)
def test_survivors_are_judged(told: list[Told], wrong: str) -> None:
    result = judge(KILLED, told)
    assert bool(result.wrong) == bool(wrong)
    assert wrong in "; ".join(result.wrong)


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nothing"], ["--write", "page.md"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
    assert "no case matches 'nothing'" in capsys.readouterr().err


def test_the_command_lists_cases(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["--list", "SIGSEGV | tcp | *"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PHASES)
