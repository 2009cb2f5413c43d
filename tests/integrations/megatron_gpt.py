"""A tiny GPT trained the way Megatron-core's users do it, on GPUs or (in tests) on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from deepytorch_core.c10d.patches import serving_name

SEQUENCE = 16
VOCABULARY = 64
MICROBATCHES = 2
MICROBATCH_SIZE = 2


def train(collection: Any, *, steps: int = 20, distributed_optimizer: bool = False) -> list[float]:
    """The losses that this rank has seen: all of them in the last stage of a pipeline, else none.

    Data is the same for ranks that hold parts of one replica, and differs between replicas.
    """
    model_parallel_cuda_manual_seed(123)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        # So that all layouts start from the same weights.
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=collection.tp.size(),
        pipeline_model_parallel_size=collection.pp.size(),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads,
    )
    stage = collection.pp.rank()
    torch.manual_seed(7)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=stage == 0,
        post_process=stage == collection.pp.size() - 1,
        pg_collection=collection,
    ).to("cuda")
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=False,
            overlap_grad_reduce=False,
            use_distributed_optimizer=distributed_optimizer,
        ),
        model,
        pg_collection=collection,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            use_distributed_optimizer=distributed_optimizer,
        ),
        [model],
        pg_collection=collection,
        use_gloo_process_groups=False,
    )
    batches = _batches(collection.dp.rank())
    losses = []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICROBATCH_SIZE,
            decoder_seq_length=SEQUENCE,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        assert updated
        losses += [float(entry["lm loss"]) for entry in reduced]
    return losses


def backends_of(collection: Any) -> dict[str, str]:
    """The backend of each group by its name in the collection."""
    return {
        name: serving_name(group)
        for name, group in vars(collection).items()
        if isinstance(group, torch.distributed.ProcessGroup)
    }


def _batches(replica: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + replica)
    positions = torch.arange(SEQUENCE).expand(MICROBATCH_SIZE, SEQUENCE)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    while True:
        shape = (MICROBATCH_SIZE, SEQUENCE + 1)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": positions,
            "attention_mask": mask,
        }
        yield {name: value.to("cuda") for name, value in batch.items()}


def _forward_step(batches: Any, model: Any) -> Any:
    batch = next(batches)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
    )
    return output, _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    replicas = parallel_state.get_data_parallel_group()
    average = loss.detach().clone()
    torch.distributed.all_reduce(average, group=replicas)
    return loss, {"lm loss": average / replicas.size()}
