"""A few cases of the fault matrix; `make test-faults` runs all of it."""

from __future__ import annotations

import dataclasses
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fault_matrix import __main__ as command
from fault_matrix import inject, page, runner, schedule
from fault_matrix.cases import CASES, FAULTS, OUTCOMES, PATHS, PHASES, Case, cases
from fault_matrix.job import Settings, Told
from fault_matrix.runner import judge, run

# No other test has these. Ranks die before and while the stock backend works, one can't make its
# part of it, and an interpreter ends by an exception.
CHEAP = [
    Case("SIGKILL", "delegated", "init"),
    Case("SIGKILL", "delegated", "collective"),
    Case("no descriptors", "shm", "init"),
    Case("exception", "shm", "collective"),
]


@pytest.mark.parametrize("case", CHEAP, ids=str)
def test_case(case: Case) -> None:
    result = run(case)
    assert not result.skipped
    assert not result.wrong, "\n".join(result.wrong)


def test_the_stock_backend_alone_takes_the_same_faults() -> None:
    result = run(Case("exit(0)", "shm", "between"), stock=True)
    assert result.outcome == "error"
    assert any("it says none of ['rank 1'" in text for text in result.wrong)  # as gloo does
    assert not any("left over" in text for text in result.wrong)
    with pytest.raises(SystemExit):
        command.main(["--stock", "--json", "file", "exit(0) | shm | between"])


def test_the_table_is_consistent() -> None:
    for fault in FAULTS.values():
        assert set(fault.paths) <= set(PATHS)
        assert set(fault.phases) <= set(PHASES)
        for path in fault.paths:
            assert {fault.outcome_in(phase, path) for phase in fault.phases} <= set(OUTCOMES)
    from_outside = {name for name in FAULTS if name not in inject.INJECT}
    assert from_outside == set(runner._ACT)
    assert set(inject.INJECT) <= set(FAULTS)
    assert {case.fault for case in CASES} == set(FAULTS)


def test_cases_are_chosen_by_pattern() -> None:
    assert cases(["SIGKILL | shm | *"]) == [Case("SIGKILL", "shm", phase) for phase in PHASES]
    assert len(cases(["*", "SIGKILL | shm | init"])) == len(CASES)
    assert {PATHS[case.path].device for case in cases(device="cuda")} == {"cuda"}
    with pytest.raises(ValueError, match="no case matches 'nothing'"):
        cases(["nothing"])
    with pytest.raises(ValueError, match="no case matches"):
        cases(["* | shm | *"], "cuda")


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
        (
            [Told(SAYS, device_mapped_mib=-1.0), Told(SAYS, device_mapped_mib=2.5)],
            "left over: mapped by the GPU's driver: 2.5 MiB",
        ),
        ([Told(SAYS, device_mapped_mib=-1.0), Told(SAYS)], ""),
        (
            [Told(SAYS, orphans=[71, 72]), Told(SAYS, orphans=[72])],
            "DataLoader workers of rank 1 outlive it: [71, 72]",
        ),
        ([Told(SAYS, again="it hangs"), Told(SAYS)], "no group could be made again: it hangs"),
    ],
)
def test_survivors_are_judged(told: list[Told], wrong: str) -> None:
    result = judge(KILLED, told)
    assert bool(result.wrong) == bool(wrong)
    assert wrong in "; ".join(result.wrong)


@pytest.mark.parametrize(
    ("phase", "took_s", "is_late"),
    [
        ("between", 2.9, False),
        ("between", 3.1, True),
        ("collective", 3.1, True),
        ("init", 12.0, False),
    ],
)
@pytest.mark.parametrize("fault", ["link down", "blackhole"])
def test_a_cut_between_connected_ranks_is_told_within_what_is_promised(
    fault: str, phase: str, took_s: float, is_late: bool
) -> None:
    wrong = judge(Case(fault, "tcp", phase), [Told(SAYS, 0.1), Told(SAYS, took_s)]).wrong
    assert wrong == ([f"took {took_s} s, the limit is 3.0 s"] if is_late else [])


ENDED = Told("deepytorch: group 0 on rank 0: rank 1 (pid 3) died", 3.0, ended=True)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (Case("SIGKILL", "nccl", "collective"), ""),
        (Case("no descriptors", "nccl", "init"), ""),
        (Case("no descriptors", "gpu", "init"), ""),
        (Case("SIGKILL", "gpu", "collective"), "error was promised: ends"),
        (Case("SIGSTOP 5 s", "nccl", "collective"), "recovers was promised: ends"),
        (Case("SIGKILL", "nccl", "destroy"), "leaves was promised: ends"),
    ],
    ids=str,
)
def test_a_process_that_ends_is_as_good_as_an_error_for_nccl(case: Case, wrong: str) -> None:
    result = judge(case, [ENDED])
    assert result.outcome == "ends"
    assert bool(result.wrong) == bool(wrong)
    assert wrong in "; ".join(result.wrong)


@pytest.mark.parametrize(
    ("path", "left", "wrong"),
    [
        ("nccl", "descriptors: socket (6)", ""),
        ("gpu", "descriptors: socket (6)", "left over: descriptors: socket (6)"),
        ("nccl", "descriptors: socket (7)", "left over: descriptors: socket (7)"),
    ],
)
def test_what_stock_leaks_is_not_ours(path: str, left: str, wrong: str) -> None:
    told = Told("no memory left of rank 1's GPU, says NCCL", 1.0, left=[left])
    assert "; ".join(judge(Case("no GPU memory", path, "init"), [told]).wrong) == wrong


def test_names_left_in_shm_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Told(SAYS), Told(SAYS)]
    assert judge(KILLED, told, names={"nccl-b", "deepytorch-a"}).wrong == [
        "left over: in /dev/shm: deepytorch-a",
        "left over: in /dev/shm: nccl-b",
    ]
    stock = dataclasses.replace(FAULTS["SIGKILL"], stock_leaves={"shm": ("/dev/shm: nccl-",)})
    monkeypatch.setitem(FAULTS, "SIGKILL", stock)
    assert judge(KILLED, told, names={"nccl-b"}).wrong == []


@pytest.mark.parametrize("slot", [None, 1])
def test_beside_others_a_name_in_shm_is_its_that_had_it_mapped(
    slot: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(function: object, ranks: int, settings: Settings, **others: object) -> list[Told]:
        with tempfile.NamedTemporaryFile(prefix="deepytorch-mine-", dir="/dev/shm") as file:
            os.truncate(file.name, 4096)
            with mmap.mmap(file.fileno(), 4096):
                settings.note_shared_memory(1)
            names.update({Path(file.name).name, "nccl-others"})
        return [Told(SAYS), Told(SAYS), Told(SAYS)]

    names: set[str] = set()
    monkeypatch.setattr(runner, "spawn_ranks", spawn)
    monkeypatch.setattr(runner, "names_in_shm", lambda: set(names))
    wrong = "; ".join(run(KILLED, slot).wrong)
    assert "left over: in /dev/shm: deepytorch-mine-" in wrong
    assert ("left over: in /dev/shm: nccl-others" in wrong) == (slot is None)


def test_workers_that_outlive_the_victim_are_seen(tmp_path: Path) -> None:
    settings = Settings(Case("SIGKILL with DataLoaders", "shm", "between"), tmp_path, None, 1.0)
    assert settings.living_loaders() == []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        settings.note_loaders([process.pid])
        assert settings.living_loaders() == [process.pid]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert settings.living_loaders() == []  # though nobody has asked for its status


def test_who_can_tell_of_its_error_need_not_end() -> None:
    assert not Case("no descriptors", "shm", "init").may_end
    assert not Case("no descriptors", "gpu", "between").may_end
    assert not Case("SIGKILL", "cpu-reduce", "init").may_end


def test_a_process_that_ended_is_quoted(tmp_path: Path) -> None:
    settings = Settings(Case("SIGKILL", "nccl", "collective"), tmp_path, None, 1.0)
    settings.note_fault()
    assert runner._ended(settings, 0).error == "it said nothing"
    ours = "deepytorch: rank 1 (pid 3) died"
    settings.stderr_of(0).write_text(f"a\n{ours}\n[rank1]:[E] rank 1 said so\n\nb\n")
    told = runner._ended(settings, 0)
    assert (told.error, told.ended) == (ours, True)
    settings.stderr_of(0).write_text("a\nb\n\n")
    assert runner._ended(settings, 0).error == "b"


def test_a_process_ended_when_it_said_so_and_not_when_the_others_did(tmp_path: Path) -> None:
    settings = Settings(Case("no GPU memory", "gpu", "init"), tmp_path, None, 1.0)
    (tmp_path / "fault").write_text(str(time.monotonic() - 60))
    settings.stderr_of(0).write_text("deepytorch: rank 1 (pid 3) died\n")
    os.utime(settings.stderr_of(0), (time.time() - 57, time.time() - 57))
    assert runner._ended(settings, 0).took_s == pytest.approx(3, abs=0.5)


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("Traceback ...\ndeepytorch_core.testing.worker.UncaughtError: own\n", ""),
        ("UncaughtError: own\nterminate called without an active exception\n", "did not end by"),
        ("Segmentation fault\n", "did not end by the exception: 'Segmentation fault"),
        (None, "never came to the exception"),
    ],
)
def test_an_exception_ends_the_interpreter(said: str | None, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "stderr"
    if said is not None:
        file.write_text(said)
    found = runner._unlike_an_exception(file)
    assert bool(found) == bool(wrong)
    assert wrong in "; ".join(found)


def test_nobody_waits_for_a_process_that_ended(tmp_path: Path) -> None:
    settings = Settings(Case("no GPU memory", "gpu", "init"), tmp_path, None, 1.0)
    assert not settings.has_ended(1)  # it may only not have begun
    settings.note_process(0)
    assert not settings.has_ended(0)
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as process:
        (tmp_path / "process-1").write_text(str(process.pid))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert settings.has_ended(1)  # though nobody has asked for its status


def test_cases_run_side_by_side_unless_they_need_the_machine() -> None:
    chosen = cases(["SIGKILL | nccl | *", "no GPU memory | nccl | *"])
    slots: dict[Case, int | None] = {}
    together = threading.Barrier(4)

    def run_one(case: Case, slot: int | None) -> runner.Result:
        if slot is not None:
            together.wait(30)
        slots[case] = slot
        return runner.Result(case)

    through = [result.case for (result,) in schedule.run_all(chosen, jobs=4, run_one=run_one)]
    assert sorted(through) == sorted(chosen)
    assert sorted(slots[case] for case in chosen[:4]) == [0, 1, 2, 3]
    assert [slots[case] for case in chosen[4:]] == [None, None]
    assert through[4:] == chosen[4:]


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_case_begins_after_the_limit(jobs: int) -> None:
    begun = []

    def run_one(case: Case, slot: int | None) -> runner.Result:
        begun.append(case)
        time.sleep(0.5)
        return runner.Result(case)

    chosen = cases(["* | shm | *"])
    through = list(schedule.run_all(chosen, jobs=jobs, limit_s=0.3, run_one=run_one))
    assert 1 <= len(through) == len(begun) <= jobs


def test_the_page_is_made_of_several_machines() -> None:
    ran = {"machine": {"name": "2 GPUs"}, "versions": {"torch": "2.11"}}
    ended = judge(Case("SIGKILL", "nccl", "collective"), [ENDED]).to_dict()
    absent = runner.Result(Case("SIGKILL", "nccl", "collective"), skipped="needs 2 GPUs").to_dict()
    text = page.render([{**ended, **ran}, {**absent, **ran}])
    assert "| SIGKILL | - | - | ends 3.0 s | - |" in text
    assert "`deepytorch: group 0 on rank 0: rank 1 (pid 3) died`" in text
    assert "1 cases, run on: 2 GPUs, torch 2.11" in text
    assert "ends 3.0 s |" not in page.render([{**absent, **ran}])
    soak = {"bench": "soak", "operations": {"a": 900, "b": 1100}, "cycles": 9, "failures": []}
    hangs = [{"plant": "loop", "how": "delegated", "device": "cuda", "right": r} for r in (1, 0)]
    hangs += [{**hang, "script": "hung.py"} for hang in hangs[:1]]
    hangs += [{**hang, "script": "package/hung.py"} for hang in hangs[:1]]
    cost = {"ratio": 1.004, "ratio_quartiles": [0.99, 1.02], "bytes": 256, "time_us": 9.5}
    others = [soak | ran, *hangs, {"bench": "flight record", **cost}]
    text = page.render([{**ended, **ran}, *others])
    assert "2,000 participations of ranks in random operations of 2 kinds" in text
    assert "and 9 cycles of making and destroying groups; 0 failures; 2 GPUs." in text
    assert "hangs in delegated operations on cuda: 2 of 3 verdicts are right" in text
    assert "on cuda, in scripts that others wrote: 1 of 1 verdicts are right" in text
    assert "adds +0.4% (-1.0 to +2.0) to an all_reduce of 256 bytes" in text


def test_a_record_does_not_say_where_the_project_lies() -> None:
    message = f"OSError: Too many open files: '{runner.__file__}'"
    told = runner.Result(Case("SIGKILL", "shm", "init"), "error", [0.1], message).to_dict()
    assert told["message"].endswith(": 'tests/tools/fault_matrix/runner.py'")


def test_the_page_counts_each_collective_once_where_the_soak_did() -> None:
    ran = {"machine": {"name": "2 GPUs"}, "versions": {"torch": "2.11"}}
    case = runner.Result(Case("SIGKILL", "shm", "init"), "error", [0.1], "gone").to_dict() | ran
    soak: dict[str, Any] = {
        "bench": "soak",
        "collectives": {"a": 500, "c": 200},
        "participations": {"a": 1400, "b": 3, "c": 400},
        "cycles": 9,
        "bytes_per_cycle": [10.2, 3071.6],
        "failures": ["one"],
    }
    text = page.render([case, soak | ran])
    assert "700 random collectives of 2 kinds, each of two or more ranks and counted once" in text
    assert "(1,803 participations, with groups of one rank) and 9 cycles" in text
    assert "by at most 3,072 bytes each; 1 failures; 2 GPUs." in text


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nothing"], ["--write", "page.md"]):
        with pytest.raises(SystemExit):
            command.main(arguments)
    assert "no case matches 'nothing'" in capsys.readouterr().err


def test_the_command_lists_cases(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["--list", "SIGSEGV | tcp | *"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PHASES)
