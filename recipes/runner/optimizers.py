# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules by name: torch's, and those that transformers knows."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.options import RunOptions

_DECAY_SHARE = 0.1  # of the steps, at the end of warmup_stable_decay
_LEAST_RATE = 0.1  # of the learning rate, at the end of cosine_with_min_lr


def make_optimizer(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    options: RunOptions,
    learning_rate: float,
) -> torch.optim.Optimizer:
    """The optimizer that ``options`` name, for ``parameters`` of ``model``.

    Raises RecipeError where the package that has it is not installed, or refuses.
    """
    decay = options.weight_decay
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=decay, fused=True)
    if options.optimizer == "muon":
        return MuonAndAdamW(model, parameters, lr=learning_rate, weight_decay=decay)
    from transformers import Trainer

    asked = SimpleNamespace(
        optim=options.optimizer,
        optim_args=None,
        learning_rate=learning_rate,
        weight_decay=decay,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
    )
    try:
        found, given = Trainer.get_optimizer_cls_and_kwargs(asked)  # type: ignore[arg-type]
        made: torch.optim.Optimizer = found(parameters, **{"weight_decay": decay, **given})
    except (ImportError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"optimizer={options.optimizer} can't be made: {reason}") from error
    return made


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices within the model; AdamW for embeddings, head, biases and norms.

    Muon's steps are scaled to those of AdamW, so both take the same learning rate.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        listed = list(parameters)
        ends = {id(weight) for weight in _ends(model)}
        inner = [weight for weight in listed if weight.ndim == 2 and id(weight) not in ends]  # noqa: PLR2004
        chosen = {id(weight) for weight in inner}
        others = [weight for weight in listed if id(weight) not in chosen]
        given: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts: list[torch.optim.Optimizer] = []
        if inner:
            self._parts.append(torch.optim.Muon(inner, adjust_lr_fn="match_rms_adamw", **given))
        if others:
            self._parts.append(torch.optim.AdamW(others, fused=True, **given))
        super().__init__([{"params": part.param_groups[0]["params"]} for part in self._parts], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Share the groups, so that a learning rate set here is set in the parts."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """A step of both."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Both parts' states, of plain types and tensors."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def _ends(model: nn.Module) -> Iterable[nn.Parameter]:
    """Embeddings and what gives the logits."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield cast(nn.Parameter, module.weight)
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            yield from head.parameters()


def make_schedule(
    optimizer: torch.optim.Optimizer, options: RunOptions, *, after: int = 0
) -> LambdaLR:
    """transformers' schedule of the name in ``options``, from behind step ``after`` on.

    It begins one step late, so that no step is taken with a learning rate of 0. Otherwise the first
    step of the warm-up and the last of a decay would have that rate.
    """
    from transformers import get_scheduler

    steps, warmup = options.total_steps, options.total_warmup_steps
    specific: dict[str, Any] = {}
    if options.schedule == "cosine_with_min_lr":
        specific = {"min_lr_rate": _LEAST_RATE}
    elif options.schedule == "warmup_stable_decay":
        specific = {"num_decay_steps": max(1, round(_DECAY_SHARE * steps))}
    made = get_scheduler(
        options.schedule,
        _copy_of(optimizer),
        num_warmup_steps=warmup,
        num_training_steps=steps + 1,
        scheduler_specific_kwargs=specific,
    )
    factor = made.lr_lambdas[0]
    return LambdaLR(optimizer, lambda step: factor(step + 1), last_epoch=after - 1)


def _copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One with the same learning rate, which making a schedule may change."""
    rate = float(optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"]))
    return torch.optim.SGD([torch.zeros(())], lr=rate)
