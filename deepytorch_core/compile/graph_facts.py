"""Facts of a captured graph, known before another backward pass may stand for its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from deepytorch_core import guard
from deepytorch_core.compile.policies import Runner


@dataclass(frozen=True)
class GraphFacts:
    """Seen in a call with copies of what it was given.

    Attributes:
        differentiable: outputs that have gradients.
        kept: those of them that stock's graph keeps for its backward pass.
        written: arguments without gradients that it writes to.
        reread: those of them that its outputs go by.
        draws: whether it draws random numbers.
        kinds: of devices that it runs on.
        problem: why its backward pass can only be the one that it has.
    """

    differentiable: list[int]
    kept: list[int]
    written: list[int]
    reread: list[int]
    draws: bool
    kinds: tuple[str, ...]
    problem: str | None

    @classmethod
    def of(cls, run: Runner, args: Sequence[Any], copies: Any) -> GraphFacts:
        """Those of the eager graph; `copies` makes arguments that it may write to."""
        with (
            guard.no_saved_tensor_hooks(),
            _disable_current_modes(),
            guard.same_random_numbers(),
            torch.enable_grad(),
        ):
            return cls._seen(run, args, copies)

    @classmethod
    def _seen(cls, run: Runner, args: Sequence[Any], copies: Any) -> GraphFacts:
        _, passed = copies(args)
        versions = [copy._version if isinstance(copy, Tensor) else 0 for copy in passed]
        before = guard.random_numbers()
        outputs = list(run(*passed))
        now = guard.random_numbers()
        draws = not all(map(torch.equal, before, now))
        written = [
            place
            for place, (copy, given) in enumerate(zip(passed, args, strict=True))
            if isinstance(copy, Tensor) and not given.requires_grad and not _is_same(copy, given)
        ]
        differentiable = [
            place
            for place, output in enumerate(outputs)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        changed = any(
            isinstance(copy, Tensor) and given.requires_grad and copy._version != version
            for copy, given, version in zip(passed, args, versions, strict=True)
        )
        inputs = {
            _place(copy) for copy in passed if isinstance(copy, Tensor) and copy.requires_grad
        }
        aliased = any(_place(outputs[place]) in inputs for place in differentiable)
        problem = "it writes to its inputs" if changed else None
        problem = "an output shares memory with an input" if aliased else problem
        kinds = {copy.device.type for copy in passed if isinstance(copy, Tensor)} & {"cpu", "cuda"}
        reread = list(written)
        if written and not draws:
            again = list(run(*passed))
            pairs = zip(outputs, again, strict=True)
            if all(_is_same(*pair) for pair in pairs if isinstance(pair[0], Tensor)):
                reread = []
        kept = [place for place in differentiable if _is_kept(outputs[place])]
        return cls(differentiable, kept, written, reread, draws, tuple(sorted(kinds)), problem)

    def random_numbers(self) -> list[Tensor]:
        """States of the generators that it draws from."""
        numbers = [torch.get_rng_state()]
        return [*numbers, torch.cuda.get_rng_state()] if "cuda" in self.kinds else numbers

    def rewind(self, numbers: Sequence[Tensor]) -> None:
        """Put the generators there."""
        torch.set_rng_state(numbers[0])
        for state in numbers[1:]:
            torch.cuda.set_rng_state(state)


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_same(tensor: Any, other: Any) -> bool:
    return bool(torch.equal(tensor.detach(), other.detach()))


def _is_kept(output: Tensor) -> bool:
    """Whether the operation that has made it keeps it, as tanh does."""
    names = [name for name in dir(output.grad_fn) if name.startswith("_saved_")]
    found = [getattr(output.grad_fn, name) for name in names]
    places = [(value.data_ptr(), value.shape) for value in found if isinstance(value, Tensor)]
    return (output.data_ptr(), output.shape) in places
