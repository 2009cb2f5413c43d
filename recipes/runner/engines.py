# SPDX-License-Identifier: Apache-2.0
"""``engine=``: what spreads a model over the ranks. One class each, one interface.

``wrapped`` is called in the loss, ``backward`` and ``step`` train it, ``state`` is this rank's part
of a checkpoint. ``group`` None is all ranks.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.run import Process
from deepytorch_core.base import config

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
State = dict[str, Any]


class Engine(Protocol):
    """An engine, as the training loop sees it."""

    model: nn.Module
    wrapped: Any
    optimizer: torch.optim.Optimizer
    sharded: bool  # whether a rank holds only a part of the weights or of the optimizer
    resizes: bool  # whether it loads what another number of ranks saved

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; gradients travel in the last one."""
        ...

    def backward(self, loss: torch.Tensor) -> None: ...
    def step(self) -> None: ...
    def save(self, folder: Path, rank: int) -> None: ...
    def load(self, folder: Path, rank: int, saved_by: int) -> None:
        """Load this rank's part of what ``saved_by`` ranks saved."""
        ...

    def full_state(self) -> State:
        """All weights on the CPU, on rank 0; empty on the others, which call it, too."""
        ...


def start_engine(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    options: RunOptions,
    process: Process,
    *,
    group: dist.ProcessGroup | None = None,
) -> Engine:
    """The engine that ``options.engine`` names, around ``model``, which is on its device."""
    if options.engine == "ddp":
        return DdpEngine(model, make_optimizer, options, process, group)
    if options.engine == "fsdp2":
        return Fsdp2Engine(model, make_optimizer, options, process)
    if options.engine == "accelerate":
        return AccelerateEngine(model, make_optimizer, options, process)
    if options.engine == "deepspeed":
        return DeepspeedEngine(model, make_optimizer, options, process)
    if options.engine == "megatron":
        from deepytorch.recipes.models.megatron import MegatronEngine

        return MegatronEngine(model, make_optimizer, options, process)
    raise RecipeError(f"no engine {options.engine}")


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def own_state(model: nn.Module) -> State:
    """Return what training changes, weights and buffers; frozen ones come from the model."""
    # Under each name: a tied weight has two.
    weights = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, weight in weights if not weight.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def refuse_other_weights(model: nn.Module, saved: State) -> None:
    """RecipeError if ``saved`` lacks what training changes in ``model``, or has another shape."""
    for name, value in own_state(model).items():
        found = tuple(saved[name].shape) if name in saved else "missing"
        if found != tuple(value.shape):
            raise RecipeError(
                f"it is of another model or adapter: {name} is {tuple(value.shape)} here, {found} "
                "there. Give the options that shape the model as they were, or start a new run"
            )


class DdpEngine:
    """torch's DistributedDataParallel; with fp16 a GradScaler."""

    sharded = False
    resizes = True

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        options: RunOptions,
        process: Process,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.model, self.options = model, options
        self.wrapped: Any = DistributedDataParallel(
            model,
            device_ids=[process.device] if process.device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
        )
        self.optimizer = make_optimizer(trained_parameters(model))
        self.scaler = torch.amp.GradScaler(process.device.type, enabled=options.precision == "fp16")

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.wrapped.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(trained_parameters(self.model), self.options.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path, rank: int) -> None:
        if rank == 0:
            state = {
                "model": own_state(self.model),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            }
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path, rank: int, saved_by: int) -> None:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        refuse_other_weights(self.model, state["model"])
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def full_state(self) -> State:
        return {name: value.cpu() for name, value in self.model.state_dict().items()}


class AccelerateEngine(DdpEngine):
    """Hugging Face's Accelerator, which wraps in DDP; ours is its plugin."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        options: RunOptions,
        process: Process,
    ) -> None:
        from accelerate import Accelerator

        handlers = []
        if options.backend == "deepytorch":
            from deepytorch.integrations.accelerate import DeepytorchPlugin

            handlers = [DeepytorchPlugin(**_adapter_options(options))]
        self.model, self.options = model, options
        self.accelerator: Any = Accelerator(
            cpu=process.device.type == "cpu", kwargs_handlers=handlers
        )
        optimizer = make_optimizer(trained_parameters(model))
        self.wrapped, prepared = self.accelerator.prepare(model, optimizer)
        self.optimizer = getattr(prepared, "optimizer", prepared)  # the scaler below is our own
        self.scaler = torch.amp.GradScaler(process.device.type, enabled=options.precision == "fp16")

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not hasattr(self.wrapped, "no_sync"):
            return nullcontext()
        context: AbstractContextManager[None] = self.accelerator.no_sync(self.wrapped)
        return context


class Fsdp2Engine:
    """torch's fully_shard: parameters, gradients and optimizer in parts on all ranks."""

    sharded = True
    resizes = True

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        options: RunOptions,
        process: Process,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        if options.precision == "fp16":
            raise RecipeError("engine=fsdp2 has no precision=fp16: use bf16, or engine=ddp")
        if options.offload != "none" and process.device.type == "cpu":
            raise RecipeError(
                f"offload={options.offload} moves from a GPU: leave it out on the CPU"
            )
        mesh = init_device_mesh(process.device.type, (process.world_size,))
        settings: dict[str, Any] = {"mesh": mesh}
        if options.offload != "none":
            settings["offload_policy"] = CPUOffloadPolicy()
        for block in blocks_of(model):
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        if options.backend == "deepytorch":
            from deepytorch.integrations.fsdp import apply_fsdp2

            apply_fsdp2(model)
        self.model, self.options = model, options
        self.wrapped: Any = model
        self.optimizer = make_optimizer(trained_parameters(model))

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        self.wrapped.set_requires_gradient_sync(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(trained_parameters(self.model), self.options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path, rank: int) -> None:
        optimizer = self.optimizer.state_dict()
        state = {
            "model": {name: _local(value) for name, value in own_state(self.model).items()},
            "optimizer": {
                "state": {
                    number: {name: _local(value) for name, value in entry.items()}
                    for number, entry in optimizer["state"].items()
                },
                "param_groups": optimizer["param_groups"],
            },
        }
        torch.save(state, folder / f"shard-{rank}.pt")

    def load(self, folder: Path, rank: int, saved_by: int) -> None:
        parts = _Parts(folder, rank, saved_by)
        with torch.no_grad():
            for name, value in own_state(self.model).items():
                _local(value).copy_(parts.of(value, "model", name))
        optimizer = parts.own["optimizer"]
        for number, parameter in enumerate(trained_parameters(self.model)):
            entry = optimizer["state"].get(number, {})
            for name, value in entry.items():
                if value.dim():  # a step counter is a number, the moments are sharded
                    part = parts.of(parameter, "optimizer", "state", number, name)
                    entry[name] = _sharded_like(parameter, part)
        self.optimizer.load_state_dict(optimizer)

    def full_state(self) -> State:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
        )

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(self.model, options=whole))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's lists of modules that have parts: a transformer's layers."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            blocks += [
                block for block in module if any(part is not block for part in block.modules())
            ]
    inner = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in inner]


class _Parts:
    """Sharded tensors as a checkpoint's ranks saved them, for a rank of as many, or others."""

    def __init__(self, folder: Path, rank: int, saved_by: int) -> None:
        self._rank, self._size = rank, dist.get_world_size()
        self._as_many = self._size == saved_by
        # All of them only where they are needed, and then page by page.
        self._states = [
            torch.load(
                folder / f"shard-{part}.pt",
                map_location="cpu",
                weights_only=True,
                mmap=not self._as_many,
            )
            for part in ([rank] if self._as_many else range(saved_by))
        ]
        self.own: State = self._states[0]

    def of(self, like: Any, *keys: Any) -> torch.Tensor:
        """This rank's part of the tensor under ``keys``, which is sharded as ``like`` is."""
        from torch.distributed.tensor import DTensor

        parts: list[Any] = self._states
        for key in keys:
            parts = [part[key] for part in parts]
        if not self._as_many and isinstance(like, DTensor):
            # As torch.chunk divides the first dimension, which is how fully_shard does.
            begin = min(self._rank * -(-like.shape[0] // self._size), like.shape[0])
            return torch.cat(parts)[begin : begin + like.to_local().shape[0]].clone()
        part: torch.Tensor = parts[0]
        return part


def _local(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def _sharded_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    own = parameter.to_local()
    result: torch.Tensor = DTensor.from_local(
        local.to(own.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return result


class DeepspeedEngine:
    """DeepSpeed's ZeRO; ours is the section in its configuration."""

    resizes = False

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        options: RunOptions,
        process: Process,
    ) -> None:
        import deepspeed

        if config.launched() is None:
            raise RecipeError(
                "engine=deepspeed asks its launcher who it is: start it with deepytorch train or "
                "torchrun, also on one GPU (--nproc-per-node 1)"
            )
        self.model, self.options = model, options
        self.sharded = options.zero_stage == 3
        optimizer = make_optimizer(trained_parameters(model))
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(options)
        )
        self.wrapped: Any = engine
        self.optimizer = optimizer

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        self.wrapped.set_gradient_accumulation_boundary(last)
        self._last = last
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.wrapped.backward(loss, scale_wrt_gas=False)
        if not self._last:
            self.wrapped.step()  # counts the micro-batch

    def step(self) -> None:
        self.wrapped.step()

    def save(self, folder: Path, rank: int) -> None:
        self.wrapped.save_checkpoint(str(folder), tag="engine")

    def load(self, folder: Path, rank: int, saved_by: int) -> None:
        self.wrapped.load_checkpoint(str(folder), tag="engine")

    def full_state(self) -> State:
        import deepspeed

        state = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            whole = [value] if hasattr(value, "ds_id") else []
            with deepspeed.zero.GatheredParameters(whole):
                if dist.get_rank() == 0:  # a host may not hold one for each of its ranks
                    state[name] = value.detach().float().cpu().clone()
        return state


def deepspeed_config(options: RunOptions) -> dict[str, Any]:
    """DeepSpeed's JSON for the options."""
    zero: dict[str, Any] = {"stage": options.zero_stage}
    if options.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if options.precision != "fp32":
        config[options.precision] = {"enabled": True}
    if options.backend == "deepytorch":
        config["deepytorch"] = {"enabled": True, **_adapter_options(options)}
    return config


def _adapter_options(options: RunOptions) -> dict[str, Any]:
    """Return what an adapter does by itself: the recipe packs batches before it sees them."""
    return {"padding_free": "off", "kernels": options.kernels, "compile": options.compile}


def enable_checkpointing(model: nn.Module) -> None:
    """Recompute activations in backward, in every part that offers it."""
    found: Any
    for found in model.modules():
        if hasattr(found, "gradient_checkpointing_enable"):  # transformers
            found.gradient_checkpointing_enable({"use_reentrant": False})
            return
        if hasattr(found, "enable_gradient_checkpointing"):  # diffusers
            found.enable_gradient_checkpointing()
            return
