"""Runs in each process of `deepytorch run`: activation, then the user's program as `__main__`.

`python runner.py SCRIPT ARGS...` or `python runner.py -m MODULE ARGS...`. The program sees the
sys.argv, sys.path[0], __name__ and __file__ that `python SCRIPT` or `python -m MODULE` gives it.
`python runner.py --compare PLAN ...` watches it and stops it as the plan says.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from deepytorch_core.base.child_ranks import Companion


def program_path(arguments: list[str]) -> str:
    """Return Python's sys.path[0]: the script's folder, or the current one for a module."""
    if arguments[0] == "-m":
        return os.getcwd()
    script = os.path.realpath(arguments[0])
    return script if os.path.isdir(script) else os.path.dirname(script)


def main(arguments: list[str]) -> None:
    plan = arguments[1] if arguments[0] == "--compare" else None
    if plan is not None:
        arguments = arguments[2:]
    # First of all, since this file's own folder holds names that a program may import.
    if not sys.flags.safe_path:
        sys.path[0] = program_path(arguments)

    from deepytorch_core.base import config
    from deepytorch_core.base.child_ranks import Companion

    address = config.rendezvous_address()  # before the program says another
    import deepytorch  # importing it activates

    if plan is None:
        if deepytorch.is_active():
            watch_for_own_ranks(Companion(address))
        run(arguments)
    else:
        from deepytorch_core.compare.plan import Plan
        from deepytorch_core.compare.probe import Probe, watch

        told = Plan.read(plan)
        probe = Probe(told)
        # Under stock, too: its steps are to be seen.
        watch_for_own_ranks(Companion(address, probe.own_ranks), lambda: not probe.has_stepped)
        if told.settings is not None:
            from deepytorch_core.tune import in_force, knobs

            in_force.put_in_force(knobs.checked(told.settings))
        if deepytorch.is_active():
            from deepytorch.integrations.seams import arm as seams

            probe.seams = seams.met()
        watch(probe, lambda: run(arguments))


def end_as_python(error: BaseException) -> None:
    """Have the traceback of what the program raised begin in the program.

    The program's own `sys.excepthook`, if it has one, goes on showing it.
    """
    show = sys.excepthook

    def show_from_program(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        while traceback is not None and is_before_program(traceback.tb_frame.f_code.co_filename):
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        show(kind, error, traceback)
        if isinstance(error, ValueError) and "environment variable RANK expected" in str(error):
            from deepytorch_core.base.console import say

            say(
                "the script wants to be a rank of a job: deepytorch run --nproc-per-node 1 starts "
                "it as the only one",
                level="error",
            )

    sys.excepthook = show_from_program


def is_before_program(file: str) -> bool:
    """Whether code of this file is part of starting a program."""
    return file in (__file__, "<frozen runpy>") or file.startswith("<frozen importlib.")


def watch_for_own_ranks(companion: Companion, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Has a line said once the program starts processes by torch.multiprocessing.

    While `is_wanted` says yes they are accompanied, as ranks where the program waits for them, and
    as are those that it starts by `multiprocessing` itself.
    """
    import functools
    import inspect
    from types import ModuleType

    from deepytorch_core.base.console import say_once
    from deepytorch_core.base.import_hook import ImportHook

    def wrap(module: ModuleType) -> None:
        start = module.start_processes

        @functools.wraps(start)
        def start_processes(fn: Any, *args: Any, **kwargs: Any) -> Any:
            say_once(
                "the script starts processes itself; if these are its ranks, no launcher can start "
                "it, neither torchrun nor deepytorch run: run it with python, and import "
                "deepytorch in it",
                level="warning",
            )
            given = inspect.signature(start).bind_partial(fn, *args, **kwargs).arguments
            if is_wanted():
                fn = functools.partial(companion.run, fn, given.get("join", True))
            return start(fn, *args, **kwargs)

        module.start_processes = start_processes  # type: ignore[attr-defined]
        package = sys.modules.get("torch.multiprocessing")
        if getattr(package, "start_processes", None) is start:
            package.start_processes = start_processes  # type: ignore[union-attr]

    ImportHook("torch.multiprocessing.spawn", wrap).install()
    companion.watch(is_wanted)


def run(arguments: list[str]) -> None:
    import runpy
    import zipfile

    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif os.path.isfile(arguments[0]) and not zipfile.is_zipfile(arguments[0]):
        sys.argv[:] = arguments
        run_file(os.path.abspath(arguments[0]))
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def run_file(path: str) -> None:
    """Runs a script as Python does: with its full path as __file__, and sys.argv[0] as given.

    runpy makes both the same.
    """
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException as error:
        end_as_python(error)
        raise
