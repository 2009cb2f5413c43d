"""The formulas against the numbers that nccl-tests' PERFORMANCE.md derives."""

import pytest

from deepytorch_core.bench.bandwidth import BUS_FACTORS, algbw_gbps, busbw_gbps
from deepytorch_core.bench.job import OPERATIONS


def test_every_operation_has_a_formula():
    assert set(BUS_FACTORS) == set(OPERATIONS)


def test_algbw_counts_decimal_gigabytes():
    assert algbw_gbps(2_000_000, 1000.0) == pytest.approx(2.0)
    assert algbw_gbps(0, 1000.0) == 0.0


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.75),  # 2 (n - 1) / n
        ("all_gather", 0.875),  # (n - 1) / n
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1.0),
    ],
)
def test_busbw_of_eight_ranks(op, factor):
    assert busbw_gbps(op, 1_000_000, 1000.0, 8) == pytest.approx(factor)


def test_one_rank_uses_no_bus():
    assert busbw_gbps("all_reduce", 1_000_000, 1000.0, 1) == 0.0


def test_an_operation_without_formula_is_named():
    with pytest.raises(ValueError, match="scan"):
        busbw_gbps("scan", 1, 1.0, 2)
