"""Tells which files could be a model's weights, and which say how these are to be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import PurePath

TORCH = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp")
"""The endings of the names of PyTorch's own checkpoints."""

_KNOWN = {
    *TORCH,
    *(".pt2", ".ot", ".mar", ".onnx", ".gguf", ".model", ".nemo", ".keras", ".msgpack"),
    *(".pkl", ".pickle", ".joblib", ".npy", ".npz", ".h5", ".hdf5"),
}
# Scripts write these at every start, whatever a file begins with: a zip is also a spreadsheet.
_OTHERS = {
    *(".txt", ".log", ".out", ".err", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".toml"),
    *(".md", ".html", ".xml", ".py", ".ipynb", ".png", ".jpg", ".gif", ".svg", ".pdf", ".mp4"),
    *(".zip", ".whl", ".jar", ".xlsx", ".docx", ".db", ".sqlite", ".parquet", ".arrow"),
    *(".lock", ".cache"),
}
_EVENTS = ".tfevents."
_DESCRIBING = (".json", ".yaml", ".yml", ".toml", ".jinja")
_VOCABULARIES = {"vocab.txt", "merges.txt"}
# Name the newest of the checkpoints beside them.
_POINTERS = {
    *("latest", "checkpoint", "last_checkpoint", "latest_checkpointed_iteration.txt"),
    ".metadata",  # of torch.distributed.checkpoint
}
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
# These mark files of torch.save: the magic number before 1.6, the zip's first member since.
_TORCHS_OWN = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_ZIP, _ZIP_NAME, _MEMBER = b"PK\x03\x04", 30, b"/data.pkl"
_HEADS = (_ZIP, b"\x89HDF\r\n", b"\x93NUMPY", b"GGUF")
_HEAD_BYTES = 300
_LONGEST_HEADER = 100_000_000  # bytes of safetensors' JSON, by its definition


def has_name(path: str) -> bool:
    """Whether a file is called as weights are, also behind `.bak`, `.old` and the like."""
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes[-2:]]
    if not suffixes or suffixes[-1] in _OTHERS:
        return False
    return suffixes[-1] == ".tar" or not _KNOWN.isdisjoint(suffixes)


def could_be(path: str) -> bool:
    """Whether a file is called as weights are, or begins as they do; it need not exist."""
    if has_name(path):
        return True
    name = os.path.basename(path)
    if PurePath(name).suffix.lower() in _OTHERS or _EVENTS in name:
        return False
    head = _head(path)
    return _is_safetensors(head) or head.startswith((*_HEADS, *_PICKLES))


def is_checkpoint(path: str) -> bool:
    """Whether a file is a checkpoint for sure: PyTorch's or safetensors', by name or content.

    What else `could_be` weights is as often data that a script has prepared.
    """
    if path.endswith(TORCH):
        return True
    head = _head(path)
    if head.startswith(_ZIP):
        length = int.from_bytes(head[26:28], "little")
        return head[_ZIP_NAME : _ZIP_NAME + length].endswith(_MEMBER)
    return _is_safetensors(head) or head.startswith(_TORCHS_OWN)


def _is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and 1 < int.from_bytes(head[:8], "little") <= _LONGEST_HEADER


def _head(path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return b""  # reading a pipe may never end
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


def described(path: str) -> Iterator[str]:
    """The files that `path` may describe or point at, as config.json does; none for others."""
    folder, name = os.path.split(path)
    if name in _POINTERS:
        yield from _files(folder, depth=1)
    elif name in _VOCABULARIES or name.endswith(_DESCRIBING):
        yield from _files(folder, depth=0)


def _files(folder: str, *, depth: int) -> Iterator[str]:
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except OSError:
        return
    for entry in entries:
        if entry.is_file():
            yield entry.path
        elif depth and entry.is_dir():
            yield from _files(entry.path, depth=depth - 1)
