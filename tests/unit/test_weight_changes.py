"""Tests which weights an optimizer's step may have changed."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from deepytorch_core.nn.weight_changes import Steps


@pytest.fixture
def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(2)]


def sgd(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1)


def step(steps: Steps, optimizer: object) -> None:
    steps(optimizer, (), {})


def test_without_a_step_nothing_has_changed(weights: list[nn.Parameter]) -> None:
    steps, owner = Steps(), sgd(weights)
    step(steps, owner)
    assert not steps.may_have_changed(weights, since=steps.count)


def test_a_step_of_who_holds_any_of_them_counts(weights: list[nn.Parameter]) -> None:
    steps, owner, other = Steps(), sgd(weights), sgd(weights[:1])
    step(steps, owner)
    since = steps.count
    step(steps, other)
    assert steps.may_have_changed(weights, since=since)
    assert not steps.may_have_changed(weights[1:], since=since)


def test_others_count_until_one_that_holds_all_has_stepped(weights: list[nn.Parameter]) -> None:
    steps, owner, copies = Steps(), sgd(weights), sgd([nn.Parameter(torch.ones(3))])
    step(steps, copies)  # which may stand for them
    assert steps.may_have_changed(weights, since=0)
    step(steps, owner)
    since = steps.count
    step(steps, copies)
    assert not steps.may_have_changed(weights, since=since)
    owner.param_groups[0]["params"] = weights[:1]  # it holds one no longer
    assert steps.may_have_changed(weights, since=since)
    weights[1].requires_grad_(False)
    assert not steps.may_have_changed(weights, since=since)


def test_what_nobody_trains_changes_only_by_who_holds_it(weights: list[nn.Parameter]) -> None:
    for weight in weights:
        weight.requires_grad_(False)
    steps, other, holder = Steps(), sgd([nn.Parameter(torch.ones(3))]), sgd(weights)
    step(steps, other)
    assert not steps.may_have_changed(weights, since=0)
    step(steps, holder)
    assert steps.may_have_changed(weights, since=0)


def test_of_an_optimizer_that_is_gone_nobody_knows_what_it_held(
    weights: list[nn.Parameter],
) -> None:
    steps, owner = Steps(), sgd(weights)
    step(steps, owner)
    since = steps.count
    other = sgd([nn.Parameter(torch.ones(3))])
    step(steps, other)
    assert not steps.may_have_changed(weights, since=since)
    del other
    gc.collect()
    assert steps.may_have_changed(weights, since=since)
    assert not steps.may_have_changed(weights, since=steps.count)
