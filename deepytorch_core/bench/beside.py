"""Matrix products that GPUs compute while they communicate, as in a training step.

A collective alone may take all of the GPU; beside products each multiprocessor it takes is one that
computing has to do without. So what is timed here is both together, until the later is done.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepytorch_core.bench import timing

WIDTHS = (4096, 2048, 1024)
MAX_PRODUCTS = 200


@dataclass(frozen=True)
class Amount:
    """`count` products of two `width` x `width` matrices."""

    width: int
    count: int


def amount_for(target_us: float, time_of: Callable[[int], float]) -> Amount:
    """Products that take about `target_us` microseconds, of the largest width that allows that.

    `time_of(width)` is how long one takes, in microseconds.
    """
    for width in WIDTHS:
        one_us = time_of(width)
        if 2 * one_us <= target_us:
            break
    count = round(target_us / one_us) if one_us > 0 else MAX_PRODUCTS
    return Amount(width, min(max(count, 1), MAX_PRODUCTS))


class Products:
    """Products in bfloat16 on the current GPU, in order on the caller's stream.

    `time_us` is what they take alone, once that has been measured.
    """

    def __init__(self, amount: Amount) -> None:
        shape = (amount.width, amount.width)
        self.amount = amount
        self.time_us = 0.0
        self._factors = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        self._result = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self) -> None:
        for _ in range(self.amount.count):
            torch.mm(*self._factors, out=self._result)

    def beside(self, call: timing.Call) -> timing.Call:
        """A call that starts `call` on a stream of its own, then the products, and joins them."""

        def both() -> None:
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                call()
            self.run()
            current.wait_stream(self._side)

        return both


def lasting(target_us: float, about: Callable[[timing.Call], float]) -> Products:
    """Products that take about as long.

    `about` times a call in microseconds, with the same result on all ranks.
    """

    def time_of(width: int) -> float:
        trial = Products(Amount(width, 1))
        trial.run()  # the first chooses a kernel, which takes long
        return about(trial.run)

    products = Products(amount_for(target_us, time_of))
    products.time_us = about(products.run)
    return products
