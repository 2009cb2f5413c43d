"""Every element type with every reduction, averages and factors, against references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base import config
from deepytorch_core.testing import spawn_ranks

BACKEND = "deepytorch"

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
OPS = {
    "SUM": lambda stack: stack.sum(0),
    "AVG": lambda stack: stack.sum(0) / stack.shape[0],
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "BAND": lambda stack: _fold(torch.bitwise_and, stack),
    "BOR": lambda stack: _fold(torch.bitwise_or, stack),
    "BXOR": lambda stack: _fold(torch.bitwise_xor, stack),
}


def _fold(function: Callable[..., torch.Tensor], stack: torch.Tensor) -> torch.Tensor:
    result = stack[0]
    for each in stack[1:]:
        result = function(result, each)
    return result


def _inputs(dtype: torch.dtype, world_size: int) -> torch.Tensor:
    numbers = torch.randint(0, 3, (world_size, 501))
    return numbers.bool() if dtype == torch.bool else numbers.to(dtype)


def _try(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return None


def every_type_and_op(rank: int, world_size: int) -> list[str]:
    """Check that ours gives gloo's answer; if gloo has none, ours is right or an error."""
    gloo = dist.new_group(backend="gloo")
    served = []
    for dtype in DTYPES:
        for name, reference in OPS.items():
            label = f"{name} of {dtype}"
            op = getattr(dist.ReduceOp, name)
            torch.manual_seed(0)
            inputs = _inputs(dtype, world_size)
            ours, theirs = inputs[rank].clone(), inputs[rank].clone()
            our_error = _try(lambda ours=ours, op=op: dist.all_reduce(ours, op))
            their_error = _try(lambda theirs=theirs, op=op: dist.all_reduce(theirs, op, group=gloo))
            if their_error is None:
                assert our_error is None, f"{label}: gloo can, deepytorch cannot: {our_error}"
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=label)
            elif our_error is None:
                expected = reference(inputs).to(dtype)
                torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2, msg=label)
            if our_error is None:
                served.append(label)
    return served


def test_every_type_and_op() -> None:
    served = spawn_ranks(every_type_and_op, 3, backend=BACKEND)
    assert served[0] == served[1] == served[2]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            assert f"{name} of {dtype}" in served[0]


def averages_and_factors(rank: int, world_size: int) -> None:
    stack = torch.arange(world_size * 1001, dtype=torch.float32).reshape(world_size, 1001)
    mean = stack[rank].clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, stack.mean(0))
    shard = torch.zeros(1001)
    dist.reduce_scatter_tensor(
        shard, stack[rank].repeat(world_size).contiguous(), dist.ReduceOp.AVG
    )
    torch.testing.assert_close(shard, stack.mean(0))
    scaled = stack[rank].clone()
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.25))
    torch.testing.assert_close(scaled, stack.sum(0) / 4)
    dist.reduce_scatter_tensor(
        shard, stack[rank].repeat(world_size).contiguous(), dist._make_nccl_premul_sum(0.5)
    )
    torch.testing.assert_close(shard, stack.sum(0) / 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_average_and_factors(world_size: int) -> None:
    spawn_ranks(averages_and_factors, world_size, backend=BACKEND)


def means_of_whole_numbers(rank: int, world_size: int) -> None:
    """NCCL's: sums, divided towards zero; of gloo a program asks none, of us it does."""
    config.set_current(dataclasses.replace(config.current(), collectives="stock"))
    delegated = dist.new_group(backend=BACKEND)
    config.set_current(None)
    mean = dist.ReduceOp.AVG
    for group in (None, delegated):
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
            signs = 1 if dtype == torch.uint8 else torch.tensor([1, -1, -1, 1])
            stack = (torch.arange(4 * world_size).reshape(world_size, 4) * signs).to(dtype)
            expected = stack.sum(0).div(world_size, rounding_mode="trunc").to(dtype)
            ours = stack[rank].clone()
            dist.all_reduce(ours, mean, group=group, async_op=True).wait()
            assert torch.equal(ours, expected), (dtype, ours, expected)
            with torch.inference_mode():
                ours = stack[rank].clone()
                dist.reduce(ours, group_dst=1, op=mean, group=group)
            assert rank != 1 or torch.equal(ours, expected), (dtype, ours, expected)
            shard, whole = torch.zeros_like(expected), stack[rank].repeat(world_size)
            dist.reduce_scatter_tensor(shard, whole, mean, group=group)
            assert torch.equal(shard, expected), (dtype, shard, expected)
            shards = list(whole.chunk(world_size))
            dist.reduce_scatter(shard.zero_(), shards, mean, group=group)
            assert torch.equal(shard, expected), (dtype, shard, expected)


def test_means_of_whole_numbers() -> None:
    spawn_ranks(means_of_whole_numbers, 3, backend=BACKEND)


def results_that_are_not_contiguous(rank: int, world_size: int, inference: bool) -> None:
    """Copied to where they belong by another thread."""

    def made(rows: int) -> torch.Tensor:
        value = torch.zeros(3, rows).t()
        return value if inference else value.requires_grad_()

    ones = torch.ones(2, 3)
    with torch.inference_mode(inference):
        for asynchronous in (False, True):
            whole, part, exchanged, summed = made(4), made(2), made(2), made(2)
            listed = [made(2) for _ in range(world_size)]
            with torch.no_grad():
                summed += 1
            works = [
                dist.all_gather(listed, ones, async_op=asynchronous),
                dist.all_gather_into_tensor(whole, ones, async_op=asynchronous),
                dist.reduce_scatter_tensor(part, torch.ones(4, 3), async_op=asynchronous),
                dist.all_to_all_single(exchanged, ones, async_op=asynchronous),
                dist.all_reduce(summed, async_op=asynchronous),
            ]
            if asynchronous:
                for work in works:
                    work.wait()
            for found, value in ((whole, 1), (part, 2), (exchanged, 1), (summed, 2)):
                assert found.eq(value).all()
            assert all(each.eq(1).all() for each in listed)


@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "trained leaves"])
def test_results_that_are_not_contiguous(inference: bool) -> None:
    spawn_ranks(results_that_are_not_contiguous, 2, inference, backend=BACKEND)


def moves_of_every_type(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        torch.manual_seed(0)
        inputs = _inputs(dtype, world_size)
        gathered = torch.zeros_like(inputs)  # stacked: a dimension more than what is gathered
        dist.all_gather_into_tensor(gathered, inputs[rank])
        copy = inputs[rank].clone()
        dist.broadcast(copy, group_src=world_size - 1)
        assert torch.equal(gathered, inputs), dtype
        assert torch.equal(copy, inputs[-1]), dtype


def test_every_type_moves() -> None:
    spawn_ranks(moves_of_every_type, 2, backend=BACKEND)


# Types that the core does not reduce.
OTHERS = [
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bits8,
    torch.bits16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def _of_bytes(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.randint(0, 3, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def reductions_of_other_types(rank: int, world_size: int) -> None:
    """Check that ours says what gloo says: nobody adds up their bytes."""
    gloo = dist.new_group(backend="gloo")

    def outcomes(group: dist.ProcessGroup | None, dtype: torch.dtype, op: Any) -> list[Any]:
        part, whole = _of_bytes(dtype, 8), _of_bytes(dtype, 8 * world_size)
        parts = list(whole.chunk(world_size))
        calls: list[Callable[..., Any]] = [
            lambda **how: dist.all_reduce(part, op, group=group, **how),
            lambda **how: dist.reduce(part, group_dst=0, op=op, group=group, **how),
            lambda **how: dist.reduce_scatter(part, parts, op, group=group, **how),
            lambda **how: dist.reduce_scatter_tensor(part, whole, op, group=group, **how),
        ]
        found: list[Any] = []
        for call in calls:
            found += [_try(call), _try(lambda call=call: call(async_op=True).wait())]
        return [error.splitlines()[0] if error else error for error in found] + part.view(
            torch.uint8
        ).tolist()

    for dtype in OTHERS:
        for name in (*OPS, "PREMUL_SUM"):
            op = getattr(dist.ReduceOp, name, None)
            if name == "PREMUL_SUM":
                op = dist._make_nccl_premul_sum(0.5)
            seed = torch.randint(1000, ()).item()
            found = []
            for group in (None, gloo):
                torch.manual_seed(seed)
                found.append(outcomes(group, dtype, op))
            assert found[0] == found[1], f"{name} of {dtype}"
    total = torch.ones(5)
    dist.all_reduce(total)
    assert total.eq(world_size).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_reductions_of_other_types(world_size: int) -> None:
    spawn_ranks(reductions_of_other_types, world_size, backend=BACKEND)


def moves_of_other_types(rank: int, world_size: int) -> None:
    """By their bytes, also where gloo refuses them."""
    for dtype in OTHERS:
        torch.manual_seed(0)
        inputs = [_of_bytes(dtype, 501) for _ in range(world_size)]
        raw = torch.stack([each.view(torch.uint8) for each in inputs])
        gathered = [torch.empty_like(each) for each in inputs]
        dist.all_gather(gathered, inputs[rank])
        exchanged = [torch.empty_like(each) for each in inputs]
        dist.all_to_all(exchanged, inputs)
        copy, received = inputs[rank].clone(), torch.empty_like(inputs[0])
        dist.broadcast(copy, group_src=1)
        works = [dist.isend(inputs[rank], 1 - rank), dist.irecv(received, 1 - rank)]
        for work in works:
            assert work is not None
            work.wait()
        for found, expected in (
            (torch.stack([each.view(torch.uint8) for each in gathered]), raw),
            (torch.stack([each.view(torch.uint8) for each in exchanged]), raw[[rank, rank]]),
            (copy.view(torch.uint8), raw[1]),
            (received.view(torch.uint8), raw[1 - rank]),
        ):
            assert torch.equal(found, expected), dtype


def test_other_types_move() -> None:
    spawn_ranks(moves_of_other_types, 2, backend=BACKEND)
