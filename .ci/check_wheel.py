"""Checks what a wheel holds, and must not: `python .ci/check_wheel.py WHEEL [FOLDER ...]`.

Prints its size, its GPU code, its adapters and the C library it needs. A binary makes it fail that
contains a folder it was made in, or has kept its symbols for debugging. So does one that needs a
newer C library than the wheel's name says (an adapter: than its own name says).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# ruff: noqa: T201
_NEEDED = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_WHEEL_LIBC = re.compile(r"manylinux_(\d+)_(\d+)_")
_ADAPTER_LIBC = re.compile(r"-glibc(\d+)\.(\d+)")


def libc(binary: bytes) -> tuple[int, int]:
    """The newest glibc that a symbol of `binary` comes from."""
    found = [(int(major), int(minor)) for major, minor in _NEEDED.findall(binary)]
    return max(found, default=(2, 0))


def allowed_libc(pattern: re.Pattern[str], text: str) -> tuple[int, int]:
    """The oldest of the C libraries that `text` names; fails for a name without one."""
    found = [(int(major), int(minor)) for major, minor in pattern.findall(text)]
    if not found:
        raise SystemExit(f"{text} names no C library")
    return min(found)


def gpu_code(binary: bytes) -> list[str]:
    """The kinds of GPU that `binary` has machine code or PTX for, as the core itself says."""
    names = re.findall(rb"(?<=\0)(?:\d+a?-(?:real|virtual) ?)+(?=\0)", binary)
    return names[0].decode().split() if names else []


def listed_gpu_code(path: Path) -> list[str]:
    """The same from cuobjdump, of what was really embedded; nothing where there is no such tool."""
    if shutil.which("cuobjdump") is None:
        return []
    found: set[str] = set()
    for flag, kind in (("--list-elf", "cubin"), ("--list-ptx", "ptx")):
        done = subprocess.run(["cuobjdump", flag, str(path)], capture_output=True, text=True)
        found |= {f"{name} {kind}" for name in re.findall(r"\.(sm_\w+)\." + kind, done.stdout)}
    return sorted(found)


def complaints(name: str, binary: bytes, folders: list[str], most: tuple[int, int]) -> list[str]:
    """Return what is wrong with one binary of the wheel."""
    found = [
        f"{name} contains the folder {folder}" for folder in folders if folder.encode() in binary
    ]
    if b"\0.debug_info\0" in binary:
        found.append(f"{name} has symbols for debugging")
    needs = libc(binary)
    if needs > most:
        found.append(f"{name} needs glibc {needs[0]}.{needs[1]}, newer than {most[0]}.{most[1]}")
    return found


def main(wheel: Path, folders: list[str]) -> int:
    wrong: list[str] = []
    folders = [folder for folder in folders if folder not in ("/", "/usr", "/usr/local")]
    named = allowed_libc(_WHEEL_LIBC, wheel.name)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        unpacked = sum(info.file_size for info in archive.infolist())
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {unpacked / 1e6:.1f} unpacked")
        adapters = []
        for name in sorted(archive.namelist()):
            if not name.endswith(".so") and ".so." not in name:
                continue
            binary = archive.read(name)
            most = named
            if "/_prebuilt/" in name:
                most = allowed_libc(_ADAPTER_LIBC, name)
                adapters.append(name.split("/_prebuilt/")[1].split("-")[0])
            wrong += complaints(name, binary, folders, most)
            if "/_core." in name:
                said = ", ".join(gpu_code(binary)) or "none"
                embedded = listed_gpu_code(Path(archive.extract(name, folder)))
                print(f"GPU code: {said}{f' ({chr(44).join(embedded)})' if embedded else ''}")
        print(f"adapters: {', '.join(adapters) or 'none'}")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
