"""Adam and AdamW in their fused form on a GPU, by a kernel that reads 16 bytes at a time.

torch's own launch dozens of kernels a step and read less at a time. Where an optimizer of exactly
these classes runs fused, because its script or `deepytorch_core.nn.swaps.fused_optimizer` said so,
the functions that it calls are replaced: for the whole process, while any optimizer wants it. What
the kernel doesn't take goes to torch's: `deepytorch_core.nn.fused_adam` tells them apart.

NOTE [Replicas]. Ranks may choose differently, and replicas of a model have to step alike. There the
kernel stays only if it gives torch's results to the last bit.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from deepytorch_core import guard
from deepytorch_core.base.patching import Patches
from deepytorch_core.nn import fused_adam
from deepytorch_core.nn.kernels import (
    Kernel,
    KernelPlace,
    KernelProbe,
    KernelSetting,
    Undo,
    register_kernel,
    register_place,
)
from deepytorch_core.nn.swaps import fused_optimizer

KIND = "fused adam"
DEVICE = "cuda"
CLASSES = (Adam, AdamW)
WHY = "fused optimizers update all parameters of a group by one kernel"
OPTION = "DEEPYTORCH_KERNELS=off"
# Elements of the copies that are tried: with fewer the launches take the time, not the memory.
_MOST_ELEMENTS = 1 << 27
# The copies of an element, in float32, and the part of the free memory that they may take.
_COPIED_BYTES = 20
_LARGEST_SHARE = 0.125
_LEAST_ELEMENTS = 1 << 20
_STEPS = 4
_BITS = {2: torch.int16, 4: torch.int32}


@register_place(KIND)
def find(setting: KernelSetting) -> Iterable[KernelPlace]:
    """The optimizers on a GPU that run fused, whoever chose that."""
    if setting.device.type != DEVICE:
        return
    for optimizer in setting.optimizers:
        own = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        if type(own) in CLASSES and fused_optimizer.is_fused(own):
            dtypes = sorted(
                {str(parameter.dtype).removeprefix("torch.") for parameter in _trained(own)}
            )
            yield KernelPlace(
                kind=KIND,
                what=f"fused {type(own).__name__}({', '.join(dtypes)})",
                targets=(own,),
                probe=lambda chosen=own: _probe(chosen, setting),  # type: ignore[misc]
                facts={"decay": [float(group["weight_decay"]) != 0 for group in own.param_groups]},
            )


def _trained(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@register_kernel
class FusedAdam(Kernel):
    """`deepytorch_core.nn.adam_kernels`."""

    name = "triton"
    kind = KIND

    def why_not(self, place: KernelPlace, setting: KernelSetting) -> str | None:
        (optimizer,) = place.targets
        if not _has_triton():
            return "Triton is not installed"
        for group in optimizer.param_groups:
            for name in ("amsgrad", "capturable", "differentiable"):
                if group.get(name):
                    return f"{name}=True was asked for"
        if any(type(parameter) not in (Tensor, nn.Parameter) for parameter in _trained(optimizer)):
            return "parameters are of a class of their own"
        served = [
            (dtype, size)
            for group in optimizer.param_groups
            for dtype, size in _sizes(group, optimizer).items()
        ]
        if not served:
            return "torch's arithmetic is another: AdamW's is known"
        if not any(
            dtype in fused_adam.DTYPES and size >= fused_adam.LEAST_ELEMENTS
            for dtype, size in served
        ):
            return "parameters are few"
        return None

    def apply(self, target: Any, setting: KernelSetting) -> Undo:
        return _serving.begin()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _sizes(group: dict[str, Any], optimizer: Any) -> dict[torch.dtype, int]:
    """Map dtypes to the numbers of elements that the kernel would update."""
    sizes: dict[torch.dtype, int] = {}
    is_decoupled = _is_decoupled(group, optimizer)
    for parameter in group["params"]:
        if fused_adam.is_known(parameter.dtype, group["weight_decay"], is_decoupled=is_decoupled):
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return sizes


def _is_decoupled(group: dict[str, Any], optimizer: Any) -> bool:
    """Whether the decay goes past the gradient."""
    return bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))


def _are_replicas(setting: KernelSetting) -> bool:
    """See NOTE [Replicas]."""
    size = guard.Ranks(KIND).size
    return setting.mode == "auto" and size > 1 and not fused_optimizer.is_cut(setting.model)


class _Serving:
    """The replaced functions, for as long as anybody wants them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._wanted: set[int] = set()
        self._patches = Patches()
        self._known = fused_adam.Known(1)

    def begin(self) -> Callable[[], None]:
        """Have calls served from here on; returns what ends that, once."""
        from deepytorch_core.nn import adam_kernels

        if not self._wanted:
            shape = adam_kernels.LaunchShape()
            self._known = fused_adam.Known(shape.chunk)
            self._patches = Patches()
            for name, is_decoupled in (("_fused_adam_", False), ("_fused_adamw_", True)):
                launch = functools.partial(adam_kernels.launch, shape=shape)
                is_taken = functools.partial(self.is_taken, launch, is_decoupled=is_decoupled)
                self._patches.replace(
                    torch,
                    name,
                    functools.partial(_replacing, is_taken),
                    why=WHY,
                    option=OPTION,
                )
        number = next(self._numbers)
        self._wanted.add(number)
        return functools.partial(self._end, number)

    def is_taken(
        self, launch: Callable[..., None], lists: Any, settings: Any, *, is_decoupled: bool
    ) -> bool:
        """See `deepytorch_core.nn.fused_adam.is_taken`."""
        return fused_adam.is_taken(self._known, launch, lists, settings, is_decoupled=is_decoupled)

    def _end(self, number: int) -> None:
        if number in self._wanted:
            self._wanted.remove(number)
            if not self._wanted:
                self._patches.undo()


def _replacing(
    is_taken: Callable[[Any, Any], bool], original: Callable[..., Any]
) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if fused_adam.is_looked_at() or not is_taken(args, kwargs):
            return original(*args, **kwargs)
        return None

    return called


_serving = _Serving()


class _Group:
    """New tensors of the shapes of a group, some of them, and its settings."""

    def __init__(self, group: dict[str, Any], optimizer: Any, left: int, device: Any) -> None:
        shapes: list[tuple[int, ...]] = []
        dtypes: list[torch.dtype] = []
        for parameter in group["params"]:
            if parameter.numel() and (parameter.numel() <= left or not shapes):
                whole = parameter.numel() <= left
                shapes.append(tuple(parameter.shape) if whole else (left,))
                dtypes.append(parameter.dtype)
                left -= min(parameter.numel(), left)
        self.left = left
        generator = torch.Generator(device).manual_seed(len(shapes))

        def drawn(scale: float) -> list[Tensor]:
            return [
                torch.randn(shape, device=device, dtype=torch.float32, generator=generator)
                .mul_(scale)
                .to(dtype)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]

        self.start, self.gradients = drawn(0.02), drawn(1e-3)
        self.parameters = [nn.Parameter(tensor.clone()) for tensor in self.start]
        self.moments = [
            [torch.empty_like(tensor, requires_grad=False) for tensor in self.start]
            for _ in range(2)
        ]
        self.steps = [torch.zeros((), dtype=torch.float32, device=device) for _ in shapes]
        self._name = "_fused_adamw_" if _is_decoupled(group, optimizer) else "_fused_adam_"
        beta1, beta2 = (float(beta) for beta in group["betas"])
        self._settings = {
            # A learning rate of a warm-up's start would hide what the kernel does.
            "lr": 1e-3,
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": float(group["weight_decay"]),
            "eps": float(group["eps"]),
            "amsgrad": False,
            "maximize": bool(group["maximize"]),
        }

    def begin(self) -> None:
        """Put everything back."""
        torch._foreach_copy_(list[Tensor](self.parameters), self.start)
        for tensors in (*self.moments, self.steps):
            torch._foreach_zero_(tensors)

    def step(self) -> None:
        """Step as the optimizer does."""
        torch._foreach_add_(self.steps, 1)
        for dtype in dict.fromkeys(tensor.dtype for tensor in self.start):
            where = [number for number, tensor in enumerate(self.start) if tensor.dtype == dtype]
            own = [list[Tensor](self.parameters), self.gradients, *self.moments, self.steps]
            lists = [[of[number] for number in where] for of in own]
            getattr(torch, self._name)(*lists[:4], [], lists[4], **self._settings)


def _probe(optimizer: Any, setting: KernelSetting) -> KernelProbe:
    """The same calls on new tensors of the same sizes."""
    groups: list[_Group] = []
    left = _num_tried(setting.device)
    # The largest first: where not all have room, these take the time.
    for group in sorted(
        optimizer.param_groups, key=lambda param_group: -sum(map(_size, param_group["params"]))
    ):
        if left:
            groups.append(_Group(group, optimizer, left, setting.device))
            left = groups[-1].left
    groups = [tried_group for tried_group in groups if tried_group.start]
    module = nn.ParameterList(parameter for group in groups for parameter in group.parameters)
    is_exact = _are_replicas(setting)

    @torch.no_grad()
    def run() -> list[Tensor]:
        for group in groups:
            group.begin()
        for _ in range(_STEPS):
            for group in groups:
                group.step()
        found = []
        for group in groups:
            moments = [moment for of in group.moments for moment in of]
            if is_exact:
                results = [*group.parameters, *moments]
                found += [result.detach().view(_BITS[result.dtype.itemsize]) for result in results]
            else:
                # The rest of an update after rounding to 16 bits is not comparable.
                found += [
                    (now - then if now.dtype.itemsize > 2 else now).detach()
                    for now, then in zip(group.parameters, group.start, strict=True)
                ]
                found += moments
        return found

    return KernelProbe(module, None, run, clock=lambda call, ranks: _clock(setting.device))


def _clock(device: torch.device) -> guard.Clock:
    """A step's launches come while the GPU is still busy with the backward pass."""
    from deepytorch_core.guard import gpu_time  # importing it takes seconds

    return gpu_time.launched_ahead(device)


def _num_tried(device: torch.device) -> int:
    """Return how many elements may be tried on the device."""
    if device.type != DEVICE or not torch.cuda.is_available():
        return _MOST_ELEMENTS
    free, _ = torch.cuda.mem_get_info(device)
    allowed = int(_LARGEST_SHARE * free) // _COPIED_BYTES
    return max(_LEAST_ELEMENTS, min(_MOST_ELEMENTS, allowed))


def _size(tensor: Tensor) -> int:
    return tensor.numel()
