"""`deepytorch run --compare SCRIPT`: the script stock and accelerated, in runs that take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch.cli import console
from deepytorch.cli.compare import failure, leftovers
from deepytorch_core.base import config
from deepytorch_core.base.errors import OFF_SWITCH, AdapterError, CompareError
from deepytorch_core.c10d import adapter
from deepytorch_core.compare import made, result, workspace
from deepytorch_core.compare.plan import MIN_STEPS, Plan
from deepytorch_core.compare.probe import OWN_RANKS, PROGRESS

if TYPE_CHECKING:
    from deepytorch_core.testing.emulation import Network

OURS, COLLECTIVES, COMPUTE = "deepytorch", "collectives only", "compute only"

_NO_COMPUTE = {
    "DEEPYTORCH_COMPILE": "off",
    "DEEPYTORCH_KERNELS": "off",
    "DEEPYTORCH_PADDING_FREE": "off",
}
# Experiment trackers write to a server: a comparison is no experiment.
_QUIET = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
_TERMINATE_S = 40.0
_LOOK_S = 0.05
# With fewer, those under the profiler would be missed among the timed ones.
LEAST_PROFILED = 25
# In the nodes' own network, where nobody else is.
_EMULATED_PORT = 29400

Say = Callable[[str], None]
Watch = Callable[[Sequence[float]], bool]
"""Told rank 0's block times in seconds while a run is under way; True ends the run."""


class StoppedEarly(Exception):
    """A run was ended by who watched it; `block_s` is what rank 0 had measured."""

    def __init__(self, block_s: Sequence[float]) -> None:
        super().__init__("stopped early")
        self.block_s = tuple(block_s)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to run the script.

    Args:
        name: for people.
        variables: environment variables of its processes.
        settings: of `deepytorch_core.tune.knobs`; None: as the profile says.
        warmup_steps: untimed steps at the beginning; 0: a fifth of all.
        is_nudged: whether its weights are moved by rounding; see `deepytorch_core.compare.nudge`.
        is_redrawn: whether its random numbers are others, too.
        seconds: when it ends, since its first step; `Job.steps` is then the most. None: after them.
        is_clocked: whether every step is timed; see `deepytorch_core.compare.clock`.
        hint: what else to say when it fails.
    """

    name: str
    variables: Mapping[str, str]
    settings: Mapping[str, int] | None = None
    warmup_steps: int = 0
    is_nudged: bool = False
    is_redrawn: bool = False
    seconds: float | None = None
    is_clocked: bool = False
    hint: str = f"stock ran through; {OFF_SWITCH}"


_ON = {"DEEPYTORCH_ENABLED": "1"}
ARMS = {
    arm.name: arm
    for arm in (
        Arm(name=result.STOCK, variables={"DEEPYTORCH_ENABLED": "0"}, hint=""),
        Arm(name=OURS, variables=_ON),
        Arm(name=COLLECTIVES, variables={**_ON, **_NO_COMPUTE}),
        Arm(name=COMPUTE, variables={**_ON, "DEEPYTORCH_COLLECTIVES": "stock"}),
    )
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Says what is compared, and how long.

    Args:
        arguments: torchrun's options, the script and its arguments.
        options: the same, parsed.
        default_processes: what stands in for an absent --nproc-per-node.
        world_size: processes of one run.
        steps: optimizer steps of one run.
        rounds: runs of each arm.
        arms: the first is stock.
        timeout_s: limit of one run in seconds.
        network: emulated nodes that the ranks live on; None is this machine as it is.
        ranks_per_node: of each emulated node.
        began: when, in seconds since the epoch.
        is_profiled: whether the last steps of each run are, for what GPUs do in them.
    """

    arguments: tuple[str, ...]
    options: Namespace
    default_processes: str
    world_size: int
    steps: int
    rounds: int
    arms: tuple[str, ...]
    timeout_s: float
    network: Network | None = None
    ranks_per_node: tuple[int, ...] = ()
    began: float = field(default_factory=time.time)
    is_profiled: bool = False


def compare(job: Job, say: Say) -> tuple[list[result.Sample], list[str]]:
    """Run every arm `rounds` times in turns; the samples, and remarks about what was left.

    Raises CompareError for a run that failed or took too long, and for a script that ends early.
    """
    if job.steps < MIN_STEPS:
        raise ValueError(f"--steps must be at least {MIN_STEPS}, not {job.steps}")
    job = dataclasses.replace(job, is_profiled=job.steps >= LEAST_PROFILED and _has_gpu())
    with contextlib.suppress(AdapterError):  # without it the script trains on stock collectives
        adapter.load()  # compiled once here, not within a run
    samples: list[result.Sample] = []
    remarks: list[str] = []
    first = run_once(job, ARMS[result.STOCK], remarks)
    if not first.is_complete:
        if first.steps < MIN_STEPS:
            raise CompareError(too_short(first.steps, MIN_STEPS))
        say(f"the script ends after {first.steps} optimizer steps: these are compared")
        is_profiled = job.is_profiled and first.steps >= LEAST_PROFILED
        job = dataclasses.replace(job, steps=first.steps, is_profiled=is_profiled)
        first = run_once(job, ARMS[result.STOCK], remarks)
    for number in range(job.rounds):
        for arm in job.arms:
            is_first = number == 0 and arm == result.STOCK
            sample = first if is_first else run_once(job, ARMS[arm], remarks)
            if sample.steps != job.steps:
                raise CompareError(
                    f"{arm} took {sample.steps} optimizer steps where stock took {job.steps}"
                )
            samples.append(sample)
            say(
                f"round {number + 1}/{job.rounds}  {arm:<18}"
                f"{sample.step_s * 1e3:10.2f} ms a step, {sample.setup_s:.1f} s to warm up"
            )
    nudged = nudged_arm(job.arms[1:], samples)
    if nudged is not None:
        say(
            "losses differ by more than stock's from run to run: one more run of stock, with "
            f"weights moved by rounding{' and other random numbers' if nudged.is_redrawn else ''}, "
            "tells what that does to them"
        )
        try:
            samples.append(run_once(job, nudged, remarks))
        except CompareError as error:  # what was measured is worth more than this yardstick
            remarks.append(f"{result.NUDGED}: {error}")
    return samples, list(dict.fromkeys(remarks))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def nudged_arm(arms: Sequence[str], samples: Sequence[result.Sample]) -> Arm | None:
    """The run that tells whether one of `arms` is off by chance; None where that is no question."""
    found = [result.judge(samples, arm).losses for arm in arms]
    if not any(agreement.is_by_size for agreement in found):
        return None
    is_redrawn = any(agreement.drawn_from is not None for agreement in found)
    return dataclasses.replace(
        ARMS[result.STOCK], name=result.NUDGED, is_nudged=True, is_redrawn=is_redrawn
    )


def too_short(steps: int, least: int) -> str:
    """Return what to say of a script that takes fewer than `least` optimizer steps."""
    if steps == 0:
        return (
            "the script took no step of a torch.optim.Optimizer: there is nothing to time. Does "
            "it train, with the arguments given?"
        )
    return f"the script ended after {steps} optimizer steps; at least {least} are needed"


def run_once(job: Job, arm: Arm, remarks: list[str], watch: Watch | None = None) -> result.Sample:
    """Run the script once in processes of its own; `remarks` receives what it left behind.

    Raises CompareError for a run that failed or took too long, StoppedEarly where `watch` ended it.
    """
    temporary = tempfile.TemporaryDirectory(
        prefix="deepytorch-compare-", ignore_cleanup_errors=True
    )
    with console.ended_by_sigterm(), temporary as name:
        folder = Path(name).resolve()
        began = folder.stat().st_mtime
        for part in ("root", "ranks", "outside"):
            (folder / part).mkdir()
        here = Path.cwd()
        view, whole = workspace.make(here, folder / "root")
        if whole:
            remarks.append(
                f"{here} has too many files to mirror: what the script writes in "
                f"{', '.join(whole[:3])}{' ...' if len(whole) > 3 else ''} is real"
            )
        plan = Plan(
            steps=job.steps,
            folder=str(folder / "ranks"),
            workspace=str(view),
            outside=str(folder / "outside"),
            began=job.began,
            warmup_steps=arm.warmup_steps,
            settings=None if arm.settings is None else dict(arm.settings),
            is_nudged=arm.is_nudged,
            is_redrawn=arm.is_redrawn,
            seconds=arm.seconds,
            is_clocked=arm.is_clocked,
            is_profiled=job.is_profiled,
        )
        plan.write(folder / "plan.json")
        log = folder / "output"
        try:
            status = _launch(job, folder, arm.variables, log, watch)
        finally:
            made.clear(folder / "outside", began)
        if status != 0:
            output = log.read_text(errors="replace").replace(str(folder / "root"), "")
            said = failure.words(output, status, arm=arm.name, hint=arm.hint, limit_s=job.timeout_s)
            ranks = folder / "ranks"
            raise CompareError(failure.with_ranks(said, ranks, job.world_size, arm=arm.name))
        sample = result.read(arm.name, folder / "ranks", job.world_size)
        remarks += leftovers.remarks(sample)
        return sample


def _environment(job: Job, variables: Mapping[str, str], view: str) -> dict[str, str]:
    environment = config.child_environment(**_QUIET, **variables, PWD=view)
    if job.network is not None:
        # Emulated nodes share this machine's cores; torchrun would let the only rank of each use
        # them all.
        share = max(1, len(os.sched_getaffinity(0)) // job.world_size)
        environment.setdefault("OMP_NUM_THREADS", str(share))
    return environment


def _launch(
    job: Job, folder: Path, variables: Mapping[str, str], log: Path, watch: Watch | None
) -> int | None:
    """The exit status of torchrun; None when it took too long."""
    view = Plan.read(folder / "plan.json").workspace
    environment = _environment(job, variables, view)
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {
            "cwd": view,
            "env": environment,
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        plan = str(folder / "plan.json")
        launchers = []
        for node in range(1 if job.network is None else job.network.num_nodes):
            if job.network is None:
                launchers.append(subprocess.Popen(_command(job, plan), **settings))
            else:
                command = _command_on(job, plan, node)
                launchers.append(job.network.start(node, command, **settings))
            stack.enter_context(_ended(launchers[-1]))
        return _wait(launchers, job.timeout_s, folder / "ranks", watch)


def _wait(
    launchers: Sequence[subprocess.Popen[bytes]],
    limit_s: float,
    ranks: Path,
    watch: Watch | None,
) -> int | None:
    """The first exit status that is not 0, or 0; None when it took too long."""
    progress = ranks / PROGRESS
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if (ranks / OWN_RANKS).exists():
            raise CompareError(
                "the script starts its ranks itself, so no launcher can start and watch them: "
                "leave that part of it out, or run it with python, without and with import "
                "deepytorch in it, and compare by hand"
            )
        statuses = [launcher.poll() for launcher in launchers]
        failed = [status for status in statuses if status]
        if failed or None not in statuses:
            return failed[0] if failed else 0
        if watch is not None and progress.exists():
            block_s = json.loads(progress.read_text(encoding="utf-8"))
            if watch(block_s):
                raise StoppedEarly(block_s)
        time.sleep(_LOOK_S)
    return None


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """No process of the run is left, however this ends."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _command(job: Job, plan: str) -> list[str]:
    arm = [sys.executable, "-m", "deepytorch.cli.compare.arm"]
    return [*arm, plan, job.default_processes, *_arguments(job)]


def _command_on(job: Job, plan: str, node: int) -> list[str]:
    """torchrun on one of several emulated nodes."""
    assert job.network is not None
    where = [f"--nnodes={job.network.num_nodes}", f"--node-rank={node}"]
    where += [f"--master-addr={job.network.address(0)}", f"--master-port={_EMULATED_PORT}"]
    where += [f"--nproc-per-node={job.ranks_per_node[node]}"]
    arm = [sys.executable, "-m", "deepytorch.cli.compare.arm"]
    return [*arm, plan, job.default_processes, *where, *_arguments(job)]


def _arguments(job: Job) -> list[str]:
    """The command line for a process that starts in the view of this folder."""
    if job.options.module:
        return list(job.arguments)
    # The script as seen from here: its outputs beside itself then go to the view, too.
    place = len(job.arguments) - len(job.options.training_script_args) - 1
    script = Path(os.path.abspath(job.arguments[place]))
    # The name that a shell has for this folder may lead through links; Python's does not.
    for path in (script, script.parent.resolve() / script.name):
        if path.is_relative_to(Path.cwd()):
            script = path.relative_to(Path.cwd())
            break
    return [*job.arguments[:place], str(script), *job.arguments[place + 1 :]]


def processes(options: Namespace, *, what: str = "--compare") -> int:
    """How many processes torchrun will start. Raises ValueError for several machines."""
    from torch.distributed import run as torchrun

    if options.nnodes not in ("1", "1:1"):
        raise ValueError(f"{what} runs on one machine: leave --nnodes out")
    return int(torchrun.determine_local_world_size(options.nproc_per_node))


def since(began: float) -> str:
    """Time passed, for people."""
    return f"{time.monotonic() - began:.0f} s"
