"""Models that are prepared with all that computes, within transforms of `torch.func`: stock's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from deepytorch.integrations.accelerate import DeepytorchPlugin

SIZES = {"vocab_size": 97, "attn_implementation": "eager"}
EXTENDED = pytest.mark.extended


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, **SIZES
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        **SIZES,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def of_parameters(loss: Callable[..., Tensor], given: Any, batch: Any) -> Any:
    return grad(loss)(given, *batch)


def of_samples(loss: Callable[..., Tensor], given: Any, batch: Any) -> Any:
    """One gradient for each row, as in differentially private training."""
    return vmap(grad(loss), (None, 0, 0, 0))(given, *(tensor[:, None] for tensor in batch))


def forward_mode(loss: Callable[..., Tensor], given: Any, batch: Any) -> Any:
    ahead = {name: torch.ones_like(tensor) for name, tensor in given.items()}
    return jvp(lambda now: loss(now, *batch), (given,), (ahead,))


def row_by_row(loss: Callable[..., Tensor], given: Any, batch: Any) -> Any:
    rows = jacrev(lambda now: torch.stack([loss(now, *(tensor[:2] for tensor in batch))]))
    return rows(given)


@pytest.mark.parametrize("make", [gpt2, pytest.param(llama, marks=EXTENDED)])
@pytest.mark.parametrize(
    "transformed",
    [
        of_parameters,
        of_samples,
        pytest.param(forward_mode, marks=EXTENDED),
        pytest.param(row_by_row, marks=EXTENDED),
    ],
)
def test_transformed_calls_are_stocks(
    transformed: Callable[..., Any], make: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    stock = make().train()
    ours = copy.deepcopy(stock)
    plugin = DeepytorchPlugin(kernels="on", padding_free="on", compile="off")
    ours = Accelerator(cpu=True, kwargs_handlers=[plugin]).prepare(ours)
    ids = torch.randint(4, 97, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    batch = ids, mask, ids.masked_fill(mask == 0, -100)
    found = []
    for model in (stock, ours):
        given = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(given: Any, ids: Tensor, mask: Tensor, labels: Tensor, of: Any = model) -> Tensor:
            named = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            result: Tensor = functional_call(of, given, (), named).loss
            return result

        found.append(transformed(loss, given, batch))
    torch.testing.assert_close(found[1], found[0])
