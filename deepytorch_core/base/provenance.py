"""Records of measurements, as JSON lines, and where they come from: machine, versions, commit."""

import contextlib
import functools
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from deepytorch_core.base import config, distribution

Record = dict[str, Any]

_SOURCE = Path(__file__).resolve().parents[2]
_PLACES = ("--json", "--plot", "--report", "--trace", "--write", "--beside", "--fuzz-record")
# These cannot change a measurement; records themselves are written into the tree.
_NOT_CODE = (":!docs", ":!*.md")


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Appends `record` with this process's `command` to `path`, as one JSON line.

    Creates the file and its folder.

    Raises ValueError for values that JSON has no form for, NaN and infinity included.
    """
    line = json.dumps({**record, "command": command()}, allow_nan=False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_records(path: str | Path) -> list[Record]:
    """The records of one file in file order; ValueError names a line that is none."""
    records: list[Record] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not a JSON line: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number} holds a {type(record).__name__}, not a record")
        records.append(record)
    return records


def _is_setting(variable: str) -> bool:
    # NVIDIA's images name the NCCL they bring in NCCL_VERSION, which nothing reads.
    return variable == "CUDA_DEVICE_MAX_CONNECTIONS" or (
        variable.startswith(("DEEPYTORCH_", "NCCL_")) and variable != "NCCL_VERSION"
    )


def command() -> str:
    """How to call this process again: settings in the environment, program, arguments.

    Without what names places of this machine: paths, and where the results go.
    """
    environment = config.child_environment()
    settings = [
        f"{name}={value}"
        for name, value in sorted(environment.items())
        if _is_setting(name) and "/" not in value
    ]
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = Path(sys.argv[0]).name
    called = ["python", "-m", module.name.removesuffix(".__main__")] if module else [program]
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument in _PLACES:
            next(arguments, None)
        elif not argument.startswith(tuple(f"{place}=" for place in _PLACES)):
            called.append(Path(argument).name if argument.startswith("/") else argument)
    return shlex.join([*settings, *called])


def provenance() -> Record:
    """The fields `machine`, `versions` and `commit` of every record."""
    return {
        "machine": machine_info(),
        "versions": {**versions(), **libraries()},
        "commit": commit(),
    }


@functools.cache
def machine_info() -> Record:
    """The machine without its host name.

    `name` is the short form ("2-core AMD EPYC", "64-core AMD EPYC 9554, 8x NVIDIA H200"). It also
    says where peer access is switched off, or links are masked, to emulate GPUs that have none.
    Then come cpu, cores (those this process may use), memory_gib, gpus (names) and kernel.
    """
    # Not above: tables and charts are made of records where no native core is.
    from deepytorch_core import _core

    cpu = _cpu_model(_read("/proc/cpuinfo"))
    cores = _core.usable_cores()
    gpus = _gpu_names()
    emulated = ""
    if len(gpus) > 1 and config.peer_access_is_off():
        emulated = ", emulated: no peer access"
    elif gpus and config.emulated_links():
        emulated = f", emulated: links {config.emulated_links()}"
    return {
        "name": machine_name(cpu, cores, gpus) + emulated,
        "cpu": cpu,
        "cores": cores,
        "memory_gib": _memory_gib(_read("/proc/meminfo")),
        "gpus": gpus,
        "kernel": f"{platform.system()} {platform.release()}",
    }


def machine_name(cpu: str, cores: int, gpus: list[str]) -> str:
    """`machine_info()["name"]` from its parts."""
    counts = {gpu: gpus.count(gpu) for gpu in dict.fromkeys(gpus)}
    parts = [f"{cores}-core {cpu}"]
    parts += [f"{count}x {gpu}" if count > 1 else gpu for gpu, count in counts.items()]
    return ", ".join(parts)


_LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "diffusers",
    "lightning",
    "peft",
    "timm",
    "torchvision",
    "transformers",
    "triton",
    "trl",
    "x-transformers",
)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of deepytorch, torch, python and, where torch has it, NCCL."""
    import torch

    found = {
        "deepytorch": distribution.version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        # Types differ between torch releases: a tuple, or nothing in a build without NCCL.
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(str(part) for part in nccl)
    return found


@functools.cache
def libraries() -> dict[str, str]:
    """Versions of what workloads and scripts are built on, of those that are installed."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache
def commit() -> str:
    """Short hash of the source tree, "-dirty" with uncommitted code; else the package version."""
    try:
        top = _git(_SOURCE, "rev-parse", "--show-toplevel")
        # Installed inside another project's repository, that one's commit would be a lie.
        if Path(top).resolve() != _SOURCE:
            return f"v{distribution.version()}"
        what = ("--untracked-files=no", "--", ".", *_NOT_CODE)
        dirty = _git(_SOURCE, "status", "--porcelain", *what)
        return _git(_SOURCE, "rev-parse", "--short=9", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return f"v{distribution.version()}"


def commit_of(path: str, folder: Path, *, is_top: bool = False) -> str:
    """Return the commit of the repository that a folder is in; "" where it is in none.

    Args:
        path: of a file, from the folder; where it is changed the commit ends in "-dirty".
        folder: anywhere in the repository.
        is_top: whether the folder has to be the repository's own.
    """
    try:
        top = Path(_git(folder, "rev-parse", "--show-toplevel"))
        if is_top and top.resolve() != folder.resolve():
            return ""
        is_dirty = bool(_git(folder, "status", "--porcelain", "--", path))
        return _git(folder, "rev-parse", "HEAD") + ("-dirty" if is_dirty else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # not Linux, or hidden in this container: the field is then unknown
        return ""


def _cpu_model(cpuinfo: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if match is None:
        return platform.machine()
    model = re.sub(r"\((R|TM|tm)\)|\bCPU\b|\bProcessor\b|@.*$", " ", match.group(1))
    model = re.sub(r"\b\d+-Core\b", " ", model)
    return " ".join(model.split())


def _memory_gib(meminfo: str) -> int:
    match = re.search(r"^MemTotal:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return round(int(match.group(1)) / 2**20) if match else 0


def _gpu_names() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
