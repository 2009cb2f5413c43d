"""Rows of language models: transformers' classes under DeepSpeed's ZeRO, FSDP2 or DDP."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import deepytorch
from deepytorch.workloads.headline import OURS
from deepytorch.workloads.headline.job import ArmJob, lengths
from deepytorch.workloads.headline.worker import Trained, swap_kernels
from deepytorch_core.base import config

_IGNORED = -100
_NUM_BATCHES = 8


def build(job: ArmJob, device: torch.device, group: dist.ProcessGroup | None = None) -> Trained:
    """The arm's model, and a function that trains it on a batch of a number.

    DDP reduces over `group`, by default over the default one.
    """
    row, ours = job.row, job.arm.startswith(OURS)
    torch.manual_seed(0)
    with _zero3(job), torch.device(device):
        model = _model(job)
    if row.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if job.arm == "tuned-compile":
        for layer in _layers(model):
            layer.compile(dynamic=True)
    numbers: Any = range(_NUM_BATCHES)
    loader: DataLoader[Any] = DataLoader(numbers, collate_fn=lambda samples: _batch(job, *samples))
    if row.zero_stage:
        step = _deepspeed_step(job, model)
    else:
        step = _torch_step(job, model, device, [loader] if ours else [], group)
    if ours and row.zero_stage != 3:
        deepytorch.compile(model, is_patient=False)
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in loader]
    if job.arm == "tuned-flatten":
        batches = [_flattened(batch) for batch in batches]

    def train(number: int) -> torch.Tensor:
        loss: torch.Tensor = step(batches[number % _NUM_BATCHES])
        return loss

    units = [_num_tokens(batch) for batch in batches]
    parameters = sum(
        getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()
    )
    return Trained(model, train, units, int(parameters))


def _model(job: ArmJob) -> Any:
    shape, library = job.shape, importlib.import_module("transformers")
    family = job.row.more["family"]
    settings: dict[str, Any] = {
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "max_position_embeddings": max(512, shape["length"]),
    }
    if family == "Bert":
        chance = {
            "hidden_dropout_prob": job.row.dropout,
            "attention_probs_dropout_prob": job.row.dropout,
        }
        return library.BertForMaskedLM(library.BertConfig(**settings, **chance))
    if job.arm == "tuned-flatten" and job.device == "cuda" and find_spec("flash_attn"):
        settings["attn_implementation"] = "flash_attention_2"
    made = getattr(library, f"{family}Config")(
        # Without a padding token: its row would be set to 0, and ZeRO-3 has taken the rows away.
        **settings,
        num_key_value_heads=shape["kv_heads"],
        use_cache=False,
        pad_token_id=None,
    )
    return getattr(library, f"{family}ForCausalLM")(made).to(_dtype(job))


def _dtype(job: ArmJob) -> torch.dtype:
    # BERT's AMP keeps float32 weights; the others train in bf16 as their recipes do.
    return torch.bfloat16 if job.row.precision == "bf16" else torch.float32


def _layers(model: nn.Module) -> list[nn.Module]:
    (longest,) = sorted(
        (module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len
    )[-1:]
    return list(longest)


def _batch(job: ArmJob, number: int) -> dict[str, torch.Tensor]:
    """Random tokens, padded to the longest of the batch; the first third is not trained."""
    shape, rank = job.shape, dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * number + rank)
    sizes = lengths(job.row.lengths, job.micro_batch, shape["length"], seed=1000 * number + rank)
    if job.row.lengths == "half":
        sizes[0] = shape["length"]
    longest = max(sizes)
    ids = torch.randint(3, shape["vocabulary"], (len(sizes), longest), generator=generator)
    mask = (torch.arange(longest)[None] < torch.tensor(sizes)[:, None]).long()
    labels = ids.masked_fill(mask == 0, _IGNORED)
    if job.row.more["family"] == "Bert":
        hidden = torch.rand(ids.shape, generator=generator) < 0.15
        hidden[:, 0] = True
        labels = labels.masked_fill(~hidden, _IGNORED)
    else:
        prompt = torch.arange(longest)[None] < torch.tensor(sizes)[:, None] // 3
        labels = labels.masked_fill(prompt, _IGNORED)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def _flattened(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make what transformers' DataCollatorWithFlattening does: one row, positions from 0 again."""
    there = batch["attention_mask"].bool()
    labels = batch["labels"].clone()
    labels[:, 0] = _IGNORED  # the end of one sequence does not predict the next one's beginning
    positions = torch.arange(there.shape[1], device=there.device).expand_as(there)
    return {
        "input_ids": batch["input_ids"][there][None],
        "labels": labels[there][None],
        "position_ids": positions[there][None],
    }


def _num_tokens(batch: dict[str, torch.Tensor]) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()


def _optimizer(job: ArmJob, model: nn.Module) -> torch.optim.Optimizer:
    fused: dict[str, Any] = {"fused": True} if job.arm.startswith("tuned") else {}
    return torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)


def _deepspeed_config(job: ArmJob) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": job.row.zero_stage}
    if job.row.offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": job.device == "cuda"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if job.arm.startswith(OURS):
        settings["deepytorch"] = {"enabled": True}
    return settings


def _zero3(job: ArmJob) -> contextlib.AbstractContextManager[Any]:
    if job.row.zero_stage != 3:
        return contextlib.nullcontext()
    import deepspeed

    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.Init(
        config_dict_or_path=_deepspeed_config(job)
    )
    return context


def _deepspeed_step(job: ArmJob, model: nn.Module) -> Any:
    import deepspeed

    optimizer = _optimizer(job, model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_deepspeed_config(job)
    )

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _torch_step(
    job: ArmJob,
    model: nn.Module,
    device: torch.device,
    loaders: Sequence[DataLoader[Any]],
    group: dist.ProcessGroup | None,
) -> Any:
    """DDP or FSDP2, and ours in a loop of one's own where there are `loaders` to plan batches."""
    amp = job.row.precision == "fp16"
    wrapped: Any = model
    if job.row.fsdp2:
        if loaders:
            swap_kernels(model, [], device, autocast=amp)
        _shard(model, device, ours=bool(loaders))
        optimizer = _optimizer(job, model)
    else:
        optimizer = _optimizer(job, model)
        if loaders:
            swap_kernels(model, [optimizer], device, autocast=amp)
        devices = [device] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(
            model, device_ids=devices, process_group=group, gradient_as_bucket_view=True
        )
    if loaders:
        from deepytorch.integrations.transformers import pack_batches

        pack_batches(wrapped, config.current().padding_free, loaders=loaders)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=amp and device.type == "cuda")

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=amp):
            loss: torch.Tensor = wrapped(**batch).loss
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _shard(model: nn.Module, device: torch.device, *, ours: bool) -> None:
    """As torch's documentation does: every layer, then the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for each in (*_layers(model), model):
        fully_shard(each, mesh=mesh)
    if ours:
        from deepytorch.integrations.fsdp import apply_fsdp2

        apply_fsdp2(model)
