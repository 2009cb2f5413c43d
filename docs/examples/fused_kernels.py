"""Train a small Llama with fused kernels where they are exact and pay, and say which.

    python docs/examples/fused_kernels.py --cpu
    deepytorch run --nproc-per-node 2 docs/examples/fused_kernels.py --cpu --kernels on

Without --cpu it takes the GPUs.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM

import deepytorch
from deepytorch.integrations.accelerate import DeepytorchPlugin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--kernels", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    plugin = DeepytorchPlugin(kernels=options.kernels)
    accelerator = Accelerator(cpu=options.cpu, kwargs_handlers=[plugin])

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2000,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    ids = torch.randint(0, 2000, (4, 64), device=accelerator.device)
    for step in range(options.steps):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss.item():.4f}")
    for decision in deepytorch.report().decisions:
        accelerator.print(f"{decision['what']}: {decision['chosen']}, {decision['reason']}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
