"""The child side of `spawn_ranks`: a process that is one rank, for many calls.

A worker is started with a socket to its parent and serves one `RankCall` after the other. So tests
pay for `import torch` once per pool and not once per test. What a call left behind is cleaned up
before its result is sent; a worker whose call failed serves no other.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepytorch_core.base import config
from deepytorch_core.c10d import activation

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STORE_HOST = "127.0.0.1"
# Shorter than the time that the others have when a rank failed.
_LEAVING = timedelta(seconds=1)


# These run whole programs: our changes to models are switched on in them as anywhere.
_OF_PROGRAMS = ("deepytorch_core.testing.script", "deepytorch_core.testing.forked")


@dataclass(frozen=True)
class FunctionRef:
    """A module-level function by file and name: test modules have no importable name."""

    path: str
    module: str
    qualname: str


@dataclass(frozen=True)
class RankCall:
    """One call of a function on one rank; `payload` is the pickled `(args, kwargs)`."""

    store_port: int
    function: FunctionRef
    payload: bytes
    backend: str | None
    group_timeout_s: float


@dataclass(frozen=True)
class CallOutcome:
    """The result of a call: a pickled value, or a pickled exception (if it can be) and text."""

    ok: bool
    payload: bytes | None
    summary: str = ""
    traceback: str = ""


class UncaughtError(Exception):
    """Nobody catches it in a worker: its interpreter ends by it, as a user's program would."""


@dataclass
class RankPlace:
    """This process's identity, and the store its current call shares with the other ranks."""

    rank: int
    world_size: int
    store_host: str = STORE_HOST
    store_port: int = 0
    store: Store | None = None


_place: RankPlace | None = None


def rank_store(name: str) -> Store:
    """Return a fresh key space shared by all ranks of the current call.

    For functions that set up torch.distributed themselves, more than once for instance: give each
    set-up its own `name`. The server lives in the parent, so it outlives any rank.
    Raises RuntimeError outside of `spawn_ranks`.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if _place is None:
        raise RuntimeError("rank_store() works only inside a function run by spawn_ranks")
    if _place.store is None:
        _place.store = TCPStore(
            _place.store_host, _place.store_port, is_master=False, timeout=timedelta(seconds=60)
        )
    return PrefixStore(name, _place.store)


def place() -> tuple[int, int]:
    """Return this worker's (rank, world_size); RuntimeError outside of `spawn_ranks`."""
    if _place is None:
        raise RuntimeError("this process was not started by spawn_ranks")
    return _place.rank, _place.world_size


def load_function(ref: FunctionRef) -> Callable[..., Any]:
    """Find `ref`, importing its file under the parent's module name when it isn't loaded yet."""
    module = sys.modules.get(ref.module)
    loaded = getattr(module, "__file__", None)
    if ref.module == "__main__" or loaded is None or os.path.abspath(loaded) != ref.path:
        module = _load_module(ref)
    target: Any = module
    for part in ref.qualname.split("."):
        target = getattr(target, part)
    # Decorated test functions keep what they wrap; a plain function has no such attribute.
    return target  # type: ignore[no-any-return]


def _load_module(ref: FunctionRef) -> ModuleType:
    # `__main__` must not run its `if __name__ == "__main__"` part here, as in multiprocessing.
    name = "__mp_main__" if ref.module == "__main__" else ref.module
    cached = sys.modules.get(name)
    if cached is not None and getattr(cached, "__file__", None) == ref.path:
        return cached
    spec = importlib.util.spec_from_file_location(name, ref.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {ref.path}: not a Python source file")
    module = importlib.util.module_from_spec(spec)
    # Under the parent's name, so that what was pickled by reference is found here too.
    sys.modules[name] = sys.modules[ref.module] = module
    spec.loader.exec_module(module)
    return module


def _run(call: RankCall) -> CallOutcome:
    assert _place is not None
    _place.store_port, _place.store = call.store_port, None
    os.environ.update(MASTER_PORT=str(call.store_port))  # noqa: TID251  nothing is read
    try:
        _reset_state()
        activation.leave_models_alone(call.function.module not in _OF_PROGRAMS)
        function = load_function(call.function)
        args, kwargs = pickle.loads(call.payload)
        if call.backend is not None:
            _init_process_group(call)
        with warnings.catch_warnings():
            result = function(_place.rank, _place.world_size, *args, **kwargs)
        payload = pickle.dumps(result)
        _leave_gloo_together()
        _clean_up()
        return CallOutcome(ok=True, payload=payload)
    except UncaughtError:
        raise
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> CallOutcome:
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        payload: bytes | None = pickle.dumps(error)
        pickle.loads(payload or b"")
    except Exception:
        payload = None  # the text below still says everything
    return CallOutcome(ok=False, payload=payload, summary=summary, traceback=_traceback_of(error))


def _traceback_of(error: BaseException) -> str:
    # Without this module's own frames: the reader wants the test's.
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _init_process_group(call: RankCall) -> None:
    import torch.distributed as dist

    assert _place is not None
    assert call.backend is not None
    if "deepytorch" in call.backend:
        from deepytorch_core.c10d import backend

        backend.register()
    dist.init_process_group(
        call.backend,
        store=rank_store("default_group"),
        rank=_place.rank,
        world_size=_place.world_size,
        timeout=timedelta(seconds=call.group_timeout_s),
    )


def _reset_state() -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler: 1 s
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _leave_gloo_together() -> None:
    """gloo's set-up of a group fails on a rank that is still at it when another leaves."""
    import torch.distributed as dist

    from deepytorch_core.c10d.patches import serving_name

    assert _place is not None
    if not dist.is_initialized() or serving_name() != "gloo":
        return
    leaving = rank_store("leaving")
    if leaving.add("ranks", 1) == _place.world_size:
        leaving.set("all", "1")
    with contextlib.suppress(dist.DistStoreError):  # a rank that died or failed doesn't come
        leaving.wait(["all"], _LEAVING)


def _clean_up() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    activation = sys.modules.get("deepytorch_core.c10d.activation")
    if activation is not None and activation.is_active():
        activation.deactivate()
    config.set_current(None)


def serve(descriptor: int, place: RankPlace, stacks_path: str) -> None:
    """Serve calls from the socket `descriptor` until the parent closes it or dies.

    Raises UncaughtError where a call did.
    """
    global _place
    _place = place
    # Kept open for the life of the process: the parent reads it after a hang or a crash.
    stacks = open(stacks_path, "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    connection = Connection(descriptor)
    calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    while True:
        outcome = _run(calls.get())
        sys.stdout.flush()
        with contextlib.suppress(Exception):  # a test may have put anything there
            sys.stderr.flush()
        connection.send_bytes(pickle.dumps(outcome))


def _receive(connection: Connection, calls: queue.SimpleQueue[RankCall]) -> None:
    # In its own thread so that a worker busy in a call still notices the end of its parent.
    while True:
        try:
            calls.put(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)
