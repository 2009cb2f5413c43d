"""Ranks that a script starts itself, though a launcher has started the script as one of its own.

The launcher's environment says that its store is served already. Processes that the script starts
inherit that. So nobody serves at an address of the script's own, "env://" with another MASTER_PORT.
They would wait for each other until the timeout, as on stock torch under torchrun.

NOTE [which processes] Those that a tool starts, such as a loader's workers, are left alone. Others
are accompanied: they run the script's function as it is, and tell when they form a process group.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import Patches

_WHY = "ranks that a script starts itself are told where nobody serves them"
_C10D = "torch.distributed.distributed_c10d"
_TOOLS = ("multiprocessing.", "concurrent.", "torch.", "deepytorch", "joblib.", "loky.")


@dataclass(frozen=True)
class Companion:
    """Accompanies the processes that a script starts; goes to them by pickle or fork.

    Args:
        address: host and port that the launcher serves, as this process was told at its start.
        mark: a file to be left once one of them forms a group; None for none.
    """

    address: tuple[str, int] | None
    mark: str | None = None

    def watch(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Accompany the processes that this one starts from now on by `multiprocessing`.

        Those processes that meet by "env://" are ranks. Others may be servers of their own, which
        form groups beside a script that trains by itself. A process that starts while `is_wanted`
        says no is not accompanied.
        """

        def watched(original: Callable[..., Any]) -> Callable[..., Any]:
            def start(process: Any) -> None:
                target = getattr(process, "_target", None)
                if target is not None and not _is_a_tools(target) and is_wanted():
                    process._target = functools.partial(self.run, target, False)
                original(process)

            return start

        Patches().replace(BaseProcess, "start", watched, why=_WHY)

    def run(self, fn: Callable[..., Any], is_rank: bool, *args: Any, **kwargs: Any) -> Any:
        """Call `fn`, in a process that the script has started.

        Args:
            fn: the script's function.
            is_rank: whether it is a rank also if it meets others by another way than "env://".
            *args: of `fn`, as are `kwargs`.

        What it returns or raises is `fn`'s own. RuntimeError where ranks would meet at an address
        that nobody serves.
        """
        ImportHook(_C10D, functools.partial(self._arm, is_rank)).install()
        return fn(*args, **kwargs)

    def _arm(self, is_rank: bool, c10d: ModuleType) -> None:
        def telling(original: Callable[..., Any]) -> Callable[..., Any]:
            def rendezvous(url: str, *args: Any, **kwargs: Any) -> Any:
                is_by_launcher = url.startswith("env://")
                if self.mark is not None and (is_rank or is_by_launcher):
                    with contextlib.suppress(OSError):  # who reads it does without
                        Path(self.mark).touch()
                if is_by_launcher:
                    self._require_served()
                return original(url, *args, **kwargs)

            return rendezvous

        # By which ranks meet; it may wait without end.
        Patches().replace(c10d, "rendezvous", telling, why=_WHY)

    def _require_served(self) -> None:
        # torch.distributed has a function of this name, too.
        module = importlib.import_module("torch.distributed.rendezvous")
        address = config.rendezvous_address()
        is_launchers = module._torchelastic_use_agent_store()
        if is_launchers and address is not None and address != self.address:
            raise RuntimeError(
                "this process, which the script has started, is to meet others at "
                f"{address[0]}:{address[1]}, where nobody serves: no launcher can start a script "
                "that starts its ranks itself, neither torchrun nor deepytorch run: run it with "
                "python, and import deepytorch in it"
            )


def _is_a_tools(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return f"{module}.".startswith(_TOOLS)
