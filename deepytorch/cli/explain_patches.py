"""`deepytorch explain patches`: what is replaced in other libraries, why, and what leaves it."""

import contextlib
import dataclasses
import importlib
import io
import json as encoder
from importlib.util import find_spec

import typer

from deepytorch.cli import console

_KERNELS = "DEEPYTORCH_KERNELS=off"
_PADDING = "DEEPYTORCH_PADDING_FREE=off"
_COMPILE = "DEEPYTORCH_COMPILE=off"

# (owner, name, why, option) of what comes in with the first model that needs it. A test sees those
# of Accelerate come.
LATER = (
    (
        "accelerate.accelerator.Accelerator",
        "prepare",
        "models that it is given are compiled, packed and get kernels",
        f"{_COMPILE}, {_KERNELS} and {_PADDING}",
    ),
    (
        "accelerate.data_loader",
        "send_to_device",
        "masks of batches are known on the host, so that packing waits for no device",
        _PADDING,
    ),
    (
        "accelerate.data_loader",
        "send_to_device",
        "batches are copied to the GPU without waiting for the steps that it still has to do",
        _COMPILE,
    ),
    (
        "torch.amp.grad_scaler.GradScaler",
        "_maybe_opt_step",
        "fused optimizers get what a scaler found without a wait for the device",
        _KERNELS,
    ),
    (
        "torch.ops.aten.cross_entropy_loss",
        "AutocastCUDA",
        "the loss of many classes is computed in one pass over the logits",
        _KERNELS,
    ),
    (
        "torch",
        "_fused_adam_",
        "fused optimizers update all parameters of a group by one kernel",
        _KERNELS,
    ),
    (
        "torch",
        "_fused_adamw_",
        "fused optimizers update all parameters of a group by one kernel",
        _KERNELS,
    ),
    (
        "torch.nn.modules.module.Module",
        "_replicate_for_data_parallel",
        "copies that nn.DataParallel makes keep to their class's forward",
        _KERNELS,
    ),
    (
        "torch._dynamo.utils",
        "warn_once",
        "what can't be captured is told in a line of our own",
        _COMPILE,
    ),
    (
        "torch._dynamo.variables.misc.RandomVariable",
        "is_supported_random_obj",
        "a generator of Python's own is not captured",
        _COMPILE,
    ),
)
_ENABLED = "DEEPYTORCH_ENABLED=0"
# Torch and Python offer these for others; `deactivate` takes ours away again.
HOOKS = (
    (
        "torch.optim.optimizer",
        "register_optimizer_step_post_hook",
        "steps are counted, and the models found that an optimizer trains",
        _ENABLED,
    ),
    ("sys", "meta_path", "the import of frameworks is noticed", _ENABLED),
)


def show(*, json: bool) -> None:
    """Import what deepytorch waits for, and print what it replaces there."""
    from deepytorch_core.base.import_hook import awaited
    from deepytorch_core.base.patching import Replaced, replaced

    missing = _import(awaited())
    now = replaced()
    known = {(patch.owner, patch.name) for patch in now}
    found = {
        "replaced as soon as it is imported": now,
        "replaced with the first model that needs it": [
            Replaced(*patch) for patch in LATER if patch[:2] not in known
        ],
        "hooks": [Replaced(*hook) for hook in HOOKS],
    }
    if json:
        plain = {title: list(map(dataclasses.asdict, rows)) for title, rows in found.items()}
        typer.echo(encoder.dumps({**plain, "not installed": missing}, indent=2))
        return
    for title, rows in found.items():
        _print(f"{title}:" if rows else f"{title}: nothing")
        for row in rows:
            _print(f"  {row.owner}.{row.name}: {row.why}; as stock with {row.option}")
    if missing:
        _print(f"not installed, so nothing is replaced there: {', '.join(missing)}")


def _import(names: list[str]) -> list[str]:
    """Import modules, in silence; returns those that are not installed."""
    missing = []
    for name in names:
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            if find_spec(name.partition(".")[0]) is None:
                missing.append(name.partition(".")[0])
            else:
                importlib.import_module(name)
    return missing


def _print(line: str) -> None:
    console.out().print(line, soft_wrap=True, highlight=False, markup=False)
