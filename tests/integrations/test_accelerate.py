"""Accelerate on deepytorch: the losses of stock Accelerate by native collectives, and undone."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

import deepytorch
from deepytorch.integrations import accelerate as adapter
from deepytorch.integrations.common import around, contract
from deepytorch_core.c10d import registered
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import place, rank_store, spawn_ranks

STEPS = 20


class Net(nn.Module):
    """Two layers, and one that takes part only when `use_extra` says so."""

    def __init__(self, *, use_extra: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)
        self.extra = nn.Linear(64, 64)
        self.use_extra = use_extra

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        if self.use_extra:
            hidden = hidden + self.extra(hidden)
        return self.second(hidden)


def batches(batch_size: int = 4) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * batch_size * STEPS, 16, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


@contextlib.contextmanager
def process_state() -> Iterator[None]:
    """Accelerate keeps its state in the process, and workers are used again."""
    deepytorch.deactivate()  # importing this module has activated it
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    # Accelerate initialises by the environment, which knows no key space for each call.
    original = dist.init_process_group
    dist.init_process_group = lambda backend, **keywords: original(
        backend,
        store=rank_store("accelerate"),
        **{"rank": place()[0], "world_size": place()[1], **keywords},
    )
    try:
        yield
    finally:
        dist.init_process_group = original
        adapter._uninstall()


def build(how: str, *, ddp: dict[str, Any], **keywords: Any) -> Accelerator:
    if how == "stock":
        handlers = [DistributedDataParallelKwargs(**ddp)]
        return Accelerator(cpu=True, kwargs_handlers=handlers, **keywords)
    if how == "beside":
        handlers = [adapter.DeepytorchPlugin(), DistributedDataParallelKwargs(**ddp)]
        return Accelerator(cpu=True, kwargs_handlers=handlers, **keywords)
    plugin = adapter.DeepytorchPlugin(ddp_kwargs=ddp)
    if how == "subclass":
        return adapter.DeepytorchAccelerator(cpu=True, deepytorch_plugin=plugin, **keywords)
    return Accelerator(cpu=True, kwargs_handlers=[plugin], **keywords)


def native_ops() -> dict[str, int]:
    rows = [row for row in deepytorch.report().rows if row.algorithm != "delegate"]
    return {op: sum(row.calls for row in rows if row.op == op) for op in {row.op for row in rows}}


def train(
    rank: int,
    world_size: int,
    how: str,
    *,
    ddp: dict[str, Any] | None = None,
    accumulate: int = 1,
    use_extra: bool = True,
) -> tuple[list[float], dict[str, int]]:
    """Losses, and the native operations of these steps."""
    with process_state():
        before = native_ops()
        accelerator = build(how, ddp=ddp or {}, gradient_accumulation_steps=accumulate)
        model = Net(use_extra=use_extra)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
        losses = []
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        after = native_ops()
        return losses, {op: calls - before.get(op, 0) for op, calls in after.items()}


def compare(how: str, **keywords: Any) -> dict[str, int]:
    """Assert that `how` gives the bits of stock Accelerate; returns rank 0's native operations."""
    stock = spawn_ranks(train, 2, "stock", **keywords)
    ours = spawn_ranks(train, 2, how, **keywords)
    assert len(stock[0][0]) == STEPS
    assert [losses for losses, _ in ours] == [losses for losses, _ in stock]
    assert not any(sum(native.values()) for _, native in stock)
    return ours[0][1]


@pytest.mark.parametrize("how", ["plugin", "subclass", "beside"])
def test_ddp_gives_the_losses_of_gloo_by_native_collectives(how: str) -> None:
    native = compare(how, ddp={"bucket_cap_mb": 1})
    # One for each step's gradients, and one for its mean loss.
    assert native["all_reduce"] >= 2 * STEPS
    assert native["broadcast"] > 0


def test_gradients_are_reduced_once_per_accumulation() -> None:
    native = compare("plugin", accumulate=4)
    assert native["all_reduce"] == STEPS // 4 + STEPS


@pytest.mark.parametrize("comm_hook", ["fp16", "power_sgd"])
def test_comm_hooks_of_accelerate_work(comm_hook: str) -> None:
    from accelerate.utils import DDPCommunicationHookType

    native = compare("plugin", ddp={"comm_hook": DDPCommunicationHookType(comm_hook)})
    assert native["all_reduce"] >= 2 * STEPS


@pytest.mark.parametrize("how", ["plugin", "beside"])
def test_ddp_keywords_reach_ddp(how: str) -> None:
    native = compare(how, ddp={"find_unused_parameters": True}, use_extra=False)
    assert native["all_reduce"] >= 2 * STEPS


def buckets_are_registered(rank: int, world_size: int) -> list[bool]:
    with process_state():
        accelerator = build("plugin", ddp={"gradient_as_bucket_view": True})
        model = accelerator.prepare(Net())
        seen = []

        def hook(group, bucket):  # DDP compares annotations, which are texts in this file
            seen.append(registered.is_registered(bucket.buffer()))
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        model.register_comm_hook(dist.group.WORLD, hook)
        for inputs, _ in batches():
            accelerator.backward(model(inputs).sum())
        return seen


def test_ddp_buckets_lie_in_registered_memory() -> None:
    for seen in spawn_ranks(buckets_are_registered, 2):
        assert len(seen) >= STEPS
        assert all(seen)


def attributes(accelerator: Accelerator) -> dict[str, Any]:
    return {**vars(accelerator), "of the class": Accelerator.__init__}


def apply_and_undo(rank: int, world_size: int) -> dict[str, Any]:
    with process_state():
        init = Accelerator.__init__
        dist.init_process_group("gloo")
        plain = Accelerator(cpu=True)
        found = attributes(plain)
        plugin = adapter.DeepytorchPlugin()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        during = serving_name()
        marks = [name for name in vars(accelerator) if "deepytorch" in name]
        # The same object again is left as it is.
        again = adapter._accelerator.apply(accelerator, {"log": "error"}, adapter="accelerate")
        undone = [adapter.undo(accelerator), adapter.undo(accelerator)]
        left = attributes(accelerator)
        return {
            "during": during,
            "marks": len(marks),
            "again": again,
            "undone": undone,
            "keys": found.keys() ^ left.keys(),
            "init": left["of the class"] is init,
            "backend": serving_name(),
            "active": deepytorch.is_active(),
        }


def test_an_existing_group_is_upgraded_in_place_and_undo_gives_it_back() -> None:
    for seen in spawn_ranks(apply_and_undo, 2):
        assert seen == {
            "during": "deepytorch",
            "marks": 1,
            "again": True,
            "undone": [True, False],
            "keys": set(),
            "init": True,
            "backend": "gloo",
            "active": False,
        }


def made_with(rank: int, world_size: int, options: dict[str, Any]) -> tuple[str, bool, Any]:
    with process_state():
        plugin = adapter.DeepytorchPlugin(**options)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
        marked = any("deepytorch" in name for name in vars(accelerator))
        return serving_name(), marked, deepytorch.report().options


def test_every_option_is_accepted_and_in_force() -> None:
    given = {"compile": "off", "padding_free": "on", "kernels": "off", "staging_mb": 16}
    for backend, marked, options in spawn_ranks(made_with, 2, given):
        assert (backend, marked) == ("deepytorch", True)
        assert {name: options[name] for name in given} == given


@pytest.mark.parametrize(
    ("options", "env"),
    [({"enabled": False}, {}), ({"enabled": True}, {"DEEPYTORCH_ENABLED": "0"})],
)
def test_switched_off_it_is_stock_accelerate(options: dict[str, Any], env: dict[str, str]) -> None:
    for backend, marked, _ in spawn_ranks(made_with, 2, options, env=env):
        assert (backend, marked) == ("gloo", False)


def refused(rank: int, world_size: int, options: list[dict[str, Any]]) -> str:
    with process_state():
        plugin = adapter.DeepytorchPlugin(**options[rank])
        with pytest.raises(contract.IntegrationError) as error:
            Accelerator(cpu=True, kwargs_handlers=[plugin])
        return str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            [{}, {"stagingmb": 8}],
            "accelerate on rank 1: unknown option 'stagingmb' (did you mean staging_mb?); valid",
        ),
        ([{"tune": "perhaps"}, {}], "accelerate on rank 0: tune='perhaps': expected one of"),
        (
            [{"compile": "off"}, {}],
            "accelerate: rank 0 was given compile='off' and rank 1 compile='auto': give every",
        ),
    ],
)
def test_wrong_or_mixed_options_are_one_error_on_every_rank(
    options: list[dict[str, Any]], said: str
) -> None:
    for message in spawn_ranks(refused, 2, options):
        assert message.startswith(said)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("handlers", "said"),
    [
        (
            lambda: [adapter.DeepytorchPlugin(), adapter.DeepytorchPlugin(compile="off")],
            "DeepytorchPlugin was passed 2 times: keep one",
        ),
        (
            lambda: [
                adapter.DeepytorchPlugin(ddp_kwargs={"static_graph": True}),
                DistributedDataParallelKwargs(),
            ],
            r"both DeepytorchPlugin\(ddp_kwargs=...\) and a DistributedDataParallelKwargs",
        ),
    ],
)
def test_handlers_that_collide_are_one_error(handlers: Any, said: str) -> None:
    with process_state(), pytest.raises(contract.IntegrationError, match=said) as error:
        Accelerator(cpu=True, kwargs_handlers=handlers())
    assert "\n" not in str(error.value)


def test_a_plugin_in_the_subclass_and_in_the_list_is_passed_twice() -> None:
    with process_state(), pytest.raises(contract.IntegrationError, match="passed 2 times"):
        adapter.DeepytorchAccelerator(cpu=True, kwargs_handlers=[adapter.DeepytorchPlugin()])


def test_in_a_single_process_only_the_model_is_looked_at() -> None:
    with process_state():
        plugin = adapter.DeepytorchPlugin(padding_free="off", kernels="off", compile="off")
        accelerator = adapter.DeepytorchAccelerator(cpu=True, deepytorch_plugin=plugin)
        assert not any("deepytorch" in name for name in vars(accelerator))
        assert not adapter.undo(accelerator)
        found = set(vars(accelerator))
        accelerator = adapter.DeepytorchAccelerator(cpu=True)
        assert around.is_put(accelerator, "prepare")
        assert adapter.undo(accelerator)
        assert set(vars(accelerator)) == found
        with pytest.raises(contract.IntegrationError, match="accelerate: padding_free='perhaps'"):
            Accelerator(
                cpu=True, kwargs_handlers=[adapter.DeepytorchPlugin(padding_free="perhaps")]
            )


class ConvolutionalNet(nn.Module):
    """Its layout is chosen for the optimizer too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(images).mean((2, 3)))


def prepare_and_free(accelerator: Accelerator) -> list[weakref.ref[Any]]:
    """The model and the optimizer of a short training, after everybody has dropped them."""
    model = ConvolutionalNet()
    kept = [weakref.ref(model)]
    optimizer = torch.optim.AdamW(model.parameters())
    kept.append(weakref.ref(optimizer))
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.randn(2, 3, 8, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = accelerator.free_memory(model, optimizer)
    del model, optimizer
    gc.collect()
    return kept


@pytest.mark.parametrize("kernels", ["auto", "on"])
def test_freed_models_and_optimizers_go_while_the_accelerator_stays(kernels: str) -> None:
    with process_state():
        plugin = adapter.DeepytorchPlugin(kernels=kernels)
        accelerator = adapter.DeepytorchAccelerator(cpu=True, deepytorch_plugin=plugin)
        assert around.is_put(accelerator, "prepare")
        for _ in range(2):
            assert [kept() for kept in prepare_and_free(accelerator)] == [None, None]
        alive = accelerator.prepare(ConvolutionalNet())
        assert any("deepytorch_kernels" in name for name in vars(alive))
        assert adapter.undo(accelerator)
        assert not any("deepytorch_kernels" in name for name in vars(alive))


def freed(rank: int, world_size: int) -> list[Any]:
    with process_state():
        accelerator = build("plugin", ddp={})
        return [kept() is None for kept in prepare_and_free(accelerator)]


def test_freed_models_and_optimizers_go_on_every_rank() -> None:
    assert spawn_ranks(freed, 2) == [[True, True]] * 2


def alone(rank: int, world_size: int) -> tuple[list[str], bool]:
    with process_state(), pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(adapter._accelerator, "say_once", lambda text, **_: said.append(text))
        accelerator = adapter.DeepytorchAccelerator()  # no GPU, and not told to use the CPU
        return said, accelerator.num_processes == 1


def test_processes_that_accelerate_leaves_alone_are_told() -> None:
    for said, is_alone in spawn_ranks(alone, 2):
        assert is_alone
        assert said[0].startswith("accelerate: 2 processes were launched but Accelerate trains")


def test_a_version_that_is_not_known_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.0")
    with process_state():
        deepytorch.activate()
        with pytest.raises(contract.IntegrationError, match="accelerate 0.9.0 is not known"):
            adapter.DeepytorchAccelerator(cpu=True)
        deepytorch.deactivate()


def test_without_accelerate_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    spec = importlib.util.find_spec("deepytorch.integrations.accelerate")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(contract.IntegrationError, match="accelerate is not installed: pip"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
