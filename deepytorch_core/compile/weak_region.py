"""A region that modules may lead to: it does not keep them, so they go with their last user."""

from __future__ import annotations

import weakref

from torch import nn

from deepytorch_core.compile.regions import Region


class WeakRegion(Region):
    """Another region's place, without its modules' lives."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.name, (), region.is_model)
        object.__setattr__(self, "_references", tuple(map(weakref.ref, region.modules)))

    def __getattribute__(self, name: str) -> object:
        if name != "modules":
            return super().__getattribute__(name)
        references: tuple[weakref.ref[nn.Module], ...] = super().__getattribute__("_references")
        return tuple(one for one in (reference() for reference in references) if one is not None)
