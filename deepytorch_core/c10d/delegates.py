"""The stock backends behind a deepytorch group, made the way torch makes them for itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from deepytorch_core.base import config, stores
from deepytorch_core.base.console import say
from deepytorch_core.base.errors import OFF_SWITCH

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

STOCK_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The stock backend that serves tensors of a device type when native code does not."""


# The native core has each rank leave the mark of its process here in the group's store.
_MARK_KEY = "deepytorch/process/"
_LOOK_FOR_DEAD_S = 0.2
# After so long it is said who is waited for.
_SAY_LATE_S = 4.0
# A socket closes a moment before its process has ended, and the kernel tells both.
_ENDING_S = 0.5
_LONGEST_PAUSE_S = 0.05
# NCCL's messages between two nodes filled 82% of 24 Gbit/s with 4 MiB and 90% with 16, so shorter
# pieces could cost what they hide.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class GroupSpec:
    """The arguments that torch passes when it makes a group's backend."""

    store: Store
    rank: int
    size: int
    timeout: timedelta
    name: str
    global_ranks: list[int]
    pg_options: Any = None
    # Weak: the group owns its backend, which owns the factory that holds this record.
    process_group: weakref.ref[Any] | None = None

    @classmethod
    def of(cls, dist_options: Any, pg_options: Any, *, timeout: timedelta) -> GroupSpec:
        """From a `_DistributedBackendOptions`; fields differ between torch versions."""
        group = getattr(dist_options, "process_group", None)
        return cls(
            store=dist_options.store,
            rank=dist_options.group_rank,
            size=dist_options.group_size,
            timeout=timeout,
            name=dist_options.group_id,
            global_ranks=list(dist_options.global_ranks_in_group or []),
            pg_options=pg_options,
            process_group=None if group is None else weakref.ref(group),
        )

    def global_rank(self, rank: int) -> int:
        """Return the number by which messages call the group's rank."""
        return self.global_ranks[rank] if self.global_ranks else rank

    def dead(self) -> str:
        """The ranks whose processes on this node have certainly ended; "rank 1 (pid 4711) died"."""
        from deepytorch_core import _core

        found: list[str] = []
        if stores.lacks(self.store):
            return ""
        for rank in range(self.size):
            mark = stores.there(self.store, f"{_MARK_KEY}{rank}") or ""
            pid = _core.dead_process(mark)
            if pid is not None:
                found.append(f"rank {self.global_rank(rank)} (pid {pid}) died")
        return ", ".join(found)


_factories: weakref.WeakSet[StockFactory] = weakref.WeakSet()


def live(device_type: str) -> list[Any]:
    """The stock backends made so far for `device_type`, of groups that still exist."""
    return [factory.made[device_type] for factory in _factories if device_type in factory.made]


def own_client(
    module: Any, store: Store, on_wait: Callable[[list[str], float], None] | None = None
) -> Store:
    """The store over a client in which nobody waits for another; a program's own as it is.

    Such a store may have no `check`, by which ours wait, and lives as long as its Python object.

    Args:
        module: the loaded adapter.
        on_wait: called about once a second with the keys that are waited for, and how long (s).
    """
    found: Store = module.own_client(store, on_wait) if stores.is_torchs(store) else store
    return found


class StockFactory:
    """Makes a group's stock backend for "cpu" or "cuda" when it is first needed.

    Every rank of the group makes it at the same operation, so they meet there. A group that may
    span nodes has its own from the start.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self._spec = spec
        # A store of the program's own would go with the program's last reference to it. Only its
        # C++ part would stay, which torch keeps. That part calls functions which are then no longer
        # there.
        self._kept_store = stores.root(spec.store)
        self.made: dict[str, Any] = {}
        _factories.add(self)
        # The deepytorch backend's own options, once it exists: its timeout may change later.
        self.live_options: Any = None
        self._parts: list[StockFactory] = []
        self._has_said_late = False

    def __call__(self, device_type: str, limit_s: float = 0.0) -> Backend:
        """Raises RuntimeError when torch has no backend for tensors of this device type.

        `limit_s` is how long the other ranks are waited for; 0: as long as the group waits.
        """
        from torch.distributed import distributed_c10d as c10d

        from deepytorch_core.network import gloo_env

        if device_type in self.made:
            return cast("Backend", self.made[device_type])

        name = STOCK_BACKENDS.get(device_type)
        if name is None:
            raise RuntimeError(
                f"deepytorch: group {self._spec.name}: no backend for tensors on {device_type}; "
                f"it serves {' and '.join(STOCK_BACKENDS)}"
            )
        # Keys of its own: several backends of one group share the group's store.
        store = c10d.PrefixStore(f"delegate/{device_type}/", self._store())
        if name == "gloo":  # NCCL needs only those ranks that take part
            gloo_env.before_gloo()
            if not stores.lacks(store):
                self._meet(store, limit_s or self.timeout.total_seconds())
        try:
            if hasattr(c10d.Backend, "_ensure_backend_registered"):  # torch >= 2.14
                backend = self._from_registry(name, store)
            else:
                backend = self._gloo(store) if name == "gloo" else self._nccl(store)
        except RuntimeError as error:
            if name == "gloo" and (why := self._why_unconnected()):
                raise _backend_error(f"{self._what()}: {why}; gloo: {error}") from error
            raise
        self.made[device_type] = backend
        return backend

    def by_nodes(
        self, device_type: str, node_of: list[int], *, piece_bytes: int = _PIECE_BYTES
    ) -> Backend:
        """The stock backend in stages: among the ranks of a node, and of one place on each.

        Args:
            device_type: as for a call.
            node_of: each rank's node; as many ranks on each.
            piece_bytes: a message between nodes that is at least as long as two goes in pieces.
        """
        from deepytorch_core.c10d import adapter

        nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(node_of):
            nodes.setdefault(node, []).append(rank)
        own = nodes[node_of[self._spec.rank]]
        place = own.index(self._spec.rank)
        rail = [ranks[place] for ranks in nodes.values()]
        # Kept, as those of `made` are.
        self._parts = [self._part(f"node-{own[0]}", own), self._part(f"rail-{place}", rail)]
        local_backend, rail_backend = (part(device_type) for part in self._parts)
        made: Backend = adapter.load().Hierarchy(
            self._spec.rank,
            flat=self(device_type),
            local=local_backend,
            rail=rail_backend,
            node_of=node_of,
            piece_bytes=piece_bytes,
        )
        return made

    def _part(self, label: str, ranks: list[int]) -> StockFactory:
        from torch.distributed import distributed_c10d as c10d

        spec = self._spec
        global_ranks = spec.global_ranks or list(range(spec.size))
        return StockFactory(
            replace(
                spec,
                store=c10d.PrefixStore(f"{label}/", spec.store),
                rank=ranks.index(spec.rank),
                size=len(ranks),
                timeout=self.timeout,
                name=f"{spec.name}/{label}",
                global_ranks=[global_ranks[rank] for rank in ranks],
                # The whole group's; a backend writes into those it is given.
                pg_options=None,
                process_group=None,
            )
        )

    def who_died(self) -> str:
        """After a failure of a stock backend: "rank 1 (pid 4711) died", or "" for all we know."""
        deadline = time.monotonic() + _ENDING_S
        while not (found := self._spec.dead()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _store(self) -> Store:
        """The group's, over a client in which nobody waits for another.

        Torch's own where there is no adapter, so that no thread of ours can be in the store.
        """
        from deepytorch_core.c10d import adapter

        module = adapter.loaded()
        if module is None:
            return self._spec.store
        this = weakref.ref(self)  # what is made with the store is held by this factory

        def on_wait(keys: list[str], waited_s: float) -> None:
            factory = this()
            # Gloo's ranks give their addresses under their numbers.
            numbers = [key.rpartition("/")[2] for key in keys]
            if factory is not None and all(number.isdigit() for number in numbers):
                factory._say_late([int(number) for number in numbers], waited_s)

        return own_client(module, self._spec.store, on_wait)

    def _meet(self, store: Store, limit_s: float) -> None:
        """Waits until all ranks are here and fit to make gloo's part of the group.

        Gloo would wait as well, but neither see that a rank died nor that it failed.
        """
        import torch.distributed as dist

        spec = self._spec
        keys = [f"here/{rank}" for rank in range(spec.size)]
        what = self._what()
        try:
            store.set(keys[spec.rank], self._why_unfit())
            self._wait_for(store, keys, what, limit_s)
            words = stores.texts(store, keys)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            reason = str(error).partition("\n")[0]
            raise _backend_error(f"{what}: rendezvous store: {reason}") from error
        unfit = [
            f"rank {spec.global_rank(rank)} can't: {word}"
            for rank, word in enumerate(words)
            if word
        ]
        if unfit:
            raise _backend_error(f"{what}: {', '.join(unfit)}")

    def _what(self) -> str:
        spec = self._spec
        return f"group {spec.name} on rank {spec.global_rank(spec.rank)}: making gloo's part"

    def _why_unfit(self) -> str:
        """Say what stops this process from making gloo's sockets and threads; "" for nothing."""
        from torch._C._distributed_c10d import HashStore
        from torch.distributed import distributed_c10d as c10d

        try:
            c10d.ProcessGroupGloo(HashStore(), 0, 1, timeout=self.timeout)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _wait_for(self, store: Store, keys: list[str], what: str, limit_s: float) -> None:
        spec = self._spec
        started = looked = time.monotonic()
        pause = 0.001
        while not store.check(keys):
            now = time.monotonic()
            if now - looked > _LOOK_FOR_DEAD_S:
                looked = now
                if dead := spec.dead():
                    raise _backend_error(f"{what}: {dead} before it joined")
            if now - started > limit_s:
                raise _backend_error(
                    f"{what}: rank(s) {self._numbers(self._absent(store, keys))} did not join "
                    f"within {limit_s:g} s"
                )
            if now - started > _SAY_LATE_S and not self._has_said_late:
                self._say_late(self._absent(store, keys), now - started)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _absent(self, store: Store, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]

    def _numbers(self, ranks: list[int]) -> str:
        return ", ".join(str(self._spec.global_rank(rank)) for rank in ranks)

    def _say_late(self, absent: list[int], waited_s: float) -> None:
        """Say once which ranks of the group are waited for, if this is the first that waits."""
        if self._has_said_late or waited_s < _SAY_LATE_S or not absent:
            return
        self._has_said_late = True
        first = next(rank for rank in range(self._spec.size) if rank not in absent)
        if first == self._spec.rank:
            say(
                f"{self._what()}: waits for rank(s) {self._numbers(absent)}, {waited_s:.0f} s by "
                f"now, up to {self.timeout.total_seconds():g} s: each makes it at the first "
                "operation that gloo serves",
                level="warning",
            )

    @property
    def timeout(self) -> timedelta:
        live = getattr(self.live_options, "_timeout", None)
        return self._spec.timeout if live is None else live

    def _from_registry(self, name: str, store: Store) -> Backend:
        from torch._C._distributed_c10d import _DistributedBackendOptions
        from torch.distributed import distributed_c10d as c10d

        backend_class: Any = c10d.Backend
        backend_class._ensure_backend_registered(name)
        plugin = backend_class._plugins[name.upper()]
        options: Any = _DistributedBackendOptions()
        options.store = store
        options.group_rank = self._spec.rank
        options.group_size = self._spec.size
        options.timeout = self.timeout
        options.group_id = self._spec.name
        options.global_ranks_in_group = self._spec.global_ranks
        if self._spec.process_group is not None:
            options.process_group = self._spec.process_group()
        made: Backend = plugin.creator_fn(options, self._nccl_options() if name == "nccl" else None)
        return made

    def _gloo(self, store: Store) -> Backend:
        from torch.distributed import distributed_c10d as c10d

        if not c10d.is_gloo_available():
            raise RuntimeError(
                f"deepytorch: group {self._spec.name}: this torch was built without gloo, which "
                "serves CPU tensors that native code does not"
            )
        backend: Any = c10d.ProcessGroupGloo(
            store, self._spec.rank, self._spec.size, timeout=self.timeout
        )
        backend.options.global_ranks_in_group = self._spec.global_ranks
        backend.options.group_name = self._spec.name
        backend._set_sequence_number_for_group()
        made: Backend = backend
        return made

    def _why_unconnected(self) -> str:
        """Explain why gloo could not connect the ranks, as far as known."""
        if dead := self.who_died():
            return dead
        if not config.spans_nodes():
            return ""
        return (
            "the nodes did not find each other (GLOO_SOCKET_IFNAME or option ifname names the "
            "interface between them; a firewall must let its ports through)"
        )

    def _nccl(self, store: Store) -> Backend:
        from torch.distributed import distributed_c10d as c10d

        if not c10d.is_nccl_available():
            raise RuntimeError(
                f"deepytorch: group {self._spec.name}: this torch was built without NCCL, which "
                "serves CUDA tensors"
            )
        nccl: Any = c10d.ProcessGroupNCCL  # absent from CPU builds
        options = self._nccl_options() or nccl.Options()
        options._timeout = self.timeout
        options.global_ranks_in_group = self._spec.global_ranks
        options.group_name = self._spec.name
        backend: Any = nccl(store, self._spec.rank, self._spec.size, options)
        backend._set_sequence_number_for_group()
        made: Backend = backend
        return made

    def _nccl_options(self) -> Any:
        """The caller's `pg_options` if they are NCCL's; other backends' don't concern it."""
        from torch.distributed import distributed_c10d as c10d

        nccl: Any = getattr(c10d, "ProcessGroupNCCL", None)
        given = self._spec.pg_options
        return given if nccl is not None and isinstance(given, nccl.Options) else None


def _backend_error(text: str) -> Exception:
    import torch.distributed as dist

    return dist.DistBackendError(f"{text} ({OFF_SWITCH})")
