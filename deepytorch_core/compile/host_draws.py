"""Random numbers that a pass draws on the host and makes nothing of: drawn beside a replay as well.

LayerDrop, as fairseq has it and many of transformers' models after it, asks before each layer
whether `torch.rand([]) < self.layerdrop`. Most versions do so where `layerdrop` is 0, too, and
nothing is ever left out. A replay runs no Python, so it goes the same way whatever the numbers are.
But it would leave the generator where it was, and a later user of the generator, such as a sampler,
would get other numbers. So the same number of them is drawn for a replay. A module whose
`layerdrop` changes is in another state (`module_state`), and what then is drawn is looked at anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deepytorch_core import guard
from deepytorch_core.compile import graphs
from deepytorch_core.guard.recorder import NotCapturedError

_LESS = (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt)


def count(run: Callable[[], object], state: guard.HostNumbers, numbers: Sequence[Tensor]) -> int:
    """How many numbers `draw` has to draw in place of a pass that was just run.

    Args:
        run: the pass; it is made once more, and eagerly, to see what becomes of the numbers.
        state: of the host's generators before the pass.
        numbers: what `guard.random_numbers` was before it; undefined afterwards.

    Raises NotCapturedError where the pass may go by what it draws on the host, or draws anything
    but single numbers of torch's own generator.
    """
    after = guard.HostNumbers()
    if after == state:
        return 0
    graphs.rewind(numbers)
    draws = _Draws()
    # Compiled code would be compiled anew for a mode.
    with torch.compiler.set_stance("force_eager"), draws:
        run()
    graphs.rewind(numbers)
    draw(draws.number)
    if not draws.are_idle or guard.HostNumbers() != after:
        raise NotCapturedError("it draws random numbers on the host")
    return draws.number


def draw(number: int) -> None:
    """Draw so many numbers as models do."""
    for _ in range(number):
        torch.rand([])  # on the default device, as theirs


class _Draws(TorchFunctionMode):
    """Counts calls of `torch.rand([])`, and sees what is done with what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._matter = False
        self._drawn: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    @property
    def are_idle(self) -> bool:
        """Whether nothing can have come of the numbers, and nobody has kept one."""
        return not self._matter and not self._drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(self._is_drawn(leaf) for leaf in tree_leaves((args, kwargs))):
            self._matter = self._matter or not _is_always_false(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and not kwargs and args in (([],), ((),)):
            self.number += 1
            self._drawn[id(result)] = result
        return result

    def _is_drawn(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and self._drawn.get(id(leaf)) is leaf


def _is_always_false(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a comparison `number < least`: no number that is drawn is below 0."""
    if func not in _LESS or kwargs or len(args) != 2:
        return False
    return isinstance(args[0], Tensor) and type(args[1]) in (int, float) and args[1] <= 0
