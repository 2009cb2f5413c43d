"""torch's compiler: what importing it leaves behind, and what a fork does to it."""

from __future__ import annotations

import os
import signal

from deepytorch_core.base import compiler_import


def test_a_forked_child_compiles_with_threads_of_its_own() -> None:
    compiler_import.load()
    from torch._inductor import async_compile, config

    with config.patch(compile_threads=2):
        pool = async_compile.AsyncCompile.pool
        assert pool().submit(int).result() == 0
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # without a handler it ends the process
            os._exit(pool().submit(int).result())
        _, status = os.waitpid(child, 0)
    assert status == 0
