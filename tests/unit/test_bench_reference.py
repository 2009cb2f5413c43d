"""The data and the reference that benchmark results are checked against."""

from types import SimpleNamespace

import pytest
import torch

from deepytorch_core.base import config
from deepytorch_core.bench import reference
from deepytorch_core.bench.collectives import Bench
from deepytorch_core.bench.ops import OPERATIONS

WORLD_SIZE = 3
SHARE = 5
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int8, torch.uint8]


def simulate(op, dtype):
    """Every rank's output, worked out here on whole tensors."""
    split = OPERATIONS[op].split
    full = SHARE * WORLD_SIZE if split and op != "all_gather" else SHARE
    inputs = [reference.values(rank, 0, full, dtype) for rank in range(WORLD_SIZE)]
    match op:
        case "all_reduce":
            return [sum_of(inputs)] * WORLD_SIZE
        case "reduce_scatter":
            return list(sum_of(inputs).chunk(WORLD_SIZE))
        case "broadcast":
            return [inputs[0]] * WORLD_SIZE
        case "all_gather":
            return [torch.cat(inputs)] * WORLD_SIZE
    return [
        torch.cat([source.chunk(WORLD_SIZE)[rank] for source in inputs])
        for rank in range(WORLD_SIZE)
    ]


def sum_of(inputs):
    if not inputs[0].dtype.is_floating_point:
        return sum(inputs[1:], start=inputs[0])
    return sum(value.double() for value in inputs).to(inputs[0].dtype)


def wrong(output, op, rank, **options):
    expected = reference.pieces(op, rank=rank, world_size=WORLD_SIZE, share=SHARE)
    return reference.count_wrong(output, expected, **{"num_roundings": 1, **options})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "barrier"])
def test_a_right_result_passes_and_each_wrong_element_counts(op, dtype):
    for rank, output in enumerate(simulate(op, dtype)):
        output = output.clone()
        assert wrong(output, op, rank) == 0
        output[0] += 3
        output[-1] += 3
        assert wrong(output, op, rank) == 2


def test_long_outputs_are_checked_to_the_end(monkeypatch):
    monkeypatch.setattr(reference, "SEGMENT", 2)
    for rank, output in enumerate(simulate("all_to_all", torch.float32)):
        assert wrong(output, "all_to_all", rank) == 0
        assert wrong(output + 1, "all_to_all", rank) == output.numel()


def test_a_missing_result_is_wrong():
    output = torch.full((SHARE,), float("nan"))
    assert wrong(output, "all_reduce", 0) == SHARE


def test_one_rounding_is_tighter_than_stepwise():
    exact = sum(reference.values(rank, 0, 4096, torch.bfloat16).double() for rank in range(3))
    stepwise = reference.values(0, 0, 4096, torch.bfloat16)
    for rank in (1, 2):
        stepwise = stepwise + reference.values(rank, 0, 4096, torch.bfloat16)
    once = exact.to(torch.bfloat16)

    def count(output, num_roundings):
        expected = reference.pieces("all_reduce", rank=0, world_size=3, share=4096)
        return reference.count_wrong(output, expected, num_roundings=num_roundings)

    assert count(once, 1) == 0
    assert count(stepwise, 2) == 0
    assert count(stepwise, 1) > 0


def test_sums_of_nodes_are_rounded_before_they_are_added():
    parts = [reference.values(rank, 0, 4096, torch.bfloat16).double() for rank in range(4)]
    nodes = [sum(parts[first : first + 2]).to(torch.bfloat16) for first in (0, 2)]
    output = (nodes[0].double() + nodes[1].double()).to(torch.bfloat16)

    def count(*, between_nodes):
        expected = reference.pieces("all_reduce", rank=0, world_size=4, share=4096)
        allowed = reference.num_roundings(
            torch.bfloat16, 4, native=True, between_nodes=between_nodes
        )
        return reference.count_wrong(output, expected, num_roundings=allowed)

    assert count(between_nodes=True) == 0
    assert count(between_nodes=False) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_often_sums_are_rounded(dtype):
    def allowed(world_size, native=True, between_nodes=True):
        return reference.num_roundings(
            dtype, world_size, native=native, between_nodes=between_nodes
        )

    assert allowed(4, native=False) == 3
    assert allowed(1) == allowed(2) == 1
    wide = dtype == torch.float32
    assert allowed(8) == (7 if wide else 2)
    assert allowed(8, between_nodes=False) == (7 if wide else 1)


def test_values_differ_between_ranks_and_elements_and_need_rounding():
    first = reference.values(0, 0, 1000, torch.float32)
    second = reference.values(1, 0, 1000, torch.float32)
    assert len(set(first.tolist())) > 990
    assert (first != second).sum() > 990
    exact = first.double() + second.double()
    assert (exact != exact.float().double()).any()


def test_fill_writes_the_values_in_segments(monkeypatch):
    monkeypatch.setattr(reference, "SEGMENT", 7)
    target = torch.empty(20)
    reference.fill(target, 2)
    assert torch.equal(target, reference.values(2, 0, 20, torch.float32))


def test_no_reference_for_an_unknown_operation():
    with pytest.raises(ValueError, match="scan"):
        list(reference.pieces("scan", rank=0, world_size=2, share=1))


@pytest.mark.parametrize(
    ("device", "tune", "op", "more"),
    [
        ("cpu", "force", "all_reduce", set()),
        ("cuda", "auto", "all_reduce", {"hierarchical"}),
        ("cuda", "force", "all_reduce", {"hierarchical", "cpu_reduce"}),
        ("cuda", "force", "reduce_scatter", {"hierarchical"}),
    ],
)
def test_only_what_the_stock_backend_adds_up_may_round_as_often(
    device, tune, op, more, monkeypatch
):
    monkeypatch.setattr(config, "current", lambda: SimpleNamespace(tune=tune))
    bench = SimpleNamespace(groups=SimpleNamespace(device=torch.device(device)))
    assert Bench._by_others(bench, OPERATIONS[op]) == {"other", "delegate"} | more
