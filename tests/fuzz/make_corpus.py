"""Writes the first inputs of each fuzzer into corpus/: valid ones, and some that are nearly so."""

from __future__ import annotations

import struct
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
MACHINE = HERE.parent / "unit" / "data" / "machine_8_gpus.json"

STRIPE, CONTROL, HELLO = 0x53545044, 0x57545044, 0x43545044
PROFILE = b"""{"format": 1, "groups": [{"machine": "a machine", "deepytorch": "1.2.3", "ranks": 4,
 "oversubscribed": true, "measured": [{"collective": "all_reduce", "bytes": 65536, "times": [
 {"algorithm": "pipelined", "chunk_bytes": 65536, "median_us": 1.5, "spread_us": [1, 2]},
 {"algorithm": "delegate", "chunk_bytes": 0, "median_us": 1e3, "spread_us": [0.5, 2e9]}]}]}],
 "decisions": [{"chosen": "inductor"}]}"""


def stripe(message: int, offset: int, total: int, data: bytes, checked: int = 0) -> bytes:
    return struct.pack("<IIQQQII", STRIPE, len(data), message, offset, total, checked, 7) + data


def control(kind: int, status: int, text: bytes) -> bytes:
    return struct.pack("<IHHI", CONTROL, kind, status, len(text)) + text


def hello(version: int = 2, size: int = 84, to: int = 1) -> bytes:
    group = b"0123456789abcdef0123456789abcdef"
    return struct.pack("<IHH32sIII32s", HELLO, version, size, group, 2, to, 0, bytes(32))


def halves(first: bytes, second: bytes) -> bytes:
    """For two sockets: what is cut in the middle arrives whole on each."""
    length = max(len(first), len(second))
    return first.ljust(length, b"\0") + second.ljust(length, b"\0")


INPUTS: dict[str, dict[str, bytes]] = {
    "json": {
        "all_kinds": b'{"a": [1, -2.5e3, true, null], "b": {"c": "\\u00e9\\ud83d\\ude00\\n"}}',
        "deep": b"[" * 64 + b"]" * 64,
        "too_deep": b"[" * 70,
        "big_number": b"123456789012345678901234567890",
        "open_string": b'{"a": "b\\',
    },
    "profile": {"valid": PROFILE, "no_groups": b'{"format": 1}', "later": b'{"format": 2}'},
    "topology": {"machine_8_gpus": MACHINE.read_bytes(), "empty": b"{}"},
    "framing": {
        "two_messages": halves(stripe(0, 0, 8, b"12345678"), stripe(1, 0, 4, b"abcd")),
        "split": halves(stripe(0, 0, 8, b"1234"), stripe(0, 4, 8, b"5678")),
        "empty": halves(stripe(0, 0, 0, b""), stripe(1, 0, 0, b"")),
        "too_long": halves(stripe(0, 0, 1 << 40, b"1234"), b""),
        "twice": halves(stripe(0, 0, 8, b"1234") * 3, b""),
        "damaged": halves(stripe(0, 0, 4, b"1234", checked=1), b""),
        "far_ahead": halves(stripe(1 << 63, 0, 4, b"1234"), b""),
    },
    "control": {
        "beat_bye": control(1, 0, b"") + control(2, 0, b""),
        "abort": control(3, 3, b"rank 1 died"),
        "unknown": control(9, 0, b""),
        "long": control(3, 3, b"x" * 480),
    },
    "handshake": {
        "hello": hello(),
        "another_version": hello(version=3),
        "wrong_size": hello(size=80),
        "to_another": hello(to=3),
        "challenge": struct.pack("<IHH32s32s", HELLO, 2, 72, bytes(32), bytes(32)),
        "http": b"GET / HTTP/1.1\r\n\r\n",
    },
}


def main() -> None:
    for target, inputs in INPUTS.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
