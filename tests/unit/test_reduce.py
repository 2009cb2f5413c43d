"""Host reductions against torch and numpy: the same bits on every instruction set."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepytorch_core import _core

FLOATS = {
    "float16": (torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
}
FLOAT_OPS = ["sum", "avg", "product", "min", "max", "premul_sum"]
INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]
INTEGER_OPS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
BOOL_OPS = {
    "sum": np.logical_or,
    "max": np.logical_or,
    "bor": np.logical_or,
    "product": np.logical_and,
    "min": np.logical_and,
    "band": np.logical_and,
    "bxor": np.logical_xor,
}
NATIVE = (
    set(itertools.product(FLOATS, FLOAT_OPS))
    | set(itertools.product(INTEGERS, INTEGER_OPS))
    | set(itertools.product(["bool"], BOOL_OPS))
)
WIDEST = _core.reduce_isa()
ISAS = ["portable", "avx2", "avx512"][: ["portable", "avx2", "avx512"].index(WIDEST) + 1]
GUARD = 64  # bytes around the destination that must stay as they were


@pytest.fixture(autouse=True)
def _widest_isa_afterwards():
    yield
    _core.limit_reduce_isa(WIDEST)


def item_size(dtype: str) -> int:
    return FLOATS[dtype][0].itemsize if dtype in FLOATS else np.dtype(dtype).itemsize


def placed(data: np.ndarray, offset: int) -> np.ndarray:
    """A copy of the bytes of `data` that starts `offset` bytes after a 64-byte boundary."""
    room = np.zeros(data.nbytes + offset + 64, dtype=np.uint8)
    start = -room.ctypes.data % 64 + offset
    view = room[start : start + data.nbytes]
    view[:] = data.view(np.uint8)
    return view


def reduce_on(isa, dtype, op, sources, offset=0, factors=()):
    """The bytes that one instruction set writes; fails when it writes beside the destination."""
    assert _core.limit_reduce_isa(isa) == isa
    size = sources[0].nbytes
    room = placed(np.full(size + 2 * GUARD, 0xA5, dtype=np.uint8), offset)
    _core.reduce(dtype, op, sources, room[GUARD : GUARD + size], list(factors))
    assert (room[:GUARD] == 0xA5).all()
    assert (room[GUARD + size :] == 0xA5).all()
    return room[GUARD : GUARD + size].copy()


def reduce_everywhere(dtype, op, sources, offset=0, factors=()):
    """The bytes that every instruction set writes; fails when two differ."""
    results = [reduce_on(isa, dtype, op, sources, offset, factors) for isa in ISAS]
    for isa, result in zip(ISAS, results, strict=True):
        np.testing.assert_array_equal(result, results[0], err_msg=f"{isa} differs from portable")
    return results[0]


def float_reference(dtype, op, sources, factors):
    """In rank order in float32 (float64 for float64), with one rounding at the end."""
    stored, compute = FLOATS[dtype]
    values = [torch.from_numpy(source.copy()).view(stored).to(compute) for source in sources]
    if op == "premul_sum":
        values = [
            value * torch.tensor(factor, dtype=compute)
            for value, factor in zip(values, factors, strict=True)
        ]
    combine = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    if op == "avg":
        result = result / torch.full_like(result, len(values))
    return result.to(stored)


def assert_same_floats(found, expected, op):
    np.testing.assert_array_equal(found.isnan().numpy(), expected.isnan().numpy())
    numbers = ~expected.isnan()
    if op in ("min", "max"):  # which of two zeros is the smaller one is nobody's promise
        assert torch.equal(found[numbers], expected[numbers])
    else:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
        assert torch.equal(found[numbers].view(bits), expected[numbers].view(bits))


def random_bytes(rng, dtype, count, kind):
    if kind == "bits" or dtype not in FLOATS:
        return rng.integers(0, 256, count * item_size(dtype), dtype=np.uint8)
    if kind == "special":
        tiny = torch.finfo(FLOATS[dtype][0]).smallest_normal
        largest = torch.finfo(FLOATS[dtype][0]).max
        choices = [0.0, -0.0, 1.0, -1.5, tiny, tiny / 2, -tiny / 8, largest, -largest]
        choices += [float("inf"), -float("inf"), float("nan"), -float("nan")]
        values = rng.choice(np.array(choices), count)
    else:
        values = rng.standard_normal(count)
    return torch.from_numpy(values).to(FLOATS[dtype][0]).view(torch.uint8).numpy()


cases = st.fixed_dictionaries(
    {
        "num_sources": st.integers(1, 9),
        "count": st.one_of(st.integers(1, 40), st.integers(1, 700)),
        "offset": st.integers(0, 63),
        "kind": st.sampled_from(["normal", "bits", "special"]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def make_sources(case, dtype):
    rng = np.random.default_rng(case["seed"])
    data = [
        random_bytes(rng, dtype, case["count"], case["kind"]) for _ in range(case["num_sources"])
    ]
    return [placed(item, (case["offset"] + 7 * rank) % 64) for rank, item in enumerate(data)]


@given(dtype=st.sampled_from(list(FLOATS)), op=st.sampled_from(FLOAT_OPS), case=cases)
@settings(max_examples=300, deadline=None)
def test_floats_equal_torch_in_rank_order(dtype, op, case):
    sources = make_sources(case, dtype)
    factors = [0.1 * rank - 0.3 for rank in range(len(sources))]
    result = reduce_everywhere(dtype, op, sources, case["offset"], factors)
    found = torch.from_numpy(result).view(FLOATS[dtype][0])
    assert_same_floats(found, float_reference(dtype, op, sources, factors), op)


@given(dtype=st.sampled_from(INTEGERS), op=st.sampled_from(list(INTEGER_OPS)), case=cases)
@settings(max_examples=200, deadline=None)
def test_integers_wrap_like_numpy(dtype, op, case):
    sources = make_sources(case, dtype)
    expected = sources[0].copy().view(dtype)
    for source in sources[1:]:
        expected = INTEGER_OPS[op](expected, source.copy().view(dtype))
    found = reduce_everywhere(dtype, op, sources, case["offset"]).view(dtype)
    np.testing.assert_array_equal(found, expected)


@given(op=st.sampled_from(list(BOOL_OPS)), case=cases)
@settings(max_examples=50, deadline=None)
def test_bools_stay_bools(op, case):
    sources = [source & 1 for source in make_sources(case, "bool")]
    expected = sources[0].astype(bool)
    for source in sources[1:]:
        expected = BOOL_OPS[op](expected, source)
    found = reduce_everywhere("bool", op, sources, case["offset"])
    np.testing.assert_array_equal(found, expected.astype(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_nothing_is_reduced_to_nothing(dtype):
    empty = np.zeros(0, dtype=np.uint8)
    assert reduce_everywhere(dtype, "sum", [empty, empty]).size == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, -1.0, 0.1, 1 / 3, 2.0**-9, 1.0009765625, 3e4, 1e-30])
def test_every_16_bit_pattern_is_read_and_rounded_right(dtype, factor):
    source = np.arange(65536, dtype=np.uint16).view(np.uint8)
    result = reduce_everywhere(dtype, "premul_sum", [source], factors=[factor])
    found = torch.from_numpy(result).view(FLOATS[dtype][0])
    assert_same_floats(found, float_reference(dtype, "premul_sum", [source], [factor]), "sum")


@pytest.mark.parametrize(("dtype", "quiet"), [("float16", 0x7E00), ("bfloat16", 0x7FC0)])
def test_the_one_nan_of_16_bits(dtype, quiet):
    patterns = np.arange(65536, dtype=np.uint16)
    nans = torch.from_numpy(patterns.view(np.int16)).view(FLOATS[dtype][0]).isnan().numpy()
    found = reduce_everywhere(dtype, "sum", [patterns.view(np.uint8)]).view(np.uint16)
    np.testing.assert_array_equal(found, np.where(nans, quiet, patterns))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", FLOAT_OPS)
def test_a_nan_of_any_rank_propagates(dtype, op):
    for position in range(3):
        values = torch.ones(3, 5, dtype=FLOATS[dtype][0])
        values[position, 2] = float("nan")
        sources = [row.view(torch.uint8).numpy() for row in values]
        result = reduce_everywhere(dtype, op, sources, factors=[1.0, 1.0, 1.0])
        found = torch.from_numpy(result).view(FLOATS[dtype][0])
        assert found.isnan().tolist() == [False, False, True, False, False]


def test_a_sum_is_rounded_once():
    # Each addend alone is lost against 256 in bfloat16; together they are one unit.
    rows = torch.tensor([256.0, 0.5, 0.5, 0.5, 0.5], dtype=torch.bfloat16)
    sources = [row.reshape(1).view(torch.uint8).numpy() for row in rows]
    found = torch.from_numpy(reduce_everywhere("bfloat16", "sum", sources)).view(torch.bfloat16)
    assert found.item() == 258.0


@pytest.mark.parametrize("count", [1, 31, 257])
@pytest.mark.parametrize("in_place", [0, 1, 2])
def test_the_destination_may_be_a_source(count, in_place):
    for isa in ISAS:
        _core.limit_reduce_isa(isa)
        buffers = [np.full(count, rank + 1.0, dtype=np.float32) for rank in range(3)]
        _core.reduce("float32", "sum", buffers, buffers[in_place])
        np.testing.assert_array_equal(buffers[in_place], np.full(count, 6.0, dtype=np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("count", [1, 33, 300])
def test_a_second_destination_gets_the_same(dtype, count):
    sources = [np.ones(count, dtype=dtype), np.ones(count, dtype=dtype)]
    for isa in ISAS:
        _core.limit_reduce_isa(isa)
        first, second = np.zeros(count, dtype=dtype), np.zeros(count, dtype=dtype)
        _core.reduce(dtype, "sum", sources, first, second_destination=second)
        np.testing.assert_array_equal(first, np.full(count, 2, dtype=dtype))
        np.testing.assert_array_equal(second, first)


def test_which_pairs_are_native():
    dtypes = [*FLOATS, *INTEGERS, "bool", "complex64", "complex128"]
    ops = [*FLOAT_OPS, "band", "bor", "bxor"]
    native = {pair for pair in itertools.product(dtypes, ops) if _core.can_reduce(*pair)}
    assert native == NATIVE


def test_wrong_arguments_are_named():
    four, eight = bytearray(4), bytearray(8)
    with pytest.raises(ValueError, match='no dtype "float8"; known: bool int8'):
        _core.reduce("float8", "sum", [four], four)
    with pytest.raises(ValueError, match='no reduce op "mean"; known: sum avg'):
        _core.can_reduce("float32", "mean")
    with pytest.raises(ValueError, match="no native sum of complex64"):
        _core.reduce("complex64", "sum", [eight], eight)
    with pytest.raises(ValueError, match="source 1 has 8 bytes, the destination has 4"):
        _core.reduce("float32", "sum", [four, eight], four)
    with pytest.raises(ValueError, match="second destination has 8 bytes"):
        _core.reduce("float32", "sum", [four], four, second_destination=eight)
    with pytest.raises(ValueError, match="no whole number of float64 elements"):
        _core.reduce("float64", "sum", [four], four)
    with pytest.raises(ValueError, match="premul_sum of 1 sources needs as many factors, found 0"):
        _core.reduce("float32", "premul_sum", [four], four)
    with pytest.raises(ValueError, match="at least one source"):
        _core.reduce("float32", "sum", [], four)
    with pytest.raises(BufferError):
        _core.reduce("float32", "sum", [four], bytes(4))
    with pytest.raises(ValueError, match='no instruction set "sse9" here; known: portable'):
        _core.limit_reduce_isa("sse9")


def test_a_limit_never_widens():
    for isa in ISAS:
        assert _core.limit_reduce_isa(isa) == isa
        assert _core.reduce_isa() == isa
