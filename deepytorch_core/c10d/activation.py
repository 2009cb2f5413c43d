"""`import deepytorch`: what it switches on, and how to switch it off again.

Before torch has been imported nothing of torch is touched: a hook waits for
torch.distributed.distributed_c10d and acts right after that module has been executed.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from deepytorch_core.base import closing, config
from deepytorch_core.base.console import say, say_once
from deepytorch_core.base.errors import OFF_SWITCH
from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d import deepspeed_flag
from deepytorch_core.metering import apart, step_timer

_C10D = "torch.distributed.distributed_c10d"
_DIST_NN = "torch.distributed.nn.functional"
_ZERO_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
_LOADER = "torch.utils.data.dataloader"
_OPTIMIZER = "torch.optim.optimizer"
_GRAPHS = "torch.cuda.graphs"


@dataclass
class _Active:
    """Everything that activation has put in place."""

    patches: Patches = field(default_factory=Patches)
    hooks: list[ImportHook] = field(
        default_factory=lambda: [
            ImportHook(_C10D, _arm),
            ImportHook(_DIST_NN, _arm_dist_nn),
            ImportHook(_ZERO_HOOKS, _arm_zero_hooks),
            ImportHook(_LOADER, _arm_loader),
            ImportHook(_OPTIMIZER, _arm_optimizer),
            ImportHook(_GRAPHS, _arm_graphs),
        ]
    )
    seams: ModuleType | None = None

    def arm_seams(self) -> None:
        """Switch on what is computed, too; see `activate_on_import`."""
        if self.seams is None and _seams is not None and not _are_models_left:
            self.seams = importlib.import_module(_seams)
            self.seams.arm()
            if not _is_command():
                closing.say_at_exit(is_active)

    def undo(self) -> None:
        if self.seams is not None:
            self.seams.disarm()
        for hook in self.hooks:
            hook.undo()
        self.patches.undo()
        step_timer.uninstall()
        for name in _reporters.values():
            reporter = sys.modules.get(name)
            if reporter is not None:
                reporter.stop()
        deepspeed_flag.disarm("activation")


_active: _Active | None = None
_seams: str | None = None
_reporters: Mapping[str, str] = {}
_are_models_left = False
_lock = threading.RLock()


def activate(**options: Any) -> None:
    """Send the collectives of torch.distributed through deepytorch, from now on.

    Models that are trained are accelerated, too, once `deepytorch` has been imported. Works before
    torch is imported, after, and after `init_process_group` (existing groups are upgraded in place;
    all ranks must then call it). May be called again to change options.

    Args:
        **options: see `deepytorch_core.base.config.Options`; each wins over its environment
            variable.

    Raises ValueError for an unknown option or a wrong value.
    """
    base = config.Options.from_env() if _active is None else config.current()
    put_in_force(config.Options.from_mapping(options, base=base))
    with _lock:
        if _active is not None:
            _active.arm_seams()


def activate_on_import(*, seams: str, reporters: Mapping[str, str]) -> None:
    """Activate, as `import deepytorch` does, if that has not been done.

    Args:
        seams: the module that switches on what is computed, by functions `arm` and `disarm`. An
            adapter that puts options in force by itself does without.
        reporters: the modules that do what options ask for, by the option: `begin` with its value,
            and `stop`.
    """
    global _seams, _reporters
    _seams, _reporters = seams, reporters
    if _active is None and not deepspeed_flag.is_left_to_adapter():
        try:
            activate()
        except ValueError:
            if not _is_command():
                raise


def _is_command() -> bool:
    """Whether this process is the command `deepytorch`, which tells of a wrong option in a line."""
    started_as = os.path.basename(sys.argv[0]) if sys.argv else ""
    return started_as == "deepytorch" or sys.orig_argv[1:3] == ["-m", "deepytorch.cli"]


def leave_models_alone(is_on: bool = True) -> None:
    """Have activation switch on collectives alone in this process, for tests of single parts."""
    global _are_models_left
    _are_models_left = is_on
    if is_on and _active is not None and _active.seams is not None:
        _active.seams.disarm()
        _active.seams = None


def put_in_force(chosen: config.Options) -> str | None:
    """`activate` with all options at once; returns why existing groups were left alone, if so.

    None also when there are no groups yet, when deepytorch serves them already, and when the
    options say that it shall not.
    """
    global _active
    with _lock:
        config.set_current(chosen)
        if not chosen.enabled:
            deactivate()
            config.set_current(chosen)
            return None
        if _active is None:
            for line in config.unknown_variables():
                say_once(line, level="warning")
            _active = _Active()
            for hook in _active.hooks:
                hook.install()
            deepspeed_flag.arm("activation")
        for option in ("metrics", "report"):
            if (value := getattr(chosen, option)) is not None:
                _begin_reporting(option, value)
        c10d = sys.modules.get(_C10D)
        if not is_active():
            return "this torch is not as expected"
        if c10d is not None and c10d.is_initialized():
            from deepytorch_core.c10d import upgrade

            return upgrade.upgrade_existing(c10d)
        return None


def deactivate() -> None:
    """Undo `activate`: torch has its functions back, upgraded groups their old backends, and
    compiled models run eagerly.

    A group that was created with our backend keeps it until it is destroyed. Does nothing when
    not active.
    """
    global _active
    with _lock:
        compiled = sys.modules.get("deepytorch_core.compile")
        if compiled is not None:
            compiled.undo_all()
        tuned = sys.modules.get("deepytorch_core.tune.in_force")
        if tuned is not None:
            tuned.reset()
        if _active is None:
            return
        _active.undo()
        _active = None
        config.set_current(None)
        c10d = sys.modules.get(_C10D)
        if c10d is not None and c10d.is_initialized():
            from deepytorch_core.c10d import upgrade

            upgrade.downgrade_all(c10d)
            left = upgrade.num_groups_made_as_ours(c10d)
            if left:
                say_once(f"{left} group(s) made with deepytorch keep it until they are destroyed")
                return
        hang = sys.modules.get("deepytorch_core.hang.live")
        if hang is not None:
            hang.rest()
        config.withdraw()


def _begin_reporting(option: str, value: str) -> None:
    if option not in _reporters:
        raise RuntimeError(
            f"{option}={value} needs deepytorch to be imported: it names what does that"
        )
    importlib.import_module(_reporters[option]).begin(value)


def is_active() -> bool:
    """Whether `activate` (or `import deepytorch`) is in force in this process."""
    return _active is not None


def _arm(c10d: ModuleType) -> None:
    global _active
    assert _active is not None
    try:
        from deepytorch_core.c10d import (
            backend_checks,
            registered,
            store_keeping,
        )
        from deepytorch_core.c10d import (
            patches as c10d_patches,
        )

        apart.install(c10d, _active.patches)
        c10d_patches.install(c10d, _active.patches)
        store_keeping.install(c10d, _active.patches)
        backend_checks.install(c10d, _active.patches)
        registered.install(_active.patches)
    except Exception as error:
        # This may be running inside `import torch`, which must not fail because of us.
        _active.undo()
        _active = None
        say(
            f"not active, this torch is not as expected: {type(error).__name__}: {error} "
            f"({OFF_SWITCH})",
            level="warning",
        )


def _arm_dist_nn(functional: ModuleType) -> None:
    if _active is not None:  # the first hook may have given up
        from deepytorch_core.c10d import backend_checks

        backend_checks.install_dist_nn(functional, _active.patches)


def _arm_zero_hooks(zero_hooks: ModuleType) -> None:
    if _active is not None:
        from deepytorch_core.c10d import backend_checks

        backend_checks.install_zero_hooks(zero_hooks, _active.patches)


def _arm_loader(dataloader: ModuleType) -> None:
    if _active is not None:
        from deepytorch_core.metering import loader_waits

        loader_waits.install(dataloader, _active.patches)


def _arm_optimizer(optimizers: ModuleType) -> None:
    if _active is not None:
        step_timer.install(optimizers)


def _arm_graphs(graphs: ModuleType) -> None:
    if _active is not None:
        apart.install_graphs(graphs, _active.patches)
