"""CUDA graphs without a GPU: a graph is a function that is called again."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepytorch_core import guard
from deepytorch_core.guard import borrowed_grads, recorder


class Again:
    """A graph: `run` once more, its results written where the first ones are."""

    def __init__(self, run: Callable[[], Any], result: Any) -> None:
        self.run = run
        self.tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def replay(self) -> None:
        # A graph draws nothing on the host.
        with torch.enable_grad(), guard.same_random_numbers():
            found = [leaf for leaf in tree_leaves(self.run()) if isinstance(leaf, Tensor)]
        with torch.no_grad():
            for mine, other in zip(self.tensors, found, strict=True):
                mine.copy_(other)


class Emulated(recorder.Recorder):
    kind = "cpu"
    leaf_of: dict[int, nn.Parameter]
    module: nn.Module

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._borrowed = borrowed_grads.BorrowedGrads()

    def lender(self, tensor: Tensor) -> Callable[[], Tensor]:
        own = tensor.untyped_storage()
        there = (ctypes.c_char * own.nbytes()).from_address(own.data_ptr())

        def lend() -> Tensor:
            flat = torch.frombuffer(there, dtype=tensor.dtype)
            lent = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            self._borrowed.note(lent.untyped_storage())
            return lent

        return lend

    def keep(self, graphs: Iterable[Any]) -> None:
        self._borrowed.keep([graph.tensors for graph in graphs])  # as graphs, they know no recorder

    def drop(self, graphs: Iterable[Any]) -> None:
        self._borrowed.drop([graph.tensors for graph in graphs])

    def lacks_memory(self) -> str | None:
        return None

    def is_captured_now(self) -> bool:
        return False

    def take_turn(self) -> None:
        pass

    def number(self) -> Tensor:
        return torch.get_rng_state()

    def rewind(self, number: Tensor) -> None:
        torch.set_rng_state(number)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        yield

    def record(self, run: Callable[[], Any]) -> Any:
        result = run()
        leaf_of, module = dict(Emulated.leaf_of), Emulated.module

        def again() -> Any:
            with _placed(module, leaf_of):
                return run()

        return Again(again, result), result

    @staticmethod
    def borrowed(tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    @contextlib.contextmanager
    def own_leaves(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
        with recorder.Recorder.own_leaves(module) as leaf_of:
            Emulated.leaf_of, Emulated.module = leaf_of, module
            yield leaf_of


@contextlib.contextmanager
def _placed(module: nn.Module, leaf_of: dict[int, nn.Parameter]) -> Iterator[None]:
    """While open, the module has the parameters of its capture, as a graph has."""
    before = [
        (submodule._parameters, dict(submodule._parameters)) for submodule in module.modules()
    ]
    for own, parameters in before:
        own.update(
            {name: leaf_of.get(id(parameter), parameter) for name, parameter in parameters.items()}
        )
    try:
        yield
    finally:
        for own, parameters in before:
            own.update(parameters)
