"""A decoder over all ranks that generates: a step is one token of each sequence of the batch.

Each layer adds up twice over the ranks, a vector for each sequence at a time, and nothing is
computed meanwhile. On GPUs a step replays one CUDA graph, as servers do, so that it does not take
as long as its Python. Ours needs nothing but `import deepytorch`.

Weights are random and the tokens are given: the loss is that of the given next ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from deepytorch.workloads import Step, TrainJob, _model

_NUM_LAYERS = 16
_HEAD_SIZE = 64
_VOCABULARY = 1024
_CONTEXT = 512
_EAGER_STEPS = 3  # before a capture: connections, staging and choices are made in them


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:  # noqa: ARG001
    dist.init_process_group(job.baseline)
    model = _Decoder(job).to(device).requires_grad_(requires_grad=False)
    generator = torch.Generator().manual_seed(_model.SEED)
    shape = (_CONTEXT + 1, job.batch_size)
    tokens = torch.randint(0, _VOCABULARY, shape, generator=generator).to(device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    loss = torch.zeros((), device=device)

    def decode() -> None:
        logits = model(tokens.index_select(0, position)[0], position)
        loss.copy_(functional.cross_entropy(logits, tokens.index_select(0, position + 1)[0]))
        position.add_(1).remainder_(_CONTEXT)

    run = _captured(decode) if device.type == "cuda" else decode

    def step() -> torch.Tensor:
        run()
        return loss.clone()

    return step


def _captured(decode: Callable[[], None]) -> Callable[[], None]:
    for _ in range(_EAGER_STEPS):
        decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    return graph.replay


class _Decoder(nn.Module):
    """This rank's heads and columns of every layer; what is not split is the same on all ranks."""

    def __init__(self, job: TrainJob) -> None:
        super().__init__()
        # A layer has about 12 times the square of its width in weights.
        width = math.isqrt(job.parameters // (12 * _NUM_LAYERS))
        unit = _HEAD_SIZE * job.world_size
        width = max(1, width // unit) * unit
        torch.manual_seed(_model.SEED)
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        torch.manual_seed(_model.SEED + 1 + dist.get_rank())
        self.layers = nn.ModuleList(
            _Layer(width, width // job.world_size, job.batch_size) for _ in range(_NUM_LAYERS)
        )

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """[batch_size, vocabulary] logits after `tokens`, int64 [batch_size], at `position`."""
        known = torch.arange(_CONTEXT, device=position.device).unsqueeze(0) <= position
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, position, known)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class _Layer(nn.Module):
    """Attention over a cache, then a gated unit, as in a Llama."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, width: int, columns: int, batch_size: int) -> None:
        super().__init__()
        between = 8 * columns // 3
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * columns, bias=False)
        self.out = nn.Linear(columns, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * between, bias=False)
        self.down = nn.Linear(between, width, bias=False)
        cache = (batch_size, columns // _HEAD_SIZE, _CONTEXT, _HEAD_SIZE)
        self.register_buffer("keys", torch.zeros(cache))
        self.register_buffer("values", torch.zeros(cache))

    def forward(
        self, hidden: torch.Tensor, position: torch.Tensor, known: torch.Tensor
    ) -> torch.Tensor:
        """[batch_size, width]; `known`, bool [1, context], is what of the cache is looked at."""
        projected = self.queries_keys_values(self.norms[0](hidden))
        query, key, value = projected.view(len(hidden), 3, -1, 1, _HEAD_SIZE).unbind(1)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        attended = functional.scaled_dot_product_attention(
            query, self.keys, self.values, attn_mask=known
        )
        hidden = hidden + _sum(self.out(attended.flatten(1)))
        gate, up = self.gate_up(self.norms[1](hidden)).chunk(2, dim=-1)
        return hidden + _sum(self.down(functional.silu(gate) * up))


def _sum(partial: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(partial)
    return partial
