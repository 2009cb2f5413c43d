"""Tests of output made of evidence: the table for people, the command, torch's dumps."""

from __future__ import annotations

import dataclasses
import json
import pickle
import runpy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from deepytorch import cli
from deepytorch.cli import hang
from deepytorch_core.hang import (
    collect,
    evidence,
    inquiry,
    mismatch,
    stacks,
    table,
    torch_format,
    verdict,
)
from deepytorch_core.hang.evidence import Frame, Group, Operation, Rank
from deepytorch_core.hang.record import Record

STACK = 'Current thread 0x1 (most recent call first):\n  File "/t/train.py", line 8 in <module>\n'
ASKING = (
    'Thread 0x2 (most recent call first):\n  File "deepytorch_core/hang/stacks.py", line 1 in a'
)
FRAME = Frame("/t/train.py", 8, "<module>", "next(loader)", mine=True)


def operation(sequence: int, op: str = "all_reduce", **changes: Any) -> Operation:
    values: dict[str, Any] = {
        "group": "0",
        "sequence": sequence,
        "op": op,
        "dtype": "float32",
        "reduce_op": "sum",
        "count": 8,
        "bytes": 32,
        "root": 0,
        "tag": 0,
        "uneven": False,
        "on_device": False,
        "asynchronous": False,
        "how": "native",
        "state": evidence.ENDED,
        "age_s": 9.0,
        "ended_age_s": 8.0,
    }
    return Operation(**(values | changes))


def job_of(size: int, *, behind: int, messages: tuple[Operation, ...] = ()) -> list[Rank]:
    """All ranks of one group are in its third operation but `behind`."""
    ranks = []
    for number in range(size):
        made = [operation(1, "all_gather"), operation(2, "barrier", count=0), *messages]
        if number != behind:
            made.append(operation(3, state=evidence.ENTERED, ended_age_s=None))
        group = Group("0", "default_pg", tuple(range(size)), 2 + (number != behind), len(messages))
        ranks.append(
            Rank(number, "b", 70 + number, groups=(group,), operations=tuple(made),
                 idle_s=8.0, frames=(FRAME,), stacks=f"{ASKING}\n\n{STACK}")
        )  # fmt: skip
    return ranks


def test_the_table_shows_the_blamed_first() -> None:
    ranks = job_of(3, behind=2)
    lines = table.full(ranks, verdict.judge(ranks)).splitlines()
    assert lines[:4] == [
        "rank  node  pid  process  operation                     for    last of the group  at",
        "2     b     72   running  none                          8.0 s  #2 of 0            "
        "train.py:8 next(loader)",
        "0     b     70   running  all_reduce #3 of 0 (entered)  9.0 s  #3 of 0            "
        "train.py:8 next(loader)",
        "1     b     71   running  all_reduce #3 of 0 (entered)  9.0 s  #3 of 0            "
        "train.py:8 next(loader)",
    ]
    assert lines[5] == "--- rank 2 (node b, pid 72): Python stacks"
    assert not [line for line in lines if "hang/stacks.py" in line]


def test_the_table_shows_the_last_sampled_call_of_who_gives_no_stack() -> None:
    ranks = job_of(3, behind=2)
    called = [evidence.Place("/t/train.py", line, "step") for line in (57, 88)]
    told = [
        dataclasses.replace(each, at=place)
        for each, place in zip(ranks[2].operations, [*called], strict=True)
    ]
    stopped: dict[str, Any] = {"process": evidence.STOPPED, "frames": (), "stacks": ""}
    ranks[2] = dataclasses.replace(ranks[2], operations=(told[1], told[0]), **stopped)
    ranks[1] = dataclasses.replace(ranks[1], operations=tuple(told))  # has a stack
    ranks[0] = dataclasses.replace(ranks[0], **stopped)  # has no sample
    lines = table.table(ranks, verdict.judge(ranks))
    assert lines[3].endswith("  called all_gather #1 at train.py:57 step")
    assert lines[2].endswith("  train.py:8 next(loader)")
    assert lines[1].endswith("#3 of 0")


def test_a_large_table_is_cut() -> None:
    ranks = job_of(100, behind=99)
    lines = table.full(ranks, verdict.judge(ranks)).splitlines()
    assert lines[1].startswith("99 ")
    assert "... and 36 more" in lines
    assert "... and the stacks of 92 more ranks" in lines


def analyze(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's own analyzer, as its users run it; returns its database."""
    out = folder.parent / "database"
    monkeypatch.setattr(sys, "argv", ["fr_trace", str(folder), "-o", str(out)])
    runpy.run_module("torch.distributed.flight_recorder.fr_trace", run_name="__main__")
    _, database = pickle.loads(out.read_bytes())
    return database


def test_torch_reads_the_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = torch_format.write([*job_of(3, behind=2), Rank(9)], tmp_path / "dumps")
    assert [path.name for path in paths] == [f"deepytorch_trace_{rank}" for rank in range(3)]
    database = analyze(tmp_path / "dumps", monkeypatch)
    names = [each.collective_name for each in database.collectives]
    assert names == ["gloo:_all_gather_base", "gloo:barrier", "gloo:all_reduce"]
    assert [each.pass_check for each in database.collectives[:2]] == [True, True]
    assert database.collectives[2].missing_ranks == {2}
    assert [group.size for group in database.groups] == [3]


def test_torch_finds_the_same_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = job_of(3, behind=2)
    other = operation(3, "broadcast", state=evidence.ENTERED, ended_age_s=None)
    groups = (dataclasses.replace(ranks[2].groups[0], collectives=3),)
    ranks[2] = dataclasses.replace(
        ranks[2], operations=(*ranks[2].operations, other), groups=groups
    )
    assert verdict.judge(ranks).ranks == (2,)
    torch_format.write(ranks, tmp_path / "dumps")
    last = analyze(tmp_path / "dumps", monkeypatch).collectives[-1]
    assert 2 in last.mismatch_collectives


def test_dumps_name_the_line_that_called() -> None:
    rank0 = job_of(2, behind=1)[0]
    place = evidence.Place("/t/train.py", 57, "step")
    operations = [dataclasses.replace(each, at=place) for each in rank0.operations[1:]]
    rank0 = dataclasses.replace(rank0, operations=(rank0.operations[0], *operations))
    called = {"name": "step", "filename": "/t/train.py", "line": 57}
    inside = {"name": "<module>", "filename": "/t/train.py", "line": 8}
    frames = [entry["frames"] for entry in torch_format.dump(rank0)["entries"]]
    assert frames == [[], [called], [inside]]  # of who is inside the whole stack
    rank0 = dataclasses.replace(rank0, frames=())
    assert torch_format.dump(rank0)["entries"][2]["frames"] == [called]


def test_messages_in_dumps() -> None:
    sent = operation(1, "send", root=1, tag=5)
    anybody = operation(2, "recv", root=evidence.ANY_RANK)
    (rank0, _) = job_of(2, behind=1, messages=(sent, anybody))
    names = [entry["profiling_name"] for entry in torch_format.dump(rank0)["entries"]]
    assert "gloo:send 0->1" in names
    assert not [name for name in names if "recv" in name]


@pytest.fixture
def one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    records = tuple(Record(70 + n, n, 4, 0, "b", "", "job1", {}, 5, 1.0, (), ()) for n in range(3))
    monkeypatch.setattr(hang, "_BETWEEN_LOOKS_S", 0.0)
    monkeypatch.setattr(
        collect, "jobs", lambda pids=None, name=None: [collect.HungJob("job1", records)]
    )

    def ranks(records: list[Record], *, stacks_limit_s: float | None) -> list[Rank]:
        assert (
            stacks_limit_s is None or stacks_limit_s >= 10
        )  # of a machine whose ranks have a fifth of a processor each
        return job_of(4, behind=2)[:3]

    monkeypatch.setattr(collect, "ranks", ranks)


def run(*arguments: str) -> None:
    cli.app([*arguments], standalone_mode=False)


@pytest.mark.usefixtures("one_job")
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("report", "--hang", "--flight-recorder", str(tmp_path / "dumps"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 2 (node b, pid 72) never entered all_reduce #3 of group")
    assert lines[2] == "job job1"
    assert lines[3].startswith(
        "not on this node, or ended: rank 3, which could not be asked: no process of this node "
        "listens for other nodes; ask on their node"
    )
    assert len(list((tmp_path / "dumps").iterdir())) == 3
    run("report", "--hang", "--json")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["verdict"]["ranks"] == [2, 3]
    assert found["not_on_this_node"] == found["without_answer"] == [3]
    assert found["why_not_asked"] == "no process of this node listens for other nodes"
    assert [evidence.from_json(json.dumps(rank)).rank for rank in found["ranks"]] == [0, 1, 2]


def answers(monkeypatch: pytest.MonkeyPatch, *given: inquiry.EvidenceReply) -> list[bool]:
    """Has other nodes answer so, one after the other; returns which were asked for again."""
    asked: list[bool] = []

    def ask(pids: list[int], *, how: str = inquiry.FIRST) -> inquiry.EvidenceReply:
        assert pids == [70, 71, 72]
        asked.append(how == inquiry.AGAIN)
        return given[len(asked) - 1]

    monkeypatch.setattr(inquiry, "ask", ask)
    return asked


def of_rank_3(*, inside: bool, pid: int = 99, **changes: Any) -> inquiry.EvidenceReply:
    (*_, last) = job_of(4, behind=-1 if inside else 3)
    return inquiry.EvidenceReply((dataclasses.replace(last, pid=pid, host="c", **changes),))


@pytest.mark.usefixtures("one_job")
def test_ranks_of_other_nodes_are_in_the_verdict_and_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = of_rank_3(inside=True)
    asked = answers(monkeypatch, answer, answer)
    run("report", "--hang")
    assert asked == [False, True]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 2 (node b, pid 72) never entered all_reduce #3 of group")
    assert "nor did" not in lines[0]
    assert lines[2:3] + lines[7:8] == ["job job1", next(x for x in lines if x.startswith("3 "))]
    assert lines[7].split()[:3] == ["3", "c", "99"]


@pytest.mark.usefixtures("one_job")
def test_a_rank_of_which_nothing_is_known_is_not_blamed_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = inquiry.EvidenceReply((Rank(3, "c", 99, evidence.MISSING, ": nobody answered"),))
    answers(monkeypatch, silent, silent)
    run("report", "--hang")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 2 (node b, pid 72) never entered all_reduce #3 of group")
    assert lines[0].endswith("(nor did rank 3)")
    assert lines[3] == "asked on the other nodes, without an answer: rank 3"


@pytest.mark.usefixtures("one_job")
def test_what_a_second_look_does_not_confirm_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ranks 0, 1 and 2 are in the third operation: rank 3 was before it, then in it.
    monkeypatch.setattr(
        collect, "ranks", lambda records, *, stacks_limit_s: job_of(4, behind=3)[:3]
    )
    answers(monkeypatch, of_rank_3(inside=False), of_rank_3(inside=True))
    run("report", "--hang", "--json")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["verdict"]["kind"] == verdict.NO_HANG, found["verdict"]
    # A node that was too slow the second time takes nothing back.
    lost = inquiry.EvidenceReply((Rank(3, "c", 99, evidence.MISSING),))
    answers(monkeypatch, of_rank_3(inside=False), lost)
    run("report", "--hang", "--json")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["verdict"]["ranks"] == [3]
    assert found["verdict"]["kind"] == verdict.NEVER_ENTERED


def test_a_wait_that_is_new_at_the_second_look_is_none() -> None:
    earlier, now = job_of(3, behind=2), job_of(3, behind=2)
    assert verdict.judge(verdict.lasting(now, earlier), least_s=1.0).ranks == (2,)
    before = [
        dataclasses.replace(rank, operations=rank.operations[:2]) for rank in job_of(3, behind=2)
    ]
    found = verdict.judge(verdict.lasting(now, before), least_s=1.0)
    assert found.kind == verdict.NO_HANG


def test_several_jobs_take_one_pause_and_hanging_ones_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    kinds = {"a": verdict.NO_HANG, "b": "stuck", "c": verdict.NO_HANG, "d": "stuck"}

    def look(job: str) -> hang._Case:
        assert pauses
        return hang._Case(job, [], SimpleNamespace(kind=kinds[job]), [], "")

    monkeypatch.setattr(hang.time, "sleep", pauses.append)
    monkeypatch.setattr(hang, "_look", look)
    assert [case.name for case in hang._look_at(list(kinds))] == ["b", "d", "a", "c"]
    assert len(pauses) == 1


def test_the_command_without_a_job() -> None:
    with pytest.raises(ValueError, match="no job called nobody's on this node"):
        run("report", "--hang", "--job", "nobody's")


def test_options_that_need_hang() -> None:
    with pytest.raises(Exception, match="go with --hang"):
        run("report", "--pid", "1")


def test_every_processor_of_a_job_is_found_by_one_of_its_pids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = {70: "a", 71: "a", 72: "b", 73: ""}
    read = {
        pid: Record(pid, pid - 70, 2, 0, "h", "", name, {}, 0, 0.0, (), ())
        for pid, name in jobs.items()
    }
    fake = SimpleNamespace(find=lambda: sorted(read), read=lambda pid: read[pid])
    monkeypatch.setattr(collect, "record", fake)
    assert [job.name for job in collect.jobs()] == ["a", "b", "process 73"]
    (found,) = collect.jobs([71])
    assert [record.pid for record in found.records] == [70, 71]
    assert collect.jobs([71], name="b") == []


def test_a_group_made_again_does_not_compare_with_what_the_former_one_left() -> None:
    store, raised = HashStore(), []

    def ranks_call(call: str) -> None:
        def call_on(rank: int) -> None:
            try:
                compare[rank](call)
            except RuntimeError as error:
                raised.append(str(error))

        compare = [mismatch.comparer(store, "0", rank, 2, limit_s=30) for rank in range(2)]
        threads = [threading.Thread(target=call_on, args=(rank,)) for rank in range(2)]
        threads[0].start()
        threads[0].join(0.2)  # rank 0 comes first, and finds what there is
        threads[1].start()
        for thread in threads:
            thread.join()

    ranks_call("all_reduce of 4 float32")
    ranks_call("broadcast of 8 float32")
    assert raised == []


def test_the_caller_in_a_comparison_is_the_users_line() -> None:
    assert mismatch._caller().startswith("test_hang_output.py:")
    assert not stacks.is_mine(stacks.__file__)
    assert not stacks.is_mine(json.__file__)
