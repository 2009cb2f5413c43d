"""This stands for what Composer imports and is not used here.

That is the client of a hosted service, and torchvision's compiled part, which the CPU build of
torch can't load.
"""

import sys
import types
from importlib.machinery import ModuleSpec

import torch


class Unused(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


for name in ("mcli", "mcli.api", "mcli.api.exceptions"):
    sys.modules[name] = Unused(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)
operators = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    operators.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
