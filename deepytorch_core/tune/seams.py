"""The seams at which torch's own wrappers take the settings of `deepytorch tune`.

* DistributedDataParallel: its argument `bucket_cap_mb`, if the script leaves it open.
* FSDP2: `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch` of torch's own
  FSDPModule, called once the root has found its modules, unless the script has called them.

They are put in place with settings, and only then: a job without any is left alone. DeepSpeed's
sizes are its adapter's to set, see integrations/deepspeed/buckets.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from deepytorch_core.base.import_hook import ImportHook
from deepytorch_core.base.patching import Patches
from deepytorch_core.tune import asking

_Function = Callable[..., Any]
_MIB = 1 << 20
_WHY = "settings that `deepytorch tune` has found are put in force"


class _Installed:
    def __init__(self) -> None:
        self.patches = Patches()
        self.hooks = [
            ImportHook("torch.nn.parallel.distributed", self._ddp),
            ImportHook("torch.distributed.fsdp._fully_shard._fsdp_state", self._fsdp2),
        ]

    def undo(self) -> None:
        for hook in self.hooks:
            hook.undo()
        self.patches.undo()

    def _ddp(self, module: ModuleType) -> None:
        self.patches.replace(
            module.DistributedDataParallel, "__init__", _constructing_ddp, why=_WHY
        )

    def _fsdp2(self, module: ModuleType) -> None:
        # Called in each forward pass until the modules are known; torch has no public moment.
        if hasattr(getattr(module, "FSDPState", None), "_lazy_init"):
            self.patches.replace(module.FSDPState, "_lazy_init", _finding_fsdp2, why=_WHY)


_installed: _Installed | None = None


def install() -> None:
    """Reach the wrappers, now or when they are imported. Idempotent."""
    global _installed
    if _installed is None:
        _installed = _Installed()
        for hook in _installed.hooks:
            hook.install()


def undo() -> None:
    """Give torch its functions back; what was made stays as it is."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def _constructing_ddp(original: _Function) -> _Function:
    signature = inspect.signature(original)

    def construct(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(wrapper, *args, **kwargs).arguments
        except TypeError:  # torch has the better words
            original(wrapper, *args, **kwargs)
            return
        sizes = [name for name in ("bucket_cap_mb", "bucket_cap_mb_list") if given.get(name)]
        value = asking.ask(
            "ddp_bucket_mb",
            why_fixed=f"the script gives {sizes[0]}" if sizes else "",
            enough=_gradient_mb(given["module"]),
        )
        if value is not None:
            kwargs["bucket_cap_mb"] = value
        original(wrapper, *args, **kwargs)

    return construct


def _gradient_mb(module: Any) -> int:
    """MiB that all gradients need, rounded up: a bucket of that size holds all."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    num_bytes: int = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return max(1, -(-num_bytes // _MIB))


def _finding_fsdp2(original: _Function) -> _Function:
    def lazy_init(state: Any) -> None:
        was_root = state._is_root
        original(state)
        if was_root is None and state._is_root:
            _prefetch([other for other in state._state_ctx.all_states if other is not state])

    return lazy_init


def _prefetch(states: list[Any]) -> None:
    """Have each unit of a root gather those after it in the pass; `states` in forward order."""
    modules = [state._modules[0] for state in states]
    why_fixed = ""
    if len(modules) < 2:
        why_fixed = "the model has fewer than two sharded units besides the whole"
    elif any(
        state._states_to_forward_prefetch or state._states_to_backward_prefetch for state in states
    ):
        why_fixed = "the script sets what is prefetched"
    enough = max(1, len(modules) - 1)
    ahead = asking.ask("fsdp2_prefetch", why_fixed=why_fixed, enough=enough)
    if ahead is None:
        return
    for index, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + ahead])
        before = modules[max(0, index - ahead) : index]
        module.set_modules_to_backward_prefetch(before[::-1])
