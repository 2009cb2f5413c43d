# SPDX-License-Identifier: Apache-2.0
"""How far rounding alone drives two equal runs apart: ``--compare`` with ``rounding_arm=true``.

Training amplifies differences in the last digit: after some hundred steps two runs that add in
another order have other losses, as two seeds have. So long curves are judged against a third arm,
the stock one again from weights that differ by rounding, not against a fixed tolerance. So is what
dropout leaves out, where the arms can't draw the same numbers: the third arm then has its own, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

ARM = "again"

# Rounding may drive one of two runs this much further from stock than the other.
_MOST_DRIFT_RATIO = 2.0


def nudged(make_model: Callable[[], nn.Module], seed: int) -> Callable[[], nn.Module]:
    """``make_model`` with each weight moved by at most one unit in the last place."""

    def make() -> nn.Module:
        model = make_model()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.is_floating_point():
                    noise = torch.rand(weight.shape, generator=generator) * 2 - 1
                    weight.mul_(1 + noise.to(weight) * torch.finfo(weight.dtype).eps)
        return model

    return make


def drops_out(model: nn.Module) -> bool:
    """Whether it leaves something out by chance: by layers, or by a share given to attention."""
    return any(
        (isinstance(module, _DropoutNd) and module.p > 0)
        or any(isinstance(value, float) and value > 0 and "dropout" in key for key, value in own)
        for module in model.modules()
        for own in [vars(module).items()]
    )


@dataclass(frozen=True)
class Drift:
    """How two loss curves lie apart in the second half of the steps, when rounding has grown.

    Attributes:
        size: mean absolute difference.
        bias: mean difference, ours less stock: noise has next to none, a wrong gradient has.
    """

    size: float
    bias: float

    @classmethod
    def of(cls, losses: Sequence[float], stock: Sequence[float]) -> "Drift":
        """Return the drift of ``losses`` from ``stock``, both of at least one step."""
        half = len(stock) // 2
        differences = [a - b for a, b in zip(losses[half:], stock[half:], strict=True)]
        return cls(fmean(abs(each) for each in differences), fmean(differences))

    def verdict(self, again: "Drift", tolerance: float) -> str | None:
        """None if this drift is no more than rounding's, ``again``; else what is wrong with it.

        A nan on either side is wrong.
        """
        small = self.size <= _MOST_DRIFT_RATIO * again.size + tolerance
        unbiased = abs(self.bias) <= again.size + tolerance
        if small and unbiased:
            return None
        return (
            f"the loss curves of stock and deepytorch lie {self.size:.3g} apart in the second half "
            f"(mean difference {self.bias:+.3g}), where two stock runs lie {again.size:.3g} apart: "
            "the two runs are not equivalent"
        )
