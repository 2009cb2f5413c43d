"""One random operation: what all ranks agree on, each rank's data, and the exact result.

Data are small whole numbers, so every sum and product is exact in every type and order. Every rank
can make every rank's data, and so knows the result without asking anybody.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = (
    *("float32", "bfloat16", "float16", "float64"),
    *("int8", "uint8", "int16", "int32", "int64"),
)
OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("gather", "scatter", "barrier", "shift", "sparse"),
)
REDUCE_OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG")
# These take lists and single tensors, which may lie in memory as they like.
_STRIDED = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("all_to_all", "gather", "scatter"),
)
_NOT_GLOOS = ("int16",)
_NOT_NCCLS = ("int16", "sparse")  # it carries out what has no kernel, but not with these
_MOST_LOG2 = 18  # elements of one part


@dataclass(frozen=True)
class Step:
    """The facts that all ranks of the group know of one operation. `members` are global ranks."""

    number: int
    members: tuple[int, ...]
    group: int
    op: str
    dtype: str
    reduce_op: str
    count: int
    root: int
    lengths: tuple[tuple[int, ...], ...]  # [from][to], of an uneven all_to_all_single
    asynchronous: bool
    layout: int  # how each rank's tensors lie in memory, as the start of its own choice
    seed: int

    def __str__(self) -> str:
        return (
            f"#{self.number} {self.op} of {self.count} x {self.dtype}, {self.reduce_op}, root "
            f"{self.root}, ranks {list(self.members)}, async {self.asynchronous}, seed {self.seed}"
        )


def draw(
    seed: int,
    number: int,
    groups: list[tuple[int, ...]],
    *,
    most_log2: int = _MOST_LOG2,
    device: str = "cpu",
) -> Step:
    """The operation with this number, the same on every rank; of those that `device` has."""
    dtypes, kinds = (
        [each for each in these if device == "cpu" or each not in _NOT_NCCLS]
        for these in (DTYPES, OPERATIONS)
    )
    dice = random.Random(seed * 1_000_003 + number)
    index = dice.randrange(len(groups))
    members = groups[index]
    size = len(members)
    dtype = dice.choice(dtypes)
    reduce_op = dice.choice(REDUCE_OPS)
    if reduce_op == "AVG" and (not dtype.startswith(("float", "bfloat")) or size == 3):
        reduce_op = "SUM"  # an average that no reference has exactly
    count = dice.choice((dice.randrange(4), int(2 ** dice.uniform(0, most_log2))))
    lengths = tuple(tuple(dice.randrange(count + 1) for _ in members) for _ in members)
    return Step(
        number,
        members,
        index,
        dice.choice(kinds),
        dtype,
        reduce_op,
        count,
        dice.randrange(size),
        lengths,
        dice.random() < 0.5,
        dice.randrange(1 << 30),
        seed,
    )


def has_gloo(step: Step) -> bool:
    """Whether stock gloo carries out the operation, too."""
    return step.reduce_op != "AVG" and step.dtype not in _NOT_GLOOS


class Performance:
    """One rank's part in a step: starts it, and checks what came of it once it has ended.

    `plain`: with tensors that are contiguous and aligned, as gloo takes them.
    """

    def __init__(
        self, step: Step, rank: int, group: Any, device: torch.device, *, plain: bool = False
    ) -> None:
        import torch
        import torch.distributed as dist

        self.step = step
        self._me = step.members.index(rank)
        self._size = len(step.members)
        self._group = group
        self._device = device
        self._plain = plain
        self._dtype = getattr(torch, step.dtype)
        self._op = getattr(dist.ReduceOp, step.reduce_op)
        self._dice = random.Random(step.layout + 7 * rank)
        self._check: Callable[[], None] = lambda: None
        self._works: list[Any] = []

    def start(self) -> None:
        getattr(self, f"_{self.step.op}")()
        if not self.step.asynchronous:
            self.finish()

    def finish(self) -> None:
        """Waits for the end; AssertionError for a wrong result."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        check, self._check = self._check, lambda: None
        check()

    # ---- data ----

    def _data(self, peer: int, part: int = 0, count: int | None = None) -> Tensor:
        """Return what the rank `peer` of the group has for `part`: as it is, for a reference."""
        import torch

        generator = torch.Generator().manual_seed(
            self.step.seed * 7919 + self.step.number * 64 + peer * 8 + part
        )
        least, beyond = (1, 3) if self.step.reduce_op == "PRODUCT" else (0, 6)
        length = self.step.count if count is None else count
        return torch.randint(least, beyond, (length,), generator=generator).to(self._dtype)

    def _mine(self, part: int = 0, count: int | None = None) -> Tensor:
        return self._placed(self._data(self._me, part, count))

    def _empty(self, count: int) -> Tensor:
        import torch

        return self._placed(torch.full((count,), 77).to(self._dtype))

    def _placed(self, data: Tensor) -> Tensor:
        """A copy on the device, in memory of one kind or another.

        Plain, not aligned, strided, or on the host registered; on GPUs
        tests/gpu/test_registered_device.py is about that.
        """
        import torch

        from deepytorch_core.c10d import registered

        on_host = self._device.type == "cpu"
        may_be_strided = on_host and self.step.op in _STRIDED
        kind = 0 if self._plain else self._dice.randrange(4 if may_be_strided else 3)
        if kind == 0:
            return data.to(self._device, copy=True)
        if kind == 3:
            strided = torch.empty(2 * data.numel(), dtype=data.dtype)[::2]
            return strided.copy_(data)
        make = registered.empty if kind == 1 and on_host else torch.empty
        memory = make(data.numel() + 1, dtype=data.dtype, device=self._device)
        place = memory[:-1] if kind == 1 else memory[1:]
        return place.copy_(data)

    def _reduced(self, part: int = 0) -> Tensor:
        import torch

        wide = torch.float64 if self._dtype.is_floating_point else torch.int64
        rows = torch.stack([self._data(peer, part).to(wide) for peer in range(self._size)])
        name = self.step.reduce_op
        if name == "PRODUCT":
            result = rows.prod(0)
        elif name in ("MIN", "MAX"):
            result = (rows.amin if name == "MIN" else rows.amax)(0)
        else:
            result = rows.sum(0) / (self._size if name == "AVG" else 1)
        return result.to(self._dtype)

    # ---- operations ----

    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        work = call(*args, group=self._group, async_op=self.step.asynchronous, **kwargs)
        if work is not None:
            self._works.append(work)

    def _expect(self, *pairs: tuple[Tensor, Tensor]) -> None:
        import torch

        def check() -> None:
            for index, (result, right) in enumerate(pairs):
                found = result.cpu()
                if not torch.equal(found, right):
                    where = (found != right).nonzero()
                    raise AssertionError(
                        f"{self.step}: rank {self.step.members[self._me]}, tensor {index}: "
                        f"{where.numel()} of {right.numel()} elements are wrong, the first at "
                        f"{where[0].item() if where.numel() else None}"
                    )

        self._check = check

    def _all_reduce(self) -> None:
        import torch.distributed as dist

        data = self._mine()
        self._run(dist.all_reduce, data, self._op)
        self._expect((data, self._reduced()))

    def _sparse(self) -> None:
        """Run an operation that only the stock backend does, in between.

        It has to be the only one under way in its group: several corrupt gloo's memory, also
        without us. With torch 2.13 alone 8 of 11 jobs of four ranks ended by that within half a
        minute. Of 10 jobs whose six groups had one each, none did.
        """
        import torch
        import torch.distributed as dist

        data = torch.sparse_coo_tensor(
            torch.tensor([[self._me]]), torch.ones(1), (self._size,), check_invariants=False
        )
        self._run(dist.all_reduce, data)
        self._works, works = [], self._works

        def check() -> None:
            for work in works:
                work.wait()
            assert torch.equal(data.to_dense(), torch.ones(self._size)), str(self.step)

        self._check = check

    def _reduce(self) -> None:
        import torch.distributed as dist

        data = self._mine()
        self._run(dist.reduce, data, group_dst=self.step.root, op=self._op)
        if self._me == self.step.root:
            self._expect((data, self._reduced()))

    def _broadcast(self) -> None:
        import torch.distributed as dist

        root = self.step.root
        data = self._mine() if self._me == root else self._empty(self.step.count)
        self._run(dist.broadcast, data, group_src=root)
        self._expect((data, self._data(root)))

    def _all_gather(self) -> None:
        import torch.distributed as dist

        parts = [self._empty(self.step.count) for _ in range(self._size)]
        self._run(dist.all_gather, parts, self._mine())
        self._expect(*((part, self._data(peer)) for peer, part in enumerate(parts)))

    def _all_gather_into_tensor(self) -> None:
        import torch
        import torch.distributed as dist

        whole = self._empty(self.step.count * self._size)
        self._run(dist.all_gather_into_tensor, whole, self._mine())
        self._expect((whole, torch.cat([self._data(peer) for peer in range(self._size)])))

    def _reduce_scatter(self) -> None:
        import torch.distributed as dist

        share = self._empty(self.step.count)
        parts = [self._mine(part) for part in range(self._size)]
        self._run(dist.reduce_scatter, share, parts, self._op)
        self._expect((share, self._reduced(self._me)))

    def _reduce_scatter_tensor(self) -> None:
        import torch
        import torch.distributed as dist

        share = self._empty(self.step.count)
        parts = torch.cat([self._data(self._me, part) for part in range(self._size)])
        self._run(dist.reduce_scatter_tensor, share, self._placed(parts), self._op)
        self._expect((share, self._reduced(self._me)))

    def _all_to_all(self) -> None:
        import torch.distributed as dist

        outputs = [self._empty(self.step.count) for _ in range(self._size)]
        self._run(dist.all_to_all, outputs, [self._mine(part) for part in range(self._size)])
        self._expect(*((part, self._data(peer, self._me)) for peer, part in enumerate(outputs)))

    def _all_to_all_single(self) -> None:
        import torch
        import torch.distributed as dist

        lengths = self.step.lengths
        arriving = [lengths[peer][self._me] for peer in range(self._size)]
        leaving = list(lengths[self._me])
        parts = [self._data(self._me, part, length) for part, length in enumerate(leaving)]
        output = self._empty(sum(arriving))
        self._run(dist.all_to_all_single, output, self._placed(torch.cat(parts)), arriving, leaving)
        right = [self._data(peer, self._me, length) for peer, length in enumerate(arriving)]
        self._expect((output, torch.cat(right)))

    def _gather(self) -> None:
        import torch.distributed as dist

        is_root = self._me == self.step.root
        parts = [self._empty(self.step.count) for _ in range(self._size)] if is_root else None
        self._run(dist.gather, self._mine(), parts, group_dst=self.step.root)
        self._expect(*((part, self._data(peer)) for peer, part in enumerate(parts or [])))

    def _scatter(self) -> None:
        import torch.distributed as dist

        root = self.step.root
        share = self._empty(self.step.count)
        parts = [self._mine(part) for part in range(self._size)] if self._me == root else None
        self._run(dist.scatter, share, parts, group_src=root)
        self._expect((share, self._data(root, self._me)))

    def _barrier(self) -> None:
        import torch.distributed as dist

        self._run(dist.barrier)

    def _shift(self) -> None:
        """Every rank sends to the next one and receives from the one before."""
        import torch.distributed as dist

        if self._size == 1:
            return
        target, source = (self._me + 1) % self._size, (self._me - 1) % self._size
        arriving = self._empty(self.step.count)
        leaving = self._mine()
        tag = self.step.number % 1000
        if self._device.type == "cpu":
            self._works = [
                dist.isend(leaving, group=self._group, group_dst=target, tag=tag),
                dist.irecv(arriving, group=self._group, group_src=source, tag=tag),
            ]
        else:  # together: two ranks' NCCL would begin both receives behind both sends
            both = [
                dist.P2POp(dist.isend, leaving, group=self._group, group_peer=target),
                dist.P2POp(dist.irecv, arriving, group=self._group, group_peer=source),
            ]
            self._works = dist.batch_isend_irecv(both)
        self._expect((arriving, self._data(source)))
