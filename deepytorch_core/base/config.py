"""Options, and every environment variable that the Python side reads.

One options record is used everywhere: as environment variables (`DEEPYTORCH_<NAME>`), as keywords
of `deepytorch.activate`, in DeepSpeed's JSON, in plugins and in YAML. A keyword wins over the
environment, the environment over the default. No other Python file reads the environment.
"""

# ruff: noqa: TID251
from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepytorch_core.base import launchers
from deepytorch_core.base.launchers import Launched

_PREFIX = "DEEPYTORCH_"

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "DEEPYTORCH_CACHE_DIR": "where compiled adapters and the profile are kept; default "
        "$XDG_CACHE_HOME/deepytorch, else ~/.cache/deepytorch",
        "DEEPYTORCH_CHUNK_BYTES": "native core: pipeline step of shared-memory algorithms in "
        "bytes, the same on every rank; default: chosen by size",
        "DEEPYTORCH_NCCL_TABLE": "the tuner plugin for NCCL: the file of algorithms, protocols and "
        "channels by size; set by deepytorch where there is one",
        "DEEPYTORCH_NUM_SOCKETS": "native core: parallel connections between two ranks of "
        "different nodes, 1 to 64; rank 0 decides; default: by the number of ranks",
        "DEEPYTORCH_SOCKET_BYTES": "native core: size of the buffers of connections between "
        "nodes, 65536 to 1 GiB; default: tuned by the system",
        "DEEPYTORCH_TCP_CONGESTION": "native core: congestion control of connections between "
        "nodes; default: the system's",
        "DEEPYTORCH_TCP_CHECKSUM": "native core: 1 adds a checksum to every message that this "
        "process sends to other nodes; who receives it compares; default: 0",
        "DEEPYTORCH_GPU_CHANNELS": "native core: most thread blocks of a group's kernels on a GPU, "
        "each on a multiprocessor that computing does without, 2 to 64; default: up to 64",
        "DEEPYTORCH_NODE_ID": "native core, for tests and emulation: the node this process "
        "pretends to be on, or those of all global ranks, separated by commas",
        "DEEPYTORCH_EMULATE_LINKS": "native core, for tests and emulation: the links between the "
        "GPUs of all global ranks, a row of letters for each, the same on every rank; a link that "
        "is not there stays away",
        "XDG_CACHE_HOME": "the user's cache folder, by convention of the desktop",
        "CXX": "the C++ compiler for the adapter; default: c++, g++ or clang++, the first found",
        "NCCL_SOCKET_IFNAME": "NCCL's choice of interfaces, to measure the same link; the other "
        "NCCL_... variables are looked at for whether they are set: what is set is left alone",
        "NCCL_CONF_FILE": "NCCL's file of settings; default ~/.nccl.conf, with /etc/nccl.conf",
        "RANK": "this process's global rank (set by torchrun); default 0",
        "WORLD_SIZE": "number of ranks (set by torchrun); default 1",
        "LOCAL_RANK": "this process's rank on its node (set by torchrun); default 0",
        "LOCAL_WORLD_SIZE": "number of ranks on this node (set by torchrun); default 1",
        "MASTER_ADDR": "where rank 0 serves the rendezvous store (set by torchrun)",
        "MASTER_PORT": "the port of the rendezvous store (set by torchrun)",
        "GROUP_RANK": "this node's number (set by torchrun)",
        "TORCHELASTIC_RUN_ID": "the job's name (set by torchrun)",
        "HOROVOD_RANK": "as RANK, set by horovodrun; also HOROVOD_SIZE, HOROVOD_LOCAL_RANK, "
        "HOROVOD_LOCAL_SIZE and HOROVOD_GLOO_RENDEZVOUS_PORT",
        "OMPI_COMM_WORLD_RANK": "as RANK, set by Open MPI's mpirun; also OMPI_COMM_WORLD_SIZE, "
        "OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE and PMIX_NAMESPACE",
        "PMI_RANK": "as RANK, set by MPICH's and Intel's mpiexec; also PMI_SIZE, MPI_LOCALRANKID "
        "and MPI_LOCALNRANKS",
        "SLURM_STEP_TASKS_PER_NODE": "in place of LOCAL_WORLD_SIZE, set by srun; also "
        "SLURM_NODEID, SLURM_STEP_NUM_TASKS and SLURM_CPUS_ON_NODE",
    }
)
"""Variables read besides the options', with what each is for."""

_TRUE = ("true", "on", "yes", "1")
_FALSE = ("false", "off", "no", "0")
GLOO_TIMEOUT_S = 1800.0
"""Torch's own time limit of gloo, for groups that are made without torch."""

_DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_Parser = Callable[[str, Any], Any]
"""Takes the option's name (for messages) and a raw value; returns it converted or raises."""


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{name}={value!r}: expected one of {', '.join(_TRUE)} or {', '.join(_FALSE)}")


def _boolean_or(*words: str) -> _Parser:
    """On, off, or one of `words`, which mean on and more."""

    def parse(name: str, value: Any) -> bool | str:
        text = str(value).strip().lower()
        if text in words:
            return text
        try:
            return _boolean(name, value)
        except ValueError as error:
            raise ValueError(f"{error} or {', '.join(words)}{_closest(text, words)}") from None

    return parse


def _choice(*choices: str) -> _Parser:
    def parse(name: str, value: Any) -> str:
        # YAML and JSON turn on and off into booleans.
        text = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else str(value)
        text = (text or "").strip().lower()
        if text in choices:
            return text
        raise ValueError(
            f"{name}={value!r}: expected one of {', '.join(choices)}" + _closest(text, choices)
        )

    return parse


def _number(*, integral: bool, above: float) -> _Parser:
    def parse(name: str, value: Any) -> int | float:
        kind = "a whole number" if integral else "a number"
        message = f"{name}={value!r}: expected {kind} above {above:g}"
        if isinstance(value, bool):
            raise ValueError(message)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(message) from None
        if not math.isfinite(number) or number <= above or (integral and number != int(number)):
            raise ValueError(message)
        return int(number) if integral else number

    return parse


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"  # YAML and JSON turn on and off into booleans
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError(f"{name}={value!r}: expected a text that is not empty")
    return str(value).strip()


def _address(name: str, value: Any) -> str:
    text = str(value).strip()
    try:
        if isinstance(value, bool):
            raise ValueError
        host_and_port(text)
    except ValueError:
        raise ValueError(f"{name}={value!r}: expected PORT or HOST:PORT, such as 9400") from None
    return text


def host_and_port(text: str) -> tuple[str, int]:
    """The parts of `PORT` or `HOST:PORT`; without a host the loopback interface.

    An address of IPv6 stands in brackets. Raises ValueError for anything else.
    """
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (colon and not host.strip("[]")):
        raise ValueError(f"{text!r} is no PORT or HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{text!r}: an address of IPv6 stands in brackets")
    return host.strip("[]") or "127.0.0.1", int(port)


def _optional(parse: _Parser) -> _Parser:
    def parse_unless_unset(name: str, value: Any) -> Any:
        return None if value is None or value == "" else parse(name, value)

    return parse_unless_unset


def _number_or(*words: str, above: float) -> _Parser:
    """A whole number above a bound, or one of `words`."""
    number = _number(integral=True, above=above)

    def parse(name: str, value: Any) -> int | str:
        text = str(_text(name, value) if isinstance(value, bool) else value).strip().lower()
        if text in words:
            return text
        try:
            return int(number(name, value))
        except ValueError as error:
            raise ValueError(f"{error} or {', '.join(words)}{_closest(text, words)}") from None

    return parse


def _closest(word: str, choices: object) -> str:
    close = difflib.get_close_matches(word, list(choices), n=1)  # type: ignore[call-overload]
    return f" (did you mean {close[0]}?)" if close else ""


def _option(default: Any, parse: _Parser, doc: str) -> Any:
    return field(default=default, metadata={"parse": parse, "doc": doc})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every option. Values given in any accepted spelling are converted and checked.

    Raises ValueError for a wrong value; the message lists what is valid.
    """

    enabled: bool = _option(True, _boolean, "false turns all of deepytorch off")
    collectives: str = _option(
        "auto",
        _choice("auto", "native", "stock"),
        "auto: native where it wins; native: wherever it can; stock: leave groups alone",
    )
    compile: str = _option("auto", _text, "policy of deepytorch.compile: auto, off, or a name")
    cuda_graphs: str = _option(
        "auto",
        _choice("auto", "off"),
        "replay the training passes of compiled models as CUDA graphs where that is faster",
    )
    padding_free: str = _option(
        "auto", _choice("auto", "on", "off"), "train without padding tokens where the model can"
    )
    tokens_per_step: int | str = _option(
        "auto",
        _number_or("auto", "off", above=0),
        "tokens of a pass that a Trainer's micro-batches share when gradients are accumulated; "
        "auto: what memory and speed say; off: each has its own pass",
    )
    token_balance: str = _option(
        "auto", _choice("auto", "on", "off"), "even tokens on all ranks of a transformers Trainer"
    )
    kernels: str = _option("auto", _choice("auto", "on", "off"), "swap in fused kernels")
    tune: str = _option(
        "auto", _choice("auto", "off", "force"), "measure candidates; force ignores the profile"
    )
    patience: str = _option(
        "auto",
        _choice("auto", "off"),
        "auto: what is tried may take 3% of the time that the run has lasted; off: try at once",
    )
    profile: str | None = _option(
        None,
        _optional(_text),
        "path of the profile that keeps decisions between runs; default: profile.json in the cache",
    )
    timeout_s: float | None = _option(
        None,
        _optional(_number(integral=False, above=0)),
        "time limit of a collective in seconds where the program gives none; default: torch's own, "
        "30 minutes, or 10 for a group that was asked for as nccl",
    )
    log: str = _option(
        "info", _choice("debug", "info", "warning", "error"), "least severe message printed"
    )
    debug: bool | str = _option(
        False,
        _boolean_or("nan"),
        "extra checks, and tracebacks in place of summaries; nan: besides, numbers that are none "
        "in what is summed are an error that names the rank and the parameters",
    )
    deterministic: bool = _option(
        False, _boolean, "decisions only from the profile: two runs give the same bits"
    )
    error_handling: str = _option(
        "abort", _choice("abort", "raise"), "what follows a failure on a GPU"
    )
    staging_mb: int | None = _option(
        None,
        _optional(_number(integral=True, above=0)),
        "staging memory in MiB; default 256 for each GPU, 32 on the host",
    )
    reduce_threads: int | None = _option(
        None,
        _optional(_number(integral=True, above=0)),
        "threads of each rank that reduce for GPUs without peer access, at most 64",
    )
    ifname: str | None = _option(
        None, _optional(_text), "network interfaces between nodes, separated by commas"
    )
    compile_budget_s: float = _option(
        120.0, _number(integral=False, above=0), "time that compile trials may take in seconds"
    )
    metrics: str | None = _option(
        None,
        _optional(_address),
        "PORT or HOST:PORT at which every rank serves Prometheus metrics: its local rank is added "
        "to the port, and without a host only this machine can ask",
    )
    report: str | None = _option(
        None,
        _optional(_text),
        "folder in which the run leaves its report when it ends: a page, JSON, each rank's own",
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            raw = getattr(self, option.name)
            object.__setattr__(self, option.name, option.metadata["parse"](option.name, raw))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all options, in the documented order."""
        return tuple(option.name for option in dataclasses.fields(cls))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, base: Options | None = None) -> Options:
        """Options from JSON, YAML or keywords; what `mapping` lacks comes from `base`.

        Raises ValueError for an unknown name (listing the valid ones) or a wrong value.
        """
        for name in mapping:
            if name not in cls.names():
                raise ValueError(
                    f"unknown option {name!r}{_closest(str(name), cls.names())}; "
                    f"valid options: {', '.join(cls.names())}"
                )
        return dataclasses.replace(base or cls(), **mapping)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Options:
        """Options from `DEEPYTORCH_<NAME>` variables; an empty one counts as unset.

        Raises ValueError naming the variable.
        """
        environ = os.environ if environ is None else environ
        given = {
            name: environ[_PREFIX + name.upper()]
            for name in cls.names()
            if environ.get(_PREFIX + name.upper(), "") != ""
        }
        try:
            return cls.from_mapping(given)
        except ValueError as error:
            name = str(error).partition("=")[0]
            raise ValueError(str(error).replace(name, _PREFIX + name.upper(), 1)) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain names and values, as `from_mapping` takes them."""
        return dataclasses.asdict(self)


OF_A_RANK = ("profile", "log", "reduce_threads", "ifname", "metrics", "report")
"""Options that may differ between the ranks of a job."""


def documented() -> list[tuple[str, Any, str]]:
    """(name, default, meaning) of every option, for tables."""
    return [
        (option.name, option.default, option.metadata["doc"])
        for option in dataclasses.fields(Options)
    ]


_current: Options | None = None
_set: dict[str, str] = {}  # the environment variables that were put in place


def current() -> Options:
    """The options in force in this process: what was set last, else the environment's."""
    return Options.from_env() if _current is None else _current


def set_current(options: Options | None) -> None:
    """Put `options` in force; None goes back to the environment's."""
    global _current
    _current = options


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """One line for each `DEEPYTORCH_...` variable that nothing reads: most likely misspelt."""
    environ = os.environ if environ is None else environ
    known = {_PREFIX + name.upper() for name in Options.names()} | set(VARIABLES)
    return [
        f"{name} is no variable of deepytorch{_closest(name, sorted(known))}"
        for name in sorted(environ)
        if name.startswith(_PREFIX) and name not in known
    ]


def for_core() -> dict[str, str]:
    """The options that the native core reads for itself, as variables of its environment.

    It reads those once (csrc/base/env); an option given as a keyword would not be seen there.
    """
    options = current()
    given = {
        "LOG": options.log,
        "IFNAME": options.ifname,
        "REDUCE_THREADS": options.reduce_threads,
    }
    return {_PREFIX + name: str(value) for name, value in given.items() if value is not None}


def rank() -> int:
    """This process's global rank according to its launcher; 0 without one."""
    return launchers.number(os.environ, "RANK", 0)


def world_size() -> int:
    """The number of ranks according to the launcher; 1 without one."""
    return launchers.number(os.environ, "WORLD_SIZE", 1)


def local_rank(default: int = 0) -> int:
    """This process's rank on its node according to the launcher; `default` without one."""
    return launchers.number(os.environ, "LOCAL_RANK", default)


def local_world_size() -> int:
    """The number of ranks on this node according to the launcher, or to srun; 1 without one."""
    told = launchers.number(os.environ, "LOCAL_WORLD_SIZE", 0)
    return told or launchers.slurm_tasks_here(os.environ) or 1


def spans_nodes() -> bool:
    """Whether the launcher said that the job has ranks on several nodes, or these are emulated."""
    if os.environ.get(_PREFIX + "NODE_ID"):
        return True
    told = launched()
    return told is not None and told.local_size is not None and told.local_size < told.size


def peer_access_is_off() -> bool:
    """Whether GPUs are to do as if they could not reach each other's memory."""
    return os.environ.get("NCCL_P2P_DISABLE") == "1"


def emulated_links() -> str:
    """The links that the ranks' GPUs are to do as if they had; empty: those that are there."""
    return os.environ.get(_PREFIX + "EMULATE_LINKS", "")


def launched(environ: Mapping[str, str] | None = None) -> Launched | None:
    """As `launchers.launched`, of this process."""
    return launchers.launched(os.environ if environ is None else environ)


def slurm_tasks() -> int:
    """As `launchers.slurm_tasks`, of this process."""
    return launchers.slurm_tasks(os.environ)


def slurm_cpus_here() -> int:
    """As `launchers.slurm_cpus_here`, of this process."""
    return launchers.slurm_cpus_here(os.environ)


def rendezvous_address(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Host and port at which rank 0 serves, or shall serve, the store; None if not given."""
    environ = os.environ if environ is None else environ
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdecimal() else None


def nccl_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the user's settings of NCCL: its environment variables, and its files of settings."""
    environ = os.environ if environ is None else environ
    own = environ.get("NCCL_CONF_FILE", "") or "~/.nccl.conf"
    found: dict[str, str] = {}
    for place in ("/etc/nccl.conf", own):
        with contextlib.suppress(OSError, RuntimeError):  # no such file, no home folder
            for line in Path(place).expanduser().read_text(errors="replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip().startswith("NCCL_"):
                    found[name.strip()] = value.strip()
    table = "DEEPYTORCH_NCCL_TABLE"
    return found | {name: environ[name] for name in environ if name.startswith(("NCCL_", table))}


def set_for_nccl(settings: Mapping[str, str]) -> None:
    """Put environment variables in place that NCCL reads when it starts, in this process alone.

    Raises ValueError for one that is set already, or that neither NCCL nor our plugin in it reads.
    """
    for name in settings:
        known = name.startswith("NCCL_") or name == "DEEPYTORCH_NCCL_TABLE"
        if name in os.environ or not known:
            raise ValueError(f"{name} is not for deepytorch to set")
    os.environ.update(settings)
    _set.update(settings)


def set_for_children(option: str, value: str) -> None:
    """Have the processes that this one starts, or becomes, have an option."""
    os.environ[f"{_PREFIX}{option.upper()}"] = value


def set_where_unset(settings: Mapping[str, str]) -> None:
    """Put environment variables in place that the native core, NCCL, gloo or torchrun reads later.

    What the user has set, NCCL's also in its files, stays as it is.
    """
    theirs = nccl_settings()
    for name, value in settings.items():
        if name not in theirs and name not in os.environ:
            os.environ[name] = _set[name] = value


def withdraw() -> None:
    """Take out of the environment what was put there, until `renew`."""
    for name, value in _set.items():
        if os.environ.get(name) == value:
            del os.environ[name]


def renew() -> None:
    """Put back what `withdraw` took, unless the user has set it since."""
    for name, value in _set.items():
        os.environ.setdefault(name, value)


def is_set(variable: str) -> bool:
    """Whether the user has set this variable of the core's, torchrun's, NCCL's or gloo's."""
    return variable in os.environ or variable in nccl_settings()


def cache_dir() -> Path:
    """Return the folder of deepytorch's own files: `DEEPYTORCH_CACHE_DIR`, else the user's cache.

    The folder need not exist. Raises RuntimeError when the user has no home folder.
    """
    own = os.environ.get("DEEPYTORCH_CACHE_DIR", "")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The convention ignores relative paths.
    base = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    return base / "deepytorch"


def profile_path(options: Options | None = None) -> Path | None:
    """Return the file that keeps decisions between runs: option `profile`, else one in `cache_dir`.

    None when the user has neither an option nor a home folder.
    """
    chosen = (options or current()).profile
    try:
        if chosen is not None:
            return Path(chosen).expanduser().absolute()
        return cache_dir() / "profile.json"
    except RuntimeError:
        return None


def temporary_dir() -> Path:
    """The system's folder for temporary files; where none can be written, the usual one."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/tmp")


def compiler() -> list[str] | None:
    """The C++ compiler's command: `CXX`, else the first of c++, g++ and clang++; None if none.

    `CXX` may hold several words, such as `ccache g++`.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def child_environment(**changes: str) -> dict[str, str]:
    """A copy of the environment for a child process, with `changes`."""
    return {**os.environ, **changes}


def distributed_environment() -> dict[str, str]:
    """The launcher's variables that are set, for reports."""
    return {name: os.environ[name] for name in _DISTRIBUTED if name in os.environ}
