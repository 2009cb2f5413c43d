"""DeepSpeed's bucket sizes and the way of its gradients, where the configuration leaves them open.

A bucket that is too small pays latency again and again; one that is too big starts late, so it
can't overlap, and costs memory. So the smallest size is chosen with which the buckets of a step
take nearly as little time as with the best size. The ranks measure together, and rank 0's times
decide. Where the backward pass waits for buckets anyway DeepSpeed's own size, or one for all of the
model, is a candidate too: a job must not have more of them than stock for nothing.

ZeRO-1 and 2 by default sum gradients on all ranks, though each is kept by one. Reducing them to
that owner alone (`use_multi_rank_bucket_allreduce` false) sends half as much through a ring, in as
many calls as a bucket has owners. It is chosen where that is faster.

ZeRO-2 by default also lets the backward pass wait for each bucket. With `overlap_comm` the two run
at the same time, on two streams of a GPU, at the price of a second bucket's memory. What they take
from each other differs, so it is measured: matrix products beside buckets. DeepSpeed waits for the
whole GPU before it reduces to an owner on a second stream, so it is one or the other.

`allgather_bucket_size` is not among them: DeepSpeed gathers each group of parameters in one piece
since torch has `all_gather_into_tensor`, and reads the size no more.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepytorch_core.base.config import Options
from deepytorch_core.base.console import say_once
from deepytorch_core.tune import in_force

Kind = tuple[torch.dtype, torch.device]

# In elements, as DeepSpeed counts.
CANDIDATES = (1 << 22, 1 << 24, 1 << 26)
# DeepSpeed's own for reductions. Not measured, as it would take gigabytes and, on slow links,
# seconds: at such sizes what an element takes more is known from smaller ones.
DEFAULT = 500_000_000
# DeepSpeed's own Python and its launches take so long for a bucket of ZeRO-2. It is 0.2 to 0.3 ms
# on a CPU, and 0.6 to 0.7 ms on an H100's host. It can't be measured before there is an engine.
PER_BUCKET_S = 0.5e-3
# A size this much slower than the best is as good as the best.
NEARLY = 1.1
_NUM_REPEATS = 3
# No further size is tried for one collective once its timed calls have taken this long. A first
# call is not among them: it may connect, and settle for seconds who carries out such sizes.
_LIMIT_S = 1.0

_ALL_REDUCE = "use_multi_rank_bucket_allreduce"
_OVERLAP = "overlap_comm"
# Memory or streams of these take part in an overlap in their own ways: DeepSpeed's default stays.
_NOT_BESIDE = ("offload_optimizer", "cpu_offload", "zenflow")
_NUM_BESIDE = 4  # buckets that are reduced beside matrix products
_MATRIX = 4096  # rows and columns of those
_PREFETCH = ("stage3_prefetch_bucket_size", "prefetch_bucket_size")
# `deepytorch tune` calls them so.
_KNOBS = {
    "reduce_bucket_size": "zero_reduce_bucket",
    **dict.fromkeys(_PREFETCH, "zero_prefetch_bucket"),
}


@dataclass(frozen=True)
class BucketChoice:
    """A size in elements, why, and which one if buckets run beside the backward pass."""

    elements: int
    reason: str
    beside: int


def fill_bucket_sizes(
    configuration: dict[str, Any],
    model: torch.nn.Module,
    options: Options,
    device: torch.device,
    *,
    may_overlap: bool = False,
) -> dict[str, Any]:
    """The configuration with the bucket sizes and way of gradients that it leaves open; collective.

    A size is left open where it is missing or "auto". Stages 1 to 3 of ZeRO have such sizes. With
    tune=off, deterministic=on or one rank DeepSpeed's own defaults stay in force. A number that is
    given is never touched, nor is `configuration` itself. `device` is where collectives take place;
    `overlap_comm` is left open on GPUs, in ZeRO-2 without offloaded optimizer states, if
    `may_overlap`: this DeepSpeed's overlapped reduction waits for each stream that filled a bucket.
    """
    zero = configuration.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if not isinstance(zero, dict) or stage not in (1, 2, 3) or dist.get_world_size() == 1:
        return configuration
    tuned = _tuned(zero, stage, _sizes_left_open(zero, stage))
    if tuned:
        words = ", ".join(f"{key}={json.dumps(value)}" for key, value in tuned.items())
        say_once(f"{words}: by deepytorch tune")
        zero = {**zero, **tuned}
        configuration = {**configuration, "zero_optimization": zero}
    open_sizes = _sizes_left_open(zero, stage)
    is_way_open = stage < 3 and _ALL_REDUCE not in zero and zero.get("reduce_scatter", True)
    is_overlap_open = may_overlap and _is_overlap_open(configuration, device)
    open_keys = [*open_sizes, *([_ALL_REDUCE] if is_way_open else [])]
    open_keys += [_OVERLAP] if is_overlap_open else []
    if not open_keys:
        return configuration
    repeatable = options.deterministic or torch.are_deterministic_algorithms_enabled()
    if options.tune == "off" or repeatable:
        why = "tune=off" if options.tune == "off" else "a deterministic run"
        say_once(f"{', '.join(open_keys)}: DeepSpeed's defaults, as {why} measures nothing")
        return configuration
    total = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in _trained(model))
    kind = _dtype(configuration, model), device
    waits = stage < 3 and not zero.get(_OVERLAP)
    choices = {key: _choose(_operation(key, stage), total, kind, waits=waits) for key in open_sizes}
    filled: dict[str, Any] = {**zero, **{key: choice.elements for key, choice in choices.items()}}
    size = filled["reduce_bucket_size"]
    # DeepSpeed says what is wrong with a size that is no number.
    if (is_way_open or is_overlap_open) and isinstance(size, (int, float)):
        size_beside = (
            choices["reduce_bucket_size"].beside if "reduce_bucket_size" in choices else size
        )
        bucket = _Bucket(max(1, min(int(size), total)), max(1, total), kind)
        to_all = to_owners = bucket.measure_to_all()
        if is_way_open:
            to_owners = bucket.measure_to_owners()
        beside = dataclasses.replace(bucket, elements=max(1, min(int(size_beside), total)))
        # The last bucket has nothing to overlap with, and of two the first has little.
        is_overlap_open = is_overlap_open and total >= 2 * beside.elements
        if is_overlap_open and beside.is_faster_beside(min(to_all, to_owners), to_all):
            filled |= {_OVERLAP: True, "reduce_bucket_size": size_beside}
        elif is_way_open:
            filled[_ALL_REDUCE] = not bucket.is_faster_to_owners(to_owners, to_all)
    for key, choice in choices.items():
        say_once(f"{key} is {filled[key]} elements: {choice.reason}")
    return {**configuration, "zero_optimization": filled}


def _tuned(zero: Mapping[str, Any], stage: int, open_keys: list[str]) -> dict[str, int]:
    """Return the open settings that `deepytorch tune` found, or tries in this job."""
    found: dict[str, int] = {}
    for key in ["reduce_bucket_size", *([_prefetch_key(zero)] if stage == 3 else [])]:
        fixed = "" if key in open_keys else f"DeepSpeed's configuration gives {key}"
        size = in_force.ask(_KNOBS[key], why_fixed=fixed)
        if size is not None:
            found[key] = size
    if stage in (1, 2):
        why_fixed = f"DeepSpeed's configuration gives {_ALL_REDUCE}" if _ALL_REDUCE in zero else ""
        if not zero.get("reduce_scatter", True):
            why_fixed = "DeepSpeed's configuration has reduce_scatter off"
        to_owner = in_force.ask("zero_reduce_to_owner", why_fixed=why_fixed)
        if to_owner is not None:
            found[_ALL_REDUCE] = not to_owner
    return found


def _sizes_left_open(zero: Mapping[str, Any], stage: int) -> list[str]:
    keys = ["reduce_bucket_size"]
    if stage == 3:
        keys.append(_prefetch_key(zero))
    return [key for key in keys if zero.get(key, "auto") == "auto"]


def _prefetch_key(zero: Mapping[str, Any]) -> str:
    return next((key for key in _PREFETCH if key in zero), _PREFETCH[0])


def _operation(key: str, stage: int) -> str:
    """The collective that DeepSpeed carries such buckets with, by default."""
    if key != "reduce_bucket_size":
        return "all_gather"
    return "reduce_scatter" if stage == 3 else "all_reduce"


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _dtype(configuration: Mapping[str, Any], model: torch.nn.Module) -> torch.dtype:
    """Return DeepSpeed's type of communication by default: the model's in training."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        given = configuration.get(section)
        if isinstance(given, Mapping) and given.get("enabled"):
            return dtype
    return next((parameter.dtype for parameter in _trained(model)), torch.float32)


def _is_overlap_open(configuration: Mapping[str, Any], device: torch.device) -> bool:
    zero = configuration["zero_optimization"]
    return bool(
        device.type == "cuda"
        and zero.get("stage") == 2
        and zero.get(_OVERLAP) is None
        and zero.get(_ALL_REDUCE, True)
        and zero.get("reduce_scatter", True)
        and zero.get("contiguous_gradients", True)
        and not any(zero.get(key) for key in _NOT_BESIDE)
    )


@dataclass(frozen=True)
class _Bucket:
    """A full bucket of gradients, of `total` elements of the model; times are in seconds.

    Of more elements than any candidate has, as many as the largest are measured.
    """

    elements: int
    total: int
    kind: Kind

    @property
    def measured(self) -> int:
        return min(self.elements, CANDIDATES[-1])

    @property
    def num_owners(self) -> int:
        """As DeepSpeed cuts it: a rank owns a connected share of all elements."""
        num_ranks = dist.get_world_size()
        return min(math.ceil(self.elements * num_ranks / self.total), num_ranks)

    def measure_to_all(self) -> float:
        return _measure(_call("all_reduce", self.measured, self.kind), self.kind[1])[0]

    def measure_to_owners(self) -> float:
        call = _reduce_to(self.num_owners, self.measured, self.kind)
        return _measure(call, self.kind[1])[0]

    def is_faster_to_owners(self, to_owners: float, to_all: float) -> bool:
        """Says so, if it is."""
        is_faster = NEARLY * to_owners <= to_all
        if is_faster:
            say_once(
                f"{_ALL_REDUCE} is false: {self.measured} elements take {1e3 * to_owners:.3g} ms "
                f"to their {self.num_owners} owner(s), {1e3 * to_all:.3g} ms to all ranks"
            )
        return is_faster

    def is_faster_beside(self, alone: float, to_all: float) -> bool:
        """Whether buckets beside matrix products, to all ranks, add less than `alone` each.

        Says so, if they do. The products take about as long as the buckets, `to_all` each.
        """
        dtype, device = self.kind
        # Random, as products of zeros take less power and time; the program's own numbers stay.
        own = torch.Generator(device).manual_seed(0)
        square = torch.randn(_MATRIX, _MATRIX, dtype=dtype, device=device, generator=own)
        out = torch.empty_like(square)
        product, _ = _measure(lambda: torch.mm(square, square, out=out), device)
        num_products = max(1, math.ceil(_NUM_BESIDE * to_all / product))
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        reduce = _call("all_reduce", self.measured, self.kind)

        def compute() -> None:
            for _ in range(num_products):
                torch.mm(square, square, out=out)

        def beside() -> None:
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(_NUM_BESIDE):
                    reduce()
            compute()
            torch.cuda.current_stream(device).wait_stream(side)

        computing, _ = _measure(compute, device)
        together, _ = _measure(beside, device)
        added = max(0.0, together - computing) / _NUM_BESIDE
        is_faster = NEARLY * added <= alone
        if is_faster:
            say_once(
                f"{_OVERLAP} is true: beside matrix products a bucket of {self.measured} elements "
                f"adds {1e3 * added:.3g} ms, alone it takes {1e3 * alone:.3g} ms"
            )
        return is_faster


def _choose(op: str, total: int, kind: Kind, *, waits: bool = False) -> BucketChoice:
    """Measure `op` at the candidate sizes that a model of `total` elements can fill.

    `waits`: the backward pass does, so that larger buckets cost it no overlap.
    """
    sizes = [size for size in CANDIDATES if size < total]
    if len(sizes) < len(CANDIDATES):
        sizes.append(CANDIDATES[len(sizes)])  # it holds the whole model
    if len(sizes) == 1:
        return BucketChoice(sizes[0], f"that holds all {total} of the model", sizes[0])
    times: dict[int, float] = {}
    calls: dict[int, float] = {}
    spent = 0.0
    for size in sizes:
        elements = min(size, total)
        fastest, took = _measure(_call(op, elements, kind), kind[1])
        calls[elements] = fastest
        times[size] = step_s(total, size, fastest)
        spent += took
        if spent > _LIMIT_S:
            break
    beside = smallest_good(times)
    largest = CANDIDATES[-1]
    if waits and total > largest and largest in calls:
        size = min(DEFAULT, total)
        times[size] = step_s(total, size, further(calls, size))
    seen = ", ".join(f"{1e3 * took:.3g} ms with {size}" for size, took in times.items())
    return BucketChoice(smallest_good(times), f"a step's buckets for {op} take {seen}", beside)


def step_s(total: int, size: int, call_s: float) -> float:
    """Seconds of a step for the buckets of `size` that `total` elements fill, one after the other.

    `call_s` is what the collective takes for a full one, or for all if there are fewer. DeepSpeed's
    own work comes on top for each, full or not.
    """
    return math.ceil(total / size) * PER_BUCKET_S + max(1.0, total / size) * call_s


def further(calls: Mapping[int, float], elements: int) -> float:
    """Seconds of a call for more elements than those of `calls`, by the largest two of them."""
    (fewer, less_s), (most, most_s) = sorted(calls.items())[-2:]
    return most_s + max(0.0, most_s - less_s) / (most - fewer) * (elements - most)


def smallest_good(times: Mapping[int, float]) -> int:
    """The smallest size whose time is nearly the best."""
    best = min(times.values())
    return min(size for size, seconds in times.items() if seconds <= NEARLY * best)


def _measure(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Rank 0's fastest time of one call, and what all timed ones took, in seconds, on all ranks."""
    samples = []
    for _ in range(1 + _NUM_REPEATS):
        begun = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        samples.append(time.perf_counter() - begun)
    # The first one connects, calibrates and touches the memory.
    timed = samples[1:]
    told = torch.tensor([min(timed), sum(timed)], dtype=torch.float32, device=device)
    dist.broadcast(told, src=0)
    fastest, took = told.tolist()
    return fastest, took


def _call(op: str, elements: int, kind: Kind) -> Callable[[], object]:
    dtype, device = kind
    num_ranks = dist.get_world_size()
    share = max(1, elements // num_ranks)
    part = torch.zeros(share, dtype=dtype, device=device)
    whole = torch.zeros(share * num_ranks, dtype=dtype, device=device)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    return lambda: dist.all_reduce(whole)


def _reduce_to(num_owners: int, elements: int, kind: Kind) -> Callable[[], object]:
    dtype, device = kind
    parts = torch.zeros(elements, dtype=dtype, device=device).chunk(num_owners)
    return lambda: [dist.reduce(part, dst=owner) for owner, part in enumerate(parts)]
