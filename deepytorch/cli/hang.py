"""`deepytorch report --hang`: who keeps a job waiting, asked from outside while it hangs."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from deepytorch.cli import console

# Two looks so far apart tell what is stuck from what merely waits for the moment.
_BETWEEN_LOOKS_S = 1.0
# A user who asks by hand would rather wait than do without.
_STACKS_LIMIT_S = 10.0


def show(pids: list[int], job: str | None, *, as_json: bool, flight_recorder: Path | None) -> None:
    """Prints the verdict on the jobs of this user on this node: sentence, table, stacks.

    The jobs' ranks on other nodes are asked through those of this one.

    Raises ValueError or OSError for a process that has no record or can't be looked into, and
    ValueError where there is no job.
    """
    from deepytorch_core.hang import collect

    jobs = collect.jobs(pids or None, name=job)
    if not jobs:
        wanted = f" called {job}" if job is not None else ""
        raise ValueError(
            f"no job{wanted} on this node: no process of this user has a flight record. One is "
            "made with the first process group that goes through deepytorch"
        )
    cases = _look_at(jobs)
    if flight_recorder is not None:
        for case in cases:
            _write_dumps(case, flight_recorder if len(cases) == 1 else flight_recorder / case.name)
    if as_json:
        print(json.dumps([case.to_dict() for case in cases], indent=1))  # noqa: T201
        return
    for case in cases:
        case.show()


@dataclasses.dataclass(frozen=True)
class _Case:
    """A job as it was looked at. `elsewhere` are its ranks that have no process on this node.

    `problem` says why they could not be asked for, empty where they were.
    """

    name: str
    ranks: list[Any]
    verdict: Any
    elsewhere: list[int]
    problem: str

    def silent(self) -> list[int]:
        """Ranks of other nodes of which nothing is known."""
        from deepytorch_core.hang import evidence

        known = {rank.rank for rank in self.ranks if rank.process != evidence.MISSING}
        return [rank for rank in self.elsewhere if rank not in known]

    def to_dict(self) -> dict[str, Any]:
        return {
            "job": self.name,
            "verdict": dataclasses.asdict(self.verdict),
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "not_on_this_node": self.elsewhere,
            "without_answer": self.silent(),
            "why_not_asked": self.problem,
        }

    def show(self) -> None:
        from deepytorch_core.hang import table, words

        out = console.out()
        lines = [self.verdict.sentence, "", f"job {self.name}"]
        silent = self.silent()
        if self.problem:
            lines.append(
                f"not on this node, or ended: {words.ranks(silent)}, which could not be asked: "
                f"{self.problem}; ask on their node, or wait for the operation's time limit"
            )
        elif silent:
            lines.append(f"asked on the other nodes, without an answer: {words.ranks(silent)}")
        text = "\n".join([*lines, table.full(self.ranks, self.verdict), ""])
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def _look_at(jobs: list[Any]) -> list[_Case]:
    """The verdicts that two looks agree on, those on hangs first."""
    from deepytorch_core.hang import verdict

    time.sleep(_BETWEEN_LOOKS_S)
    cases = [_look(job) for job in jobs]
    return sorted(cases, key=lambda case: case.verdict.kind == verdict.NO_HANG)


def _look(job: Any) -> _Case:
    """The verdict of a second look: of what moved in between nothing is said."""
    from deepytorch_core.hang import collect, inquiry, verdict

    pids = [record.pid for record in job.records]
    earlier = {record.pid: record for record in job.records}
    elsewhere = job.elsewhere()
    answer = inquiry.ask(pids) if elsewhere else inquiry.EvidenceReply()
    records = _again(job)
    local = collect.ranks(records, stacks_limit_s=_STACKS_LIMIT_S)
    ranks = collect.together(local, answer.ranks, elsewhere)
    found = verdict.judge(ranks, least_s=_BETWEEN_LOOKS_S)
    if answer.ranks and found.kind != verdict.NO_HANG:
        # Nodes were not looked at in the same moment, so another look has to come to the same.
        again = inquiry.ask(pids, how=inquiry.AGAIN).newer_than(answer)
        local = collect.ranks(_again(job), stacks_limit_s=None)
        later = verdict.lasting(collect.together(local, again.ranks, elsewhere), ranks)
        confirmed = verdict.judge(later, least_s=_BETWEEN_LOOKS_S)
        if not verdict.is_same(found, confirmed):
            sentence = f"no hang: of {len(ranks)} ranks those that wait go on after a moment"
            found = verdict.Verdict(verdict.NO_HANG, sentence)
    moved = [
        record.rank
        for record in records
        if record.pid in earlier and record.begun != earlier[record.pid].begun
    ]
    if found.kind == verdict.NO_HANG and moved:
        found = dataclasses.replace(
            found, sentence=f"{found.sentence}; {len(moved)} of them began new ones just now"
        )
    return _Case(job.name, ranks, found, elsewhere, answer.problem)


def _again(job: Any) -> Any:
    """The job's flight records as they are now."""
    from deepytorch_core.hang import collect

    again = collect.jobs([record.pid for record in job.records], name=job.name)
    return again[0].records if again else job.records


def _write_dumps(case: _Case, folder: Path) -> None:
    from deepytorch_core.hang import torch_format

    for path in torch_format.write(case.ranks, folder):
        console.err().print(f"[dim]wrote {path}[/]")
