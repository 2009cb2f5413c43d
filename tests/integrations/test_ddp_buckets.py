"""DDP's bucket sizes: changed between steps without a trace, measured on the job, agreed on."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import deepytorch
from deepytorch.integrations import ddp
from deepytorch.integrations.ddp import bucket_tuning, buckets
from deepytorch.integrations.ddp.buckets import MIB, Layout
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

Wrap = Callable[..., Any]

LAYOUTS = [Layout(60_000, 60_000), Layout(10_000, 200_000)]


def make_model(width: int = 129) -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Linear(13, width), nn.GELU(), nn.Linear(width, 2 * width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(2 * width, 5))


class Job:
    """A training loop with gradient accumulation, one step at a time."""

    def __init__(self, model: Any, rank: int, *, accumulate: int = 1) -> None:
        self.model, self._accumulate = model, accumulate
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self._data = torch.Generator().manual_seed(rank)
        self.losses: list[float] = []

    def step(self) -> None:
        x = torch.randn(6, 13, generator=self._data)
        number = len(self.losses) + 1
        last = number % self._accumulate == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = (self.model(x) - x[:, :5]).square().mean()
            loss.backward()
        if last:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=bool(number % 3))
        self.losses.append(loss.item())

    def steps(self, count: int) -> list[float]:
        for _ in range(count):
            self.step()
        return self.losses


def relaid(rank: int, world_size: int, kwargs: dict[str, Any], compress: str | None) -> None:
    accumulate = 2 if kwargs.get("gradient_as_bucket_view") else 1

    def job() -> Job:
        model = ddp.prepare_ddp(make_model(), compress=compress, bucket_cap_mb=1, **kwargs)
        return Job(model, rank, accumulate=accumulate)

    expected = job().steps(20)
    changed = job()
    attributes = set(vars(changed.model))
    parameters = buckets.reduced_parameters(changed.model)
    for number in range(20):
        if number % 5 == 3:  # also between the steps of an accumulation
            size = 40_000 * (number // 5 + 1)
            buckets.rebuild(changed.model, parameters, Layout(size // 4, size))
            assert buckets.layout_of(changed.model) == Layout(size // 4, size)
        changed.step()
        if number % 5 == 0 and number > 0:
            in_use = changed.model._get_ddp_logging_data()
            assert in_use["bucket_cap_bytes"] == size
            assert ("comm_hook" in in_use) == (compress is not None)
    assert changed.losses == expected
    assert vars(changed.model).keys() == attributes
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == MIB  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kwargs", "compress"),
    [
        ({}, "bf16"),
        ({"gradient_as_bucket_view": True}, None),
        ({"static_graph": True}, None),
        ({"find_unused_parameters": True}, None),
    ],
)
def test_sizes_change_between_steps_and_nothing_else(
    kwargs: dict[str, Any], compress: str | None
) -> None:
    # With three ranks DDP divides a bucket's view otherwise when it is new: by a product.
    world_size = 2 if kwargs.get("gradient_as_bucket_view") else 3
    spawn_ranks(relaid, world_size, kwargs, compress, backend="deepytorch")


class FakeClock:
    """A step takes 0.4 s with the quick layout and 0.5 s with any other."""

    def __init__(self, model: Any, quick: Layout | None) -> None:
        self._model, self._quick, self._now = model, quick, 0.0

    def perf_counter(self) -> float:
        is_quick = buckets.layout_of(self._model) == self._quick
        self._now += 0.4 if is_quick else 0.5
        return self._now


def start_tuning(model: Any, options: dict[str, Any], quick: Layout | None) -> None:
    bucket_tuning.candidates = lambda *_: LAYOUTS  # type: ignore[assignment]
    bucket_tuning.time = FakeClock(model, quick)  # type: ignore[assignment]
    ddp.tune_buckets(model, **options)


def tune(rank: int, world_size: int, options: dict[str, Any], quick: Layout | None) -> Any:
    def make_ddp() -> Any:
        # The job came with one bucket.
        return DistributedDataParallel(make_model(), bucket_cap_mb=1, gradient_as_bucket_view=True)

    # Three layouts, then the best and the first again.
    steps = (3 if quick is None else 5) * 8
    expected = Job(make_ddp(), rank).steps(steps + 3)
    job = Job(make_ddp(), rank)
    base = buckets.layout_of(job.model)
    start_tuning(job.model, options, quick)
    ddp.tune_buckets(job.model, **options)
    assert len(job.model._forward_pre_hooks) == 1
    job.steps(steps)
    assert job.model._forward_pre_hooks
    job.steps(3)
    assert not job.model._forward_pre_hooks
    chosen = buckets.layout_of(job.model)
    assert job.losses == expected
    assert_same_on_all_ranks(str(chosen), "chosen")
    decision = deepytorch.report().decisions[-1]
    report = str(deepytorch.report())
    assert ddp.undo(job.model)
    assert not ddp.undo(job.model)
    assert buckets.layout_of(job.model) == base
    job.steps(2)
    return base, chosen, decision, report


@pytest.mark.parametrize("quick", [None, *LAYOUTS])
def test_the_faster_sizes_stay_and_no_others(quick: Layout | None, tmp_path: Path) -> None:
    options = {"tune": "force", "profile": tmp_path / "profile.json"}
    results = spawn_ranks(tune, 2, options, quick, backend="deepytorch", fresh=True)
    for base, chosen, decision, report in results:
        assert chosen == (quick or base)
        assert (decision["what"], decision["chosen"]) == ("DDP buckets", str(chosen))
        assert len(decision["times_ms"]) == 3
        assert f"decision: DDP buckets: {chosen}, " in report


def interrupted(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Validation on one rank, and copies, while the sizes are measured."""
    job = Job(ddp.prepare_ddp(make_model(), **options), rank, accumulate=2)
    start_tuning(job.model, options, LAYOUTS[0])
    for number in range(90):
        job.step()
        if rank == 0 and number % 7 == 0:
            with torch.no_grad():
                job.model(torch.ones(2, 13))
        if number == 13:
            copied = pickle.loads(pickle.dumps(job.model))
            (inert,) = copied._forward_pre_hooks.values()
            assert inert(copied, ()) is None
            assert not any(
                parameter._post_accumulate_grad_hooks for parameter in copied.parameters()
            )
            assert copied.join_hook.__func__ is DistributedDataParallel.join_hook
            ddp.undo(copied)  # has nothing of ours to take back
            assert job.model._forward_pre_hooks
            assert copy.deepcopy(job.model).module is not job.model.module
            del copied
    assert not job.model._forward_pre_hooks
    assert buckets.layout_of(job.model) == LAYOUTS[0]
    assert_same_on_all_ranks(job.model.module.state_dict()["0.weight"], "weights")


def test_other_forward_passes_and_copies_come_between(tmp_path: Path) -> None:
    options = {"tune": "force", "profile": tmp_path / "profile.json"}
    spawn_ranks(interrupted, 2, options, backend="deepytorch", fresh=True)


def frozen_at_first(wrap: Wrap, rank: int) -> list[nn.Module]:
    """A layer is frozen while the sizes change, and trains later."""
    job = Job(wrap(make_model(), find_unused_parameters=True), rank)
    for number in range(40):
        job.model.module[2].requires_grad_(number >= 30)
        job.step()
    return [job.model]


def adversarial(wrap: Wrap, rank: int) -> list[nn.Module]:
    """Two forward passes to one reduction, and one without while all is frozen."""
    generator = wrap(nn.Sequential(nn.Linear(5, 64), nn.GELU(), nn.Linear(64, 13)))
    critic = wrap(make_model())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (generator, critic)]
    data = torch.Generator().manual_seed(rank)
    for _ in range(30):
        x, z = torch.randn(6, 13, generator=data), torch.randn(6, 5, generator=data)
        made = generator(z)
        (critic(made.detach()).square() - critic(x).square()).mean().backward()
        critic.requires_grad_(False)
        critic(made).square().mean().neg().backward()
        critic.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [generator, critic]


def validated(wrap: Wrap, rank: int, **kwargs: Any) -> list[nn.Module]:
    """One rank validates, with gradients."""
    job = Job(wrap(make_model(), **kwargs), rank)
    for number in range(40):
        job.step()
        if rank == 0 and number % 5 == 2:
            job.model.eval()(torch.ones(2, 13))
            job.model.train()
    return [job.model]


def validated_with_a_static_graph(wrap: Wrap, rank: int) -> list[nn.Module]:
    return validated(wrap, rank, static_graph=True)


def train_as_stock(rank: int, world_size: int, options: dict[str, Any]) -> None:
    def tuned(module: nn.Module, **kwargs: Any) -> Any:
        model = ddp.prepare_ddp(module, **options, **kwargs)
        start_tuning(model, options, None)
        return model

    def no_more_compressed(module: nn.Module, **kwargs: Any) -> Any:
        model = ddp.prepare_ddp(module, compress="bf16", **options, **kwargs)
        model.module[2].requires_grad_(False)
        assert ddp.undo(model)
        return model

    for loop, wrap in (
        (frozen_at_first, tuned),
        (frozen_at_first, no_more_compressed),
        (adversarial, tuned),
        (validated, tuned),
        (validated_with_a_static_graph, tuned),
    ):
        case = f"{loop.__name__}, {wrap.__name__}"
        torch.manual_seed(3)
        stock = weights(loop(DistributedDataParallel, rank))
        torch.manual_seed(3)
        trained = loop(wrap, rank)
        assert not any(hooked(model) for model in trained)
        assert torch.equal(weights(trained), stock), case
        assert_same_on_all_ranks(stock, case)


def hooked(model: Any) -> bool:
    return bool(model._forward_pre_hooks) or any(
        parameter._post_accumulate_grad_hooks for parameter in model.parameters()
    )


def weights(models: list[nn.Module]) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().flatten() for model in models for parameter in model.parameters()]
    )


def test_weights_are_stocks_whatever_the_loop_does(tmp_path: Path) -> None:
    options = {"tune": "force", "profile": tmp_path / "profile.json"}
    spawn_ranks(train_as_stock, 2, options, backend="deepytorch", fresh=True)


def swapped(rank: int, world_size: int, options: dict[str, Any]) -> None:
    def trained(*, tunes: bool) -> tuple[torch.Tensor, set[nn.Parameter], nn.Module]:
        torch.manual_seed(3)
        layers = [nn.Linear(13, 64), *(nn.Linear(64, 64) for _ in range(2)), nn.Linear(64, 5)]
        layers[1].requires_grad_(False)
        model = DistributedDataParallel(nn.Sequential(*layers), find_unused_parameters=True)
        # Others of the same number and sizes, which DDP does not reduce.
        layers[1].requires_grad_(True)
        layers[2].requires_grad_(False)
        if tunes:
            start_tuning(model, options, LAYOUTS[0])
        job = Job(model, rank)
        for number in range(48):
            layers[2].requires_grad_(number >= 20)
            job.step()
        assert not hooked(model)
        return weights([model]), set(buckets.reduced_parameters(model)), layers[1]

    stock, _, _ = trained(tunes=False)
    tuned, reduced, unfrozen = trained(tunes=True)
    assert torch.equal(tuned, stock)
    assert not reduced & set(unfrozen.parameters())


def test_what_was_frozen_when_it_was_wrapped_is_not_reduced_later(tmp_path: Path) -> None:
    options = {"tune": "force", "profile": tmp_path / "profile.json"}
    spawn_ranks(swapped, 2, options, backend="deepytorch", fresh=True)


def joined(rank: int, world_size: int, options: dict[str, Any]) -> None:
    job = Job(ddp.prepare_ddp(make_model(), **options), rank)
    base = buckets.layout_of(job.model)
    start_tuning(job.model, options, LAYOUTS[0])
    job.steps(10)
    assert buckets.layout_of(job.model) == LAYOUTS[0]
    with Join([job.model]):
        job.steps(3 + 4 * rank)
    assert buckets.layout_of(job.model) == base
    assert deepytorch.report().decisions[-1]["reason"].endswith("a join context began")
    assert "join_hook" not in vars(job.model)
    assert not job.model._forward_pre_hooks
    assert_same_on_all_ranks(job.model.module.state_dict()["0.weight"], "weights")
    assert ddp.undo(job.model)
    ddp.tune_buckets(job.model, **options)
    assert "join context" in deepytorch.report().decisions[-1]["reason"]


def test_uneven_inputs_end_the_measurement(tmp_path: Path) -> None:
    options = {"tune": "force", "profile": tmp_path / "profile.json"}
    spawn_ranks(joined, 2, options, backend="deepytorch", fresh=True)


def compiled(rank: int, world_size: int, options: dict[str, Any]) -> None:
    expected = Job(DistributedDataParallel(make_model()), rank).steps(45)
    inside = ddp.prepare_ddp(torch.compile(make_model(), backend="aot_eager"))
    outside = ddp.prepare_ddp(make_model())
    for model in (inside, outside):
        start_tuning(model, options, LAYOUTS[1])
        job = Job(model, rank)
        if model is outside:
            no_sync = model.no_sync
            job.model = torch.compile(model, backend="aot_eager")
            job.model.no_sync = no_sync
        assert job.steps(45) == pytest.approx(expected, rel=1e-6)
        assert not model._forward_pre_hooks
        assert buckets.layout_of(model) == LAYOUTS[1]


def test_compiled_modules(tmp_path: Path) -> None:
    options = {"tune": "force", "profile": tmp_path / "profile.json"}
    spawn_ranks(compiled, 2, options, backend="deepytorch", fresh=True, timeout_s=100)


def not_measured(rank: int, world_size: int) -> None:
    for options, why in (
        ({"tune": "off"}, "tune=off"),
        ({"tune": "auto", "deterministic": True}, "deterministic"),
        ({"tune": "auto", "deterministic": False}, "the gradients fit one bucket"),
    ):
        model = ddp.prepare_ddp(make_model(), tune_buckets=True, **options)
        assert not model._forward_pre_hooks
        assert deepytorch.report().decisions[-1]["reason"] == f"not measured: {why}"
        assert ddp.undo(model)


def test_nothing_is_measured_where_it_shall_not_or_need_not() -> None:
    spawn_ranks(not_measured, 2, backend="deepytorch", fresh=True)


def test_candidates() -> None:
    default = Layout(MIB, 25 * MIB)
    assert bucket_tuning.candidates(MIB // 2, default) == []
    assert [str(candidate) for candidate in bucket_tuning.candidates(3 * MIB, default)] == [
        "3+3 MiB"
    ]
    assert [str(candidate) for candidate in bucket_tuning.candidates(30 * MIB, default)] == [
        "1+4 MiB",
        "4+4 MiB",
        "1+16 MiB",
        "16+16 MiB",
        "1+30 MiB",
        "30+30 MiB",
    ]
    assert default not in bucket_tuning.candidates(1 << 30, default)
    small = Layout(MIB // 4, MIB // 4)
    assert bucket_tuning.candidates(MIB // 2, small) == [Layout(MIB // 2, MIB // 2)]
