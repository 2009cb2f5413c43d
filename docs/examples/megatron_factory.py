"""Choose the backend of each of Megatron-core's process groups, and pass the groups on.

    torchrun --nproc-per-node 2 megatron_factory.py

Two replicas of a small GPT; gradients are reduced and the optimizer's state is sharded by
Megatron's distributed optimizer, over a data-parallel group that deepytorch serves.
"""

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import deepytorch
from deepytorch.integrations.megatron import ProcessGroupFactory

SEQUENCE, VOCABULARY, BATCH = 32, 128, 4

dist.init_process_group()
torch.cuda.set_device(dist.get_node_local_rank())

factory = ProcessGroupFactory(
    tensor=1,
    data=dist.get_world_size(),
    # Groups not named here are deepytorch's. "stock" is NCCL on GPUs and gloo on CPUs.
    backend_for={"pp": "stock", "mp": "stock"},
)
groups = factory.build()

model_parallel_cuda_manual_seed(123)
torch.manual_seed(123)
config = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
)
model = GPTModel(
    config,
    get_gpt_layer_local_spec(),
    vocab_size=VOCABULARY,
    max_sequence_length=SEQUENCE,
    pg_collection=groups,
).to("cuda")
model = DistributedDataParallel(
    config,
    DistributedDataParallelConfig(use_distributed_optimizer=True),
    model,
    pg_collection=groups,
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True),
    [model],
    pg_collection=groups,
    use_gloo_process_groups=False,  # Megatron has none in a collection
)

torch.manual_seed(dist.get_rank())
positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, SEQUENCE)
mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)
for step in range(5):
    # Sequences that count upwards, from where is random: easy to learn.
    start = torch.randint(0, VOCABULARY, (BATCH, 1), device="cuda")
    tokens = (start + torch.arange(SEQUENCE + 1, device="cuda")) % VOCABULARY
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
    loss = losses.mean()
    loss.backward()
    finalize_model_grads([model], pg_collection=groups)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")

if dist.get_rank() == 0:
    print(deepytorch.report())
factory.undo()
dist.destroy_process_group()
