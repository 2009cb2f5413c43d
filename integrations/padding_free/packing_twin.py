"""A twin of a model: the same class of a narrow and shallow copy of its configuration.

A model's twin shows on the CPU whether the model packs. So the model itself runs no pass that its
program doesn't make. `describe` says what a twin has to be made of, or why none would be like the
model; `examine` makes it and tries it out, in a process of its own (`packing_helper`).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .packed_forward import FUSED_HEAD, Conventions
from .packing_probe import Unsupported, probe

# Packages whose modules give a token what they give it in any row.
_KNOWN = (
    *("torch", "transformers", "peft", "accelerate", "deepspeed", "trl", "liger_kernel"),
    *("bitsandbytes", "torchao", "deepytorch", "deepytorch_core"),
)
# Adapters that look at each token by itself.
_ADAPTERS = ("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA")
# Configurations name their number of layers so; entries for each layer are a list as long.
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
_LEAST_DEPTH = 4
_HEADS = ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "hidden_dim")
_INNER = (
    *("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "ffn_hidden_size"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
    "hidden_size_per_layer_input",
)
_MOST_HEADS, _HEAD_WIDTH, _INNER_WIDTH = 4, 16, 48
# Parameters that a twin may have, if its configuration can't be made narrow.
_MOST_PARAMETERS = 300_000_000
# Settings of what is drawn in training, which would hide a difference.
_DRAWN = ("drop", "jitter")


@dataclass(frozen=True)
class Twin:
    """The description of a twin; can be pickled.

    Attributes:
        module: of the model's class.
        name: of the class in it.
        config: the model's configuration.
        classes: qualified names of the transformers modules that the model has.
        fused_head: arguments of the head that TRL has given it, if it has one.
    """

    module: str
    name: str
    config: Any
    classes: tuple[str, ...]
    fused_head: dict[str, Any] | None


def describe(outer: Any, model: Any) -> Twin:
    """Describe a twin of `model`.

    Args:
        outer: what a training loop calls inside its wrappers: the model, or a PeftModel of it.
        model: a transformers model.

    Raises Unsupported where a twin would not be like it.
    """
    for adapter in getattr(outer, "peft_config", {}).values():
        method = str(getattr(adapter, "peft_type", "")).rpartition(".")[2].upper()
        if method not in _ADAPTERS or getattr(adapter, "alora_invocation_tokens", None):
            raise Unsupported(f"its adapter ({method}) may look at more than each token")
    for module in outer.modules():
        own = vars(module).get("forward")
        kind: Any = _kind(type(module))
        if not _is_known(kind.__module__):
            raise Unsupported(f"{kind.__qualname__} is a module of the script's own")
        for forward in (own, kind.forward):
            if forward is not None and not _is_known(_written_in(forward)):
                raise Unsupported(f"somebody has replaced the forward of {kind.__qualname__}")
    kind = _kind(type(model))
    return Twin(
        kind.__module__,
        kind.__qualname__,
        copy.deepcopy(model.config),
        tuple(sorted(set(_classes(model)))),
        _fused_head(model),
    )


def examine(twin: Twin) -> Conventions:
    """Make the twin, and try it out.

    Raises Unsupported where its packed rows differ from its padded batches, or none can be made.
    """
    model = _made(twin)
    if missing := set(twin.classes) - set(_classes(model)):
        raise Unsupported(f"it has {min(missing)}, which its configuration doesn't make")
    if twin.fused_head is not None:
        utils = importlib.import_module("trl.trainer.utils")
        utils.add_fused_lm_head(model, **twin.fused_head)
    return probe(model, model, precision=torch.float32, as_trained=True)


def _made(twin: Twin) -> Any:
    kind = getattr(importlib.import_module(twin.module), twin.name)
    problems: list[str] = []
    for make in (_narrow, _narrow_between_heads, _shallow):
        config = make(twin.config)
        try:
            with torch.device("meta"):
                number = sum(parameter.numel() for parameter in kind(config).parameters())
            if number > _MOST_PARAMETERS:
                problems.append(f"{number:,} parameters are too many")
                continue
            model = kind(config).to(torch.float32)
            _move(model)
            model(input_ids=torch.ones(1, 4, dtype=torch.int64, device="cpu"))
        except Exception as error:  # whatever a class has against a configuration
            problems.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        else:
            return model.train()
    raise Unsupported(f"no small copy of it could be made: {problems[0]}")


def _move(model: Any) -> None:
    """Give every weight a value of its own: those that begin at zero or one would hide theirs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(
                weight.shape, generator=generator, dtype=torch.float32, device="cpu"
            )
            if weight.dim() > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * noise)


def _shallow(config: Any) -> Any:
    """A copy with fewer layers, of each kind one at least, that draws nothing in training."""
    made = copy.deepcopy(config)
    for part in _parts(made):
        for name in list(vars(part)):
            if any(drawn in name for drawn in _DRAWN) and type(getattr(part, name)) is float:
                setattr(part, name, 0.0)
        if getattr(part, "_attn_implementation", None) not in (None, "eager", "sdpa"):
            part._attn_implementation = "sdpa"  # others need a GPU; which tokens they see is alike
        for name in _DEPTHS:
            depth = vars(part).get(name)
            if type(depth) is int and depth > _LEAST_DEPTH:
                _cut(part, name, depth)
        if "use_cache" in vars(part):
            part.use_cache = False
    return made


def _cut(config: Any, name: str, depth: int) -> None:
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == depth
    }
    least = _LEAST_DEPTH
    for value in lists.values():
        kinds = {repr(entry) for entry in value}
        least = max(least, next(n for n in range(1, depth + 1) if _has(value[:n], kinds)))
    least = min(depth, least)
    for key, value in lists.items():
        setattr(config, key, value[:least])
    setattr(config, name, least)


def _has(values: Any, kinds: set[str]) -> bool:
    return {repr(value) for value in values} == kinds


def _narrow(config: Any) -> Any:
    """The same with few and narrow heads, and narrow layers, in the former proportions."""
    made = _narrow_between_heads(config)
    for part in _parts(made):
        settings = vars(part)
        heads = next((settings[name] for name in _HEADS if type(settings.get(name)) is int), None)
        if heads is None:
            continue
        fewer = min(heads, _MOST_HEADS)
        while heads % fewer:
            fewer -= 1
        for name in _HEADS:
            if settings.get(name) == heads:
                setattr(part, name, fewer)
        for name in _GROUPS:
            groups = settings.get(name)
            if type(groups) is int:
                setattr(part, name, max(1, fewer * groups // heads))
        for name in _WIDTHS:
            if type(settings.get(name)) is int:
                setattr(part, name, fewer * _HEAD_WIDTH)
        if type(settings.get("head_dim")) is int:
            part.head_dim = min(settings["head_dim"], _HEAD_WIDTH)
    return made


def _narrow_between_heads(config: Any) -> Any:
    """The same with narrow layers around heads that stay as they are."""
    made = _shallow(config)
    for part in _parts(made):
        settings = vars(part)
        for name in _WIDTHS:
            if type(settings.get(name)) is int:
                setattr(part, name, _MOST_HEADS * _HEAD_WIDTH)
        for name in _INNER:
            if type(settings.get(name)) is int:
                setattr(part, name, min(settings[name], _INNER_WIDTH))
    return made


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and those within it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "_attn_implementation_internal"):
            yield from _parts(value)


def _classes(model: Any) -> Iterator[str]:
    for module in model.modules():
        kind = _kind(type(module))
        if kind.__module__.startswith("transformers."):
            yield f"{kind.__module__}.{kind.__qualname__}"


def _kind(of: type) -> type:
    """The class as it was written: sharding and parametrizations derive others from it."""
    for base in of.__mro__:
        is_derived = getattr(sys.modules.get(base.__module__), base.__name__, None) is not base
        if base.__module__.startswith("torch.") and (
            is_derived or "distributed" in base.__module__
        ):
            continue
        return base
    return of


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _written_in(function: Any) -> str:
    """The module whose code a function is, whatever it calls itself."""
    while hasattr(function, "__func__") or hasattr(function, "func"):
        function = getattr(function, "__func__", None) or function.func
    names = getattr(function, "__globals__", None)
    return str((names or {}).get("__name__", type(function).__module__))


def _fused_head(model: Any) -> dict[str, Any] | None:
    """The arguments of TRL's `add_fused_lm_head`, from what it has put in the model's forward."""
    function: Callable[..., Any] | None = vars(model).get("forward")
    while function is not None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is not None and FUSED_HEAD in code.co_varnames:
            given = inspect.getclosurevars(function).nonlocals
            names = ("temperature", "cast_lm_head_to_fp32", "outputs")
            return {name: given[name] for name in names if name in given}
        function = getattr(function, "__wrapped__", None)
    return None
