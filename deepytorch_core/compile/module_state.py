"""Everything that a module's Python code may go by, which a replayed pass has frozen.

A pass that is replayed runs no Python, so it is the same only while all of this is the same.
Globals and closures of functions can't be seen.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import parameter

from deepytorch_core.compile import recorders, seam, switches

_Facts = tuple[Hashable, ...]

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types that are compared by value; all else is compared by identity."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Objects within objects that are looked into, such as dictionaries of a model's configuration.
_DEPTH = 3
# Lists and dictionaries of a module's attributes live on with each.
MOST_KNOWN = 24
# A list or dictionary may have so many; longer ones are data rather than settings.
_MOST_ITEMS = 256


def hooked(
    root: nn.Module, *, collected: Iterable[str] = (), is_replayed: bool = False
) -> str | None:
    """The name of a module inside with hooks, which a replay or shared code would not run.

    Recorders of a framework (`recorders`) count only where they collect one of `collected`. Hooks
    that a graph is recorded with don't count where the module is to be replayed.
    """
    named: Iterable[tuple[str, nn.Module]] = root.named_modules()
    for name, module in named:
        for kind in _HOOKS if module is not root else ():
            for hook in (vars(module).get(kind) or {}).values():
                if is_replayed and recorders.asks_for_gradients(hook):
                    continue
                what = recorders.collects(hook)
                if what is None or what in collected:
                    return name
    return None


def hooks_inside(root: nn.Module) -> list[dict[int, Any]]:
    """Return the tables of the hooks of modules inside, to see whether there are any."""
    inside = [vars(module) for module in root.modules() if module is not root]
    return [own[hooks] for own in inside for hooks in _HOOKS if own.get(hooks) is not None]


def is_lazy(root: nn.Module) -> bool:
    """Whether some parameters get their shapes in the pass that is about to begin."""
    return any(map(parameter.is_lazy, (*root.parameters(), *root.buffers())))


class States:
    """Numbers a module's states: equal ones have the same number.

    A state is forgotten when something in it is gone, since what takes its address is another
    thing; and where `MOST_KNOWN` came after it.

    Args:
        root: the module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._known: OrderedDict[_Facts, tuple[int, list[Any]]] = OrderedDict()
        self._last: _Walk | None = None
        self._number = 0
        self._count = 0

    @property
    def count(self) -> int:
        """How many states were seen."""
        return self._count

    def now(self) -> int:
        """The number of the state that the module is in. Quick where it is the last one."""
        if self._last is None or not self._last.is_current():
            self._last = _Walk(self._root)
            self._number = self._number_of(tuple(self._last.facts), self._last.known)
        return self._number

    def living(self) -> set[int]:
        """The numbers of states that may come back."""
        return {number for number, _ in self._known.values()}

    def forget(self) -> None:
        """Let go of what states have kept."""
        self._known.clear()
        self._last = None

    def _number_of(self, facts: _Facts, objects: list[Any]) -> int:
        if facts in self._known:
            self._known.move_to_end(facts)
            return self._known[facts][0]
        known = self._known

        def forget(gone: Any) -> None:
            known.pop(facts, None)

        known[facts] = (self._count, [_held(value, forget) for value in objects])
        self._count += 1
        if len(known) > MOST_KNOWN:
            known.popitem(last=False)
        return self._count - 1


def _held(value: Any, when_gone: Callable[[Any], None]) -> Any:
    """A weak reference; what allows none, such as a list, is kept itself."""
    try:
        return weakref.ref(value, when_gone)
    except TypeError:
        return value


class _Walk:
    """One look at everything; it keeps what it saw, so that no address is used for another object.

    Attributes:
        facts: modules' attributes, the plain values in them, where parameters and buffers lie.
        known: the objects that are known in `facts` by their addresses alone.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._empty: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._settings = _settings()
        self.facts: list[Hashable] = [*self._settings]
        self.known: list[Any] = []
        self._seen: set[int] = set()
        for module in root.modules():
            self._keep(vars(module))
            for name, value in vars(module).items():
                self._look_at(module, name, value)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self._tensors.append(tensor)
                    self.facts.append((tensor.data_ptr(), tensor.requires_grad, tensor.dtype))
        self._sizes = self._sizes_now()
        self._items = list(self._items_now())
        self._places = self._places_now()

    def is_current(self) -> bool:
        """Whether all is as it was, object for object. Asked at every pass of a training."""
        return (
            self._settings == _settings()
            and not any(self._empty)
            and self._sizes == self._sizes_now()
            and all(map(operator.is_, self._items_now(), self._items))
            and self._places == self._places_now()
        )

    def _sizes_now(self) -> list[int]:
        return list(map(len, itertools.chain(self._dicts, self._lists)))

    def _items_now(self) -> Iterator[Any]:
        of_dicts = itertools.chain.from_iterable(map(dict.values, self._dicts))
        return itertools.chain(of_dicts, itertools.chain.from_iterable(self._lists))

    def _places_now(self) -> list[tuple[int, bool]]:
        return [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors]

    def _look_at(self, module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, dict) and (name.endswith("_hooks") or "_hooks_" in name):
            # The root's run outside of its pass; on others they are a reason to stop.
            if module is not self._root:
                self._keep(value)
                self.facts.append(len(value))
        elif isinstance(value, PLAIN):
            self.facts.append((name, value))
        elif name == seam.PLACE and isinstance(value, seam.Seam):
            pass  # what is computed there stays, and comes and goes while code is tried
        elif name in ("forward", seam.PLACE) or "deepytorch" in name:
            self._note(value)  # ours count calls; what they compute stays
        else:
            self._look_into(value, _DEPTH)

    def _look_into(self, value: Any, depth: int) -> None:
        self._note(value)
        if id(value) in self._seen or isinstance(value, nn.Module | torch.Tensor | type):
            return
        self._seen.add(id(value))
        container = value if isinstance(value, dict | list | tuple | set) else _attributes(value)
        self.facts.append(len(container))
        if len(container) > _MOST_ITEMS:
            return
        self._keep(container)
        for item in _items(container):
            if isinstance(item, PLAIN):
                self.facts.append(item)
            elif depth:
                self._look_into(item, depth - 1)

    def _note(self, value: Any) -> None:
        self.facts.append(id(value))
        self.known.append(value)

    def _keep(self, container: Any) -> None:
        if container is None:
            return
        if not container:
            self._empty.append(container)
        elif isinstance(container, dict):
            self._dicts.append(container)
        else:
            self._lists.append(container)


def _settings() -> tuple[Hashable, ...]:
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        switches.matmul_precision(),
    )


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _attributes(value: Any) -> dict[str, Any]:
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def own_generator(root: nn.Module) -> str | None:
    """A module's attribute that draws random numbers, whose state no pass can be told apart by."""
    numpy = sys.modules.get("numpy.random")
    kinds: tuple[type, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.Generator, numpy.RandomState)
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, kinds):
                return f"{path}.{name}".lstrip(".")
    return None


Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, int]]]


def attributes_of(root: nn.Module) -> Attributes:
    """Return the attributes of modules, and how long the lists among them are."""
    return [
        (
            module,
            dict(vars(module)),
            {n: len(v) for n, v in vars(module).items() if isinstance(v, list)},
        )
        for module in root.modules()
    ]


def put_back(attributes: Attributes) -> None:
    """Undo what passes have done to attributes since `attributes_of`."""
    for module, values, lengths in attributes:
        vars(module).clear()
        vars(module).update(values)
        for name, length in lengths.items():
            del values[name][length:]
