"""The means to make CUDA graphs: capture, the memory that they share, the stream of captures.

The mechanics under `replay`, apart from what is captured.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from deepytorch_core.guard import breaks
from deepytorch_core.guard.borrowed_grads import BorrowedGrads

_Result = TypeVar("_Result")

# A pass's memory, that of its graphs, and some that is in pieces.
MEMORY_OF_PASSES = 2.3


class NotCapturedError(Exception):
    """Why a call can't become CUDA graphs."""


class RecordedGraph(Protocol):
    """A recorded graph."""

    def replay(self) -> None:
        """Do it again: the same operations at the same addresses."""


# Torch's allocator of pinned memory still asks these whether a stream is theirs.
_spoiled: list[RecordedGraph] = []


class Recorder:
    """Records passes of one module.

    Args:
        device: the GPU that all of it runs on.
    """

    kind = "cuda"
    is_spoiled = False
    """Whether a capture could not even be ended: torch can't begin another one then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.Stream | None = None
        self._borrowed = BorrowedGrads()

    def lacks_memory(self) -> str | None:
        """Why there is no room for the memory of graphs beside that of passes without; or None.

        Asked between passes: what they take is what has been taken at most.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        there = torch.cuda.memory_allocated(self.device)
        pass_bytes = torch.cuda.max_memory_allocated(self.device) - there
        room = free + torch.cuda.memory_reserved(self.device) - there
        if room >= MEMORY_OF_PASSES * pass_bytes:
            return None
        missing = (MEMORY_OF_PASSES * pass_bytes - room) / 2**30
        return f"{missing:.1f} GiB of GPU memory are missing for it"

    def is_captured_now(self) -> bool:
        """Whether what is launched now goes into somebody's graph."""
        return torch.cuda.is_current_stream_capturing()

    def take_new_memory(self) -> None:
        """Share no memory with graphs recorded before, which may be gone but for a tensor."""
        self._pool = torch.cuda.graph_pool_handle()

    def take_turn(self) -> None:
        """Before a replay: have the current stream wait for what the last one was on."""
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and stream != self._last:
            stream.wait_stream(self._last)
        self._last = stream

    def number(self) -> Tensor:
        """Return the state of the device's random numbers."""
        return torch.cuda.get_rng_state(self.device)

    def rewind(self, number: Tensor) -> None:
        """Put the device's random numbers back to `number`."""
        torch.cuda.set_rng_state(number, self.device)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """For a pass before it is recorded, on the stream of the captures, where libraries make
        their workspaces. Raises NotCapturedError for what waits for the GPU.
        """
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream), _no_waiting():
                yield
        finally:  # a pass that failed may still run, in memory that others get from here on
            outer.wait_stream(self._stream)

    def record(self, run: Callable[[], _Result]) -> tuple[RecordedGraph, _Result]:
        """A graph of what `run` launches, and its result, whose tensors every replay fills.

        Raises whatever `run` and CUDA raise; nothing is left in the capture then.
        """
        graph = torch.cuda.CUDAGraph()
        outer, device = torch.cuda.current_stream(self.device), torch.cuda.current_device()
        mode = "thread_local"  # other threads, such as a data loader's, may do what they want
        try:
            with (
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
                ),
                _as_rehearsed(),
                _without_device_states(),
            ):
                result = run()
        except Exception:
            if torch.cuda.current_stream(self.device) != outer:
                # Something that CUDA forbids in a capture, such as waiting in a library of the
                # program's, has ended it. The context manager of torch has failed too, in the
                # middle.
                torch.cuda.set_stream(outer)
                torch.cuda.set_device(device)
                self.is_spoiled = True
                _spoiled.append(graph)
            self._leave()
            raise
        return graph, result

    def _leave(self) -> None:
        """A capture that fails leaves random numbers and allocations in it: take them out."""
        index = self.device.index or 0
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)

    @property
    def may_lend(self) -> bool:
        """Whether everybody has given back in time so far."""
        return not self._borrowed.is_overdue

    def keep(self, graphs: Iterable[RecordedGraph]) -> None:
        """From now on memory of these may be lent: they stay as long as somebody has some of it."""
        self._borrowed.keep(graphs)

    def drop(self, graphs: Iterable[RecordedGraph]) -> None:
        """Nobody runs these graphs again; there are others, which keep the memory."""
        self._borrowed.drop(graphs)

    def let_go(self) -> None:
        """Nobody runs the graphs again: their memory is free once nobody has any of it."""
        self._borrowed.let_go()

    def lender(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what gives the same memory to somebody else, who lets go of it to give it back.

        Each of hundreds of gradients is lent in each step, so their facts are looked up once.
        """
        make, note = _maker(tensor), self._borrowed.note

        def lend() -> Tensor:
            lent, storage = make()
            note(storage)
            return lent

        return lend

    def reclaim(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Before graphs write to lent memory: see to it that nobody has it any more.

        Gradients of `parameters` that lie there get memory of their own. Returns whether that was
        all of it.
        """
        return self._borrowed.reclaim(parameters)

    @staticmethod
    def borrowed(tensor: Tensor) -> Tensor:
        """The same memory, without keeping it."""
        return _maker(tensor)()[0]

    @staticmethod
    @contextlib.contextmanager
    def own_leaves(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
        """While open, parameters are others with the same memory, given by the first ones' ids.

        Autograd's nodes of the first ones may belong to another stream, as DDP keeps them.
        """
        leaf_of: dict[int, nn.Parameter] = {}
        places = []
        for submodule in module.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    leaf = leaf_of.get(id(parameter))
                    if leaf is None:
                        leaf = nn.Parameter(parameter.detach(), parameter.requires_grad)
                        leaf_of[id(parameter)] = leaf
                    places.append((submodule._parameters, name, parameter, leaf))
        try:
            for own, name, _, leaf in places:
                own[name] = leaf
            yield leaf_of
        finally:
            for own, name, parameter, _ in places:
                own[name] = parameter


def _maker(tensor: Tensor) -> Callable[[], tuple[Tensor, torch.UntypedStorage]]:
    """Return what makes tensors over the same memory, which they don't keep, and their storages."""
    own = tensor.untyped_storage()
    place, device, nbytes = own.data_ptr(), tensor.device, own.nbytes()
    facts = {
        "size": tensor.shape,
        "stride": tensor.stride(),
        "storage_offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "device": device,
        "nbytes": nbytes,
        "data_ptr": place,
    }
    new_storage: Any = torch._C._construct_storage_from_data_pointer
    new_tensor: Any = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata

    def make() -> tuple[Tensor, torch.UntypedStorage]:
        storage = new_storage(place, device, nbytes)
        return new_tensor(facts, storage), storage

    return make


@contextlib.contextmanager
def _as_rehearsed() -> Iterator[None]:
    """While open, modules that ask are told that nothing is captured.

    They ask so as not to wait for the GPU, as transformers' masks do, and then go another way.
    Compiled code would be compiled anew for that way, within the capture. The rehearsal has not
    waited.
    """
    stock = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = stock


@contextlib.contextmanager
def _without_device_states() -> Iterator[None]:
    """While open, activation checkpointing here keeps no state of a GPU's random numbers.

    A capture forbids to look at it. A pass that draws numbers draws others when it is made again,
    so its replay differs from the rehearsal, which is found out.
    """
    stock: Any = checkpoint.get_device_states
    own = threading.get_ident()

    def get_device_states(*args: Any) -> Any:
        return ([], []) if threading.get_ident() == own else stock(*args)

    checkpoint.get_device_states = get_device_states
    try:
        yield
    finally:
        checkpoint.get_device_states = stock


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """While open, waiting for the GPU is an error."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise NotCapturedError(f"it waits for the GPU in {breaks.function(error)}") from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode(before)
