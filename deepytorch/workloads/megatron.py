"""Megatron-core's GPT over two tensor-parallel ranks; ours is the factory of its groups."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from deepytorch.workloads import Step, TrainJob, _model

_TENSOR_PARALLEL = 2
_NUM_LAYERS = 4
_NUM_HEADS = 8
_SEQUENCE = 128
_VOCABULARY = 512


def build(job: TrainJob, device: torch.device, *, ours: bool) -> Step:
    dist.init_process_group(job.baseline)
    groups = _ours(job.world_size) if ours else _stock()
    model_parallel_cuda_manual_seed(_model.SEED)
    torch.manual_seed(_model.SEED)
    config = _configuration(job)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=_VOCABULARY,
        max_sequence_length=_SEQUENCE,
        pg_collection=groups,
    ).to(device)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(), model, pg_collection=groups
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=_model.LEARNING_RATE, clip_grad=1.0),
        [model],
        pg_collection=groups,
        use_gloo_process_groups=False,
    )
    generator = torch.Generator().manual_seed(_model.SEED + 1 + groups.dp.rank())
    positions = torch.arange(_SEQUENCE, device=device).expand(job.batch_size, _SEQUENCE)
    mask = torch.ones(1, 1, _SEQUENCE, _SEQUENCE, dtype=torch.bool, device=device).triu(1)

    def step() -> torch.Tensor:
        shape = (job.batch_size, _SEQUENCE + 1)
        tokens = torch.randint(0, _VOCABULARY, shape, generator=generator).to(device)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss: torch.Tensor = model(inputs, positions, mask, labels=labels).float().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        finalize_model_grads([model], pg_collection=groups)
        optimizer.step()
        return loss.detach()

    return step


def _ours(world_size: int) -> Any:
    from deepytorch.integrations.megatron import ProcessGroupFactory

    factory = ProcessGroupFactory(tensor=_TENSOR_PARALLEL, data=world_size // _TENSOR_PARALLEL)
    return factory.build(create_gloo_process_groups=False)


def _stock() -> Any:
    parallel_state.initialize_model_parallel(_TENSOR_PARALLEL, create_gloo_process_groups=False)
    return ProcessGroupCollection.use_mpu_process_groups()


def _configuration(job: TrainJob) -> TransformerConfig:
    # A layer has about 12 times the square of its width in weights.
    width = math.isqrt(job.parameters // (12 * _NUM_LAYERS))
    return TransformerConfig(
        num_layers=_NUM_LAYERS,
        hidden_size=max(64, width // 64 * 64),
        num_attention_heads=_NUM_HEADS,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=_TENSOR_PARALLEL,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
