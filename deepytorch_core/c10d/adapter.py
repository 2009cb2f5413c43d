"""Find or build the c10d adapter: the compiled module that puts the core under torch.distributed.

torch has no stable C++ interface, so there is one binary per torch build. `load` looks into

1. `deepytorch_core/_prebuilt/<tag>/`, which released wheels carry; one made with an older C library
   fits too,
2. the user's cache, `<cache>/adapter-<uid>/<tag>/`,

and else compiles the sources into the cache. The tag names everything the binary depends on:
torch's build, Python, the C library and the sources themselves. `build` compiles for the installed
torch, or for another one of which there is a wheel (`torch_builds`).

The sources are compiled as one translation unit, because torch's headers cost more than our code.
This takes a third of the processor time of a file each, and no longer on a small machine. It needs
no build tool beside the compiler.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from deepytorch_core.base import config
from deepytorch_core.base.console import say
from deepytorch_core.base.errors import OFF_SWITCH, AdapterError
from deepytorch_core.base.file_permissions import (
    UntrustedError,
    opened,
    why_not_private,
    why_not_reached,
)
from deepytorch_core.base.torch_builds import TorchBuild, installed

MODULE_NAME = "deepytorch_c10d"
NO_HOME = "this user has no home folder"

_HERE = Path(__file__).parents[1]  # deepytorch_core
_COMPILE_LIMIT_S = 900.0
# Longer than one compilation, so that a waiting rank outlives the one that compiles.
_LOCK_LIMIT_S = _COMPILE_LIMIT_S + 60
_GLIBC = re.compile(r"-glibc(\d+(?:\.\d+)*)")
_loading = threading.Lock()
_spellings = itertools.count()


@dataclass(frozen=True)
class Sources:
    """The adapter's sources: `c10d/*.cpp` and `include/` under one folder."""

    root: Path

    @classmethod
    def find(cls) -> Sources:
        """The installed sources, or those of the tree this package is in."""
        for root in (_HERE / "csrc", _HERE.parent / "csrc"):
            if (root / "c10d").is_dir():
                return cls(root)
        raise AdapterError(
            f"the c10d adapter's sources are missing (looked into {_HERE / 'csrc'} and "
            f"{_HERE.parent / 'csrc'}): reinstall deepytorch-train, or {OFF_SWITCH}"
        )

    def units(self) -> list[Path]:
        return sorted((self.root / "c10d").glob("*.cpp"))

    def digest(self) -> str:
        digest = hashlib.sha256()
        for folder in ("c10d", "include"):
            for file in sorted((self.root / folder).rglob("*")):
                if file.is_file():
                    digest.update(file.relative_to(self.root).as_posix().encode() + b"\0")
                    digest.update(file.read_bytes() + b"\0")
        return digest.hexdigest()[:12]


def load(sources: Sources | None = None) -> ModuleType:
    """Return the adapter, compiled first if need be (about a minute, once).

    Raises AdapterError saying what to do when it can't be had.
    """
    with _loading:
        module = sys.modules.get(MODULE_NAME)
        if module is not None:
            return module
        import torch  # noqa: F401  (the adapter needs torch's libraries in the process)

        from deepytorch_core import _core

        for name, value in config.for_core().items():
            _core.set_variable(name, value)
        sources = sources or Sources.find()
        path = find(sources) or build(sources=sources)
        try:
            return _import(path)
        except ImportError as error:
            if _is_prebuilt(path):
                raise AdapterError(_cannot_import(path, error)) from error
            say(f"the adapter in {path.parent} can't be imported ({error}); compiling it again")
        path = build(force=True, sources=sources)
        try:
            return _import(path)
        except ImportError as error:
            raise AdapterError(_cannot_import(path, error)) from error


def loaded() -> ModuleType | None:
    """The adapter if this process has it: without it there are no groups of ours."""
    return sys.modules.get(MODULE_NAME)


def find(sources: Sources | None = None) -> Path | None:
    """Path of an adapter that fits this torch and may be trusted; None if there is none."""
    this = tag(sources or Sources.find())
    prebuilt = _find_prebuilt(this)
    if prebuilt is not None:
        return prebuilt
    for folder in cache_folders():
        cached = folder / this / _file_name()
        if _is_usable(cached):
            return cached
    return None


def state() -> str:
    """In words: where the adapter for this torch is, or that it has to be compiled."""
    try:
        path = find()
    except (AdapterError, ImportError) as error:
        return f"not available: {error}"
    if path is not None:
        return f"{'prebuilt' if _is_prebuilt(path) else 'compiled'}: {path}"
    if config.compiler() is None:
        return "not compiled yet, and there is no C++ compiler"
    return "not compiled yet: happens at first use, or now with `deepytorch build`"


def build(
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    *,
    sources: Sources | None = None,
    torch: TorchBuild | None = None,
) -> Path:
    """Compile the adapter for the installed torch, or another, and return the binary's path.

    Goes into the user's cache, or to `<output>/<tag>/` to be copied to another machine. An
    existing binary is kept unless `force`. Of several processes that ask at once one compiles and
    the others wait. Raises AdapterError with the compiler's output in a named file.
    """
    sources = sources or Sources.find()
    folder = Path(output) if output is not None else _writable_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AdapterError(f"{folder} can't be used ({error.strerror}): give another") from None
    torch = torch or installed()
    this = tag(sources, torch)
    target = folder / this / _file_name()
    asked = time.time()
    try:
        with _locked(folder / f"{this}.lock"):
            # With force, a binary that came while we waited for the lock is as new as ours.
            if _is_usable(target) and (not force or target.stat().st_mtime > asked):
                return target
            _remove_leftovers(folder, this)
            _compile_into(folder / this, sources, torch)
    except OSError as error:
        raise AdapterError(
            f"the c10d adapter can't be compiled in {folder} ({error.strerror}): make room, or set "
            "DEEPYTORCH_CACHE_DIR to another folder"
        ) from error
    return target


def tag(sources: Sources, torch: TorchBuild | None = None) -> str:
    """A folder name that is equal only for exchangeable binaries."""
    torch = torch or installed()
    libc = ""
    with contextlib.suppress(ValueError, OSError):
        libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "")
    suffix = (sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag).strip(".")
    parts = [torch.name, suffix, f"abi{torch.cxx11_abi}", libc, sources.digest()]
    return "-".join(part for part in parts if part)


def _find_prebuilt(this: str) -> Path | None:
    """The wheel's adapter for `this` tag, made with this C library or the newest of older ones.

    glibc runs what was made with an older one. Another C library's name has to be the same.
    """
    found = []
    for path in sorted((_HERE / "_prebuilt").glob(f"*/{_file_name()}")):
        theirs = path.parent.name
        if _GLIBC.sub("", theirs) == _GLIBC.sub("", this):
            made_with, runs_with = _glibc(theirs), _glibc(this)
            if bool(made_with) == bool(runs_with) and made_with <= runs_with:
                found.append((made_with, path))
    return max(found)[1] if found else None


def _glibc(name: str) -> tuple[int, ...]:
    """The version of glibc in a tag; () without one."""
    found = _GLIBC.search(name)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


def _file_name() -> str:
    return MODULE_NAME + ".so"


def _is_prebuilt(path: Path) -> bool:
    return _HERE / "_prebuilt" in path.parents


def _cannot_import(path: Path, error: ImportError) -> str:
    return (
        f"the c10d adapter {path} can't be imported: {error}. Run `deepytorch build --force`, or "
        f"set DEEPYTORCH_ENABLED=0 to train without it"
    )


def _import(path: Path) -> ModuleType:
    if _is_prebuilt(path):  # beside this very file
        return _import_from(str(path), path)
    try:
        file = _opened(path)
    except (OSError, UntrustedError) as error:
        raise ImportError(str(error)) from error
    with file, _named(file) as name:
        return _import_from(name, path)


def _import_from(name: str, path: Path) -> ModuleType:
    """Import what is to be had by `name`, as the module that lies at `path`."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, name)
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    assert spec is not None
    spec.origin = name  # what is loaded
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.__file__ = str(path)
    sys.modules[MODULE_NAME] = module
    return module


@contextlib.contextmanager
def _named(file: io.BufferedReader) -> Iterator[str]:
    """A name by which the open file, and no other, is loaded; of a copy where /proc is missing."""
    # Python and the loader know libraries by their names, so no two are spelled alike.
    name = f"/proc/self/fd/{'./' * next(_spellings)}{file.fileno()}"
    if os.path.exists(name):
        yield name
        return
    with tempfile.TemporaryDirectory(prefix="deepytorch-") as folder:  # ours alone
        copy = Path(folder) / _file_name()
        file.seek(0)
        with copy.open("xb") as target:
            shutil.copyfileobj(file, target)
        yield str(copy)


def _opened(binary: Path) -> io.BufferedReader:
    """The binary, open, if nobody else can have written it and it is what was built.

    Raises UntrustedError, or OSError where it or its digest is not there.
    """
    file = opened(binary)
    try:
        with opened(_digest_file(binary)) as kept:
            expected = kept.read(1024).decode("ascii", "replace").strip()
        if hashlib.file_digest(file, "sha256").hexdigest() != expected:
            raise UntrustedError(f"{binary} is not what was built")
        return file
    except BaseException:
        file.close()
        raise


def _digest_file(binary: Path) -> Path:
    return binary.with_name(f"{binary.name}.sha256")


# The cache. A shared library runs as whoever loads it, so nothing is loaded from a place that
# somebody else could have written.


def cache_folders() -> list[Path]:
    """Return folders of compiled adapters: the user's cache, if any, then a temporary one."""
    me = os.geteuid()
    folders = [config.temporary_dir() / f"deepytorch-{me}" / f"adapter-{me}"]
    with contextlib.suppress(RuntimeError):  # no home
        folders.insert(0, config.cache_dir() / f"adapter-{me}")
    return folders


def _writable_cache() -> Path:
    """The cache folder, or, when that can't be used, a private one among the temporary files."""
    *usual, fallback = cache_folders()
    reason = why_not_usable(usual[0]) if usual else NO_HOME
    if reason is None:
        return usual[0]
    # Its parent is ours too: /tmp is open to all, and only there is the name for the taking.
    other = why_not_usable(fallback.parent) or why_not_usable(fallback)
    if other is None:
        say(
            f"{reason}; keeping the adapter in {fallback} until the next cleaning of temporary "
            "files (DEEPYTORCH_CACHE_DIR names a better place)"
        )
        return fallback
    raise AdapterError(
        f"no place to keep the compiled c10d adapter: {reason}; {other}. Set "
        f"DEEPYTORCH_CACHE_DIR to a folder of your own"
    )


def why_not_usable(folder: Path) -> str | None:
    """Create `folder` as ours alone; say what is wrong if it can't be, or isn't."""
    try:
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        reason = why_not_private(folder) or why_not_reached(folder)
        if reason is None and not os.access(folder, os.W_OK | os.X_OK):
            reason = f"{folder} can't be written"
        if reason is None:
            with tempfile.TemporaryFile(dir=folder):
                pass  # a read-only file system answers only now
    except OSError as error:
        return f"{folder} can't be used ({error.strerror})"
    return reason


def _is_usable(binary: Path) -> bool:
    """Whether it is there, whole, and nobody else can have written it."""
    try:
        _opened(binary).close()
    except (OSError, UntrustedError):
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file's lock, which the system releases even when its owner is killed."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for_lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_LIMIT_S
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError:
            # No locks on this file system. Builds may then run twice, never into each other:
            # each has its own folder and takes its place in one step.
            return
        if not told and config.local_rank() == 0:
            say("waiting for another process that is compiling the c10d adapter ...")
        told = True
        if time.monotonic() > deadline:
            raise AdapterError(
                f"another process has held {path} for {_LOCK_LIMIT_S:.0f} s: end it, or set "
                "DEEPYTORCH_CACHE_DIR to another folder"
            )
        time.sleep(0.1)


# Compiling.


def _building_prefix(this: str) -> str:
    return f".building-{this}-"


def _remove_leftovers(folder: Path, this: str) -> None:
    """Remove what interrupted builds left; under the lock, none of them can be running."""
    for leftover in folder.glob(_building_prefix(this) + "*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _compile_into(place: Path, sources: Sources, torch: TorchBuild) -> None:
    """Compile beside `place`, then put the result there in one step."""
    folder, this = place.parent, place.name
    command = _command(sources, torch)
    log = folder / f"{this}.log"
    work = Path(tempfile.mkdtemp(prefix=_building_prefix(this), dir=folder))
    try:
        unit = work / f"{MODULE_NAME}.cpp"
        unit.write_text("".join(f'#include "{source}"\n' for source in sources.units()))
        binary = work / _file_name()
        command += [f"-ffile-prefix-map={work}=.", str(unit), "-o", str(binary)]
        command += torch.link_flags()
        say(f"compiling the c10d adapter for torch {torch.version} (about 1 minute, once) ...")
        started = time.monotonic()
        _run(command, log)
        binary.chmod(0o700)
        with open(binary, "rb") as file:
            os.fsync(file.fileno())
        with open(binary, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        noted = _digest_file(binary)
        noted.write_text(f"{digest}\n", encoding="ascii")
        noted.chmod(0o600)  # whatever the umask is
        place.mkdir(mode=0o700, exist_ok=True)
        os.replace(noted, _digest_file(place / _file_name()))
        os.replace(binary, place / _file_name())
        log.unlink(missing_ok=True)
        say(f"compiled the c10d adapter in {time.monotonic() - started:.0f} s: {place}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _command(sources: Sources, torch: TorchBuild) -> list[str]:
    compiler = config.compiler()
    if compiler is None:
        raise AdapterError(
            f"no C++ compiler to build the c10d adapter for torch {torch.version}, and none "
            "prebuilt for it. Install g++ (for instance `apt install g++`); or run `deepytorch "
            "build --output DIR` on a machine with the same torch, Python and C library and copy "
            f"DIR/{tag(sources, torch)} to {cache_folders()[0]}; or set DEEPYTORCH_ENABLED=0 to "
            "train without deepytorch"
        )
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise AdapterError(
            f"Python's headers are not in {python}, so the c10d adapter can't be compiled: "
            "install them (for instance `apt install python3-dev`), or set DEEPYTORCH_ENABLED=0 "
            "to train without deepytorch"
        )
    if not sources.units():
        folder = sources.root / "c10d"
        raise AdapterError(f"no adapter sources in {folder}: reinstall deepytorch-train")
    return [
        *compiler,
        "-shared",
        "-fPIC",
        "-std=c++20",
        "-O2",
        "-fvisibility=hidden",
        "-fno-plt",  # a call through the table alone touches one page less
        f"-DTORCH_EXTENSION_NAME={MODULE_NAME}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        # Checks in headers name their files, and where those lie here is nobody's business.
        f"-ffile-prefix-map={sources.root}=csrc",
        f"-ffile-prefix-map={python}=python",
        f"-I{sources.root / 'include'}",
        f"-I{sources.root / 'c10d'}",
        *torch.compile_flags(),
        "-isystem",
        str(python),
    ]


def _run(command: list[str], log: Path) -> None:
    """Run the compiler with its output in `log`; end it if we are interrupted."""
    with open(log, "w") as output:
        output.write(shlex.join(command) + "\n")
        output.flush()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=_COMPILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AdapterError(
                f"the C++ compiler did not finish within {_COMPILE_LIMIT_S:.0f} s; its command "
                f"and output: {log}"
            ) from None
        finally:
            if process.poll() is None:
                # The compiler proper is a child of the driver, hence the whole group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0:
        raise AdapterError(
            f"compiling the c10d adapter failed: {_first_error(log)}. The compiler's output: "
            f"{log}. A compiler with C++20 is needed (g++ 11, clang 14 or newer; CXX chooses "
            "one); DEEPYTORCH_ENABLED=0 trains without deepytorch"
        )


def _first_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[1:]
    for line in lines:
        if "error" in line.lower():
            return line.strip()
    return lines[-1].strip() if lines else "no output"
