# SPDX-License-Identifier: Apache-2.0
"""``engine=megatron``: Megatron-core's data parallelism around the recipe's own model.

Gradients lie in Megatron-core's buffers and are reduced and scattered while backward runs; its
distributed optimizer updates a part of the weights on each rank and gathers them. Splitting layers
over ranks takes a model that Megatron-core builds itself: see docs/megatron.md.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def refuse_without_gpu(process: Process) -> None:
    """Megatron-core puts its buffers on a GPU. RecipeError where there is none."""
    if process.device.type != "cuda":
        raise RecipeError("engine=megatron needs a GPU: use engine=ddp or deepspeed on the CPU")


class MegatronEngine:
    """Megatron-core's DistributedDataParallel and distributed optimizer; ours are its groups."""

    sharded = True  # of the optimizer, each rank holds a part
    resizes = False

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        options: RunOptions,
        process: Process,
    ) -> None:
        refuse_without_gpu(process)
        try:
            from megatron.core import distributed, optimizer
        except ImportError:
            raise RecipeError(
                "engine=megatron needs Megatron-core: pip install 'deepytorch-train[megatron]'"
            ) from None
        from megatron.core.transformer.transformer_config import TransformerConfig

        groups = _groups(options, process)
        self.model, self.options = model, options
        self.wrapped: Any = distributed.DistributedDataParallel(
            # Nothing is built of the layers that it describes.
            TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1),
            distributed.DistributedDataParallelConfig(
                overlap_grad_reduce=True, use_distributed_optimizer=True
            ),
            model,
            pg_collection=groups,
        )
        # The recipe's settings, whatever parameters they are for.
        settings = make_optimizer([nn.Parameter(torch.zeros(1, device=process.device))]).defaults
        self.megatron: Any = optimizer.get_megatron_optimizer(
            optimizer.OptimizerConfig(
                optimizer="adam",
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
                adam_beta1=settings["betas"][0],
                adam_beta2=settings["betas"][1],
                adam_eps=settings["eps"],
                clip_grad=options.max_grad_norm,
                use_distributed_optimizer=True,
            ),
            [self.wrapped],
            config_overrides={},  # else one-dimensional weights would not decay
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
        (only,) = getattr(self.megatron, "chained_optimizers", [self.megatron])
        self.optimizer: torch.optim.Optimizer = only.optimizer

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = nullcontext() if last else self.wrapped.no_sync()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def step(self) -> None:
        self.wrapped.finish_grad_sync()
        self.megatron.step()
        self.wrapped.zero_grad_buffer()
        self.megatron.zero_grad()

    def save(self, folder: Path, rank: int) -> None:
        # The weights are whole on every rank, the optimizer's state is this rank's part.
        torch.save(self.optimizer.state_dict(), folder / f"optimizer-{rank}.pt")
        if rank == 0:
            torch.save(self.model.state_dict(), folder / "state.pt")

    def load(self, folder: Path, rank: int, saved_by: int) -> None:
        own = folder / f"optimizer-{rank}.pt"
        self.optimizer.load_state_dict(torch.load(own, map_location="cpu", weights_only=True))
        # Into the buffers that the optimizer's parts are views of.
        weights = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        self.model.load_state_dict(weights)

    def full_state(self) -> dict[str, Any]:
        if dist.get_rank() > 0:  # a host may not hold one for each of its ranks
            return {}
        return {name: value.cpu() for name, value in self.model.state_dict().items()}


def _groups(options: RunOptions, process: Process) -> Any:
    """Megatron-core's process groups for data parallelism alone."""
    if options.backend == "deepytorch":
        from deepytorch.integrations.megatron import ProcessGroupFactory

        factory = ProcessGroupFactory(data=process.world_size)
        return factory.build(create_gloo_process_groups=False)
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    return ProcessGroupCollection.use_mpu_process_groups()
