"""Ranks that train apart: each steps on its parameters, and nothing like gradients goes between.

So it is where a model was left without its wrapper, or the wrapper is gone round. Every rank then
trains a model of its own, and nothing fails. It is said in one line of the job.

NOTE [Sure] Apart is a step since whose predecessor too few bytes went to other ranks to be
gradients, however compressed. Ranks that average their parameters from time to time (local SGD,
DiLoCo, a last average) make many such steps, so they are counted. It is said after more than anyone
leaves between two averages or, where none came in the whole training, at its end. Another rank must
have counted as many: that goes over the store, in the background. What is not to be seen, other
libraries' communication and graphs that replay collectives, means silence.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepytorch_core.base import stores, unlisted
from deepytorch_core.base.console import say
from deepytorch_core.base.patching import Patches
from deepytorch_core.metering import counts

_C10D = "torch.distributed.distributed_c10d"

# DiLoCo averages every 500 steps, and some every 1000.
_SURE_STEPS = 1024
# Fewer steps are enough if they take long.
_SURE_S, _LEAST_STEPS = 7200.0, 64

# Gradients have this part of the parameters' bytes at least, where each step has some: the best
# compression leaves more. Bytes that come once in a while may be of a metric, or of an average. An
# average has more bytes, even where it is of a few layers in 4 bits. After the last step only a
# whole average makes sense.
_PART_AT_EACH, _PART_AT_TIMES, _PART_AT_END = 1e-4, 1e-3, 0.25

# These modules may connect ranks, too, unseen.
_OTHER_WAYS = (
    *("horovod.torch", "byteps.torch", "bagua", "hivemind", "torchft", "torchcomms"),
    *("mpi4py.MPI", "cupy.cuda.nccl", "ray.util.collective", "torch_xla"),
)

# Other ranks may be this much behind where one ends.
_END_LIMIT_S = 0.5
_STEPPED, _SURE, _SAID = "stepped", "sure", "said"


class ApartWatch:
    """Knowledge of one default group's training on this rank. A step costs below 1 us.

    Not thread-safe, but for `end`, which comes once.
    """

    def __init__(self, generation: int = 0) -> None:
        self._generation = generation
        self._over = False  # nothing is to be said any more
        self._first: weakref.ref[Any] | None = None  # of the parameters that are stepped on
        self._synced: weakref.ref[Any] | None = None  # of those that had gradients of others
        self._several = False  # there were others before
        self._bytes = 0  # of these parameters; 0: not known yet
        self._given = 0
        self._steps = 0  # apart, one after the other
        self._look_at = 1
        self._began = 0.0
        self._others: int | None = None
        self._left: set[str] = set()
        self._telling: unlisted.Thread | None = None

    def stepped(self, optimizer: Any, given_bytes: int) -> None:
        """A step has ended.

        Args:
            optimizer: what has stepped.
            given_bytes: what this process has given to operations with other ranks, ever.
        """
        if self._over:
            return
        given, self._given = given_bytes - self._given, given_bytes
        first = _first_of(optimizer)
        if first is None:
            return
        if self._first is None or self._first() is not first:
            self._begin(first)
            return
        if given > 0 and given >= self._least(optimizer):
            self._synced = self._first
            self._wait()
            return
        self._steps += 1
        if self._steps >= self._look_at:
            self._look_at = 2 * self._steps
            try:
                self._look(optimizer)
            except Exception as error:  # the training matters more
                self._give_up(error)

    def note_unseen(self) -> None:
        """Ranks are connected in a way that is not seen here."""
        self._over = True

    def end(self) -> None:
        """The group is about to go. Takes half a second at most, and that in doubt only."""
        over, self._over = self._over, True
        if self._telling is not None:
            self._telling.join(_END_LIMIT_S)
        if over or _STEPPED not in self._left or self._several or self._synced is not None:
            return
        averaged = counts.given_bytes() - self._given >= _PART_AT_END * self._bytes
        c10d = sys.modules[_C10D]
        try:
            if averaged or self._steps < 2 or _operations_of_others(c10d) != self._others:
                return
            store = self._store(c10d)
            if stores.poll(lambda: store.add(_STEPPED, 0) > 1, _END_LIMIT_S):
                self._say(store, c10d.get_world_size())
        except Exception as error:  # a store may have fewer functions, or be gone
            self._give_up(error)

    def _begin(self, first: Any) -> None:
        """The first step on some parameters is none to judge: before it DDP sends all of them."""
        self._several = self._first is not None
        self._first = weakref.ref(first)
        self._bytes = self._steps = 0
        self._began = 0.0
        self._look_at = 1

    def _least(self, optimizer: Any) -> float:
        """The fewest bytes that may be gradients."""
        if self._bytes == 0:
            self._bytes = _bytes_of(optimizer)
        return (_PART_AT_TIMES if self._steps else _PART_AT_EACH) * self._bytes

    def _wait(self) -> None:
        """Count anew, and don't look before there can be something to say."""
        self._steps = 0
        self._began = 0.0
        self._look_at = _LEAST_STEPS

    def _look(self, optimizer: Any) -> None:
        c10d = sys.modules.get(_C10D)
        if c10d is None or not c10d.is_initialized() or c10d.get_world_size() == 1:
            self._wait()
            return
        others = _operations_of_others(c10d)
        if others is None or _are_connected_otherwise():
            self.note_unseen()
            return
        known, self._others = self._others, others
        if known is not None and others != known:
            self._synced = self._first
            self._wait()
            return
        if self._began == 0.0:
            self._began = time.monotonic()
        key = self._word()
        if key is None:
            return
        if not _trains(optimizer):
            self._wait()
            return
        if self._bytes == 0:
            self._bytes = _bytes_of(optimizer)
        self._leave(c10d, key)

    def _word(self) -> str | None:
        """Return the word that this rank has to leave in the store now, if any."""
        took_s = time.monotonic() - self._began
        sure = self._steps >= _SURE_STEPS or (self._steps >= _LEAST_STEPS and took_s >= _SURE_S)
        if sure:
            # These may be this rank's own: a probe of what was trained together, for one.
            is_own = self._synced is not None and self._synced is not self._first
            return None if is_own else _SURE
        return _STEPPED if self._synced is None and _STEPPED not in self._left else None

    def _leave(self, c10d: Any, key: str) -> None:
        """Tell the other ranks, in a thread, as a store may take its time."""
        store, size = self._store(c10d), c10d.get_world_size()
        added = 0 if key in self._left else 1
        self._left.add(key)
        _at_exit()

        def tell() -> None:
            try:
                if store.add(key, added) > 1 and key == _SURE:
                    self._say(store, size)
            except Exception as error:
                self._give_up(error)

        self._telling = unlisted.Thread(tell, name="deepytorch-apart")
        self._telling.start()

    def _store(self, c10d: Any) -> Any:
        # Ranks with other parameters have other work.
        space = f"deepytorch/apart/{self._generation}/{self._bytes}"
        return c10d.PrefixStore(space, c10d._get_default_store())

    def _say(self, store: Any, size: int) -> None:
        self._over = True
        if store.add(_SAID, 1) > 1:
            return
        say(
            f"several of the {size} ranks seem to train apart, each a model of its own: before "
            f"none of the last {self._steps} optimizer steps was there an operation between "
            "ranks that could carry gradients. It happens where the model is not wrapped in "
            "DistributedDataParallel or FSDP (a framework may leave that out for a launcher or "
            "backend that it does not know), where .module of the wrapper is called in its "
            "place, where no_sync() is never left, or where the wrapper's group has one rank. "
            "If it is meant, as for an ensemble, DEEPYTORCH_LOG=error leaves this out",
            level="warning",
        )

    def _give_up(self, error: Exception) -> None:
        self._over = True
        say(f"whether ranks train apart is not known: {error}", level="debug")


_watch = ApartWatch()
_is_at_exit = False


def stepped(optimizer: Any) -> None:
    """A step of this process has ended, with this optimizer."""
    _watch.stepped(optimizer, counts.given_bytes())


def pause() -> None:
    """Steps and collectives that follow are not seen."""
    global _watch
    _watch = ApartWatch(_watch._generation)


def install(c10d: ModuleType, patches: Patches) -> None:
    """Look once more where the default group of `torch.distributed.distributed_c10d` ends."""

    def ending(original: Callable[..., None]) -> Callable[..., None]:
        def update_default_pg(group: Any) -> None:
            if group is None:
                _end()
            original(group)

        return update_default_pg

    # By torch's destroy_process_group, which other modules may have by its name.
    why = "it is looked once more whether ranks train apart where the default group ends"
    patches.replace(c10d, "_update_default_pg", ending, why=why)


def install_graphs(graphs: ModuleType, patches: Patches) -> None:
    """See which graphs of `torch.cuda.graphs` hold collectives: their replays can't be counted."""
    given_before: list[int] = []

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            given_before[:] = [counts.given_bytes()]
            return original(*args, **kwargs)

        return capture_begin

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            if given_before and counts.given_bytes() != given_before[0]:
                _watch.note_unseen()
            return original(*args, **kwargs)

        return capture_end

    why = "graphs that hold collectives are noted, as their replays can't be counted"
    patches.replace(graphs.CUDAGraph, "capture_begin", beginning, why=why)
    patches.replace(graphs.CUDAGraph, "capture_end", ending, why=why)


def _end() -> None:
    global _watch
    ended, _watch = _watch, ApartWatch(_watch._generation + 1)
    ended.end()


def _at_exit() -> None:
    """For programs that leave their groups open."""
    global _is_at_exit
    if not _is_at_exit:
        _is_at_exit = True
        atexit.register(_end)


def _first_of(optimizer: Any) -> Any:
    groups = optimizer.param_groups
    parameters = groups[0]["params"] if groups else ()
    return parameters[0] if parameters else None


def _parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _bytes_of(optimizer: Any) -> int:
    return sum(
        parameter.numel() * parameter.element_size() for parameter in _parameters_of(optimizer)
    )


def _trains(optimizer: Any) -> bool:
    """Whether a model learns here: not a number such as a temperature, nor shared memory."""
    graded = [parameter for parameter in _parameters_of(optimizer) if parameter.grad is not None]
    if all(parameter.numel() == 1 for parameter in graded):
        return False
    # Hogwild's processes step on the same parameters. On a GPU all tensors count as shared.
    return graded[0].device.type != "cpu" or not graded[0].is_shared()


def _operations_of_others(c10d: Any) -> int | None:
    """Count operations of groups that are not ours; None if some can't be counted; gloo's can."""
    import torch

    adapter = sys.modules.get("deepytorch_c10d")
    gloo = getattr(c10d, "ProcessGroupGloo", ())
    total = 0
    for group in list(c10d._world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(torch.device(device))
            while (inner := getattr(backend, "wrapped_pg", None)) is not None:
                backend = inner  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            if adapter is not None and isinstance(backend, adapter.Backend):
                continue
            if not isinstance(backend, gloo):
                return None
            total += backend._get_sequence_number_for_group()
    return total


def _are_connected_otherwise() -> bool:
    rpc = sys.modules.get("torch.distributed.rpc.api")
    if rpc is not None and rpc._is_current_rpc_agent_set():
        return True
    return any(name in sys.modules for name in _OTHER_WAYS)


def _begin_anew() -> None:
    """In a forked child."""
    global _watch
    _watch = ApartWatch()


os.register_at_fork(after_in_child=_begin_anew)
