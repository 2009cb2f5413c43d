"""PyTorch's FSDP2 tutorial's form: a small transformer, sharded layer by layer, from meta device.

The lines marked `# deepytorch` are the only ones that plain PyTorch would not have.

torchrun --standalone --nproc-per-node 2 docs/examples/fsdp2_tutorial.py --mixed-precision
"""

# ruff: noqa: T201, TID251
import argparse
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from deepytorch.integrations.fsdp import apply_fsdp2  # deepytorch


@dataclass
class ModelArgs:
    n_layers: int = 4
    dim: int = 64
    n_heads: int = 4
    vocab_size: int = 128
    max_seq_len: int = 32


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = nn.MultiheadAttention(args.dim, args.n_heads, batch_first=True)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(args.dim, 4 * args.dim), nn.GELU(), nn.Linear(4 * args.dim, args.dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        h = h + self.pos_embeddings(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            h = layer(h)
        logits: torch.Tensor = self.output(self.norm(h)).float()
        return logits

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module._reset_parameters()
            elif module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


def set_modules_to_prefetch(model: Transformer, num_layers: int) -> None:
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + num_layers])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - num_layers) : i][::-1])


def main(args: argparse.Namespace) -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local_rank)
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    backend = torch.distributed.get_default_backend_for_device(device)
    torch.distributed.init_process_group(backend)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)

    model_args = ModelArgs()
    with torch.device("meta"):
        model = Transformer(model_args)
    fsdp_kwargs = {}
    if args.mixed_precision:
        fsdp_kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for layer in model.layers:
        fully_shard(layer, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)
    apply_fsdp2(model)  # deepytorch
    assert isinstance(model, FSDPModule)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
    if args.explicit_prefetching:
        set_modules_to_prefetch(model, num_layers=2)

    model.to_empty(device=device)
    model.reset_parameters()

    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(10):
        if args.explicit_prefetching:
            model.unshard()  # the first all_gather starts before forward
        x = torch.randint(0, model_args.vocab_size, (8, model_args.max_seq_len), device=device)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.6f}")

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state_dict = get_model_state_dict(model, options=options)
    if rank == 0:
        print(f"full state dict of {len(state_dict)} tensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="FSDP2")
    parser.add_argument("--explicit-prefetching", action="store_true")
    parser.add_argument("--mixed-precision", action="store_true")
    main(parser.parse_args())
