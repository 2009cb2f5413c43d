"""A process that compiles graphs for another one; see `ahead`.

Jobs come in on stdin and answers go out on stdout, each after its length. An empty answer means
that the job was done; any other says why not. A negative length ends it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import struct
import sys
import threading
import time

from deepytorch_core.compile import collecting


def main(parent: int, kind: str) -> None:
    """Serve until there are no more jobs, or the process `parent` is gone, which asks.

    `kind`: of the device that code is compiled for.
    """
    os.nice(10)  # the training goes first, and what loads its data
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # compilers print
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with collecting.rarely(), contextlib.suppress(ImportError):  # a job says so
        importlib.import_module("torch._inductor.compile_fx")  # takes seconds, and all jobs need it
    collecting.rarely_from_now_on()
    if kind == "cuda" and not select.select([sys.stdin], [], [], 0.0)[0]:
        with contextlib.suppress(Exception):  # a job says so
            _warm_up()
    while len(head := sys.stdin.buffer.read(8)) == 8:
        (size,) = struct.unpack("!q", head)
        if size < 0:
            return
        answer = _done(sys.stdin.buffer.read(size)).encode()
        answers.write(struct.pack("!q", len(answer)) + answer)
        answers.flush()


def _warm_up() -> None:
    """Compile something small, with all that the first job would wait for.

    Inductor imports its back ends, traces its patterns and starts processes for kernels then.
    """
    import torch
    import torch._inductor.config as inductor

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(torch.nn.functional.rms_norm(x @ weight, (64,))).sum()

    x, weight = (
        torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(2)
    )
    with inductor.patch(force_disable_caches=True):
        torch.autograd.backward(torch.compile(step)(x, weight))
    torch._dynamo.reset()
    del x, weight
    torch.cuda.empty_cache()


def _done(job: bytes) -> str:
    from deepytorch_core.compile.ahead import compile_packed

    try:
        compile_packed(job)
    except Exception as error:  # whatever a compiler may raise
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
