"""Attention within the sequences of a packed row, against plain arithmetic in float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepytorch_core.data import varlen_attention

LENGTHS = [7, 1, 0, 13, 4]


pytestmark = pytest.mark.usefixtures("one_thread")


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(heads: int, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(heads)
    tensors = (torch.randn(sum(LENGTHS), n, 8) for n in (heads, key_heads, key_heads))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One masked softmax over the whole row, in float64."""
    query, key, value = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
    shared = query.shape[0] // key.shape[0]
    key, value = (tensor.repeat_interleave(shared, 0) for tensor in (key, value))
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    distance = place[None, :] - place[:, None]
    seen = owner[None, :] == owner[:, None]
    before, after = window or (-1, -1)
    if causal:
        seen &= distance <= 0
    if before >= 0:
        seen &= distance >= -before
    if after >= 0:
        seen &= distance <= after
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:  # one more column, without a value
        column = sinks.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)
        return (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value).transpose(0, 1)
    return (scores.softmax(-1) @ value).transpose(0, 1)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "both ways": {"causal": False},
    "scaled": {"causal": True, "scale": 0.3},
    "causal window": {"causal": True, "window": (3, 0)},
    "window": {"causal": False, "window": (2, 2)},
    "window of one": {"causal": True, "window": (0, 0)},
    "wide window": {"causal": True, "window": (100, 0)},
}


HEADS = [(4, 4, False), (4, 2, False), (3, 1, False), (4, 4, True), (4, 2, True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "key_heads", "compiled"), HEADS)
def test_padding_free_attention_sees_its_own_sequence_only(
    case: str, heads: int, key_heads: int, compiled: bool
) -> None:
    tensors = inputs(heads, key_heads, torch.float64)
    torch._dynamo.reset()
    attend: Any = (
        torch.compile(varlen_attention, backend="aot_eager") if compiled else varlen_attention
    )
    out = attend(*tensors, bounds(LENGTHS), 16, **CASES[case])
    expected = reference(*tensors, **CASES[case])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("heads", "key_heads", "compiled"), [(4, 4, False), (4, 2, True)])
def test_sinks_take_their_share_of_every_softmax(
    case: str, heads: int, key_heads: int, compiled: bool
) -> None:
    tensors = inputs(heads, key_heads, torch.float64)
    sinks = (2 * torch.randn(heads, dtype=torch.float64)).requires_grad_()
    torch._dynamo.reset()
    attend: Any = (
        torch.compile(varlen_attention, backend="aot_eager") if compiled else varlen_attention
    )
    out = attend(*tensors, bounds(LENGTHS), 16, sinks=sinks, **CASES[case])
    expected = reference(*tensors, sinks=sinks, **CASES[case])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), [*tensors, sinks])
    wanted = torch.autograd.grad((expected * weights).sum(), [*tensors, sinks])
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_may_have_another_dtype(dtype: torch.dtype) -> None:
    tensors = inputs(4, 2, dtype)
    sinks = torch.randn(4).requires_grad_()
    out = varlen_attention(*tensors, bounds(LENGTHS), 16, causal=True, sinks=sinks)
    assert out.dtype == dtype
    error = 1e-5 if dtype == torch.float32 else 3e-2
    expected = reference(*tensors, causal=True, sinks=sinks)
    torch.testing.assert_close(out, expected.to(dtype), rtol=error, atol=error)
    grads = torch.autograd.grad(out.float().sum(), [*tensors, sinks])
    wanted = torch.autograd.grad(expected.sum(), [*tensors, sinks])
    assert [grad.dtype for grad in grads] == [dtype, dtype, dtype, torch.float32]
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want.to(grad.dtype), rtol=10 * error, atol=10 * error)


def test_sinks_on_cuda_have_the_flash_kernels_layout() -> None:
    with FakeTensorMode():
        query = torch.empty(25, 4, 8, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(25, 2, 8, dtype=torch.bfloat16, device="cuda")
        sinks = torch.empty(4, dtype=torch.bfloat16, device="cuda")
        cu_seq_lens = torch.empty(6, dtype=torch.int32, device="cuda")
        settings = {"longest": 16, "before": -1, "after": 0, "scale": None}
        given = (query, key, key, sinks, cu_seq_lens)
        out, total = torch.ops.deepytorch.varlen_sinks(*given, **settings)
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert (total.shape, total.dtype) == ((4, 25), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_free_attention_keeps_the_dtype(dtype: torch.dtype) -> None:
    tensors = inputs(4, 2, dtype)
    out = varlen_attention(*tensors, bounds(LENGTHS), 16, causal=True)
    assert out.dtype == dtype
    error = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
    expected = reference(*tensors, causal=True).to(dtype)
    torch.testing.assert_close(out, expected, rtol=error, atol=error)


def test_padding_free_attention_drops_weights_when_asked_to() -> None:
    query, key, value = inputs(4, 4, torch.float32)
    torch.manual_seed(1)
    draws = [
        varlen_attention(query, key, value, bounds(LENGTHS), 16, causal=False, dropout=0.3)
        for _ in range(200)
    ]
    assert not torch.equal(draws[0], draws[1])
    exact = varlen_attention(query, key, value, bounds(LENGTHS), 16, causal=False)
    # Weights that stay are scaled up, so the mean is the attention without dropout.
    torch.testing.assert_close(torch.stack(draws).mean(0), exact, rtol=0, atol=0.3)
    # A token alone has one weight, kept or dropped as a whole.
    alone = torch.stack(draws)[:, 7]
    kept = alone.abs().amax(dim=-1, keepdim=True) > 0
    torch.testing.assert_close(alone, kept * value[7] / 0.7)
    assert 0.6 < kept.float().mean() < 0.8


class Calls(TorchDispatchMode):
    """Notes the attention kernels that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if "attention" in name or "attn" in name:
            self.seen.append((name, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


ON_CUDA: list[tuple[torch.dtype, float, dict[str, Any], str]] = [
    (torch.bfloat16, 0.0, {"causal": True}, "_varlen_attn"),
    (torch.float16, 0.0, {"causal": False, "window": (3, 3)}, "_varlen_attn"),
    (torch.bfloat16, 0.1, {"causal": False}, "_flash_attention_forward"),
    (torch.float16, 0.1, {"causal": True, "window": (3, 0)}, "_flash_attention_forward"),
    (torch.float32, 0.0, {"causal": True}, "_efficient_attention_forward"),
    (torch.float32, 0.1, {"causal": False}, "_efficient_attention_forward"),
    (torch.float32, 0.0, {"causal": True, "window": (3, 0)}, "_efficient_attention_forward"),
]


@pytest.mark.parametrize(("dtype", "dropout", "sees", "kernel"), ON_CUDA)
def test_padding_free_attention_on_cuda_takes_a_kernel_that_keeps_dropout(
    dtype: torch.dtype, dropout: float, sees: dict[str, Any], kernel: str
) -> None:
    """See which kernel gets what, on tensors without memory."""
    with FakeTensorMode(), Calls() as calls:
        query = torch.empty(25, 4, 8, dtype=dtype, device="cuda")
        key = torch.empty(25, 2, 8, dtype=dtype, device="cuda")
        cu_seq_lens = torch.empty(6, dtype=torch.int32, device="cuda")
        out = varlen_attention(query, key, key, cu_seq_lens, 16, dropout=dropout, scale=0.5, **sees)
        assert (out.shape, out.dtype, out.device.type) == (query.shape, dtype, "cuda")
    name, args, kwargs = calls.seen[0]
    assert name == kernel
    before, after = sees.get("window", (-1, -1))
    after = 0 if sees["causal"] else after
    if kernel == "_varlen_attn":
        assert args[5:10] == (16, 16, (before, after) == (-1, 0), 0.5, [before, after])
        assert args[10]  # key heads are shared
        return
    assert kwargs["scale"] == 0.5
    if kernel == "_flash_attention_forward":
        assert args[1].shape[-2] == 2  # heads are shared
        assert args[5:9] == (16, 16, dropout, (before, after) == (-1, 0))
        assert (kwargs["window_size_left"], kwargs["window_size_right"]) == (before, after)
    else:
        assert args[1].shape[-2] == 4  # the kernel knows no shared key heads
        assert args[6:11] == (16, 16, dropout, int(sees["causal"]), True)
        assert kwargs.get("window_size") == (None if before < 0 else before + 1)


def test_padding_free_attention_of_float32_on_cuda_is_opaque_to_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They can't trace aten's operation, whose backward pass is described without an argument."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode(), Calls() as calls:
        query = torch.empty(25, 4, 8, device="cuda")
        key = torch.empty(25, 2, 8, device="cuda")
        cu_seq_lens = torch.empty(6, dtype=torch.int32, device="cuda")
        out = varlen_attention(query, key, key, cu_seq_lens, 64, causal=True, dropout=0.1)
        assert (out.shape, out.device.type) == (query.shape, "cuda")
    assert calls.seen == []
    with FakeTensorMode():  # of a device that this build of torch can differentiate on
        inputs = [torch.empty(25, 4, 8, requires_grad=True) for _ in range(3)]
        bounds = torch.empty(6, dtype=torch.int32)
        settings = {"causal": True, "window_size": None, "scale": None, "dropout": 0.1}
        out, *_ = torch.ops.deepytorch.varlen_efficient(*inputs, bounds, longest=25, **settings)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]


@pytest.mark.parametrize(
    ("name", "kernel", "key_heads"),
    [
        ("_takes_groups", "_flash_attention_forward", 2),
        ("_has_flash", "_efficient_attention_forward", 4),
    ],
)
def test_padding_free_attention_on_cuda_shares_key_heads_where_kernels_do(
    name: str, kernel: str, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11's function has no such argument, and GPUs before Ampere not that function."""
    file = importlib.import_module("deepytorch_core.data.varlen_attention")
    monkeypatch.setattr(file, name, lambda *_: False)
    with FakeTensorMode(), Calls() as calls:
        query = torch.empty(25, 4, 8, dtype=torch.float16, device="cuda")
        key = torch.empty(25, 2, 8, dtype=torch.float16, device="cuda")
        cu_seq_lens = torch.empty(6, dtype=torch.int32, device="cuda")
        varlen_attention(query, key, key, cu_seq_lens, 16, causal=True)
    called, args, _ = calls.seen[0]
    assert called == kernel
    assert args[1].shape[-2] == key_heads


WITHOUT_A_KERNEL: list[tuple[torch.dtype, dict[str, Any], bool, str]] = [
    (torch.float32, {"causal": False, "window": (3, 3)}, False, "a window after the token needs"),
    (torch.float32, {"causal": True}, True, "attention with sinks needs float16 or bfloat16"),
    (torch.bfloat16, {"causal": True, "dropout": 0.1}, True, "no kernel with dropout"),
]


@pytest.mark.parametrize(("dtype", "sees", "has_sinks", "why"), WITHOUT_A_KERNEL)
def test_attention_on_cuda_without_a_kernel_takes_one_sequence_after_the_other(
    dtype: torch.dtype,
    sees: dict[str, Any],
    has_sinks: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file: Any = importlib.import_module("deepytorch_core.data.varlen_attention")
    calls: list[Any] = []
    monkeypatch.setattr(file, "_one_by_one", lambda query, *_, **given: calls.append(given))
    with FakeTensorMode():
        query = torch.empty(25, 4, 8, dtype=dtype, device="cuda")
        sinks = torch.empty(4, dtype=dtype, device="cuda") if has_sinks else None
        cu_seq_lens = torch.empty(6, dtype=torch.int32, device="cuda")
        varlen_attention(query, query, query, cu_seq_lens, 16, sinks=sinks, **sees)
        told = file.lacking(query, **{"window": None, "dropout": 0.0, **sees}, sinks=sinks)
    assert [given["sinks"] is sinks for given in calls] == [True]
    assert why in told


@pytest.mark.parametrize("case", CASES)
def test_sinks_are_the_same_without_a_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file: Any = importlib.import_module("deepytorch_core.data.varlen_attention")
    monkeypatch.setattr(file, "lacking", lambda query, **_: "none was built")
    tensors = [*inputs(4, 2, torch.float64), torch.randn(4, dtype=torch.float64).requires_grad_()]
    out = varlen_attention(*tensors[:3], bounds(LENGTHS), 16, sinks=tensors[3], **CASES[case])
    expected = reference(*tensors[:3], sinks=tensors[3], **CASES[case])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-8)


def test_sinks_keep_their_share_where_weights_are_dropped() -> None:
    query, key, value = inputs(4, 4, torch.float32)
    sinks = torch.randn(4)
    torch.manual_seed(1)
    given = (query, key, value, bounds(LENGTHS), 16)
    draws = [varlen_attention(*given, causal=True, dropout=0.3, sinks=sinks) for _ in range(200)]
    assert not torch.equal(draws[0], draws[1])
    exact = varlen_attention(*given, causal=True, sinks=sinks)
    torch.testing.assert_close(torch.stack(draws).mean(0), exact, rtol=0, atol=0.3)


def test_padding_free_attention_refuses_shapes_that_do_not_fit() -> None:
    query, key, value = (tensor.detach() for tensor in inputs(4, 3, torch.float32))
    with pytest.raises(ValueError, match="heads a multiple of the key heads"):
        varlen_attention(query, key, value, bounds(LENGTHS), 16, causal=True)
    with pytest.raises(ValueError, match="with as many tokens"):
        varlen_attention(query, key[1:, :1], value[1:, :1], bounds(LENGTHS), 16, causal=True)
