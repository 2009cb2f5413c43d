"""Fused optimizers that a GradScaler does not wait for."""

from __future__ import annotations

import functools
import gc
import math
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from deepytorch_core.nn.kernels import KernelSetting, apply_kernels

CPU = torch.device("cpu")
OVERFLOWS = (0, 3)
STEPS = 7


class Waits(TorchDispatchMode):
    """Counts how often a value was asked for, which waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Training:
    """A few parameters, whose gradients overflow now and then."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(5)
        self.parameters = [nn.Parameter(torch.randn(shape)) for shape in ((17, 3), (5,), (2, 3, 7))]
        self.optimizer = kind(self.parameters, lr=0.05)
        self.scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.undo = lambda: None

    def switched(self) -> Training:
        setting = KernelSetting(model=nn.Linear(1, 1), optimizers=[self.optimizer], device=CPU)
        self.undo = apply_kernels(setting, "on").undo
        return self

    def step(self, number: int) -> int:
        """Returns how often something was waited for."""
        torch.manual_seed(number)
        self.scaler.scale(torch.ones(()))  # as the loss is
        for parameter in self.parameters:
            gradient = self.scaler.get_scale() * torch.randn(parameter.shape)
            parameter.grad = (
                torch.full_like(gradient, math.inf) if number in OVERFLOWS else gradient
            )
        with Waits() as waits:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return waits.number


@pytest.fixture
def training() -> Iterator[Training]:
    own = Training().switched()
    yield own
    own.undo()


def compare(ours: Training, stock: Training) -> None:
    assert ours.scaler.get_scale() == stock.scaler.get_scale()
    for mine, theirs in zip(ours.parameters, stock.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
        if mine.grad is not None and torch.isfinite(theirs.grad).all():
            torch.testing.assert_close(mine.grad, theirs.grad)  # unscaled, for who logs it
        state, own = stock.optimizer.state.get(theirs), ours.optimizer.state.get(mine)
        for name, value in (state or {}).items():
            if value is None:  # fused SGD's momentum begins as zeros
                assert not own[name].any()
            else:
                torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-7)


KINDS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AMSGrad": functools.partial(torch.optim.Adam, amsgrad=True, maximize=True),
    "SGD": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01),
    "Nesterov": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_nothing_is_waited_for_and_overflows_change_nothing(kind: Any) -> None:
    ours, stock = Training(kind).switched(), Training(kind)
    for number in range(STEPS):
        assert stock.step(number) > 0
        assert ours.step(number) == 0
        compare(ours, stock)
    ours.undo()
    assert ours.step(STEPS) > 0


def test_gradients_that_were_unscaled_before_are_not_again(training: Training) -> None:
    stock = Training()
    for own in (training, stock):
        own.scaler.scale(torch.ones(()))
        for number, parameter in enumerate(own.parameters):
            torch.manual_seed(number)
            parameter.grad = own.scaler.get_scale() * torch.randn(parameter.shape)
        own.scaler.unscale_(own.optimizer)
        torch.nn.utils.clip_grad_norm_(own.parameters, 0.1)
        own.scaler.step(own.optimizer)
        own.scaler.update()
    compare(training, stock)


def patched_as_accelerate_does(optimizer: Any) -> None:
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)


WATCHERS = {
    "a step hook": lambda optimizer: optimizer.register_step_post_hook(lambda *_: None),
    "a hook before": lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "a step of its own": patched_as_accelerate_does,
}


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS.keys())
def test_who_looks_at_steps_sees_stocks(training: Training, watch: Any) -> None:
    stock = Training()
    watch(training.optimizer)
    for number in range(STEPS):
        assert min(training.step(number), stock.step(number)) > 0
        compare(training, stock)


def test_a_hook_on_all_optimizers_sees_stocks_steps(training: Training) -> None:
    steps: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    for number in range(STEPS):
        training.step(number)
    handle.remove()
    assert len(steps) == STEPS - len(OVERFLOWS)


def test_a_learning_rate_scheduler_changes_nothing(training: Training) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
    for number in range(STEPS):
        assert training.step(number) == 0
        schedule.step()


def test_a_step_of_somebody_below_a_schedulers_is_seen(training: Training) -> None:
    steps = []
    optimizer: Any = training.optimizer
    optimizer.step = types.MethodType(lambda stepped: steps.append(stepped), optimizer)
    torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
    for number in range(STEPS):
        training.step(number)
    assert len(steps) == STEPS - len(OVERFLOWS)


def test_who_asks_whether_a_scaler_is_handed_over_hears_what_stock_says(
    training: Training,
) -> None:
    assert not getattr(training.optimizer, "_step_supports_amp_scaling", False)


def test_other_optimizers_and_closures_go_the_stock_way(training: Training) -> None:
    assert Training(torch.optim.Adagrad).switched().step(1) > 0
    own = training.parameters
    own[0].grad, own[1].grad, own[2].grad = (torch.randn_like(parameter) for parameter in own)
    training.scaler.scale(torch.ones(()))
    with Waits() as waits:
        training.scaler.step(training.optimizer, lambda: 3.0)
    assert waits.number > 0


def test_scalers_are_torchs_again_once_nobody_needs_ours() -> None:
    before = GradScaler._maybe_opt_step
    first, second = Training().switched(), Training().switched()
    assert GradScaler._maybe_opt_step is not before
    first.undo()
    assert second.step(1) == 0
    second.undo()
    assert GradScaler._maybe_opt_step is before


def test_scalers_are_torchs_again_once_a_model_goes_with_its_optimizer() -> None:
    before = GradScaler._maybe_opt_step
    model, training = nn.Linear(1, 1), Training()
    training.switched()
    assert GradScaler._maybe_opt_step is not before
    # The model's finalizer comes before the entry of the optimizer is gone.
    weakref.finalize(model, training.undo).atexit = False
    model.optimizer, training.optimizer.model = training.optimizer, model
    del model, training
    gc.collect()
    assert GradScaler._maybe_opt_step is before


def test_a_step_that_was_replaced_on_the_class_is_seen(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        functools.wraps(step)(lambda *args, **kwargs: (steps.append(0), step(*args, **kwargs))[1]),
    )
    for number in range(STEPS):
        training.step(number)
    assert len(steps) == STEPS - len(OVERFLOWS)


def test_a_group_of_another_form_goes_the_stock_way(training: Training) -> None:
    more = nn.Parameter(torch.ones(3))
    training.optimizer.add_param_group({"params": [more], "fused": False})
    training.parameters.append(more)
    for number in range(1, STEPS):
        assert training.step(number) > 0


def found_instead(scaler: GradScaler, value: Any) -> Any:
    """The scaler, one that finds `value` for every optimizer where there was an overflow."""
    unscale = scaler.unscale_

    def unscale_(optimizer: Any) -> None:
        unscale(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device, overflow in found.items():
            found[device] = overflow * value

    scaler.unscale_ = unscale_  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [2.0, 0.5, torch.ones(1)], ids=["summed", "averaged", "sharded"])
def test_what_ranks_have_added_up_skips_a_step_as_well(training: Training, value: Any) -> None:
    stock = Training()
    for own in (training, stock):
        found_instead(own.scaler, value)
    for number in range(STEPS):
        training.step(number)
        stock.step(number)
        compare(training, stock)
