"""init and shutdown, who is who, process sets: Horovod's world over torch.distributed's."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from deepytorch.integrations.common.contract import IntegrationError, Joined, join, require
from deepytorch.integrations.common.horovod_common import RankPlacement, no_such_feature
from deepytorch.integrations.common.horovod_rendezvous import local_store, require_one_node
from deepytorch_core.base import agreement, config, stores
from deepytorch_core.base.launchers import Launched
from deepytorch_core.c10d import activation
from deepytorch_core.c10d.backend import limit_of

from ._handle import Handle

_ADAPTER = "horovod"
_RENDEZVOUS_S = 300.0
_STUCK_S = 60.0
_numbers = itertools.count(1)
_meetings = itertools.count(1)


class RoundsProtocol(Protocol):
    """The operations of a process set that this process is in; see `_rounds`."""

    group: dist.ProcessGroup

    def begin(self, make: Callable[[], Any], name: str | None, *, asynchronous: bool) -> Handle: ...

    def number_of(self, optimizer: Any) -> int: ...

    def join(self) -> None: ...

    def end_join(self) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class ProcessSet:
    """Some of the ranks, for collectives among them.

    Args:
        ranks: their global ranks. They are ordered, whatever the order given.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] | None = sorted(ranks)
        self.process_set_id: int | None = None
        self._group: dist.ProcessGroup | None = None
        self._rounds: RoundsProtocol | None = None
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"ProcessSet: the ranks {list(ranks)} are not all different")

    def size(self) -> int | None:
        """The number of its ranks; None before it is registered."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """This process's rank in it, -1 if it has none; None before it is registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return self.ranks.index(rank()) if rank() in self.ranks else -1

    def included(self) -> bool | None:
        """Whether this process is one of it; None before it is registered."""
        return None if self.process_set_id is None else rank() in (self.ranks or ())

    @property
    def group(self) -> dist.ProcessGroup:
        """The torch group behind it.

        Raises ValueError when it is not registered, or this process is not in it.
        """
        if self._group is None:
            world()  # its error comes first
            reason = (
                "is not registered: pass it to hvd.init or hvd.add_process_set"
                if self.process_set_id is None
                else f"does not include this process, rank {rank()}"
            )
            raise ValueError(f"{self} {reason}")
        return self._group

    @property
    def rounds(self) -> RoundsProtocol:
        """Return the rounds that its operations begin in. Raises as `group` does."""
        _ = self.group
        assert self._rounds is not None
        return self._rounds

    def _register(self, number: int, ranks: list[int], group: dist.ProcessGroup | None) -> None:
        """Every rank calls it."""
        self.process_set_id, self.ranks, self._group = number, ranks, group
        others = group if len(ranks) == 1 else dist.new_group(ranks)
        if group is not None and others is not None:
            stuck_s = 0.0 if in_debug() else _STUCK_S
            self._rounds = _parts().rounds(self, others, stuck_s=stuck_s)

    def _forget(self, *, alive: bool) -> None:
        """Also of torch, unless all groups are gone there already."""
        groups = {self._group}
        if self._rounds is not None:
            self._rounds.close()
            groups.add(self._rounds.group)
        for group in groups - {None, dist.group.WORLD}:
            if alive:
                with contextlib.suppress(ValueError):  # the user has destroyed this one
                    dist.destroy_process_group(group)
        self.process_set_id = self._group = self._rounds = None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks, from `init` on."""


@dataclass
class World:
    """The state that `init` set up."""

    group: dist.ProcessGroup
    joined: Joined
    placement: RankPlacement
    made_group: bool
    sets: list[ProcessSet] = field(default_factory=list)
    journal: Any = None  # _join.Journal, which builds on this module
    reducers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # of _optimizer


@dataclass(frozen=True)
class WorldParts:
    """The classes that a world is made of; their modules build on this one."""

    rounds: Callable[..., RoundsProtocol]
    journal: Callable[[float], Any]


_world: World | None = None
_made_of: WorldParts | None = None


def make_of(parts: WorldParts) -> None:
    """Have worlds and their sets made of `parts`; called once, when Horovod's API is imported."""
    global _made_of
    _made_of = parts


def _parts() -> WorldParts:
    assert _made_of is not None
    return _made_of


def world() -> World:
    """Return what `init` set up. Raises ValueError before it and after `shutdown`."""
    if not is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    assert _world is not None
    return _world


def init(
    comm: None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    **options: Any,
) -> None:
    """Connect the ranks; every rank calls it. A second call does nothing.

    Who this process is comes from torchrun, horovodrun, mpirun or mpiexec, or from the group when
    torch.distributed is initialised already. Without any of them there is one rank.

    Args:
        comm: only None; an MPI communicator or ranks are refused.
        process_sets: sets to register at once. "dynamic", which Horovod wants for sets that come
            later, is taken and not needed.
        **options: of deepytorch, see `deepytorch_core.base.config.Options`; the same on every rank.

    Raises IntegrationError, on every rank, for what can't be served.
    """
    global _world
    if is_initialized():
        return
    require("torch", ">=2.11", tested="2.13.0")
    if comm is not None:
        raise no_such_feature("init(comm=...)", "use hvd.init(process_sets=[hvd.ProcessSet(...)])")
    made_group = not dist.is_initialized()
    if made_group:
        _init_group(options)
    group = dist.group.WORLD
    assert group is not None
    joined = join(_ADAPTER, options)
    _world = World(group, joined, _placement(), made_group)
    global_process_set._register(0, list(range(_world.placement.size)), group)
    _world.journal = _parts().journal(limit_of(group).total_seconds())
    if process_sets not in (None, "dynamic"):
        if isinstance(process_sets, str):
            raise ValueError(f"process_sets={process_sets!r}: expected a list or 'dynamic'")
        for process_set in process_sets or ():
            add_process_set(process_set)
    atexit.register(shutdown)


def shutdown() -> None:
    """Undo `init`: what it made is destroyed, what was there before stays.

    Optimizers made by DistributedOptimizer go on as ordinary ones.
    """
    global _world
    ended, _world = _world, None
    if ended is None:
        return
    atexit.unregister(shutdown)
    for reducer in ended.reducers:
        reducer.stop()
    ended.journal.close()
    # Gone where the user destroyed all groups himself.
    alive = dist.is_initialized() and dist.group.WORLD is ended.group
    for process_set in [*ended.sets, global_process_set]:
        process_set._forget(alive=alive)
    global_process_set.ranks = []
    if alive and ended.made_group:
        dist.destroy_process_group()
    ended.joined.leave()


def is_initialized() -> bool:
    """Whether `init` is in force."""
    return _world is not None and dist.is_initialized() and dist.group.WORLD is _world.group


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set; every rank calls it, also those that are not in it.

    Raises ValueError for ranks that don't exist, or that another set has already.
    """
    here = world()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if not ranks or ranks[0] < 0 or ranks[-1] >= here.placement.size:
        raise ValueError(f"{process_set}: the ranks must be from 0 to {here.placement.size - 1}")
    if any(other.ranks == ranks for other in [global_process_set, *here.sets]):
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    made = dist.new_group(ranks)
    group = made if here.placement.rank in ranks else None
    process_set._register(next(_numbers), ranks, group)
    here.sets.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Undo `add_process_set`, on every rank; False for the global or an unknown set."""
    here = world()
    if process_set not in here.sets:
        return False
    here.sets.remove(process_set)
    process_set._forget(alive=True)
    return True


def rank() -> int:
    """This process's rank, from 0 to `size() - 1`."""
    return world().placement.rank


def size() -> int:
    """The number of ranks."""
    return world().placement.size


def size_op() -> torch.Tensor:
    """`size()` as a tensor, int32 on the CPU."""
    return torch.tensor(size(), dtype=torch.int32, device="cpu")


def local_rank() -> int:
    """This process's rank among those of its node: which GPU it takes."""
    return world().placement.local_rank


def local_size() -> int:
    """The number of ranks on this node."""
    return world().placement.local_size


def cross_rank() -> int:
    """This process's rank among those of the same local rank on other nodes."""
    return world().placement.cross_rank


def cross_size() -> int:
    """The number of ranks that have this local rank on their node."""
    return world().placement.cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of ranks."""
    return world().placement.is_homogeneous


def _init_group(options: dict[str, Any]) -> None:
    # The options count for the group that is about to be made. Wrong ones are left to `join`,
    # which tells every rank.
    with contextlib.suppress(ValueError):
        base = config.current()
        chosen = config.Options.from_mapping(options, base=base)
        if base.enabled:
            activation.put_in_force(chosen)
    try:
        launched = config.launched()
    except ValueError as error:
        raise IntegrationError(f"horovod: {error}") from None
    if launched is None:
        dist.init_process_group(store=HashStore(), rank=0, world_size=1)
        return
    if config.rendezvous_address() is not None and launched.launcher == "torchrun":
        dist.init_process_group()
        return
    dist.init_process_group(store=_store(launched), rank=launched.rank, world_size=launched.size)


def _store(launched: Launched) -> Store:
    """A store for ranks whose launcher is not torch's."""
    address = config.rendezvous_address()
    here: dict[str, Any] = {
        "is_master": launched.rank == 0,
        "world_size": launched.size,
        "timeout": timedelta(seconds=_RENDEZVOUS_S),
    }
    if address is not None:
        # One server for all times that the ranks meet: a port is not free at once.
        everyone = TCPStore(*address, multi_tenant=True, **here)
        return PrefixStore(f"deepytorch/horovod/{next(_meetings)}", everyone)
    require_one_node(
        launched,
        "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, for every "
        "rank (mpirun -x MASTER_ADDR -x MASTER_PORT), or use torchrun",
    )
    meeting = local_store(launched, "torch")
    if launched.rank == 0:
        store = stores.serve("127.0.0.1", here["timeout"])
        meeting.set("port", str(store.port).encode())
        meeting.remove_at_exit()
        return store
    port = meeting.get_alive("port", _RENDEZVOUS_S)
    if port is None:
        raise IntegrationError(
            f"horovod: rank 0 did not come within {_RENDEZVOUS_S:g} s: is it on this node, and did "
            "it call hvd.init()?"
        )
    return TCPStore("127.0.0.1", int(port), **here)


def _placement() -> RankPlacement:
    """Found out together: a launcher need not tell every rank's node to every rank."""
    from torch.distributed import distributed_c10d as c10d

    launched = config.launched()
    node = (launched.node if launched is not None else None) or socket.gethostname()
    own, count = dist.get_rank(), dist.get_world_size()
    store = agreement.numbered(c10d._get_default_store(), "deepytorch/horovod/nodes", own)
    store.set(str(own), node)
    nodes = [store.get(str(other)).decode() for other in range(count)]
    return RankPlacement.among(own, nodes)


def in_debug() -> bool:
    """Whether option `debug` is on."""
    return bool(world().joined.options.debug)


def default_device(process_set: ProcessSet) -> torch.device:
    """Return where small facts are exchanged: on the CPU, if the set's group can."""
    with contextlib.suppress(RuntimeError):
        process_set.group._get_backend(torch.device("cpu"))
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a group that serves no CPU serves an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
