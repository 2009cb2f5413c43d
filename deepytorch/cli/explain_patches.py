"""`deepytorch explain patches`: what is replaced in other libraries, why, and what leaves it."""

import contextlib
import dataclasses
import importlib
import io
import json as encoder
from importlib.util import find_spec

import typer

from deepytorch.cli import console
from deepytorch_core.import_hook import awaited
from deepytorch_core.patching import ENABLED, Replaced, replaced

_KERNELS = "DEEPYTORCH_KERNELS=off"
_COMPUTE = "DEEPYTORCH_COMPILE=off, DEEPYTORCH_KERNELS=off and DEEPYTORCH_PADDING_FREE=off"

# What comes in with the first model that needs it; a test compares it with what does.
LATER = (
    Replaced(
        "accelerate.accelerator.Accelerator",
        "prepare",
        "models that it is given are compiled, packed and get kernels",
        _COMPUTE,
    ),
    Replaced(
        "accelerate.data_loader",
        "send_to_device",
        "masks of batches are known on the host, so that packing waits for no device",
        "DEEPYTORCH_PADDING_FREE=off",
    ),
    Replaced(
        "torch.amp.grad_scaler.GradScaler",
        "_maybe_opt_step",
        "fused optimizers get what a scaler found without a wait for the device",
        _KERNELS,
    ),
    Replaced(
        "torch.nn.modules.module.Module",
        "_replicate_for_data_parallel",
        "copies that nn.DataParallel makes keep to their class's forward",
        _KERNELS,
    ),
    Replaced(
        "torch._dynamo.utils",
        "warn_once",
        "what can't be captured is told in a line of our own",
        "DEEPYTORCH_COMPILE=off",
    ),
    Replaced(
        "torch._dynamo.variables.misc.RandomVariable",
        "is_supported_random_obj",
        "a generator of Python's own is not captured",
        "DEEPYTORCH_COMPILE=off",
    ),
)
# What torch offers, and is given back by `deactivate`.
HOOKS = (
    Replaced(
        "torch.optim.optimizer",
        "register_optimizer_step_post_hook",
        "steps are counted, and the models found that an optimizer trains",
        ENABLED,
    ),
    Replaced("sys", "meta_path", "the import of frameworks is noticed", ENABLED),
)


def show(*, json: bool) -> None:
    """Import what deepytorch waits for, and print what it replaces there."""
    missing = _import(awaited())
    now = replaced()
    known = {(one.owner, one.name) for one in now}
    later = [one for one in LATER if (one.owner, one.name) not in known]
    if json:
        found = {
            "replaced": [dataclasses.asdict(one) for one in now],
            "with_a_model": [dataclasses.asdict(one) for one in later],
            "hooks": [dataclasses.asdict(one) for one in HOOKS],
            "not_installed": missing,
        }
        typer.echo(encoder.dumps(found, indent=2))
        return
    for title, rows in (
        ("replaced as soon as it is imported", now),
        ("replaced with the first model that needs it", later),
        ("hooks", HOOKS),
    ):
        if rows:
            _print(f"{title}:")
        for one in rows:
            _print(f"  {one.owner}.{one.name}: {one.why}; as stock with {one.option}")
    if missing:
        _print(f"not installed, so nothing is replaced there: {', '.join(missing)}")
    if not now:
        _print("nothing is replaced: deepytorch is off")


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
