"""The table: faults, paths, phases, which of them go together, and what is promised."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PHASES = ("init", "between", "collective", "destroy")
"""Before the ranks meet; while nothing runs; in the middle of an all_reduce; while leaving."""

# These may come of a fault:
#
# - "error": every survivor gets one, in time, that names who is gone.
# - "recovers": all results stay right and nobody gets an error.
# - "either": "error" or "recovers", the same on every rank.
# - "leaves": destroy_process_group returns in time, whatever the others do.
# - "ends": every survivor's process ends, and says why. With `Case.may_end` this is as good as an
#   error.
OUTCOMES = ("error", "recovers", "either", "leaves", "ends")


@dataclass(frozen=True, kw_only=True)
class Path:
    """A way of the data. `nodes` has one letter per rank: who shares one shares a node.

    Attributes:
        count: elements of an operation.
        algorithms: one of them carries the operations out, or the case is none; empty: any.
        may_end: an operation that another rank left unfinished may end the process.
        timeout_s: of the group, in seconds; None: far more than any wait is to take.
        within_s: what it takes at least for an answer; the larger of this and the fault's counts.
    """

    name: str
    nodes: str
    means: str
    dtype: str = "float32"
    count: int = 1 << 18  # 1 MiB, beyond what goes in one step
    device: str = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)
    algorithms: tuple[str, ...] = ()
    may_end: bool = False
    timeout_s: float | None = None
    within_s: float = 0.0

    @property
    def ranks(self) -> int:
        return len(self.nodes)

    @property
    def victim(self) -> int:
        """The rank that things happen to: not rank 0, and the first of the second node."""
        return self.ranks // 2

    @property
    def spans_nodes(self) -> bool:
        return len(set(self.nodes)) > 1


def _of_gpus(nodes: str) -> tuple[Path, ...]:
    """The ways of GPUs of one node; two of them are what a plain name means."""
    number, more = len(nodes), "" if len(nodes) == 2 else f"-{len(nodes)}"
    return (
        Path(
            name=f"gpu{more}",
            nodes=nodes,
            device="cuda",
            env={"DEEPYTORCH_COLLECTIVES": "native", "DEEPYTORCH_ERROR_HANDLING": "raise"},
            algorithms=("packet", "two_shot"),
            within_s=12.0,
            means=f"{number} GPUs of one node, native kernels",
        ),
        Path(
            name=f"cpu-reduce{more}",
            nodes=nodes,
            device="cuda",
            env={
                "DEEPYTORCH_COLLECTIVES": "native",
                "DEEPYTORCH_ERROR_HANDLING": "raise",
                "NCCL_P2P_DISABLE": "1",
            },
            algorithms=("cpu_reduce",),
            within_s=12.0,
            means=f"{number} GPUs of one node without peer access, native through the host",
        ),
        Path(
            name=f"nccl{more}",
            nodes=nodes,
            device="cuda",
            algorithms=("delegate",),
            may_end=True,
            timeout_s=10.0,
            within_s=30.0,
            means=f"{number} GPUs of one node, a size that NCCL carries out",
        ),
    )


PATHS = {
    path.name: path
    for path in (
        Path(name="shm", nodes="aaa", means="3 ranks of one node, native over shared memory"),
        Path(name="tcp", nodes="ab", means="2 nodes of one rank, native over TCP"),
        Path(name="hierarchical", nodes="aabb", means="2 nodes of 2 ranks, native"),
        Path(
            name="delegated",
            nodes="aaa",
            dtype="sparse",
            means="3 ranks, sparse tensors, which gloo reduces",
        ),
        *_of_gpus("aa"),
        *_of_gpus("aaaa"),
        Path(
            name="nccl-stages-4",
            nodes="aabb",
            count=1 << 21,  # smaller ones go in one stage
            device="cuda",
            # NCCL's RAS threads outlive its communicators and go on calling a node that cannot be
            # reached: sockets of theirs would be counted as left over by ours.
            env={"DEEPYTORCH_COLLECTIVES": "native", "NCCL_RAS_ENABLE": "0"},
            algorithms=("hierarchical",),
            may_end=True,
            timeout_s=10.0,
            within_s=45.0,  # who leaves in peace is waited for by its own node, then that by others
            means="2 nodes of 2 GPUs, in stages that NCCL carries out (without its RAS threads)",
        ),
    )
}

_ON_HOST = ("shm", "tcp", "hierarchical", "delegated")
_NATIVE = ("shm", "tcp", "hierarchical")
_ON_GPUS = tuple(path.name for path in PATHS.values() if path.device == "cuda")
_BY_NCCL = tuple(name for name in _ON_GPUS if name.startswith("nccl"))
_BETWEEN_NODES = ("tcp", "hierarchical", "nccl-stages-4")
_WHILE_RUNNING = ("between", "collective")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that breaks.

    Attributes:
        means: for people.
        ends: the rank it happens to does not live on.
        paths, phases: where it makes sense.
        outcome: by phase, or by path where that differs, or one for all; see `OUTCOMES`.
        says: of which an error on survivors has at least one; {victim} is the rank's number.
        within_s: the limit in seconds from the fault to the end on every survivor, by phase where
            that differs. It tells an answer from a time limit that ran out, or is the promise
            itself; what was measured stands in the results.
        timeout_s: of the group, in seconds; None: far more than `within_s`.
        alone: it takes from the whole machine, so no other case may run meanwhile.
        network: the ranks live on emulated nodes of their own (needs the right to make some).
        again: the survivors can make a new group afterwards.
        stock_leaves: what the stock backend leaks then, also without us, by path; "": on all.
        in_start: phases, of the paths on GPUs, in which NCCL starts and can't. A rank that waits in
            NCCL's start for the failed one hears nothing, so that process may end everywhere.
    """

    name: str
    means: str
    ends: bool = False
    paths: tuple[str, ...] = (*_ON_HOST, *_ON_GPUS)
    phases: tuple[str, ...] = PHASES
    outcome: str | Mapping[str, str] = "error"
    says: tuple[str, ...] = ("rank {victim}", "rank(s) {victim}")
    within_s: float | Mapping[str, float] = 5.0
    timeout_s: float | None = None
    alone: bool = False
    network: bool = False
    again: bool = True
    stock_leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    in_start: tuple[str, ...] = ()

    def is_stocks(self, left: str, path: str) -> bool:
        """Whether `left` over on `path` is what the stock backend leaks."""
        left = re.sub(r"^threads: .* \(", "threads (", left)  # whatever their names
        known = (words for on, words in self.stock_leaves.items() if on in ("", path))
        return any(words in left for each in known for words in each)

    def within_in(self, phase: str) -> float:
        return self.within_s if isinstance(self.within_s, float) else self.within_s[phase]

    def outcome_in(self, phase: str, path: str = "") -> str:
        if isinstance(self.outcome, str):
            return self.outcome
        return self.outcome.get(path) or self.outcome[phase]


_OF_A_DEATH = {**dict.fromkeys(PHASES, "error"), "destroy": "leaves"}
_OF_A_STOP = {**dict.fromkeys(PHASES, "recovers"), "destroy": "leaves"}
_OF_A_LACK = {**dict.fromkeys(PHASES, "either"), "destroy": "leaves"}
_OF_A_CUT = _OF_A_DEATH
# A connected rank hears of it by the connection, within a promised time. Before, the group's time
# limit alone says that the others do not come, or that the store is out of reach.
_WITHIN_OF_A_CUT = {"init": 15.0, "between": 3.0, "collective": 3.0, "destroy": 8.0}

FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            name="SIGKILL",
            means="the rank is killed",
            ends=True,
            outcome=_OF_A_DEATH,
        ),
        Fault(
            name="SIGKILL with DataLoaders",
            means="killed while it and the others have 4 live DataLoader workers",
            ends=True,
            outcome=_OF_A_DEATH,
            phases=("between", "collective"),
        ),
        Fault(name="SIGSEGV", means="the rank crashes", ends=True, outcome=_OF_A_DEATH),
        Fault(
            name="exit(0)",
            means="the rank's program ends early, without a word",
            ends=True,
            outcome=_OF_A_DEATH,
        ),
        Fault(
            name="exception",
            means="the rank's program raises, and its process ends with status 1",
            ends=True,
            outcome=_OF_A_DEATH,
        ),
        Fault(
            name="SIGSTOP 5 s",
            means="the rank is stopped for 5 s and goes on",
            outcome=_OF_A_STOP,
            within_s=15.0,
            # Seen with stock NCCL 2.28.9 alone, too, on two of four ranks, not without the stop.
            stock_leaves=dict.fromkeys(("nccl-4", "nccl-stages-4"), ("descriptors: socket (1)",)),
        ),
        Fault(
            name="SIGTERM",
            means="the rank is asked to end; its program has no handler",
            ends=True,
            outcome=_OF_A_DEATH,
        ),
        Fault(
            name="no memory",
            means="the rank may not map any more memory (RLIMIT_AS)",
            paths=_ON_HOST,  # what a GPU's driver makes of it is its own affair
            phases=("init", "between", "destroy"),
            outcome=_OF_A_LACK,
            says=("memory", "alloc", "rank {victim}", "rank(s) {victim}", "map", "by peer"),
            stock_leaves={"": ("anon_inode:[eventpoll]",)},  # gloo
            within_s=20.0,
            timeout_s=10.0,
        ),
        Fault(
            name="no GPU memory",
            means="nothing is left of the memory of the rank's GPU",
            paths=_ON_GPUS,
            phases=("init", "between"),
            outcome="either",
            says=("memory", "rank {victim}", "NCCL"),
            within_s=20.0,
            timeout_s=10.0,
            alone=True,
            # A failed start leaves these; one that was NCCL's first in the process does so on the
            # victim of four ranks. NCCL 2.28.9 alone left the same, without peer access, too.
            stock_leaves={
                **dict.fromkeys(_BY_NCCL, ("descriptors: socket (6)",)),
                "gpu-4": ("descriptors: pipe, socket (12)", "threads (1)"),
                "cpu-reduce-4": ("descriptors: pipe, socket (12)", "threads (3)"),
            },
            in_start=("init",),
        ),
        Fault(
            name="no descriptors",
            means="the rank may not open any more files (RLIMIT_NOFILE)",
            phases=("init", "between", "destroy"),
            outcome=_OF_A_LACK,
            says=("Too many open files", "rank {victim}", "rank(s) {victim}", "by peer", "NCCL"),
            within_s=20.0,
            timeout_s=10.0,
            in_start=("init",),
        ),
        Fault(
            name="disk full",
            means="no byte can be written to the folder of the profile",
            phases=("init",),
            outcome="recovers",
            paths=(*_NATIVE, *_ON_GPUS),
            within_s=20.0,
        ),
        Fault(
            name="/dev/shm full",
            means="no byte can be written to /dev/shm",
            phases=("init", "between", "destroy"),
            # NCCL keeps a part of its own there.
            outcome={
                "init": "recovers",
                "between": "recovers",
                "destroy": "leaves",
                **dict.fromkeys(_BY_NCCL, "either"),
            },
            says=("memory", "space", "rank {victim}", "NCCL"),
            within_s=20.0,
        ),
        Fault(
            name="clock jump",
            means="the rank's wall clock jumps an hour ahead",
            phases=("init", *_WHILE_RUNNING),
            outcome="recovers",
            within_s=15.0,
        ),
        Fault(
            name="store death",
            means="the rendezvous store's process is killed",
            outcome={
                "init": "error",
                "between": "recovers",
                "collective": "recovers",
                "destroy": "leaves",
            },
            says=("store", "Store"),
            within_s=12.0,
            timeout_s=10.0,
        ),
        Fault(
            name="link down 1 s",
            means="the second node's cable is out for a second",
            network=True,
            paths=_BETWEEN_NODES,
            phases=_WHILE_RUNNING,
            outcome="either",
            says=("rank ",),
            within_s=15.0,
            again=False,
        ),
        Fault(
            name="link down",
            means="the second node's cable is out for good",
            network=True,
            paths=_BETWEEN_NODES,
            outcome=_OF_A_CUT,
            says=("rank ",),
            within_s=_WITHIN_OF_A_CUT,
            timeout_s=10.0,
            again=False,
        ),
        Fault(
            name="blackhole",
            means="all that goes to and from the second node is lost",
            network=True,
            paths=_BETWEEN_NODES,
            outcome=_OF_A_CUT,
            says=("rank ",),
            within_s=_WITHIN_OF_A_CUT,
            timeout_s=10.0,
            again=False,
        ),
    )
}


@dataclass(frozen=True, order=True)
class Case:
    """One cell of the matrix."""

    fault: str
    path: str
    phase: str

    def __str__(self) -> str:
        return f"{self.fault} | {self.path} | {self.phase}"

    @property
    def outcome(self) -> str:
        return FAULTS[self.fault].outcome_in(self.phase, self.path)

    @property
    def may_end(self) -> bool:
        """Whether a survivor's process may end, saying why, in place of an error."""
        path = PATHS[self.path]
        return path.may_end or (path.device == "cuda" and self.phase in FAULTS[self.fault].in_start)


CASES = [
    Case(fault.name, path, phase)
    for fault in FAULTS.values()
    for path in fault.paths
    for phase in fault.phases
]


def cases(patterns: Iterable[str] = ("*",), device: str | None = None) -> list[Case]:
    """The cases whose text, "fault | path | phase", matches a shell pattern.

    With `device`, "cpu" or "cuda", only those of paths there. Raises ValueError for a pattern that
    no case matches.
    """
    chosen = []
    here = [case for case in CASES if device in (None, PATHS[case.path].device)]
    for pattern in patterns:
        found = [case for case in here if fnmatch.fnmatchcase(str(case), pattern)]
        if not found:
            raise ValueError(f"no case matches {pattern!r}; a case reads like {str(CASES[0])!r}")
        chosen += [case for case in found if case not in chosen]
    return chosen
