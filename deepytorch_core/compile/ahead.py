"""Compiling in other processes while the training goes on.

A compiler takes seconds for a block and minutes for a model that repeats none, in one thread of
Python. So each graph that was captured goes to a helper process (`helper`), several at a time where
there are many. The helper compiles the graph and leaves the result in torch's caches on disk. Once
a part's graphs are done they are captured again, and found there. What a helper could not do is
left eager where no step may be held up, else it is compiled in this process.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import math
import os
import pickle
import pickletools
import queue
import struct
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule

from deepytorch_core.base import cgroup, config, cpu_affinity
from deepytorch_core.compile import policies, regions, switches
from deepytorch_core.topology import model as topology

# From which on it takes minutes, so that parts are compiled side by side. Smaller ones stay whole,
# so that nothing is missed between the parts: the training doesn't wait for either.
MODEL_IN_PARTS = 250
# Each takes a core while it compiles, and memory on the GPU to ask for what it can do.
MOST_HELPERS = 8
LEAST_HELPERS = 2
CORES_OF_A_HELPER = 2
HELPER_BYTES = 1 << 30
# A helper takes so much main memory, of which the training is left some.
HELPER_HOST_BYTES = 2 << 30
# This part of the most that the training has taken must be free beside them: batches differ.
SPARE_MEMORY = 0.25
# Helpers without work end so long after there was any, or after the first should have come.
_IDLE_S = 5.0
_FIRST_JOB_S = 120.0
_POLL_S = 0.5
# Modules are found where this process finds them, and not in the current folder before all others.
# Ctrl-C is for the training, which may go on.
_HELPER = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[3:]; "
    "from deepytorch_core.compile import helper; helper.main(int(sys.argv[1]), sys.argv[2])"
)
# Threads of a helper's own, at least, that make kernels of its code.
_KERNEL_THREADS = 2
# Cores that the training keeps.
_OWN_CORES = 2


def may_help(root: nn.Module, device: torch.device, *, num_ranks: int) -> bool:
    """Whether helpers can compile the model, as far as this rank knows."""
    found = regions.find(root)
    is_whole = [region.modules for region in found] == [(root,)]
    # Code for DDP's buckets is in none of torch's caches: only parts can be handed over.
    is_sent = num_ranks == 1 or not is_whole or is_in_parts(root)
    is_wanted = bool(found) and is_sent and len(policies.automatic(device)) == 1
    return is_wanted and why_not(device) is None


def why_not(device: torch.device) -> str | None:
    """Why models on `device` are compiled in this process alone; None if helpers can do it."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    if device.type != "cuda":
        return "its device has no compiler that takes so long"
    number = _num_helpers()
    if number < LEAST_HELPERS:
        return "there are too few cores, or too little main memory"
    if not sys.executable or getattr(sys, "frozen", False):
        return "there is no Python to start others with"
    spare = SPARE_MEMORY * torch.cuda.max_memory_reserved(device)
    if torch.cuda.mem_get_info(device)[0] < 2 * LEAST_HELPERS * HELPER_BYTES + spare:
        return "there is too little memory left on the GPU"
    caches = (functorch.enable_autograd_cache, inductor.fx_graph_cache)
    is_on = all(caches) and not inductor.force_disable_caches
    return None if is_on else "torch's caches are switched off"


def is_in_parts(root: nn.Module) -> bool:
    """Whether a model that helpers compile, and that repeats no blocks, is compiled in parts."""
    if regions.num_modules(root) < MODEL_IN_PARTS:
        return False
    return [region.modules for region in regions.find(root)] == [(root,)]


def _num_helpers() -> int:
    by_memory = _host_bytes_left() // config.local_world_size() // HELPER_HOST_BYTES
    return min(MOST_HELPERS, _num_cores() // CORES_OF_A_HELPER, by_memory)


def _num_by_gpu(device: torch.device) -> int:
    """How many may ask the GPU what it can do, with what is left of its memory."""
    if device.type != "cuda":
        return MOST_HELPERS
    return max(1, torch.cuda.mem_get_info(device)[0] // (2 * HELPER_BYTES))


def _host_bytes_left() -> int:
    """Return the bytes left of main memory, on this machine and in this container."""
    machine = topology.discover().memory
    group = cgroup.ControlGroup(cgroup.read_file, "memory")
    taken = cgroup.CgroupMemory.of(group, machine.total_bytes)
    left = machine.available_bytes or machine.total_bytes
    return left if taken.limit is None else min(left, taken.limit - taken.used)


def _num_cores() -> int:
    return int(cpu_affinity.of_rank(topology.discover().cores.usable))


@dataclass(frozen=True)
class Settings:
    """The settings that a process goes by when it compiles, besides the graph."""

    inductor: dict[str, Any]
    functorch: dict[str, Any]
    autocast: tuple[str, bool, torch.dtype]
    switches: dict[str, Any]
    current_gpu: int | None
    namesake: str
    """The module that pickle takes torch's memory formats for members of: the first with a `torch`.

    The caches' keys are pickles.
    """

    @classmethod
    def now(cls, device: torch.device) -> Settings:
        """This process's."""
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor

        kind = device.type
        return cls(
            inductor.save_config_portable(),
            functorch.save_config_portable(),
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            switches.now(),
            torch.cuda.current_device() if kind == "cuda" else None,
            _namesake(),
        )

    def resemble(self) -> None:
        """Make this process one that compiles as that one does; for good."""
        switches.resemble(self.switches)
        if self.current_gpu is not None:  # machines may have different ones
            torch.cuda.set_device(self.current_gpu)
        if _namesake() != self.namesake:
            first = sys.modules.get(self.namesake) or types.ModuleType(self.namesake)
            vars(first).setdefault("torch", torch)
            others = {name: module for name, module in sys.modules.items() if name != self.namesake}
            sys.modules.clear()
            sys.modules.update({self.namesake: first} | others)


def _namesake() -> str:
    # Asked of a pickle: `pickle.whichmodule` passes over modules that the one in C takes.
    pickled = pickletools.genops(pickle.dumps(torch.contiguous_format))
    return next(value for _, value, _ in pickled if isinstance(value, str))


@dataclass(eq=False)
class HelperJob:
    """One graph's way to a helper and back.

    Attributes:
        is_over: whether a helper has done it, or nobody will.
        problem: why nobody will; empty if one has.
    """

    is_over: bool = False
    problem: str = ""

    def end(self, problem: str) -> None:
        """It is over."""
        self.problem = problem
        self.is_over = True


def begun(owner: object, device: torch.device, *, budget_s: float) -> Ahead:
    """Helpers that compile as `auto` does; they end with `owner`, at work or not."""
    helpers = Ahead(device, policies.automatic(device)[0].name, budget_s=budget_s)
    weakref.finalize(owner, helpers.close).atexit = False
    return helpers


class Ahead:
    """The helpers of one model, and what they have to do.

    Args:
        device: the model's.
        policy: what compiles, by name.
        budget_s: how long one may take for each of the parts that it is given.
    """

    def __init__(self, device: torch.device, policy: str, *, budget_s: float) -> None:
        self.failed: dict[str, str] = {}
        """Parts of which a graph was not sent or not compiled, and why."""
        self._device = device
        self._policy = policy
        self._budget_s = budget_s
        self._late_at = math.inf
        self._jobs: queue.SimpleQueue[tuple[str, bytes, HelperJob]] = queue.SimpleQueue()
        self._open: collections.Counter[str] = collections.Counter()
        self._expected: collections.Counter[str] = collections.Counter()
        self._asked_at = math.inf
        self._is_closed = False
        # A thread that has it may come to collect a compilation, whose end closes its helpers.
        self._lock = threading.RLock()
        # Before they have taken any memory.
        self._num_helpers = min(_num_helpers(), _num_by_gpu(device))
        self._num_serving = 0
        self._kernel_threads = _KERNEL_THREADS
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, num_parts: int) -> None:
        """Have helpers ready for so many parts of the model."""
        cores = _num_cores() - _OWN_CORES
        with self._lock:
            number = max(1, min(num_parts, self._num_helpers))
            self._late_at = time.monotonic() + self._budget_s * math.ceil(num_parts / number)
            self._kernel_threads = max(_KERNEL_THREADS, cores // number)
            if math.isinf(self._asked_at):
                self._asked_at = time.monotonic() + _FIRST_JOB_S
            self._serve_by(num_parts)

    def _serve_by(self, number: int) -> None:
        for _ in range(min(number, self._num_helpers) - self._num_serving):
            self._num_serving += 1
            # A daemon: the end of the training does not wait for it.
            threading.Thread(target=self._serve, daemon=True).start()

    def expect(self, part: str, job: HelperJob | None = None) -> Callable[[GraphModule], None]:
        """A graph was captured of that part, of which is not known yet how it is compiled.

        Returns what takes it once that is known. Neither the part nor `job` is done before.
        """
        settings, job = Settings.now(self._device), job or HelperJob()
        is_open = [True]
        with self._lock:
            self._open[part] += 1
            self._expected[part] += 1

        def submit(graph: GraphModule) -> None:
            with self._lock:
                was_open, is_open[0] = is_open[0], False
            if was_open:
                self.submit(graph, part, job, settings)
                with self._lock:
                    self._open[part] -= 1
                    self._expected[part] -= 1

        return submit

    def submit(
        self,
        graph: GraphModule,
        part: str,
        job: HelperJob | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Have a helper compile a graph.

        Args:
            graph: as Dynamo has captured it.
            part: the model's part that it is of.
            job: told when it is over.
            settings: as they were at the capture; None: this process's now.
        """
        job = job or HelperJob()
        try:
            packed = _packed(graph, self._policy, settings or Settings.now(self._device))
        except Exception as error:  # whatever in a graph can't be sent
            job.end(f"{type(error).__name__}: {error}")
            self.failed.setdefault(part, job.problem)
            return
        with self._lock:
            self._asked_at = time.monotonic()
            self._open[part] += 1
            self._jobs.put((part, packed, job))
            self._serve_by(self._open.total())

    def is_done(self, part: str) -> bool:
        """Whether nothing of that part is left to be compiled."""
        return self._open[part] == 0

    def has_all(self, part: str) -> bool:
        """Whether it is known of all graphs of that part how they are compiled."""
        return self._expected[part] == 0

    @property
    def is_late(self) -> bool:
        """Whether they have had their time for all parts."""
        return time.monotonic() > self._late_at

    def close(self) -> None:
        """Stop the helpers, whatever they do."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.kill()

    def _serve(self) -> None:
        """In a thread: give jobs to one helper, one after the other, as long as there are some."""
        process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            process = self._started()  # what it begins with takes it seconds
        while (next_one := self._next_job()) is not None:
            part, packed, job = next_one
            try:
                if process is None or process.poll() is not None:
                    process = self._started()
                why = _asked(process, packed)
            except OSError as error:
                why = f"a helper could not be started: {error}"
            job.end(why)
            with self._lock:
                self._open[part] -= 1
                if why and not self._is_closed:
                    self.failed.setdefault(part, why)
        if process is not None:
            with contextlib.suppress(OSError):
                # The end of what it reads it may not see: forked processes have the pipe, too.
                _end(process.stdin)
            process.communicate()

    def _next_job(self) -> tuple[str, bytes, HelperJob] | None:
        """The next one; None where nobody has asked for one for a while, or wants any more."""
        since = time.monotonic()
        while not self._is_closed:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=_POLL_S)
            with self._lock:
                idle_s = time.monotonic() - max(since, self._asked_at)
                if idle_s > _IDLE_S and self._jobs.empty():
                    self._num_serving -= 1
                    return None
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        environment = config.child_environment(
            DEEPYTORCH_ENABLED="0",
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
            TORCHINDUCTOR_COMPILE_THREADS=str(self._kernel_threads),
        )
        with self._lock:
            if self._is_closed:
                raise OSError("it is too late")
            process = subprocess.Popen(
                [sys.executable, "-c", _HELPER, str(os.getpid()), self._device.type, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if config.current().log == "debug" else subprocess.DEVNULL,
                env=environment,
            )
            self._processes.append(process)
            return process


def _end(jobs: Any) -> None:
    """Tell the helper that reads `jobs` that there are no more; raises OSError if it is gone."""
    jobs.write(struct.pack("!q", -1))
    jobs.flush()


def _asked(process: subprocess.Popen[bytes], job: bytes) -> str:
    """Why a helper failed, or nothing."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(struct.pack("!q", len(job)) + job)
        process.stdin.flush()
        size = process.stdout.read(8)
    except OSError:
        size = b""
    if len(size) < 8:
        return f"a helper ended with status {process.wait()}"
    return process.stdout.read(struct.unpack("!q", size)[0]).decode()


def inputs_of(graph: GraphModule) -> Hashable:
    """Describe a graph's inputs, equal for equal sizes; None where they may change."""
    try:
        return _facts_of(graph)
    except TypeError:
        return None


def _facts_of(graph: GraphModule) -> tuple[_Input, ...]:
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return tuple(_Input.of(node.meta["example_value"]) for node in places)


def _packed(graph: GraphModule, policy: str, settings: Settings) -> bytes:
    """Pack a job for `helper`: the graph, what its inputs are, and settings.

    Raises whatever pickle does, and TypeError for inputs that are no tensors of fixed sizes.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    facts = list(_facts_of(graph))
    sources = [getattr(node, "_dynamo_source", None) for node in places]
    # The caches ask of methods whether they are a tensor's, that is, whether there is an example.
    known = ["example_value" in node.meta for node in graph.graph.nodes]
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: False)
    pickled = GraphPickler.dumps((graph, facts, known), options)
    return pickle.dumps((_modules_of_operators(graph), pickled, sources, policy, settings))


def _modules_of_operators(graph: GraphModule) -> list[str]:
    """The modules that have defined the custom operators in a graph, which has none of them."""
    from torch._library.custom_ops import OPDEFS

    targets = {node.target for module in graph.modules() for node in _nodes(module)}
    names = {
        target._qualified_op_name if isinstance(target, OpOverloadPacket) else target._schema.name
        for target in targets
        if isinstance(target, OpOverload | OpOverloadPacket)
    }
    defined = [OPDEFS[name] for name in sorted(names) if name in OPDEFS]
    return sorted({definition._init_fn.__module__ for definition in defined})


def _nodes(module: nn.Module) -> list[torch.fx.Node]:
    return list(module.graph.nodes) if isinstance(module, GraphModule) else []


@dataclass(frozen=True)
class _Input:
    """An input of a graph: a tensor that has everything but memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_parameter: bool

    @classmethod
    def of(cls, value: Any) -> _Input:
        """That of an example; raises TypeError if it is no tensor of a fixed size."""
        if not isinstance(value, torch.Tensor) or any(
            not isinstance(size, int) for size in (*value.shape, *value.stride())
        ):
            raise TypeError("it is compiled for sizes that change")
        return cls(
            tuple(value.shape),
            tuple(value.stride()),
            value.dtype,
            value.device,
            value.requires_grad,
            isinstance(value, nn.Parameter),
        )

    def made(self) -> torch.Tensor:
        """Such a tensor. Nothing is computed with it."""
        value = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        value.untyped_storage().resize_(0)
        if self.is_parameter:
            return nn.Parameter(value, self.requires_grad)
        return value.requires_grad_(self.requires_grad)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """While open, backward passes are compiled with their forward passes, not when they are run.

    Helpers run none; and since the caches go by it, nor may who is to find what they have made.
    """
    import torch._functorch.config as functorch

    with functorch.patch(force_non_lazy_backward_lowering=True):
        yield


def compile_packed(job: bytes) -> None:
    """In a helper: what `Ahead.submit` has sent. The caches on disk are the result."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from deepytorch_core.compile import graphs

    modules, pickled, sources, policy, settings = pickle.loads(job)
    for name in modules:
        importlib.import_module(name)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    loaded: Any = GraphPickler.loads(pickled, mode)
    graph, facts, known = loaded
    inputs = [fact.made() for fact in facts]
    nodes = list(graph.graph.nodes)
    for node in itertools.compress(nodes, known):
        node.meta["example_value"] = None
    places = [node for node in nodes if node.op == "placeholder"]
    for node, value, source in zip(places, inputs, sources, strict=True):
        node.meta["example_value"] = mode.from_tensor(value, static_shapes=True)
        node._dynamo_source = source
    kind, enabled, dtype = settings.autocast
    settings.resemble()
    own = {"compile_threads": inductor.compile_threads}
    with (
        inductor.patch({**settings.inductor, **own}),
        functorch.patch(settings.functorch),
        at_once(),
        tracing(TracingContext(mode)),
        torch.autocast(kind, dtype=dtype, enabled=enabled),
    ):
        # As the process that asks does it: keys of the caches go by the smallest difference.
        _, dropped = graphs.compile_with(
            [policies.get(policy)], graph, inputs, may_try=lambda number, seconds: True
        )
    if dropped:
        raise RuntimeError(dropped[policy])
