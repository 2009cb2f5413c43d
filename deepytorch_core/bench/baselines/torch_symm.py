"""torch's symmetric memory, `torch.distributed._symmetric_memory`: the fastest of its kernels.

Which one is fastest at a size is measured before the row. Kernels that need NVLink's multicast are
never taken, and torch is told not to prepare for them. Its all_gather without multicast is left
out: it is private and allocates its result.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepytorch_core.bench.baselines.arm import Measure, Prepare, TimedArm
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.memory import Arena
from deepytorch_core.bench.ops import Buffers
from deepytorch_core.bench.rivals import Setup

if TYPE_CHECKING:
    from deepytorch_core.bench.rows import Row
    from deepytorch_core.bench.worker import Groups

_SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

OFFERED: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("one_shot_all_reduce_out", "two_shot_all_reduce_"),
    "reduce_scatter": ("reduce_scatter_out",),
}


def prepare() -> Setup:
    return Setup(environment=_SETTINGS, settings=_SETTINGS)


def connect(groups: "Groups", rows: Sequence["Row"], measure: Measure) -> Prepare:
    """Arms whose inputs lie in symmetric memory, made for the largest of `rows`."""
    name = groups.baseline.group_name

    def symmetric(count: int, dtype: torch.dtype) -> torch.Tensor:
        symm_mem = _module()
        tensor: torch.Tensor = symm_mem.empty(count, dtype=dtype, device=groups.device)
        symm_mem.rendezvous(tensor, name)
        return tensor

    def plain(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=groups.device)

    arena = Arena(rows, symmetric, plain)
    # One kernel reduces into another tensor than its input.
    in_place = [row.share * row.torch_dtype.itemsize for row in rows if row.op.in_place]
    results = plain(max(in_place, default=0), torch.uint8)

    def prepare_row(row: "Row") -> TimedArm:
        buffers = arena.buffers(row)
        result = buffers.output
        if row.op.in_place:
            result = results[: result.numel() * result.element_size()].view(result.dtype)
        return fastest(trials(row.op.name, buffers, result, name), measure)

    return prepare_row


def trials(
    op: str, buffers: Buffers, result: torch.Tensor, group_name: str, namespace: Any = None
) -> list[TimedArm]:
    """A trial for each kernel of this torch; `result` takes what is not reduced in place.

    Raises BenchError when there is none.
    """
    kernels = torch.ops.symm_mem if namespace is None else namespace
    found = []
    for way in OFFERED[op]:
        kernel = getattr(kernels, way, None)
        if kernel is not None:
            found.append(_trial(way, kernel, buffers, result, group_name))
    if not found:
        raise BenchError(
            f"--baseline torch-symm: torch {torch.__version__} has no {op} in symmetric memory "
            "without multicast: leave it out of --ops, update torch, or use --baseline nccl"
        )
    return found


def fastest(offered: Sequence[TimedArm], measure: Measure) -> TimedArm:
    """The trial whose call takes least; those that refuse this size or type are left out."""
    times: dict[int, float] = {}
    refusals = []
    for index, trial in enumerate(offered):
        trial.buffers.input.zero_()  # whatever lies there may overflow when it is summed again
        try:
            trial.call()
        except RuntimeError as error:  # of the arguments, so on all ranks alike
            refusals.append(f"{trial.way}: {str(error).splitlines()[0]}")
            continue
        times[index] = measure(trial.call)
    if not times:
        raise BenchError(
            f"--baseline torch-symm cannot do it: {'; '.join(refusals)}; use --baseline nccl here"
        )
    return offered[min(times, key=lambda index: times[index])]


def _trial(
    way: str, kernel: Any, buffers: Buffers, result: torch.Tensor, group_name: str
) -> TimedArm:
    source = buffers.input
    if way == "two_shot_all_reduce_":
        return TimedArm(
            lambda: kernel(source, "sum", group_name), Buffers(source, source), "two_shot"
        )
    target = Buffers(source, result)
    if way == "one_shot_all_reduce_out":
        return TimedArm(lambda: kernel(source, "sum", group_name, result), target, "one_shot")
    return TimedArm(lambda: kernel(source, group_name, False, result), target, "reduce_scatter")


def _module() -> Any:
    try:
        from torch.distributed import _symmetric_memory as symm_mem

        symm_mem.empty, symm_mem.rendezvous  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise BenchError(
            f"--baseline torch-symm needs torch 2.6 or newer with CUDA, this is torch "
            f"{torch.__version__} ({error}): update it, or use --baseline nccl"
        ) from error
    return symm_mem
