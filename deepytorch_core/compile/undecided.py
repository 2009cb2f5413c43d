"""Models of which something is found out that changes the code of their passes.

Compiling or capturing them before would be in vain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

_questions: weakref.WeakKeyDictionary[nn.Module, Callable[[], bool]] = weakref.WeakKeyDictionary()


def register(module: nn.Module, is_open: Callable[[], bool] | None) -> None:
    """Have `is_open` asked whether it is still found out; None: it is known."""
    if is_open is None:
        _questions.pop(module, None)
    else:
        _questions[module] = is_open


def is_open(module: nn.Module) -> bool:
    """Whether something is found out about the module now."""
    asked = _questions.get(module)
    return asked is not None and asked()
