# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of any recipe: micro-batches, the mean over all ranks, clipping, schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import nn

import deepytorch
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.rank_consistency import digest_of, draw_apart, refuse_unlike
from deepytorch.recipes.base.run import Process, together
from deepytorch.recipes.data.batches import BatchT
from deepytorch.recipes.runner import fp8, memory
from deepytorch.recipes.runner.engines import enable_checkpointing, start_engine
from deepytorch.recipes.runner.optimizers import make_optimizer, make_schedule
from deepytorch.recipes.runner.task import Task
from deepytorch_core.nn import channels_last
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels


@dataclass(frozen=True)
class StepResult:
    """The results of one optimizer step."""

    loss_share: torch.Tensor  # float32 scalar; its sum over the ranks is the mean loss
    num_units: torch.Tensor  # float32 scalar; tokens or images of all ranks, without padding
    learning_rate: float


class Trainer(Generic[BatchT]):
    """A model under an engine, its optimizer and its schedule."""

    def __init__(
        self,
        task: Task[BatchT],
        options: RunOptions,
        process: Process,
        *,
        group: dist.ProcessGroup | None = None,
        ours: bool = True,
    ) -> None:
        self.options, self.process, self.group = options, process, group
        torch.manual_seed(options.seed)  # every trainer starts from the same weights
        model = together(lambda: self._made(task), process)
        if options.engine in ("fsdp2", "megatron"):  # the others begin with rank 0's
            refuse_unlike(process, weights=digest_of(model))
        if options.gradient_checkpointing:
            enable_checkpointing(model)
        self.flops_per_unit = task.flops_of(model) if task.flops_of else 0.0
        self.learning_rate = task.learning_rate
        if options.learning_rate is not None:
            self.learning_rate = options.learning_rate
        if ours and options.engine in (
            "ddp",
            "megatron",
        ):  # the other engines' adapters do it themselves
            autocast = None if options.precision == "fp32" else self._autocast_dtype()
            setting = KernelSetting(model=model, device=process.device, autocast=autocast)
            apply_kernels(setting, options.kernels)
            if channels_last.is_convolutional(model):
                self._choose_layout(model, task)

        def with_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return make_optimizer(model, parameters, options, self.learning_rate)

        self.engine = start_engine(model, with_optimizer, options, process, group=group)
        if ours and options.compile != "off":
            steps = options.total_steps * options.accumulation
            deepytorch.compile(model, policy=options.compile, steps=steps)
        self.loss_share = task.make_loss(self.engine.wrapped, ours)
        self.go_on_after(0)
        draw_apart(options.seed, process)

    def _made(self, task: Task[BatchT]) -> nn.Module:
        """The model on its device; RecipeError if it can't be there, or not in this precision."""
        model = task.make_model()
        memory.refuse_if_too_large(model, self.options, self.process)
        model.to(self.process.device)
        model.train()
        if self.options.precision == "fp8":
            fp8.convert(model, self.options, self.process)
        return model

    def go_on_after(self, step: int) -> None:
        """Train on with the options' learning rates and weight decay from behind ``step``.

        An optimizer that was loaded has those of the run that saved it.
        """
        for group in self.engine.optimizer.param_groups:
            group.update(initial_lr=self.learning_rate, weight_decay=self.options.weight_decay)
        self.schedule = make_schedule(self.engine.optimizer, self.options, after=step)

    def _choose_layout(self, model: nn.Module, task: Task[BatchT]) -> None:
        """Try channels_last on the first batch, before DDP lays its buckets out as the weights."""
        channels_last.choose(model, mode=self.options.kernels)
        if self.options.kernels != "auto":
            return
        position = task.batches.position
        batch = next(task.batches).to(self.process.device)
        task.batches.position = position
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        with self.autocast():
            task.make_loss(model, True)(batch, batch.counts()[0])
        with torch.no_grad():
            for name, value in model.named_buffers():
                value.copy_(buffers[name])

    @property
    def model(self) -> Any:
        """The recipe's own model, without the engine."""
        return self.engine.model

    def step(self, micro_batches: Sequence[BatchT]) -> StepResult:
        """One optimizer step on this rank's micro-batches."""
        # The loss is a mean over what all ranks and micro-batches have, so their number is agreed
        # first: averaging per rank would give tokens in short batches more weight.
        batches = [batch.to(self.process.device) for batch in micro_batches]
        counts = torch.stack([batch.counts() for batch in batches]).sum(dim=0)
        dist.all_reduce(counts, group=self.group)
        learning_rate = float(self.schedule.get_last_lr()[0])
        total = torch.zeros((), device=self.process.device)
        for index, batch in enumerate(batches):
            with self.engine.accumulating(last=index == len(batches) - 1):
                with self.autocast():
                    share = self.loss_share(batch, counts[0])
                # Engines average gradients over the ranks, and the shares are to be summed.
                self.engine.backward(share * self.process.world_size)
            total += share.detach()
        self.engine.step()
        self.schedule.step()
        return StepResult(total, counts[1], learning_rate)

    def autocast(self) -> torch.autocast:
        """The options' precision, around forward and loss."""
        kind, enabled = self.process.device.type, self.options.precision != "fp32"
        return torch.autocast(kind, dtype=self._autocast_dtype(), enabled=enabled)

    def _autocast_dtype(self) -> torch.dtype:
        return torch.float16 if self.options.precision == "fp16" else torch.bfloat16

    @torch.no_grad()
    def evaluate(self, batches: Sequence[BatchT]) -> float:
        """The mean loss over all ranks' ``batches``; collective, with as many on every rank."""
        self.engine.wrapped.eval()
        on_device = [batch.to(self.process.device) for batch in batches]
        counts = torch.stack([batch.counts() for batch in on_device]).sum(dim=0)
        dist.all_reduce(counts, group=self.group)
        total = torch.zeros((), device=self.process.device)
        for batch in on_device:
            with self.autocast():
                total += self.loss_share(batch, counts[0])
        dist.all_reduce(total, group=self.group)
        self.engine.wrapped.train()
        return float(total)
