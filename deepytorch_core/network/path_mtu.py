"""How large a packet gets from one node to another in one piece: measured with UDP, in a second.

A path that drops what its first interface lets out is the hard case. Connections come up, small
messages pass, and the first large one hangs. Packets are sent with "don't fragment" and regardless
of what the kernel believes of the path (IP_PMTUDISC_PROBE); the other side answers each that
arrives with a short packet that names its size. Packets prove by HMAC, each way in its own manner,
that their sender knows the secret; it is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

SECRET_BYTES = 16
USUAL = (9000, 8900, 4200, 2048, 1500, 1480, 1450, 1400, 1280, 576)
"""Sizes of packets that are tried below the interface's own, in bytes."""

_PROOF_BYTES = hashlib.sha256().digest_size
_HEAD = struct.Struct(f"!{_PROOF_BYTES}sI")
_ROUNDS, _ROUND_S = 3, 0.3
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PROBE = 10, 23, 3  # linux/in.h, linux/in6.h
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # IP and UDP


@dataclass(frozen=True)
class PathMtu:
    """One direction between two ranks' nodes.

    `largest` is the largest packet in bytes that arrived, None when none did; `mtu` and
    `receiver_mtu` are the interfaces'; `interface` is the sender's.
    """

    sender: int
    receiver: int
    interface: str
    address: str
    mtu: int
    receiver_mtu: int
    largest: int | None


class Echo:
    """Answers the packets of who knows `secret`, in a thread, until `close`."""

    def __init__(self, address: str, secret: bytes) -> None:
        """Raises OSError when there is no such address here."""
        self._socket = socket.socket(_family(address), socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._secret = secret
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that packets are to be sent to."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._over.is_set():
            if not select.select([self._socket], [], [], 0.05)[0]:
                continue
            with contextlib.suppress(OSError):
                data, sender = self._socket.recvfrom(1 << 16)
                size = _size_in(data, self._secret, b"question")
                if size is not None:
                    self._socket.sendto(_head(size, self._secret, b"answer"), sender)


def largest(target: tuple[str, int], secret: bytes, mtu: int) -> int | None:
    """The largest packet, in bytes with its headers, that reaches an `Echo` at `target`.

    Tries `mtu`, the sending interface's, and the usual sizes below it. None when nothing comes
    back. Raises OSError when there is no way to the target.
    """
    family = _family(target[0])
    sizes = [mtu, *(size for size in USUAL if size < mtu)]
    arrived: set[int] = set()
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        if family == socket.AF_INET:
            asking.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)
        else:
            asking.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
        asking.connect(target)
        for _ in range(_ROUNDS):
            for size in sizes:
                padding = bytes(size - _HEADERS[family] - _HEAD.size)
                with contextlib.suppress(OSError):  # larger than the interface lets out
                    asking.send(_head(size, secret, b"question") + padding)
            _collect(asking, secret, arrived, wanted=len(sizes))
            if mtu in arrived:
                break
    return max(arrived, default=None)


def _collect(asking: socket.socket, secret: bytes, arrived: set[int], *, wanted: int) -> None:
    deadline = time.monotonic() + _ROUND_S
    while len(arrived) < wanted and (left := deadline - time.monotonic()) > 0:
        if not select.select([asking], [], [], left)[0]:
            return
        with contextlib.suppress(OSError):
            size = _size_in(asking.recv(1 << 16), secret, b"answer")
            if size is not None:
                arrived.add(size)


def _head(size: int, secret: bytes, role: bytes) -> bytes:
    """Return a packet's head; one seen on the way proves nothing in the other direction."""
    text = b"deepytorch packet " + role + struct.pack("!I", size)
    return _HEAD.pack(hmac.digest(secret, text, "sha256"), size)


def _size_in(data: bytes, secret: bytes, role: bytes) -> int | None:
    """The size that a packet names; None for a stranger's."""
    if len(data) < _HEAD.size:
        return None
    _, size = _HEAD.unpack_from(data)
    known = hmac.compare_digest(data[: _HEAD.size], _head(size, secret, role))
    return int(size) if known else None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
