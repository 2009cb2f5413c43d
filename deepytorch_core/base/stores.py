"""A rendezvous store, whoever wrote it.

Programs may give torch a store of their own: a subclass of `torch.distributed.Store` in Python, of
which gloo needs `set`, `get` and `wait` alone. What else we ask of a store goes through here. Of
one that is not torch's only `add` and `check` are used besides, and `lacks` says that it has none.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

# torch's own.
_TIMEOUT = timedelta(seconds=300)
_FIRST_PAUSE_S, _PAUSE_S = 0.0005, 0.05
# Between claiming to be the first and saying what, a rank does nothing else.
_CLAIM_LIMIT_S = 30.0


def serve(host: str, timeout: timedelta = _TIMEOUT) -> TCPStore:
    """A TCPStore at a free port of `host`, an address of this machine, and nowhere else.

    By itself it would listen on all interfaces, with a socket for IPv6 and IPv4. It asks for the
    name of each caller, in its only thread. /etc/hosts tells the name of a local IPv4 address. Such
    a socket takes the caller's for an IPv6 address, of which /etc/hosts tells none: then all wait
    for DNS, which may be silent.
    """
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


def root(store: Any) -> Any:
    """The store below prefixes."""
    from torch._C._distributed_c10d import PrefixStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def is_torchs(store: Any) -> bool:
    """Whether it is one of torch's, which have every function and may be used by any thread."""
    from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

    return type(root(store)) in (TCPStore, FileStore, HashStore)


def lacks(store: Any) -> str:
    """Say in words which of the functions that we need a store lacks; "" if it has all.

    It is the same on every rank, as far as their stores are of one kind.
    """
    from torch._C._distributed_c10d import PrefixStore

    if is_torchs(store):
        return ""
    asked: Any = PrefixStore("deepytorch", store)  # so torch checks what it answers
    missing = []
    questions: dict[str, Callable[[], Any]] = {
        "add": lambda: asked.add("probe", 0),
        "check": lambda: asked.check(["probe"]),
    }
    for name, ask in questions.items():
        try:
            ask()
        except Exception:  # each kind of store has errors of its own for that
            missing.append(f"{name}()")
    if not missing:
        return ""
    return f"{type(root(store)).__name__}, the job's store, has no {' and no '.join(missing)}"


def first(store: Any, key: str, value: str, *, limit_s: float = _CLAIM_LIMIT_S) -> str:
    """The value that the first of all ranks gave for `key`: this one, or another's.

    By `add`, which every store has, and for all stores alike: ranks whose stores differ in what
    else they have must come to the same. Raises RuntimeError where the first does not say its value
    within `limit_s`, for it has died.
    """
    if store.add(f"{key}/claims", 1) == 1:
        store.set(key, value)
        return value
    if not wait(store, [key], limit_s):
        raise RuntimeError(f"the rank that was to give {key} did not within {limit_s:g} s")
    return text(store, key)


def text(store: Any, key: str) -> str:
    """The value of a key that is there, or comes."""
    found: bytes = store.get(key)
    return found.decode()


def there(store: Any, key: str) -> str | None:
    """The value of a key, if it is there."""
    return text(store, key) if store.check([key]) else None


def texts(store: Any, keys: Sequence[str]) -> list[str]:
    """The values of keys that are there."""
    if is_torchs(store):  # one question
        return [value.decode() for value in store.multi_get(list(keys))]
    return [text(store, key) for key in keys]


def wait(store: Any, keys: Sequence[str], limit_s: float) -> bool:
    """Whether all keys were there before the time was over."""
    if not is_torchs(store):  # how it waits, and what it raises, is its own
        return poll(lambda: bool(store.check(list(keys))), limit_s)
    try:
        store.wait(list(keys), timedelta(seconds=limit_s))
    except RuntimeError:  # torch's DistStoreError: the time is over
        return bool(store.check(list(keys)))
    return True


def poll(is_there: Callable[[], bool], limit_s: float) -> bool:
    """Ask again and again; False when the time is over. A store's own wait can't end early.

    That one also prints two lines of torch's when the time is over.
    """
    until, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while not is_there():
        if time.monotonic() >= until:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)
    return True


def drop(store: Any, keys: Iterable[str]) -> None:
    """Forget what nobody reads any more, where the store can."""
    if is_torchs(store):
        for key in keys:
            with contextlib.suppress(RuntimeError):  # FileStore has no such function
                store.delete_key(key)


def connection(store: Any) -> Any:
    """Another connection to the store, for a thread that waits; the same one where none is to be
    had."""
    if is_torchs(store):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            return store.clone()
    return store
