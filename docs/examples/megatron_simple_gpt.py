"""Megatron-core's simple training loop: a small GPT on mock data, tensor parallel over two GPUs.

    torchrun --nproc-per-node 2 megatron_simple_gpt.py

The form is that of Megatron's quick start. One line differs: the factory's `build` stands where
`parallel_state.initialize_model_parallel` stood, and takes the same sizes.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.optim import Adam
from torch.utils.data import DataLoader

from deepytorch.integrations.megatron import ProcessGroupFactory

SEQUENCE_LENGTH = 64
BATCH_SIZE = 8


def initialize_distributed(tensor_model_parallel_size=1, pipeline_model_parallel_size=1):
    parallel_state.destroy_model_parallel()
    torch.distributed.init_process_group()
    torch.cuda.set_device(torch.distributed.get_node_local_rank())
    # In place of parallel_state.initialize_model_parallel(tensor_..., pipeline_...):
    ProcessGroupFactory(
        tensor=tensor_model_parallel_size, pipeline=pipeline_model_parallel_size
    ).build()


def model_provider():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=SEQUENCE_LENGTH,
    )


def get_train_data_iterator():
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE_LENGTH,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=NullTokenizer(vocab_size=SEQUENCE_LENGTH),
        mid_level_dataset_surplus=0.005,
    )
    datasets = BlendedMegatronDatasetBuilder(
        MockGPTDataset, [1000, None, None], lambda: True, config
    ).build()
    return iter(DataLoader(datasets[0], batch_size=BATCH_SIZE, shuffle=True))


def forward_step_func(data_iterator: Iterator, model: torch.nn.Module):
    def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor):
        losses = output_tensor.float()
        loss_mask = loss_mask.view(-1).float()
        loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
        return loss, {"lm loss": loss.detach()}

    data = {name: value.to("cuda") for name, value in next(data_iterator).items()}
    output_tensor = model(
        data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"]
    )
    return output_tensor, partial(loss_func, data["loss_mask"])


def save_distributed_checkpoint(checkpoint_path, gpt_model):
    state = gpt_model.sharded_state_dict(prefix="")
    dist_checkpointing.save(sharded_state_dict=state, checkpoint_dir=checkpoint_path)


def load_distributed_checkpoint(checkpoint_path, gpt_model):
    state = gpt_model.sharded_state_dict(prefix="")
    checkpoint = dist_checkpointing.load(sharded_state_dict=state, checkpoint_dir=checkpoint_path)
    gpt_model.load_state_dict(checkpoint)


if __name__ == "__main__":
    initialize_distributed(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(123)

    gpt_model = model_provider().to("cuda")
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    model = DistributedDataParallel(gpt_model.config, ddp_config, gpt_model)
    optimizer = Adam(model.parameters())
    train_iterator = get_train_data_iterator()
    forward_backward_func = get_forward_backward_func()

    for _ in range(5):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=train_iterator,
            model=model,
            num_microbatches=1,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=BATCH_SIZE,
            decoder_seq_length=SEQUENCE_LENGTH,
            forward_only=False,
        )
        finalize_model_grads([model])
        for parameter in model.parameters():  # Megatron reduces gradients in its own buffers
            parameter.grad = parameter.main_grad
        optimizer.step()
        if torch.distributed.get_rank() == 0:
            print(f"Losses reduced: {losses_reduced}")

    folder = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(folder)
    save_distributed_checkpoint(Path(folder[0]), gpt_model)
    load_distributed_checkpoint(Path(folder[0]), gpt_model)
    if torch.distributed.get_rank() == 0:
        print("Successfully loaded the model")
    torch.distributed.destroy_process_group()
