"""Says what `bench` is to measure, and checks that before any process starts."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from deepytorch_core.bench.rivals import BASELINES, LIMITS, TORCH_BACKENDS, RivalLimits
from deepytorch_core.testing.emulation import Seat, Setting, parse_delay, parse_rate, seats

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
)
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int8",
    "uint8",
    "int32",
    "int64",
)
DEVICES = ("cpu", "cuda")
MODELS = ("mlp",)
MIN_PARAMETERS = 1024
MIN_BLOCKS = 5  # of each arm in `bench ddp`
DEFAULT_FACTOR = 4

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)


class BenchError(ValueError):
    """The benchmark cannot run as asked; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Emulated nodes for the ranks of a run: how many ranks each has, their order, and the links.

    `link`, `flow_cap` and `delay` are texts such as "1gbit" and "1ms"; "" is none.
    """

    ranks_per_node: tuple[int, ...]
    order: str = "block"
    link: str = ""
    flow_cap: str = ""
    delay: str = ""

    def __post_init__(self) -> None:
        try:
            self.setting()
            self.seats()
        except ValueError as error:
            raise BenchError(str(error)) from None

    def setting(self) -> Setting:
        return Setting(
            rate_bps=parse_rate(self.link) if self.link else None,
            flow_cap_bps=parse_rate(self.flow_cap) if self.flow_cap else None,
            delay_s=parse_delay(self.delay) if self.delay else 0.0,
        )

    def seats(self) -> list[Seat]:
        return seats(self.ranks_per_node, self.order)

    def to_dict(self) -> dict[str, Any]:
        """The part of a record's field `emulated` that the ranks' places are."""
        return {
            "nodes": len(self.ranks_per_node),
            "ranks_per_node": list(self.ranks_per_node),
            "order": self.order,
        }


@dataclass(frozen=True, kw_only=True)
class Run:
    """The base of every benchmark: its ranks, and the two arms.

    `library` is the compiled code of a baseline that has any, filled in by the launcher, as is
    `scratch` unless it is given: a folder for what `caches` keep.
    """

    WORKER: ClassVar[str]  # the module that runs as a rank
    NUM_STORES: ClassVar[int] = 0  # beyond the one over which the processes meet
    APART: ClassVar[bool] = False  # each arm has processes of its own
    SHARES_GPUS: ClassVar[bool] = False  # ranks of different nodes may have one GPU

    world_size: int
    device: str = "cpu"
    baseline: str = "gloo"
    timeout_s: int = 120
    ours: str = "deepytorch"  # another name measures that backend instead: how the tests run
    library: str = ""
    scratch: str = ""
    nodes: Nodes | None = None  # None: all ranks live on this machine as it is

    def __post_init__(self) -> None:
        _expect("device", self.device, DEVICES)
        _expect("baseline", self.baseline, BASELINES)
        if self.world_size < 1:
            raise BenchError(f"--world-size must be at least 1, not {self.world_size}")
        limits = LIMITS[self.baseline]
        if self.device == "cpu" and "cpu" not in limits.devices:
            raise BenchError(
                f"{limits.title} moves GPU memory only: use --baseline gloo, or --device cuda"
            )
        if self.device not in limits.devices:
            raise BenchError(
                f"{limits.title} is for {', '.join(limits.devices)} only: use --baseline gloo or "
                "nccl here"
            )
        if self.nodes is not None:
            self._check_nodes(self.nodes)

    def _check_nodes(self, nodes: Nodes) -> None:
        if sum(nodes.ranks_per_node) != self.world_size:
            raise BenchError(
                f"--world-size {self.world_size} is not what the nodes have, "
                f"{' + '.join(map(str, nodes.ranks_per_node))}: leave it out"
            )
        if self.baseline not in TORCH_BACKENDS:
            raise BenchError(
                f"{LIMITS[self.baseline].title} does not reach emulated nodes: use --baseline "
                f"{' or '.join(TORCH_BACKENDS)}"
            )

    @property
    def seats(self) -> list[Seat]:
        """The place where each rank lives; without emulated nodes all on one."""
        return seats((self.world_size,)) if self.nodes is None else self.nodes.seats()

    def device_number(self, rank: int, found: int) -> int:
        """The number of the rank's GPU on a machine that has `found`.

        Ranks of different nodes share one where there are no more. Raises BenchError when there are
        fewer than that, or this benchmark has them not shared.
        """
        seat = self.seats[rank]
        if found >= self.world_size:
            return seat.device
        if not (self.SHARES_GPUS and self.nodes and found >= max(self.nodes.ranks_per_node)):
            raise BenchError(
                f"--world-size {self.world_size} needs as many GPUs; this machine has {found}"
            )
        return seat.local_rank

    @property
    def num_processes(self) -> int:
        """How many processes the launcher starts; they are numbered from 0."""
        return self.world_size

    @property
    def baseline_settings(self) -> dict[str, str]:
        """The record's words on the baseline beyond its name."""
        return {}

    def caches(self, name: str) -> dict[str, str]:
        """Environment variables of processes that find no compiled code but each other's."""
        names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        return {variable: f"{self.scratch}/{name}/{folder}" for variable, folder in names.items()}

    def environment(self, process: int, store_ports: Sequence[int]) -> dict[str, str]:
        """Environment variables of one process; the launcher serves `NUM_STORES` stores for it."""
        return {}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        nodes = fields.pop("nodes")
        return cls(**_tuples(fields), nodes=Nodes(**_tuples(nodes)) if nodes else None)


@dataclass(frozen=True, kw_only=True)
class CollectivesJob(Run):
    """`bench collectives`. `iterations` 0 adapts to the time.

    `sizes` are bytes as nccl-tests counts them, or, with `per_rank`, those of one rank's part.
    `direct` calls a group's backend past torch.distributed's Python functions and dispatcher.
    `cuda_graph` times replays of captured calls. `beside_compute` times calls together with matrix
    products that take about as long as the baseline's.
    """

    WORKER = "deepytorch_core.bench.collectives"
    SHARES_GPUS = True

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    per_rank: bool = False
    registered: bool = False
    direct: bool = False
    cuda_graph: bool = False
    beside_compute: bool = False
    iterations: int = 0
    budget_s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for op in self.ops:
            _expect("operation", op, OPERATIONS)
        for dtype in self.dtypes:
            _expect("dtype", dtype, DTYPES)
        if self.iterations < 0:
            raise BenchError(f"--iterations must be 0 (adaptive) or more, not {self.iterations}")
        if not (self.ops and self.sizes and self.dtypes):
            raise BenchError("nothing to measure: --ops, --sizes and --dtype need a value each")
        limits = LIMITS[self.baseline]
        if self.cuda_graph:
            self._check_graphs(limits)
        if self.beside_compute and (self.device != "cuda" or self.APART):
            raise BenchError("--beside-compute is for GPUs of one machine: give --device cuda")
        for option, asked, offered in (
            ("--ops", self.ops, limits.ops),
            ("--dtype", self.dtypes, limits.dtypes),
        ):
            lacking = [name for name in asked if offered is not None and name not in offered]
            if lacking:
                raise BenchError(
                    f"{limits.title} has no {', '.join(lacking)}: limit {option} to "
                    f"{', '.join(offered or ())}, or use --baseline "
                    f"{'gloo' if 'cpu' in limits.devices else 'nccl'}"
                )

    def _check_graphs(self, limits: RivalLimits) -> None:
        if self.device != "cuda":
            raise BenchError("--cuda-graph captures work of GPUs: give --device cuda too")
        if limits.backend != "nccl":
            raise BenchError(f"{limits.title} cannot be captured: use --baseline nccl")
        if "barrier" in self.ops:
            raise BenchError("--cuda-graph: a barrier waits on the CPU: leave it out of --ops")


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Run):
    """A training: `parameters` is about how many the model has, `batch_size` is a rank's."""

    parameters: int = 4 << 20
    batch_size: int = 8
    steps: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size < 2:
            raise BenchError(f"one rank reduces nothing: --world-size {self.world_size}")
        if self.parameters < MIN_PARAMETERS:
            raise BenchError(
                f"--parameters must be at least {MIN_PARAMETERS}, not {self.parameters}"
            )
        if self.batch_size < 1:
            raise BenchError(f"--batch-size must be at least 1, not {self.batch_size}")
        if self.steps < MIN_BLOCKS:
            raise BenchError(
                f"--steps must be at least {MIN_BLOCKS}, one for each block, not {self.steps}"
            )


@dataclass(frozen=True, kw_only=True)
class DdpJob(TrainingRun):
    """`bench ddp`."""

    WORKER = "deepytorch_core.bench.ddp"

    model: str = "mlp"

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect("model", self.model, MODELS)
        if self.baseline not in TORCH_BACKENDS:
            raise BenchError(
                f"DistributedDataParallel has no {self.baseline!r}: use --baseline gloo, or nccl "
                "with --device cuda"
            )


def parse_ranks_per_node(text: str, num_nodes: int) -> tuple[int, ...]:
    """Ranks of each of `num_nodes` nodes, of "4" (each) or "4,2"."""
    counts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in counts):
        raise BenchError(f"--ranks-per-node {text!r}: write 4, or 4,2 for nodes that differ")
    if num_nodes < 1 or len(counts) not in (1, num_nodes):
        raise BenchError(f"--ranks-per-node {text} does not fit --nodes {num_nodes}")
    return tuple(int(part) for part in counts) * (num_nodes if len(counts) == 1 else 1)


def parse_size(text: str) -> int:
    """Bytes of "512", "4K", "1M" or "2G" (binary units; a trailing B or iB is allowed)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BenchError(f"{text!r} is no size: write bytes or 4K, 1M, 2G")
    return int(match.group(1)) * _UNITS[match.group(2).upper()]


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes of "1K:64M[:factor]", of "4K,1M" or of both mixed, ascending, each once.

    A range multiplies by `factor` (default 4) from its start; its end is always included.
    """
    sizes: set[int] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        first, *rest = item.split(":")
        if not rest:
            sizes.add(parse_size(first))
            continue
        if len(rest) > 2:
            raise BenchError(f"{item!r} is no range: write first:last or first:last:factor")
        size, last = parse_size(first), parse_size(rest[0])
        factor = _parse_factor(rest[1]) if len(rest) == 2 else DEFAULT_FACTOR
        if not 0 < size <= last:
            raise BenchError(f"{item!r} is empty: a range goes up from a size above 0")
        while size < last:
            sizes.add(size)
            size *= factor
        sizes.add(last)
    return tuple(sorted(sizes))


def parse_variables(text: str) -> tuple[str, ...]:
    """The settings of "NAME=VALUE,NAME=VALUE", each as it stands; BenchError for anything else."""
    settings = parse_names(text)
    for setting in settings:
        if re.fullmatch(r"[A-Za-z_]\w*=.*", setting) is None:
            raise BenchError(f"--baseline-env {setting!r}: write NAME=VALUE,NAME=VALUE")
    return settings


def parse_names(text: str) -> tuple[str, ...]:
    """The names of a comma-separated list, each once, in order."""
    return tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))


def format_size(num_bytes: int) -> str:
    """The shortest exact form that `parse_size` reads back."""
    for unit in ("G", "M", "K"):
        if num_bytes and num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return str(num_bytes)


def _parse_factor(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise BenchError(f"the factor of a range of sizes must be a number from 2 on, not {text!r}")
    return int(text)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples they were."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def _expect(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise BenchError(f"unknown {what} {name!r}; known: {', '.join(known)}")
