"""How the two ends of a connection between nodes make sure of each other before they use it.

    client -> server  Hello      the connection's number and a nonce
    server -> client  Challenge  a nonce, and HMAC(secret, "server", Hello, nonce)
    client -> server  Answer     HMAC(secret, "client", Hello, nonce)
    server -> client  Welcome    so that the client knows that it was believed

The secret comes from the rendezvous store and is never sent, and a proof is good for one connection
and one direction. Each message has one fixed size, so a stranger can't make this side read or hold
more. `csrc/transport/tcp/handshake.hpp` does the same for the connections that carry data.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

SECRET_BYTES = 32
LIMIT_S = 5.0
"""A greeting may take so long; a peer that is not done by then is a stranger."""

_MAGIC, _VERSION = b"DPTM", 1
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_PREFIX = struct.Struct("!4sH")
_HELLO = struct.Struct(f"!{_PREFIX.size}sB{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"!{_PREFIX.size}s{_NONCE_BYTES}s{_PROOF_BYTES}s")


class StrangerError(RuntimeError):
    """The other end did not prove that it knows the secret; the message says what it did."""


def introduce(connection: socket.socket, secret: bytes, number: int, deadline: float) -> None:
    """The connecting end's greeting, for its connection `number` (0 to 255).

    Args:
        deadline: by the monotonic clock; `LIMIT_S` from now where that is sooner.

    Raises StrangerError, also when the deadline passes, and OSError.
    """
    deadline = min(deadline, time.monotonic() + LIMIT_S)
    hello = _HELLO.pack(_prefix(), number, secrets.token_bytes(_NONCE_BYTES))
    _send(connection, hello, deadline)
    challenge = _receive_message(connection, _CHALLENGE.size, deadline)
    _, nonce, proof = _CHALLENGE.unpack(challenge)
    _check_proof(proof, _proof(secret, b"server", hello, nonce))
    _send(connection, _proof(secret, b"client", hello, nonce), deadline)
    _receive_message(connection, _PREFIX.size, deadline)


def welcome(connection: socket.socket, secret: bytes, deadline: float) -> int:
    """The listening end's greeting; the number that the other end gave this connection.

    Args and errors as those of `introduce`.
    """
    deadline = min(deadline, time.monotonic() + LIMIT_S)
    hello = _receive_message(connection, _HELLO.size, deadline)
    _, number, _ = _HELLO.unpack(hello)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = _proof(secret, b"server", hello, nonce)
    _send(connection, _CHALLENGE.pack(_prefix(), nonce, proof), deadline)
    answer = _receive(connection, _PROOF_BYTES, deadline)
    _check_proof(answer, _proof(secret, b"client", hello, nonce))
    _send(connection, _prefix(), deadline)
    return int(number)


def _prefix() -> bytes:
    return _PREFIX.pack(_MAGIC, _VERSION)


def _check_prefix(found: bytes) -> None:
    magic, version = _PREFIX.unpack(found)
    if magic != _MAGIC:
        raise StrangerError("the other side does not speak deepytorch's protocol")
    if version != _VERSION:
        raise StrangerError(
            f"the other side speaks version {version} of the protocol, this one {_VERSION}: "
            "install the same version of deepytorch on every node"
        )


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"deepytorch measurement " + role + hello + nonce, "sha256")


def _check_proof(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise StrangerError("the other side does not know the secret")


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(_left(deadline))
    connection.sendall(data)


def _receive_message(connection: socket.socket, count: int, deadline: float) -> bytes:
    """A message with a prefix, which is looked at before the rest is waited for."""
    prefix = _receive(connection, _PREFIX.size, deadline)
    _check_prefix(prefix)
    return prefix + _receive(connection, count - len(prefix), deadline)


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes; whoever sends them one by one gets no more time for it."""
    data = b""
    while len(data) < count:
        connection.settimeout(_left(deadline))
        try:
            piece = connection.recv(count - len(data))
        except TimeoutError:
            continue
        if not piece:
            raise StrangerError("the other side hung up during the greeting")
        data += piece
    return data


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StrangerError("the other side did not finish its greeting in time")
    return left
