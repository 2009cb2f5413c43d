"""The import of torch's compiler, which takes seconds: late, and without a trace.

`torch.fx.wrap`, called where modules of it are imported, leaves a frame that holds itself. A frame
holds the frames it was called by. So a model that is prepared meanwhile would live on, with all of
its memory, until cycles of garbage are looked for.

A forked child would wait for ever where its parent has compiled: Inductor keeps its pool of
threads, none of which is in the child.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
from types import FrameType


def _renew_pool() -> None:
    inductor = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(inductor, "AsyncCompile", None), "pool", None)
    forget = getattr(pool, "cache_clear", None)
    if forget is not None:
        forget()


os.register_at_fork(after_in_child=_renew_pool)

# Helpers' work is given and found by these imports, which take a second or two.
_FOR_HELPERS = ("torch._inductor.compile_fx", "torch.fx._graph_pickler")


def load() -> None:
    """Import `torch._dynamo`, unless somebody has."""
    if "torch._dynamo" in sys.modules:
        return
    importlib.import_module("torch._dynamo")
    from torch.fx._symbolic_trace import wrap

    for candidate in gc.get_objects():
        if type(candidate) is FrameType and candidate.f_code is wrap.__code__:
            candidate.clear()


@functools.cache
def load_beside() -> None:
    """Import, in one thread, what is needed once helpers compile: no step is to wait for it."""
    from deepytorch_core.base import unlisted

    if not all(name in sys.modules for name in _FOR_HELPERS):
        unlisted.Thread(_load_all, name="deepytorch imports").start()


def _load_all() -> None:
    for name in _FOR_HELPERS:
        with contextlib.suppress(Exception):  # whoever needs it says what is wrong
            importlib.import_module(name)
