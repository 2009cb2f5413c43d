"""Why a plan was chosen: runs one collective on ranks of this machine and asks the tuner.

The ranks may live on emulated nodes; then the answer also says what the plan does between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core.base.console import say_once
from deepytorch_core.bench.job import DTYPES, BenchError, Nodes, format_size
from deepytorch_core.metering import counts
from deepytorch_core.report.explain_nodes import BetweenNodes
from deepytorch_core.report.explain_stages import Stages

if TYPE_CHECKING:
    import torch

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)
MAX_BYTES = 1 << 30
TUNE = ("auto", "off", "force")

_SPLIT = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
_TIMEOUT_S = 120.0
_PARAMETERS = ("algorithm", "chunk_bytes", "channels", "threads", "delegated")


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """One collective of `bytes`, as nccl-tests counts them: over all ranks' shares where ranks have
    shares. Raises BenchError, listing what is valid."""

    op: str
    bytes: int
    dtype: str = "float32"
    world_size: int = 2
    tune: str = "auto"
    nodes: Nodes | None = None  # emulated ones; None: all ranks live on this machine as it is

    def __post_init__(self) -> None:
        for what, name, known in (
            ("operation", self.op, OPERATIONS),
            ("dtype", self.dtype, DTYPES),
            ("tune", self.tune, TUNE),
        ):
            if name not in known:
                raise BenchError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        if not 0 < self.bytes <= MAX_BYTES:
            raise BenchError(
                f"a size of {self.bytes} bytes: give one from 1 to {format_size(MAX_BYTES)}"
            )
        if self.world_size < 2:
            raise BenchError(f"--world-size must be at least 2, not {self.world_size}")
        if self.nodes is not None and sum(self.nodes.ranks_per_node) != self.world_size:
            raise BenchError(
                f"--world-size {self.world_size} is not what the nodes have, "
                f"{' + '.join(map(str, self.nodes.ranks_per_node))}: leave it out"
            )


@dataclass(frozen=True)
class PlanCandidate:
    """A plan that was tried: median time and quartiles in microseconds; `speedup` is the stock
    backend's time (gloo's, on GPUs NCCL's) over this one's, None where that was not tried.
    `channels` of `threads` are a GPU kernel's grid, 0 on the host; of cpu_reduce, each rank's
    slots, of `chunk_bytes`, and its workers. `delegated` percent of the message are the stock
    backend's at the same time."""

    algorithm: str
    chunk_bytes: int
    channels: int
    threads: int
    delegated: int
    median_us: float
    spread_us: tuple[float, float]
    speedup: float | None
    chosen: bool


@dataclass(frozen=True)
class DeviceAnswer:
    """The decision of groups of `ranks` GPUs by the profile; sizes as in Answer."""

    device: str
    ranks: int
    buffer_bytes: int
    measured_bytes: int
    algorithm: str
    reason: str
    candidates: tuple[PlanCandidate, ...]


@dataclass(frozen=True)
class Answer:
    """`source` says where the times are from; sizes in bytes of one rank's buffer or share.

    On emulated nodes `emulated` is their setting, `between_nodes` what a native plan does, and
    `stages` what GPUs on such nodes may do.
    """

    op: str
    bytes: int
    dtype: str
    world_size: int
    buffer_bytes: int
    algorithm: str
    chunk_bytes: int | None
    reason: str
    source: str
    measured_bytes: int | None
    candidates: tuple[PlanCandidate, ...]
    devices: tuple[DeviceAnswer, ...] = ()
    emulated: dict[str, Any] | None = None
    between_nodes: BetweenNodes | None = None
    stages: Stages | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def ask(question: PlanQuestion) -> Answer:
    """Starts the ranks, lets them run the collective once, and reads what the tuner decided.

    Raises RuntimeError: RankError when a rank fails, EmulationError where nodes can't be emulated.
    """
    from deepytorch_core import testing
    from deepytorch_core.base import config
    from deepytorch_core.c10d import adapter, backend
    from deepytorch_core.testing.emulation import Network, Placement

    env = {"DEEPYTORCH_TUNE": question.tune}
    profile = config.profile_path()
    if profile is not None:
        env["DEEPYTORCH_PROFILE"] = str(profile)
    nodes = question.nodes
    emulated = None
    with contextlib.ExitStack() as stack:
        placement = None
        if nodes is not None:
            network = stack.enter_context(Network(len(nodes.ranks_per_node), nodes.setting()))
            placement = Placement(network, nodes.seats())
            emulated = {**nodes.to_dict(), **network.to_dict()}
            # The nodes have no name server, at which torch wonders.
            env["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        adapter.load()  # compiled once here, not by every rank against its time limit
        plans, calls, groups = testing.spawn_ranks(
            run_once,
            question.world_size,
            question,
            backend=backend.NAME,
            env=env,
            timeout_s=_TIMEOUT_S,
            fresh=True,
            placement=placement,
        )[0]
    found = answer(question, plans, calls)
    if nodes is None:
        return dataclasses.replace(found, devices=device_answers(question, _device_plans(profile)))
    between = BetweenNodes.of(found.op, found.algorithm, groups)
    stages = Stages.of(question.op, question.bytes, nodes.ranks_per_node)
    return dataclasses.replace(found, emulated=emulated, between_nodes=between, stages=stages)


def _device_plans(profile: Path | None) -> Sequence[Mapping[str, Any]]:
    from deepytorch_core import _core

    try:
        return _core.device_plans(str(profile)) if profile is not None else []
    except RuntimeError as error:  # what the ranks do without, explaining can
        say_once(f"nothing about GPUs: {profile}: {error}", level="warning")
        return []


def answer(
    question: PlanQuestion,
    plans: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]],
) -> Answer:
    """Answer the question from `_core.plans()` and `_core.statistics()` of rank 0."""
    share = question.bytes // _shares(question.op, question.world_size)
    (call,) = [row for row in calls if row["op"] == question.op]
    plan = next(
        (plan for plan in plans if not plan["device"] and counts.serves(plan, question.op, share)),
        None,
    )
    common = {
        "op": question.op,
        "bytes": question.bytes,
        "dtype": question.dtype,
        "world_size": question.world_size,
        "buffer_bytes": share,
        "algorithm": call["algorithm"],
        "reason": call["reason"],
    }
    if plan is None or plan["algorithm"] is None:
        return Answer(
            **common,
            chunk_bytes=None,
            source="rule of thumb",
            measured_bytes=None,
            candidates=(),
        )
    return Answer(
        **common,
        chunk_bytes=plan["chunk_bytes"],
        source=plan["source"],
        measured_bytes=plan["measured_bytes"],
        candidates=_candidates(plan),
    )


def device_answers(
    question: PlanQuestion, plans: Sequence[Mapping[str, Any]]
) -> tuple[DeviceAnswer, ...]:
    """Answer the question from `_core.device_plans()`, for each kind of group they are of."""
    found = []
    for plan in plans:
        share = question.bytes // _shares(question.op, plan["ranks"])
        if not counts.serves(plan, question.op, share) or plan["algorithm"] is None:
            continue
        found.append(
            DeviceAnswer(
                device=plan["device"],
                ranks=plan["ranks"],
                buffer_bytes=share,
                measured_bytes=plan["measured_bytes"],
                algorithm=plan["algorithm"],
                reason=plan["reason"],
                candidates=_candidates(plan),
            )
        )
    return tuple(found)


def _candidates(plan: Mapping[str, Any]) -> tuple[PlanCandidate, ...]:
    times = plan["candidates"]
    stock = next((time["median_us"] for time in times if time["algorithm"] == "delegate"), None)
    return tuple(
        PlanCandidate(
            algorithm=time["algorithm"],
            chunk_bytes=time["chunk_bytes"],
            channels=time["channels"],
            threads=time["threads"],
            delegated=time["delegated"],
            median_us=time["median_us"],
            spread_us=(time["spread_us"][0], time["spread_us"][1]),
            speedup=None if stock is None else stock / time["median_us"],
            chosen=all(time[name] == plan[name] for name in _PARAMETERS),
        )
        for time in times
    )


def run_once(
    rank: int, world_size: int, question: PlanQuestion
) -> tuple[list[Any], list[Any], list[Any]]:
    """A rank's part: carries the collective out once, on zeros.

    Returns what the tuner then knows, what was called, and what was done between nodes.
    """
    import torch
    import torch.distributed as dist

    from deepytorch_core import _core
    from deepytorch_core.bench.ops import OPERATIONS as MEASURED

    dtype: torch.dtype = getattr(torch, question.dtype)
    share = max(1, question.bytes // dtype.itemsize // _shares(question.op, world_size))
    group = dist.group.WORLD
    assert group is not None

    def zeros(parts: int) -> torch.Tensor:
        return torch.zeros(share * parts, dtype=dtype, device="cpu")

    mine = zeros(1)
    parts = list(zeros(world_size).chunk(world_size)) if rank == 0 else None
    rooted: dict[str, Callable[[], object]] = {
        "reduce": lambda: dist.reduce(mine, group_dst=0, group=group),
        "gather": lambda: dist.gather(mine, parts, group_dst=0, group=group),
        "scatter": lambda: dist.scatter(mine, parts, group_src=0, group=group),
    }
    if question.op in rooted:
        rooted[question.op]()
    else:
        op = MEASURED[question.op]
        source = zeros(op.input_shares or world_size)
        op.call(source, source if op.in_place else zeros(op.output_shares or world_size), group)
    return list(_core.plans()), list(_core.statistics()), list(_core.node_groups())


def _shares(op: str, ranks: int) -> int:
    return ranks if op in _SPLIT else 1
