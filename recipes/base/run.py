# SPDX-License-Identifier: Apache-2.0
"""The parts that recipes need around their loops: processes, devices, run directory, progress."""

import gc
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import deepytorch
from deepytorch.recipes.base.config import RankRecipeError, RecipeError
from deepytorch_core.base import config
from deepytorch_core.network import gloo_env

T = TypeVar("T")

# Paths and names may have brackets and colons, which rich would take for markup and emoji.
console = Console(soft_wrap=True, markup=False, emoji=False)

# How errors of deepytorch, gloo and NCCL say that another rank is gone.
_GONE = (
    "has left the group",
    ") died",
    "died before it joined",
    "died or was cut off",
    "closed its connection",
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process exited",
)

_LINES_PER_RUN = 10  # progress lines of a run whose output is not a terminal


def print_any_text() -> None:
    """From now on, characters that the output's encoding lacks are replaced: data has any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@dataclass(frozen=True)
class Process:
    """This process's place in the run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0


def choose_device(device: str) -> torch.device:
    """``auto``: this local rank's GPU, else the CPU. Raises RecipeError when there is none."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = dist.get_node_local_rank(fallback_rank=0)
    if local_rank >= torch.cuda.device_count():
        raise RankRecipeError(
            f"local rank {local_rank} has no GPU: this machine shows {torch.cuda.device_count()}. "
            "Start fewer processes or set device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def say_error(recipe: str, error: RecipeError) -> int:
    """Print the error, once a node where all ranks have it, and give the exit status, 2."""
    if isinstance(error, RankRecipeError) or dist.get_node_local_rank(fallback_rank=0) == 0:
        sys.stderr.write(f"{recipe}: {error}\n")
    return 2


def say_gone(recipe: str, error: RuntimeError) -> int:
    """Print, in a line, that another rank has ended, and give the exit status, 1.

    Raises ``error`` again if it says anything else, and where the option `debug` is on.
    """
    text = str(error)
    if config.current().debug or not any(words in text for words in _GONE):
        raise error
    named = re.search(r"rank \d+(?= \(pid \d+\) died| died| has left)", text)
    rank = dist.get_rank() if dist.is_initialized() else 0
    sys.stderr.write(
        f"{recipe}: rank {rank} ends because {named[0] if named else 'another rank'} has ended: "
        "its message is above; if it has none, see the kernel's log\n"
    )
    return 1


def stock_backend(device: torch.device) -> str:
    """The backend PyTorch itself recommends for the device."""
    return "nccl" if device.type == "cuda" else "gloo"


def _has_others() -> bool:
    """Whether this is a rank of torchrun or one that sets its variables, as DeepSpeed's does."""
    try:
        launched = config.launched()
    except ValueError as error:
        raise RankRecipeError(str(error)) from error
    use = "start recipes with deepytorch run or torchrun on each node"
    if launched is None:
        tasks = config.slurm_tasks()
        if tasks > 1:
            raise RankRecipeError(
                f"srun started {tasks} processes, which know nothing of each other: {use}, with "
                "srun --ntasks-per-node 1 (docs/scaling-out.md). For runs of one process each, "
                "unset SLURM_STEP_NUM_TASKS"
            )
        return False
    if launched.launcher == "torchrun" and config.rendezvous_address() is not None:
        return True
    if launched.size == 1:
        return False
    raise RankRecipeError(
        f"{launched.launcher} started this as rank {launched.rank} of {launched.size}, without "
        f"saying where they meet: {use}"
    )


@contextmanager
def distributed(backend: str, device: torch.device) -> Iterator[Process]:
    """The default process group, for torchrun's ranks or for one process started alone.

    ``backend`` is "deepytorch" or the name of a stock backend, which is then left untouched.
    Whatever uses the group (DDP, say) must be out of scope when the block ends. Raises RecipeError
    if there are others, and nobody said where they meet.
    """
    has_others = _has_others()
    if backend != "deepytorch":
        deepytorch.deactivate()  # importing the recipes activated it
    if has_others:
        gloo_env.before_gloo()  # stock gloo can't start either where a name leads back to its node
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://localhost:0", rank=0, world_size=1)
    yield Process(dist.get_rank(), dist.get_world_size(), device)
    # Not after an exception, because its frames keep DDP alive. A DDP that outlives its group tears
    # gloo down while it holds the GIL, which gloo's own thread may be waiting for.
    gc.collect()
    dist.destroy_process_group()


def on_main(action: Callable[[], T], process: Process) -> T:
    """Return on every rank what ``action`` gives on rank 0; all raise if it raises there.

    The others raise a RecipeError, as they would wait otherwise.
    """
    box: list[Any] = [None, None]
    raised: Exception | None = None
    if process.is_main:
        try:
            box[0] = action()
        except RecipeError as error:
            raised, box[1] = error, str(error)
        except Exception as error:
            raised, box[1] = error, f"rank 0: {type(error).__name__}: {error}"
    # NCCL moves what lies on the GPU; gloo, under a comparison, moves it in the host's memory.
    device = torch.device("cpu") if dist.get_backend() == "gloo" else process.device
    dist.broadcast_object_list(box, src=0, device=device)
    if raised is not None:
        raise raised
    if box[1] is not None:
        raise RecipeError(box[1])
    found: T = box[0]
    return found


def together(action: Callable[[], T], process: Process) -> T:
    """Return what ``action`` gives on this rank; if any fails, all raise the same RecipeError.

    For actions that depend on a node's files, packages and GPUs. If one has collectives in it, it
    must have agreed before each of them.
    """
    if process.world_size == 1:
        return action()
    value: T | None = None
    problem = None
    try:
        value = action()
    except (RecipeError, OSError, ImportError) as error:
        problem = str(error)
    problems = all_of(problem, process)
    failed = [(rank, message) for rank, message in enumerate(problems) if message]
    if failed:
        rank, first = failed[0]
        is_everyones = len(failed) == len(problems) and len(set(problems)) == 1
        raise RecipeError(first if is_everyones else f"rank {rank}: {first}")
    return cast(T, value)


def all_of(value: T, process: Process) -> list[T]:
    """Every rank's ``value``, in the order of ranks."""
    values: list[Any] = [value] * process.world_size
    if process.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def everyones(problem: str | None, process: Process) -> str | None:
    """The first rank's problem, with its rank, on every rank; None if none has any."""
    problems: list[Any] = [None] * process.world_size
    dist.all_gather_object(problems, problem)
    if process.world_size == 1:
        return problem
    return next(
        (f"rank {rank}: {message}" for rank, message in enumerate(problems) if message), None
    )


def wait_for_all(process: Process) -> None:
    """Return when every rank has come here."""
    # Not a barrier: over NCCL it warns that it has to guess the device.
    done = torch.zeros((), device=process.device)
    dist.all_reduce(done)
    done.item()


def refuse_file(option: str, folder: Path) -> None:
    """RecipeError if a file is where the option's folder, or one above it, would be made."""
    for path in (folder, *folder.parents):
        if os.path.isdir(path):
            return
        if os.path.exists(path):
            raise RecipeError(
                f"{option}: {path} is a file: name a folder, which need not be there yet"
            )


def make_run_dir(output_dir: str, name: str) -> Path:
    """Create ``output_dir/name-<time>``; a second run in the same second gets its own."""
    refuse_file("output_dir", Path(output_dir))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        path = Path(output_dir) / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RecipeError(f"cannot create the run directory {path}: {error}") from error
        return path
    raise RecipeError(f"{output_dir} has too many runs named {name}-{stamp}")


def runs(output_dir: str, name: str) -> list[Path]:
    """The folders that `make_run_dir` has made, the one changed last at the end."""
    start = Path(output_dir) / f"{name}-"
    whole = re.compile(re.escape(start.name) + r"(\d{8}-\d{6})(?:-(\d\d?))?")
    there = start.parent.iterdir() if start.parent.is_dir() else ()
    found = []
    for path in there:
        if made := whole.fullmatch(path.name):
            # A file system's clock may stand still while two of them are made.
            found.append((path.stat().st_mtime_ns, made[1], int(made[2] or 0), path))
    return [path for *_, path in sorted(found)]


class StepProgress:
    """A progress bar on a terminal, a line now and then in a log, nothing on other ranks."""

    def __init__(self, steps: int, *, enabled: bool, what: str = "training") -> None:
        self._steps, self._enabled = steps, enabled
        self._word = "step" if what == "training" else what
        self._bar: Progress | None = None
        # FORCE_COLOR, which notebooks set, asks for colours: in a log a bar is hundreds of lines.
        if enabled and console.is_terminal and console.file.isatty():
            self._bar = Progress(
                TextColumn(what),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=console,
            )
        self._task = self._bar.add_task("", total=steps) if self._bar else None

    def __enter__(self) -> "StepProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, text: str) -> None:
        """Show that ``step`` (counted from 1) is done."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif self._enabled:
            every = max(1, self._steps // _LINES_PER_RUN)
            if step % every == 0 or step in (1, self._steps):
                console.print(f"{self._word} {step}/{self._steps}  {text}", highlight=False)
