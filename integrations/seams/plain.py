"""Compute in training loops that call torch alone: nanoGPT's, a notebook's, DDP's, FSDP's.

NOTE [Finding]. No hook sees the calls of all modules: torch would call each of them another way,
and its compiler would notice. Torch's hook of steps tells of an optimizer instead. Modules that own
its parameters are found among the objects that Python's garbage collector knows, and the outermost
that contain them. In the next step a seam lies on these (`deepytorch_core.compile.seam`), and sees
which of them the loop calls. A step later it lies on the parts of those that were not called.

Everything is done between two steps, on this rank alone, and without a pass of the model.
"""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepytorch.integrations.common import claims, compilation, contract
from deepytorch.integrations.kernels import apply as kernels
from deepytorch.integrations.padding_free import apply as padding_free
from deepytorch_core.base import compiler_import, config, decisions
from deepytorch_core.base.config import Options

# Steps in which it is looked which modules are called, and the most that a loop calls by itself.
_MOST_STEPS, _MOST_CALLED = 5, 8
# Optimizers of one process that are looked at whenever they come. A search of its objects takes a
# tenth of a second. Further searches may take their part of the time that the process has lasted.
_MOST_SEARCHES = 32
_SEARCH_S, _LARGEST_SHARE = 0.1, 0.03

_searches: weakref.WeakKeyDictionary[Any, _Search | None] = weakref.WeakKeyDictionary()
_applied: list[contract.Changes] = []
_num_searches = 0
_began = time.monotonic()


def stepped(optimizer: Any, note: Callable[[str], None]) -> None:
    """Go on with the models of an optimizer that has stepped; they get what the options say.

    Args:
        optimizer: of torch.
        note: told where something is switched on: "ddp", "fsdp" or "plain".
    """
    if optimizer not in _searches:
        _searches[optimizer] = None
        _attempt(lambda: _begin(optimizer))
        return
    search = _searches[optimizer]
    if search is not None:
        _attempt(lambda: search.go_on(optimizer, note))


def undo_unasked() -> None:
    """Take back what was done to models, and look for no others."""
    global _num_searches
    for search in list(_searches.values()):
        if search is not None:
            search.close()
    _searches.clear()
    _num_searches = 0
    while _applied:
        _applied.pop().undo()


def _attempt(do: Callable[[], object]) -> None:
    contract.Changes(asked=False).attempt("the model of a training loop", do)


def _begin(optimizer: Any) -> None:
    global _num_searches
    options = config.current()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if (
        not _is_any_on(options)
        or claims.is_left_to_stock()
        or not _may_search(time.monotonic() - _began)
        or not trained
    ):
        return
    if claims.is_taken(optimizer) or claims.trains_taken(trained):
        return
    _num_searches += 1
    found = _outermost({id(parameter) for parameter in trained})
    # Kernels and packing would change modules that `deepytorch.compile` has code for, or measures.
    if any(claims.is_taken(module) or compilation.is_begun(module) for module in found):
        return
    if found:
        _searches[optimizer] = _Search(found, {id(parameter) for parameter in trained})


def _may_search(lasted_s: float) -> bool:
    spent_s = _SEARCH_S * _num_searches
    return _num_searches < _MOST_SEARCHES or spent_s < _LARGEST_SHARE * lasted_s


def _is_any_on(options: Options) -> bool:
    chosen = (options.compile, options.kernels, options.padding_free)
    return options.enabled and any(mode != "off" for mode in chosen)


def _outermost(wanted: set[int]) -> list[nn.Module]:
    """The modules that contain parameters of these ids and are in no other; see NOTE [Finding]."""
    # By the type alone: to ask an object what it is may run its code.
    modules = [module for module in gc.get_objects() if issubclass(type(module), nn.Module)]
    modules = [
        module for module in modules if "_modules" in vars(module) and "_parameters" in vars(module)
    ]
    outer: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            outer.setdefault(id(child), []).append(module)
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    left = [module for module in modules if _owns(module, wanted)]
    while left:
        module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if id(module) in outer:
            left += outer[id(module)]
        else:
            found[id(module)] = module
    return list(found.values())


def _owns(module: nn.Module, wanted: set[int]) -> bool:
    return any(id(parameter) in wanted for parameter in module._parameters.values())


class _Spotter:
    """Sees the training calls of a module; see `seam.Watcher`."""

    def __init__(self) -> None:
        self.is_called = False
        self.autocast: torch.dtype | None = None

    def on_forward(self, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.is_called = True
            for kind in ("cuda", "cpu"):
                if torch.is_autocast_enabled(kind):
                    self.autocast = torch.get_autocast_dtype(kind)

    def give_up(self, reason: str) -> None:
        pass


class _Search:
    """Finds out which modules a loop calls, and applies what is to be applied. Keeps none alive.

    Args:
        found: the outermost modules.
        wanted: the ids of what is trained.
    """

    def __init__(self, found: Iterable[nn.Module], wanted: set[int]) -> None:
        compiler_import.load()
        self._wanted = wanted
        self._num_steps = 0
        self._spotted: list[tuple[weakref.ref[nn.Module], _Spotter]] = []
        self._watch(found)

    def _watch(self, found: Iterable[nn.Module]) -> None:
        from deepytorch_core.compile import seam

        for module in _callable(found):
            if compilation.is_compiled_by_script(module):
                self._spotted.append((weakref.ref(module), _Spotter()))
                self._spotted[-1][1].is_called = True  # its calls are torch's compiler's
                continue
            opened = seam.opened(module)
            if opened is not None and opened.watcher is None:
                opened.watcher = _Spotter()
                self._spotted.append((weakref.ref(module), opened.watcher))

    def close(self) -> None:
        """Lie on no module any more."""
        from deepytorch_core.compile import seam

        for reference, spotter in self._spotted:
            module = reference()
            opened = None if module is None else seam.of(module)
            if module is not None and opened is not None and opened.watcher is spotter:
                opened.watcher = None
                seam.close(module)
        self._spotted = []

    def go_on(self, optimizer: Any, note: Callable[[str], None]) -> None:
        """Another step has ended."""
        self._num_steps += 1
        seen = [(reference(), spotter) for reference, spotter in self._spotted]
        alive = [(module, spotter) for module, spotter in seen if module is not None]
        self.close()
        called = [(module, spotter) for module, spotter in alive if spotter.is_called]
        if called or not alive or self._num_steps >= _MOST_STEPS:
            _searches[optimizer] = None
            if len(called) > _MOST_CALLED:
                what = f"models of {type(optimizer).__name__}"
                decisions.record(what, "stock", f"the loop calls {len(called)} parts by themselves")
                return
            for number, (module, spotter) in enumerate(called):
                optimizers = [optimizer] if number == 0 else []
                _apply(module, optimizers, spotter.autocast, note)
            return
        self._watch(
            child
            for module, _ in alive
            for child in module.children()
            if any(id(parameter) in self._wanted for parameter in child.parameters())
        )


def _callable(found: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Without lists of modules, which nobody calls: their parts."""
    for module in found:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _callable(module.children())
        else:
            yield module


def _apply(
    module: nn.Module,
    optimizers: list[Any],
    autocast: torch.dtype | None,
    note: Callable[[str], None],
) -> None:
    if claims.is_taken(module):
        return
    options, kind = config.current(), _kind(module)
    note(kind)
    claims.take([module, *optimizers], kind)
    changes = contract.Changes(asked=False)
    _applied.append(changes)
    changes.attempt(
        "kernels", functools.partial(_swap, module, optimizers, options, changes, autocast)
    )
    changes.attempt("padding", functools.partial(_pack, module, options, changes, autocast))
    changes.attempt("code", functools.partial(compilation.start, module, options, changes))


def _kind(module: nn.Module) -> str:
    if any(_is_sharded(part) for part in module.modules()):
        return "fsdp"
    return "ddp" if isinstance(module, nn.parallel.DistributedDataParallel) else "plain"


def _is_sharded(module: nn.Module) -> bool:
    names = {"FullyShardedDataParallel", "FSDPModule"}
    return any(
        base.__name__ in names and base.__module__.startswith("torch.distributed.fsdp")
        for base in type(module).__mro__
    )


def _swap(
    module: nn.Module,
    optimizers: list[Any],
    options: Options,
    changes: contract.Changes,
    autocast: torch.dtype | None,
) -> None:
    from deepytorch_core.compile import regions

    device = next(module.parameters()).device
    if _is_whole(module):
        things = [regions.unwrapped(module), *optimizers]
        kernels.apply(things, options, changes, device=device, autocast=autocast)
    elif not any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        kernels.apply_to_optimizers(optimizers, options, changes, device=device)


def _is_whole(module: nn.Module) -> bool:
    """Whether kernels may stand in its parts.

    Not where they are cut up or copied to other devices, and not in what the script has compiled.
    """
    is_cut = _kind(module) == "fsdp" or isinstance(module, nn.DataParallel)
    return not is_cut and not compilation.is_compiled_by_script(module)


def _pack(
    module: nn.Module,
    options: Options,
    changes: contract.Changes,
    autocast: torch.dtype | None,
) -> None:
    if options.padding_free == "off" or compilation.is_compiled_by_script(module):
        return
    changes.on_undo_of(module, padding_free.detach)
    if options.padding_free == "auto":
        padding_free.watch(module)
    else:
        padding_free.attach(
            module, options.padding_free, adapter="loop", precision=autocast, is_asked=False
        )
