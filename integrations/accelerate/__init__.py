"""Accelerate: `Accelerator(kwargs_handlers=[DeepytorchPlugin(...)])`.

`Accelerator.__init__` is replaced, from the first DeepytorchPlugin on. It takes the plugin out of
`kwargs_handlers`, which Accelerate itself looks up by exact class. Once the process group is there,
it puts deepytorch under this one Accelerator (`accelerator`). Nothing happens to Accelerators that
were given no plugin. Left alone are data loaders, optimizers, gradient accumulation, mixed
precision, checkpoints, and DDP's own keywords and hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from deepytorch.integrations.common import contract
from deepytorch.integrations.seams import accelerator as _accelerator

try:
    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        KwargsHandler,
    )
except ModuleNotFoundError:
    contract.require("accelerate", ">=1.10,<2", tested="1.15.0")
    raise

__all__ = ["DeepytorchAccelerator", "DeepytorchPlugin", "undo"]

_NAME = "accelerate"


class DeepytorchPlugin(KwargsHandler):  # type: ignore[misc]
    """Turns deepytorch on for the Accelerator whose `kwargs_handlers` it is in.

    Args:
        ddp_kwargs: keywords of DistributedDataParallel, as a mapping or as Accelerate's
            DistributedDataParallelKwargs; that handler may as well stand beside the plugin.
        **options: see `deepytorch_core.base.config.Options`. All ranks must give the same.

    Wrong options are an IntegrationError on every rank when the Accelerator is built.
    """

    def __init__(
        self,
        *,
        ddp_kwargs: Mapping[str, Any] | DistributedDataParallelKwargs | None = None,
        **options: Any,
    ) -> None:
        if isinstance(ddp_kwargs, Mapping):
            ddp_kwargs = DistributedDataParallelKwargs(**ddp_kwargs)
        self.ddp_kwargs = ddp_kwargs
        self.options = options
        _install()

    def __repr__(self) -> str:
        return f"DeepytorchPlugin(ddp_kwargs={self.ddp_kwargs!r}, options={self.options!r})"


class DeepytorchAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator with deepytorch under it; everything else is Accelerate's.

    Args:
        deepytorch_plugin: default: one without options.
        *args, **kwargs: as for Accelerator; a plugin among `kwargs_handlers` too is an error.
    """

    def __init__(
        self,
        *args: Any,
        deepytorch_plugin: DeepytorchPlugin | None = None,
        kwargs_handlers: list[KwargsHandler] | None = None,
        **kwargs: Any,
    ) -> None:
        plugin = deepytorch_plugin or DeepytorchPlugin()
        super().__init__(*args, kwargs_handlers=[*(kwargs_handlers or []), plugin], **kwargs)


def undo(accelerator: Accelerator) -> bool:
    """Put the Accelerator, its process groups and `Accelerator.__init__` back as they were.

    Returns False when there was nothing to undo. Collective: all ranks must call it. To apply it
    again make a new DeepytorchPlugin.
    """
    _uninstall()
    return _accelerator.undo(accelerator)


_WHY = "a DeepytorchPlugin is taken out of kwargs_handlers"
_OPTION = "no DeepytorchPlugin"

_installed: contract.Changes | None = None


def _install() -> None:
    global _installed
    if _installed is None:
        _installed = contract.Changes()
        _installed.replace(Accelerator, "__init__", _constructing, why=_WHY, option=_OPTION)


def _uninstall() -> None:
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def _constructing(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    def construct(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(accelerator, *args, **kwargs)
        plugin, others = _sorted_out(call.arguments.get("kwargs_handlers") or [])
        if plugin is None:
            original(accelerator, *args, **kwargs)
            return
        call.arguments["kwargs_handlers"] = others
        armed = contract.arm(plugin.options)
        original(*call.args, **call.kwargs)
        _accelerator.apply(accelerator, plugin.options, adapter=_NAME, armed=armed)

    return construct


def _sorted_out(
    handlers: list[KwargsHandler],
) -> tuple[DeepytorchPlugin | None, list[KwargsHandler]]:
    """The plugin, if there is one, and the handlers that are Accelerate's."""
    plugins = [handler for handler in handlers if isinstance(handler, DeepytorchPlugin)]
    others = [handler for handler in handlers if not isinstance(handler, DeepytorchPlugin)]
    if not plugins:
        return None, others
    if len(plugins) > 1:
        raise contract.IntegrationError(
            f"{_NAME}: DeepytorchPlugin was passed {len(plugins)} times: keep one, with all options"
        )
    ddp_kwargs = plugins[0].ddp_kwargs
    if ddp_kwargs is not None:
        if any(isinstance(handler, DistributedDataParallelKwargs) for handler in others):
            raise contract.IntegrationError(
                f"{_NAME}: both DeepytorchPlugin(ddp_kwargs=...) and a "
                "DistributedDataParallelKwargs in kwargs_handlers were given: keep one of them"
            )
        others.append(ddp_kwargs)
    return plugins[0], others
