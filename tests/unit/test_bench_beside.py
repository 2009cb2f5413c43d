"""How much is computed beside a collective that is timed with it."""

import pytest

from deepytorch_core.bench.beside import MAX_PRODUCTS, Amount, amount_for

# About what an H200 takes, in microseconds.
TIMES = {4096: 190.0, 2048: 26.0, 1024: 8.0}


@pytest.mark.parametrize(
    ("target_us", "amount"),
    [
        (4500.0, Amount(4096, 24)),
        (380.0, Amount(4096, 2)),
        (100.0, Amount(2048, 4)),
        (15.0, Amount(1024, 2)),
        (0.5, Amount(1024, 1)),
        (1e9, Amount(4096, MAX_PRODUCTS)),
    ],
)
def test_products_take_about_as_long_in_the_largest_pieces(target_us, amount):
    assert amount_for(target_us, TIMES.__getitem__) == amount


def test_a_clock_that_shows_nothing_ends_in_the_most():
    assert amount_for(5.0, lambda width: 0.0) == Amount(4096, MAX_PRODUCTS)
