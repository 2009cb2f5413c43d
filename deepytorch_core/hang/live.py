"""In the job itself: who this process is, and what is said when one of its operations times out.

The ranks whose operation failed agree, over the store of the default group, on one of them to
judge. It reads the flight records of its node by itself, also of ranks that are stuck or stopped;
of each other node some rank answers for all. Every wait here is short and bounded: the operation
has failed already, and its error shall not wait for long.

In the same way a rank asks the other nodes for who asks it from outside (inquiry.py), while no
operation has failed yet.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from deepytorch_core.base import config, stores, unlisted
from deepytorch_core.base.console import say
from deepytorch_core.hang import (
    answer,
    collect,
    evidence,
    inquiry,
    processes,
    record,
    store_limit,
    table,
    verdict,
    waiting,
    words,
)
from deepytorch_core.hang.evidence import Rank

# Explaining a failure takes so long at most, of which other nodes get the first part to answer.
_ANSWER_LIMIT_S = 4.0
_VERDICT_LIMIT_S = 8.0
_JUDGE_LIMIT_S = 2.0  # between claiming to be the judge and saying so
_AGREE_LIMIT_S = 20.0  # of all that, however slow the store is
# A program that lives with timeouts is not to be slowed down by each.
_MOST_VERDICTS = 4
# The store is asked so often whether a rank wants to know. Nothing waits for that, since a store's
# wait that finds nothing prints two lines when its time is up.
_LISTEN_S = 1.0
_END_LIMIT_S, _REACH_LIMIT_S = 3.0, 2.0
_CONNECT_LIMIT_S = 0.5  # of one attempt, which torch may make twice as long
# A store that can't be reached any more is given up after so long. Otherwise torch would wait for
# the system to do so, a quarter of an hour.
_LOST_LIMIT_S = 10.0
_MOST_STACKS = 1 << 14  # letters of a rank's stacks that travel
_STACKS_LIMIT_S = 2.0  # so long they are waited for, where others wait for the answer
# How the cases are called that are asked for from outside, and what marks one that is over.
_ASKED, _OVER = "asked {}/", "over"
_INQUIRY_POLL_S = 0.05
# An older failure is not what is being told.
_FRESH_S = 60.0


@dataclass
class _Home:
    """The job's common ground: the default group's store, and this process's place.

    `store` is None where it can't serve, or no more. `prefix` is that of its keys.
    """

    store: Any
    prefix: str
    rank: int
    size: int
    job: str
    over: threading.Event = dataclasses.field(default_factory=threading.Event)
    desk: inquiry.Desk | None = None
    watch: waiting.HangWatch | None = None
    thread: unlisted.Thread | None = None

    def begin(self) -> None:
        """Tell of waits, and answer ranks of other nodes, until `end`."""
        if self.size == 1:
            return
        self.over.clear()
        if self.watch is None:
            self.watch = waiting.HangWatch(self.job, self.rank, asks=self.can_ask)
        # Whether a store of the program's own may be asked by another thread is not known.
        served = self.store is not None and stores.is_torchs(self.store)
        if not served or self.thread is not None or _is_on_one_node():
            return
        with contextlib.suppress(OSError):  # then nobody can ask from outside
            self.desk = inquiry.Desk()
        self.thread = unlisted.Thread(_listen, (self,), name="deepytorch-hang")
        self.thread.start()

    def can_ask(self) -> bool:
        """Whether ranks of this job are on other nodes, and can be asked."""
        return self.desk is not None and self.desk.is_open

    def end(self) -> None:
        """End the threads of this job."""
        self.over.set()
        if self.desk is not None:
            self.desk.wake()
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.stop(limit_s=_END_LIMIT_S)
        if self.thread is not None:
            self.thread.join(_END_LIMIT_S)
            self.thread = self.thread if self.thread.is_alive() else None


_home: _Home | None = None
_lock = threading.Lock()
_judged: dict[str, str] = {}


def join(store: Any, *, rank: int, size: int) -> Callable[[], None]:
    """Say in this process's flight record who it is; call it where the default group is made.

    Args:
        store: the default group's torch Store. What is asked of it waits for no other rank.
        rank: this process's in the default group.
        size: of the default group.

    Returns what to call when the group has ended.
    """
    global _home
    from torch._C._distributed_c10d import PrefixStore

    own: Any = PrefixStore("deepytorch/hang", store)
    job = secrets.token_hex(6)
    prefix = ""
    if size > 1:
        pid = os.getpid()
        try:
            # The rank that comes first names the job.
            job = stores.first(own, "job", job)
            # A former group over the same store gave its operations the same numbers.
            prefix = f"deepytorch/hang/{job}/{own.add(f'joined/{rank}', 1)}"
            own = PrefixStore(prefix, store_limit.server_below(store) or store)
            own.set(f"who/{rank}", json.dumps([pid, processes.start_time(pid), _node()]))
        except Exception as error:  # of a store of the program's own
            say(f"hangs can't be explained over this store: {error}", level="debug")
            own = None
    if _home is not None:
        _home.end()
    _home = _Home(own, prefix, rank, size, job)
    _judged.clear()
    rouse()
    return functools.partial(_leave, _home)


def _is_on_one_node() -> bool:
    """Whether the launcher said that all ranks are on this node. Some launchers say neither."""
    told = config.launched()
    return not config.spans_nodes() and told is not None and told.local_size is not None


def rouse() -> None:
    """Have this process answer who asks what it does: after `join`, and again after `rest`."""
    from deepytorch_core import _core

    if _home is not None:
        signal = answer.register()
        _core.identify_process(job=_home.job, rank=_home.rank, world_size=_home.size, signal=signal)
        _home.begin()


def rest() -> None:
    """Answer nobody, until `rouse`: no group of this process goes through deepytorch any more."""
    answer.unregister()
    _end()


def _leave(home: _Home) -> None:
    """The group has ended: no thread, and no connection to its store, is to stay behind."""
    global _home
    home.end()
    home.store = None
    if _home is home:
        answer.unregister()
        _home = None


def explainer(group: str) -> Callable[[str], str]:
    """Return what a group's backend calls with a failure's words, for the sentence to put first."""

    def explain(failure: str) -> str:
        return explain_failure(group, failure)

    return explain


def explain_failure(group: str, failure: str) -> str:
    """Say who kept this rank waiting in the operation of `group` that has just failed.

    The text is empty if that can't be said: then the failure speaks for itself. This takes a few
    seconds at most and raises nothing.
    """
    home = _home
    try:
        with _lock:
            if home is None or home.store is None or len(_judged) >= _MOST_VERDICTS:
                return ""
            operation = _failed_operation(group)
            # A kernel that gives up ends the group, so there is one such case of it.
            case = f"{group}/device"
            if operation is not None:
                kind = "message" if operation.is_message else "collective"
                case = f"{group}/{kind}/{operation.sequence}"
                if operation.is_message:
                    case += f"/{home.rank}"
            elif not any(call.state == evidence.ISSUED for call in _operations(group)):
                return ""
            if case not in _judged:
                _judged[case] = ""
                _judged[case] = _meet(home, case, group, operation)
            return _judged[case]
    except Exception as error:  # the operation's own error matters more
        say(f"the hang was not explained: {type(error).__name__}: {error}", level="debug")
        return ""


def whereabouts(ranks: Iterable[int]) -> str:
    """Say what the first of these ranks that this node knows of does: "rank 1: it is in ...".

    The text is empty if nothing is known. This raises nothing.
    """
    if _home is not None:
        with contextlib.suppress(Exception):  # who asks has an error of its own to tell
            known = {member.rank: member for member in _here(_home)}
            for rank in ranks:
                if rank in known:
                    return f"rank {rank}: {words.state(known[rank])}"
    return ""


def awaited(least_s: float) -> str:
    """The operation of the default group in which ranks of this node wait for this one.

    For `least_s` already; "barrier #3 of group 0", empty for none. Raises nothing.
    """
    home = _home
    with contextlib.suppress(Exception):
        from torch.distributed import distributed_c10d as c10d

        if home is not None:
            found = verdict.judge(
                collect.ranks(_records(home), stacks_limit_s=None), least_s=least_s
            )
            blamed = found.kind == verdict.NEVER_ENTERED and home.rank in found.ranks
            # In other groups threads of their own may wait for each other.
            if blamed and found.group == c10d._get_default_group().group_name:
                return found.operation
    return ""


def _operations(group: str) -> list[evidence.Operation]:
    from deepytorch_core import _core

    mine = record.read_descriptor(_core.flight_record_fd())
    return [operation for operation in mine.operations if operation.group == group]


def _failed_operation(group: str) -> evidence.Operation | None:
    failed = [
        operation
        for operation in _operations(group)
        if operation.state == evidence.FAILED and (operation.ended_age_s or 0) < _FRESH_S
    ]
    return failed[-1] if failed else None


def _meet(home: _Home, case: str, group: str, operation: evidence.Operation | None) -> str:
    """Return what all ranks agree on of the failed operation; None is a kernel that gave up."""

    def judge(ranks: Iterable[Rank]) -> verdict.Verdict:
        if operation is None:
            return verdict.judge(ranks, gave_up=group)
        return verdict.judge(ranks, failed=(group, operation.sequence, operation.is_message))

    if home.size == 1:
        return ""
    unreachable = _unreachable(home.store)
    if not unreachable:
        try:
            with store_limit.at_most(home.store, _AGREE_LIMIT_S):
                return _agree(home, case, judge)
        except RuntimeError:  # the store has gone meanwhile, perhaps
            unreachable = _unreachable(home.store)
            if not unreachable:
                raise
    here = _here(home)
    if _is_on_one_node():
        here += _ended(home, here)
    found = judge(here)
    known = len(here) == home.size and found.kind != verdict.NO_HANG
    return found.sentence if known else unreachable


def _agree(home: _Home, case: str, judge: Callable[[Iterable[Rank]], verdict.Verdict]) -> str:
    """The sentence that all ranks of the case come to, over the job's store.

    Raises RuntimeError where that goes away meanwhile.
    """
    from torch._C._distributed_c10d import PrefixStore

    # A connection of its own: another thread may be waiting in the store.
    clone = _clone(home)
    store = PrefixStore(f"case/{case}", clone)
    if stores.first(store, "judge", str(home.rank), limit_s=_JUDGE_LIMIT_S) != str(home.rank):
        _answer(home, store)
        if stores.wait(store, ["verdict"], _VERDICT_LIMIT_S):
            sentence: str = json.loads(stores.text(store, "verdict"))
            return sentence
        return judge(_here(home)).sentence
    ranks = {member.rank: member for member in _here(home)}
    absent = [
        rank
        for rank in range(home.size)
        if rank not in ranks or ranks[rank].process == evidence.MISSING
    ]
    if absent:
        _call(clone, case)
        for member in _await_answers(store, absent):
            ranks[member.rank] = member
        for rank in absent:
            if rank not in ranks or ranks[rank].process == evidence.MISSING:
                ranks[rank] = _without_answer(clone, rank)
    found = judge(ranks.values())
    told = verdict.with_cause(found, lambda rank: stores.there(clone, f"failed/{rank}"))
    sentence = "" if found.kind == verdict.NO_HANG else told
    store.set("verdict", json.dumps(sentence))
    if sentence:
        clone.set(f"failed/{home.rank}", sentence)
        everything = [ranks[rank] for rank in sorted(ranks)]
        say(f"{sentence}\n{table.full(everything, found)}", level="error")
    return sentence


def _ended(home: _Home, here: Iterable[Rank]) -> list[Rank]:
    """The ranks of a job on one node that have no flight record there: they had one once."""
    left = {member.rank for member in here}
    detail = "no flight record of it is left on this node"
    host = _node().partition("/")[0]
    return [
        Rank(rank, host, process=evidence.GONE, detail=detail)
        for rank in range(home.size)
        if rank not in left
    ]


def _unreachable(store: Any) -> str:
    """Return what to say if the store's server does not answer; empty if it does.

    Torch's own connection would be tried for as long as the store's timeout says, which is minutes.
    """
    server = store_limit.server_below(store)
    if server is None:
        return ""
    try:
        socket.create_connection((server.host, server.port), timeout=_REACH_LIMIT_S).close()
    except ConnectionRefusedError:
        gone = "the process that kept it has ended"
    except OSError as error:
        gone = f"its node, or the network to it, is gone ({error})"
    else:
        return ""
    return (
        f"the job's store at {server.host}:{server.port} does not answer: {gone}; other nodes "
        "can't be asked"
    )


def _clone(home: _Home) -> Any:
    """The job's store over a connection of its own, one that ends where the network is gone.

    Not by `Store.clone`: if the server dies meanwhile that goes on trying for as long as the
    store's timeout says, minutes. A program that ends then has a thread in there.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    server = store_limit.server_below(home.store)
    if server is None:
        return stores.connection(home.store)
    known = store_limit.sockets()
    deadline = time.monotonic() + _LOST_LIMIT_S
    while True:
        try:
            limit = timedelta(seconds=_CONNECT_LIMIT_S)
            clone = TCPStore(server.host, server.port, is_master=False, timeout=limit)
            break
        except RuntimeError:
            late = time.monotonic() > deadline
            if late or home.over.is_set() or _unreachable(home.store):
                raise
    clone.set_timeout(timedelta(seconds=_LOST_LIMIT_S))
    for name in store_limit.sockets() - known:
        # Others of this moment are most likely the same job's, and as little use without a network.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name[0]))) as own:
            store_limit.set_limit(own, _LOST_LIMIT_S)
    return PrefixStore(home.prefix, clone)


def _records(home: _Home) -> list[record.Record]:
    """The flight records of the job's processes that this one sees: those of its node."""
    return [member for job in collect.jobs(name=home.job) for member in job.records]


def _here(home: _Home) -> list[Rank]:
    """Evidence of the job's ranks on this node."""
    return collect.ranks(_records(home))


def _answer(home: _Home, store: Any, *, how: str = inquiry.FIRST) -> None:
    """Leave this node's evidence for the judge, unless another rank of the node does."""
    mine = str(home.rank)
    if stores.first(store, f"node/{_node()}", mine, limit_s=_JUDGE_LIMIT_S) != mine:
        return
    records = _records(home)  # once: on a busy node with many processes it takes a while
    judge = stores.first(store, "judge", mine, limit_s=_JUDGE_LIMIT_S)
    if judge in {str(member.rank) for member in records}:
        return  # it sees for itself
    limit_s = None if how == inquiry.AGAIN else _STACKS_LIMIT_S
    for rank in collect.ranks(records, stacks_limit_s=limit_s, gently=how == inquiry.GENTLY):
        if rank.process != evidence.MISSING and not store.check([_OVER]):
            # Main threads come last in their stacks, and it is those that are needed.
            short = dataclasses.replace(rank, stacks=rank.stacks[-_MOST_STACKS:])
            store.set(f"rank/{rank.rank}", evidence.to_json(short))
    store.set(f"answered/{_node()}", "")


def _call(store: Any, case: str) -> None:
    """Wake the ranks on other nodes whose own operations have not failed."""
    number = store.add("calls", 1)
    store.set(f"call/{number}", case)


@atexit.register
def _end() -> None:
    """Before the interpreter goes down: a thread that is in the store then would abort it.

    Python ends its other threads where they next take the GIL, which in torch's C++ is no place to
    be ended.
    """
    if _home is not None:
        _home.end()


def _listen(home: _Home) -> None:
    """Serve all the time those that ask: on other nodes, and on this process's own."""
    from torch._C._distributed_c10d import PrefixStore

    number = 1
    inquiries: list[_Inquiry] = []
    silent: set[int] = set()
    spans_nodes = config.spans_nodes()
    everybody = [f"who/{rank}" for rank in range(home.size)]
    try:
        own = _clone(home)
        while not home.over.is_set():
            if not spans_nodes and own.check(everybody):
                # The launcher did not say it, but those who joined did.
                nodes = {json.loads(own.get(key))[2] for key in everybody}
                if len(nodes) == 1:
                    return
                spans_nodes = True
            if own.check([f"call/{number}"]):
                case = own.get(f"call/{number}").decode()
                number += 1
                hows = (inquiry.AGAIN, inquiry.GENTLY)
                how = next((how for how in hows if case.startswith(_ASKED.format(how))), "")
                _answer(home, PrefixStore(f"case/{case}", own), how=how or inquiry.FIRST)
            for query in inquiries:
                query.look()
            silent = next((query.silent for query in inquiries if query.is_over), silent)
            inquiries = [query for query in inquiries if not query.is_over]
            pause_s = _INQUIRY_POLL_S if inquiries else _LISTEN_S
            if home.desk is None:
                home.over.wait(pause_s)
                continue
            inquiries += [
                _Inquiry(home, own, question, silent) for question in home.desk.wait(pause_s)
            ]
    except Exception as error:  # the store's end is this thread's
        with contextlib.suppress(OSError):
            for query in inquiries:
                query.give_up(f"the job's store is gone ({error})")
    finally:
        if home.desk is not None:
            home.desk.close()


class _Inquiry:
    """A question from outside, while the other nodes are being asked."""

    def __init__(
        self, home: _Home, own: Any, question: inquiry.EvidenceRequest, silent: set[int]
    ) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self.is_over = False
        self.silent: set[int] = set()
        self._desk = home.desk
        self._own = own
        self._question = question
        case = f"{_ASKED.format(question.how)}{question.token}"
        self._store: Any = PrefixStore(f"case/{case}", own)
        # Another rank of this node may have been asked the same, before this one came to it.
        mine = str(home.rank)
        if stores.first(self._store, "judge", mine, limit_s=_JUDGE_LIMIT_S) == mine:
            _call(own, case)
        self._nodes = {
            rank: json.loads(own.get(f"who/{rank}"))[2] if own.check([f"who/{rank}"]) else ""
            for rank in range(home.size)
        }
        asked = {rank for rank, node in self._nodes.items() if node not in ("", _node())}
        awaited = asked - silent if question.how == inquiry.AGAIN else asked
        self._awaited = {self._nodes[rank] for rank in awaited}
        self._until = time.monotonic() + inquiry.ANSWER_LIMIT_S

    def look(self) -> None:
        """Reply once all have answered, or the time is up."""
        answered = {node for node in self._awaited if self._store.check([f"answered/{node}"])}
        self._awaited -= answered
        if not self._awaited or time.monotonic() > self._until:
            self._reply()

    def give_up(self, problem: str) -> None:
        """Reply that the others can't be asked."""
        if self._desk is not None:
            self._desk.reply(self._question, [], problem=problem)
        self.is_over = True

    def _reply(self) -> None:
        ranks = []
        for rank, node in self._nodes.items():
            report = _said(self._store, rank)
            if report is None:
                report = _without_answer(self._own, rank, inquiry.ANSWER_LIMIT_S)
                if node == _node() and report.process != evidence.GONE:
                    continue  # whoever asks sees it
                self.silent.add(rank)
            ranks.append(report)
        if self._desk is not None:
            self._desk.reply(self._question, ranks)
        self.is_over = True
        # Nobody reads it again, and a store keeps what it was given. Not deleted: another rank of
        # this node, asked the same, would wait for it.
        with contextlib.suppress(RuntimeError):
            self._store.set(_OVER, "")
            for rank in self._nodes:
                self._store.set(f"rank/{rank}", "")


def _await_answers(store: Any, absent: list[int]) -> list[Rank]:
    stores.wait(store, [f"rank/{rank}" for rank in absent], _ANSWER_LIMIT_S)
    return [member for rank in absent if (member := _said(store, rank)) is not None]


def _said(store: Any, rank: int) -> Rank | None:
    """Return what a rank's node said of it in this case; None if it said nothing."""
    if told := stores.there(store, f"rank/{rank}"):
        with contextlib.suppress(ValueError):
            report = evidence.from_json(told)
            return report if report.rank == rank else None
    return None


def _without_answer(store: Any, rank: int, limit_s: float = _ANSWER_LIMIT_S) -> Rank:
    """Return what is known of a rank that did not answer: its own words at the start."""
    if not store.check([f"who/{rank}"]):
        return Rank(rank, process=evidence.MISSING, detail=": it never joined the job")
    pid, started, node = json.loads(store.get(f"who/{rank}"))
    host = str(node).partition("/")[0]
    if node == _node():
        if processes.state(pid)[0] == evidence.GONE or processes.start_time(pid) != started:
            return Rank(rank, host, pid, evidence.GONE)
        return Rank(rank, host, pid, evidence.MISSING, ": its flight record can't be read")
    limit = f"{limit_s:g} s"
    return Rank(rank, host, pid, evidence.MISSING, f": nobody on its node answered within {limit}")


def _node() -> str:
    """The same for processes that see each other in /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, namespace = "", 0
    return f"{os.uname().nodename}/{boot}/{namespace}"
