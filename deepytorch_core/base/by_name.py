"""Models for which a script has said by name what is to become of a part of them.

The script's word stays. Parts that it has named are left alone by all that is on unasked.
"""

from __future__ import annotations

from typing import Any

COMPILE, PADDING_FREE = "compile", "padding_free"
"""The parts: `deepytorch.compile`, `pack_batches`."""

# By module, made when torch is there.
_said: Any = None


def note(model: Any, part: str) -> None:
    """Keep that the script has decided about `part` of `model`."""
    global _said
    if _said is None:
        from torch.utils.weak import WeakIdKeyDictionary

        _said = WeakIdKeyDictionary()
    _said.setdefault(model, set()).add(part)


def is_noted(model: Any, part: str) -> bool:
    """Whether the script has decided about `part` of a module or of any module in it."""
    return _said is not None and any(part in _said.get(module, ()) for module in model.modules())
