"""The torch-free native core (csrc/bindings)."""

from collections.abc import Sequence
from typing import Any, TypedDict

from typing_extensions import Buffer

__version__: str
abi_version: int

class StatisticsRow(TypedDict):
    group: str
    op: str
    algorithm: str
    reason: str
    calls: int
    bytes: int
    time_us: float

class RegisteredMemory(TypedDict):
    in_use_bytes: int
    reserved_bytes: int

class Candidate(TypedDict):
    algorithm: str
    chunk_bytes: int
    median_us: float
    spread_us: tuple[float, float]

class TunedPlan(TypedDict):
    op: str
    ranks: int
    oversubscribed: bool
    first_bytes: int
    last_bytes: int
    measured_bytes: int
    algorithm: str | None
    chunk_bytes: int
    reason: str
    source: str
    candidates: list[Candidate]

def dpt_api() -> Any: ...
def plans() -> list[TunedPlan]: ...
def statistics() -> list[StatisticsRow]: ...
def is_registered(address: int, bytes: int) -> bool: ...
def registered_memory() -> RegisteredMemory: ...
def trim_registered_memory() -> int: ...
def reset_statistics() -> None: ...
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
