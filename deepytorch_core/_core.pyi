"""The torch-free native core (csrc/bindings)."""

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from typing_extensions import Buffer

__version__: str
abi_version: int
gpu_architectures: str
staged_bytes: int

class StatisticsRow(TypedDict):
    group: str
    op: str
    algorithm: str
    reason: str
    calls: int
    bytes: int
    time_us: float

class RankArrivals(TypedDict):
    rank: int
    times_last: int
    cost_us: float

class GroupArrivals(TypedDict):
    group: str
    operations: int
    waited_us: float
    ranks: list[RankArrivals]

class Candidate(TypedDict):
    algorithm: str
    chunk_bytes: int
    channels: int
    threads: int
    delegated: int
    median_us: float
    spread_us: tuple[float, float]

class TunedPlan(TypedDict):
    op: str
    ranks: int
    oversubscribed: bool
    device: str
    first_bytes: int
    last_bytes: int
    measured_bytes: int
    algorithm: str | None
    chunk_bytes: int
    channels: int
    threads: int
    delegated: int
    reason: str
    source: str
    candidates: list[Candidate]

class NodePhase(TypedDict):
    where: str
    what: str
    bytes: int

class NodePlan(TypedDict):
    op: str
    algorithm: str
    way: str
    rails: list[list[int]]
    pieces: int
    piece_bytes: int
    under_way: int
    sent_bytes: int
    phases: list[NodePhase]

class NodeGroup(TypedDict):
    group: str
    nodes: list[list[int]]
    sockets: int
    plans: list[NodePlan]

class RegisteredMemory(TypedDict):
    in_use_bytes: int
    reserved_bytes: int

class DeviceMemory(TypedDict):
    chunk_bytes: int
    shared_bytes: int

class Store(Protocol):
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, timeout_ms: int, /) -> bytes | None: ...

class Communicator:
    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        name: str,
        timeout_s: float = ...,
        tune: str = ...,
        profile: str = ...,
        staging_bytes: int = ...,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, dtype: str, op: str, input: Buffer, output: Buffer) -> None: ...
    def all_gather(self, dtype: str, input: Buffer, outputs: Sequence[Buffer]) -> None: ...
    def broadcast(self, dtype: str, buffer: Buffer, root: int) -> None: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...

def dpt_api() -> Any: ...
def arrivals() -> list[GroupArrivals]: ...
def set_variable(name: str, value: str) -> None: ...
def identify_process(job: str, rank: int, world_size: int, signal: int) -> None: ...
def describe_group(name: str, description: str) -> None: ...
def longest_wait_s() -> float: ...
def flight_record_fd() -> int: ...
def pause_flight_record(paused: bool) -> None: ...
def plans() -> list[TunedPlan]: ...
def node_groups() -> list[NodeGroup]: ...
def spent_on_tuning_s() -> float: ...
def device_plans(path: str) -> list[TunedPlan]: ...
def statistics() -> list[StatisticsRow]: ...
def is_registered(address: int, bytes: int) -> bool: ...
def registered_memory() -> RegisteredMemory: ...
def trim_registered_memory() -> int: ...
def why_no_device_memory() -> str: ...
def device_memory(device: int) -> DeviceMemory: ...
def is_shared_on_device(address: int, bytes: int, device: int) -> bool: ...
def peer_mappings() -> int: ...
def landing_calls() -> int: ...
def reset_statistics() -> None: ...
def dead_process(mark: str) -> int | None: ...
def topology_json(*, root: str = ...) -> str: ...
def normalize_topology_json(text: str) -> str: ...
def usable_cores() -> int: ...
def reduce(
    dtype: str,
    op: str,
    sources: Sequence[Buffer],
    destination: Buffer,
    factors: Sequence[float] = ...,
    *,
    second_destination: Buffer | None = ...,
) -> None: ...
def can_reduce(dtype: str, op: str) -> bool: ...
def reduce_isa() -> str: ...
def limit_reduce_isa(isa: str) -> str: ...
