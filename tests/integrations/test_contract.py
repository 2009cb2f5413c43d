"""Tests what all adapters share: versions, options all ranks agree on, changes to be undone."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import pickletools
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch.integrations.common import around, contract
from deepytorch_core.base import agreement
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import rank_store, spawn_ranks


class Owner:
    inherited = "of the class"

    def __init__(self) -> None:
        self.own = 1


def test_changes_are_undone_in_reverse_order() -> None:
    owner, order = Owner(), []
    changes = contract.Changes()
    changes.set(owner, "own", 2)
    changes.set(owner, "own", 3)
    changes.set(owner, "inherited", "of the object")
    changes.on_undo(lambda: order.append(owner.own))
    assert (owner.own, owner.inherited) == (3, "of the object")
    changes.undo()
    changes.undo()
    assert vars(owner) == {"own": 1}
    assert owner.inherited == "of the class"
    assert order == [3]


def test_a_mark_belongs_to_one_object_and_goes_with_undo() -> None:
    module = torch.nn.Linear(2, 2)
    changes = contract.Changes()
    changes.set(module, "forward", lambda x: x)
    contract.mark(module, "test", changes)
    assert contract.is_marked(module, "test")
    assert not contract.is_marked(torch.nn.Linear(2, 2), "test")
    assert contract.undo(module, "test")
    assert not contract.undo(module, "test")
    assert vars(module).keys() == vars(torch.nn.Linear(2, 2)).keys()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_nothing_to_undo(again: Any) -> None:
    module = torch.nn.Linear(2, 2)
    changes = contract.Changes()
    changes.set(module, "note", "changed")
    contract.mark(module, "test", changes)
    copied = again(module)
    assert not contract.is_marked(copied, "test")
    assert not contract.undo(copied, "test")
    assert module.note == "changed"


class Acting:
    def act(self) -> str:
        return f"stock's {self.name}"

    name = "first"


@pytest.mark.parametrize("again", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_has_the_method_of_its_class_again(again: Any) -> None:
    owner = Acting()
    changes = contract.Changes()
    for _ in range(2):  # one around the other
        original = owner.act
        changes.set(owner, "act", lambda original=original: f"ours around {original()}")
    contract.mark(owner, "test", changes)
    assert owner.act() == "ours around ours around stock's first"
    copied = again(owner)
    copied.name = "second"
    assert copied.act() == "stock's second"
    assert not any("deepytorch" in word for word in asked_for(owner))
    changes.undo()
    assert owner.act() == "stock's first"


def asked_for(thing: Any) -> list[str]:
    """The words that a pickle has, among them those of modules whose things it asks for."""
    words = [arg for _, arg, _ in pickletools.genops(pickle.dumps(thing)) if isinstance(arg, str)]
    return [word for word in words if not word.startswith("__deepytorch_")]


@pytest.mark.parametrize(
    ("distribution", "versions", "said"),
    [
        ("no-such-framework", ">=1", "no-such-framework is not installed: pip install"),
        ("torch", ">=99", f"torch {torch.__version__} is not known to this adapter, which is for"),
    ],
)
def test_a_wrong_version_is_one_line_with_the_remedy(
    distribution: str, versions: str, said: str
) -> None:
    with pytest.raises(contract.IntegrationError, match=said.replace("+", r"\+")) as error:
        contract.require(distribution, versions, tested="1.2.3")
    assert f"pip install '{distribution}==1.2.3'" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_installed_version_passes() -> None:
    contract.require("torch", ">=2.11", tested="2.13.0")


def stock_group() -> None:
    """A group of torch's own; importing this module has activated deepytorch."""
    deepytorch.deactivate()
    dist.init_process_group("gloo")


def join_and_leave(rank: int, world_size: int) -> tuple[str, int, str]:
    stock_group()
    joined = contract.join("test", {"collectives": "native"})
    value = torch.full((1000,), float(rank))
    dist.all_reduce(value)
    assert value[0].item() == sum(range(world_size))
    during = serving_name()
    native = deepytorch.report().native_calls
    joined.leave()
    return during, native, serving_name()


def test_join_upgrades_the_group_that_exists_and_leave_gives_it_back() -> None:
    results = spawn_ranks(join_and_leave, 2, fresh=True)
    assert results == [("deepytorch", 1, "gloo")] * 2


def join_with(rank: int, world_size: int, given: list[dict[str, Any]]) -> tuple[str, str, bool]:
    stock_group()
    with pytest.raises(contract.IntegrationError) as error:
        contract.join("test", given[rank])
    return str(error.value), serving_name(), deepytorch.is_active()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [{}, {"colectives": "native"}],
            "test on rank 1: unknown option 'colectives' (did you mean collectives?); valid",
        ),
        ([{"tune": "perhaps"}, {}], "test on rank 0: tune='perhaps': expected one of"),
        (
            [{"staging_mb": 8}, {"staging_mb": 16}],
            "test: rank 0 was given staging_mb=8 and rank 1 staging_mb=16: give every rank the",
        ),
    ],
)
def test_wrong_or_different_options_are_the_same_error_on_every_rank(
    given: list[dict[str, Any]], said: str
) -> None:
    for message, backend, active in spawn_ranks(join_with, 2, given, fresh=True):
        assert message.startswith(said)
        assert "\n" not in message
        assert (backend, active) == ("gloo", False)


def join_with_own(rank: int, world_size: int, own: list[Any]) -> str | dict[str, Any]:
    stock_group()

    def check() -> dict[str, Any]:
        if isinstance(own[rank], str):
            raise contract.IntegrationError(own[rank])
        return own[rank]

    try:
        return contract.join("test", own=check).options.to_dict()
    except contract.IntegrationError as error:
        assert not deepytorch.is_active()
        return str(error)


def test_what_an_adapter_checks_itself_is_shared_too() -> None:
    def run(*own: Any) -> list[Any]:
        return spawn_ranks(join_with_own, 2, list(own), fresh=True)

    assert all("compress" not in options for options in run({"compress": 1}, {"compress": 1}))
    for message in run({"compress": 1}, {"compress": None}):
        assert message.startswith("test: rank 0 was given compress=1 and rank 1 compress=None")
    assert run({}, "no such model") == ["test on rank 1: no such model"] * 2


def join_on_rank_0(rank: int, world_size: int, served: bool) -> str | None:
    if served:
        dist.init_process_group("cpu:deepytorch")
        dist.all_reduce(torch.ones(1))
    else:
        stock_group()
    contract.here_limit_s = lambda: 0.5 if not served else 3.0
    if rank == 1:
        rank_store("done").get("rank 0")
        return None
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(contract.IntegrationError) as error,
    ):
        contract.join("test")
    rank_store("done").set("rank 0", "1")
    return f"{said.getvalue()}{error.value}"


@pytest.mark.parametrize("served", [False, True])
def test_a_rank_that_does_not_come_is_named(served: bool) -> None:
    message, _ = spawn_ranks(join_on_rank_0, 2, served, fresh=True)
    assert message is not None
    limit, doing = ("0.5 s", "")
    if served:  # then it is known what the rank does instead
        limit, doing = "3 s", " (rank 1: it is in test_contract.py:"
    early, late = message.splitlines()
    assert early.startswith(f"deepytorch: test waits for rank 1, up to {limit}: it is for every ")
    assert late.startswith(f"test: rank(s) 1 did not call it within {limit}{doing}")


def join_beside(rank: int, world_size: int) -> str:
    """Rank 0 alone calls the adapter, while rank 1 waits for it in a collective."""
    dist.init_process_group("cpu:deepytorch")
    dist.all_reduce(torch.ones(1))
    agreement.PATIENCE_S, contract._LOOK_S = 1.0, 0.2
    if rank == 0:
        with pytest.raises(contract.IntegrationError) as error:
            contract.join("test")
        dist.barrier()
        return str(error.value)
    dist.barrier()
    return ""


def test_a_rank_that_waits_for_the_one_in_an_adapter_will_not_come() -> None:
    message, _ = spawn_ranks(join_beside, 2, fresh=True)
    assert message.startswith(
        "test: rank(s) 1 did not call it, and wait for this one in barrier #2 of group default_pg: "
        "use it on every rank or on none"
    )


def join_late(rank: int, world_size: int) -> bool:
    """Rank 1 waits for rank 0 in a thread of its own, and calls the adapter late."""
    dist.init_process_group("cpu:deepytorch")
    side = dist.new_group()
    dist.all_reduce(torch.ones(1), group=side)
    dist.all_reduce(torch.ones(1))
    agreement.PATIENCE_S, contract._LOOK_S = 0.5, 0.2
    saving = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=side))
    if rank == 1:
        saving.start()
        time.sleep(1.5)
    joined = contract.join("test")
    if rank == 0:
        saving.start()
    saving.join()
    return joined.options.enabled


def test_a_rank_that_is_only_late_is_waited_for() -> None:
    assert spawn_ranks(join_late, 2, fresh=True) == [True, True]


def join_switched_off(rank: int, world_size: int) -> tuple[bool, str]:
    stock_group()
    joined = contract.join("test", {"enabled": True})
    return joined.options.enabled, serving_name()


def test_the_off_switch_wins() -> None:
    results = spawn_ranks(join_switched_off, 2, fresh=True, env={"DEEPYTORCH_ENABLED": "0"})
    assert results == [(False, "gloo")] * 2


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(contract.IntegrationError, match="call init_process_group"):
        contract.join("test")


def train_workload(rank: int, world_size: int, framework: str, ours: bool) -> dict[str, Any]:
    from deepytorch import workloads

    if not ours:
        deepytorch.deactivate()
    job = workloads.TrainJob(framework=framework, world_size=world_size, parameters=4096)
    step = workloads.load(framework).build(job, torch.device("cpu"), ours=ours)
    losses = [step().item() for _ in range(20)]
    return {"losses": losses, "native": deepytorch.report().native_calls}


@pytest.mark.parametrize(
    "framework",
    [
        "ddp",
        pytest.param("ddp-small-buckets", marks=pytest.mark.extended),
        pytest.param("fsdp1", marks=pytest.mark.extended),
        "accelerate-ddp",
        pytest.param("deepspeed-zero2", marks=pytest.mark.extended),
        pytest.param("tensor-parallel", marks=pytest.mark.extended),
        "tensor-parallel-decode",
    ],
)
def test_what_bench_train_compares_has_the_same_losses(
    framework: str, deepspeeds_ranks: dict[str, Any]
) -> None:
    stock = spawn_ranks(train_workload, 2, framework, False, **deepspeeds_ranks)
    ours = spawn_ranks(train_workload, 2, framework, True, **deepspeeds_ranks)
    assert [rank["losses"] for rank in ours] == [rank["losses"] for rank in stock]
    assert [rank["native"] for rank in stock] == [0, 0]
    assert all(rank["native"] > 0 for rank in ours)


class Calling:
    def act(self, what: str) -> str:
        """Says who acted."""
        return f"{type(self).__name__} {what}"


class CallingBelow(Calling):
    def act(self, what: str) -> str:
        return f"below: {super().act(what)}"


def twice(original: Any, owner: Any, what: str) -> str:
    return " and ".join([original(what)] * 2)


def loud(original: Any, owner: Any, what: str) -> str:
    return original(what.upper())


def test_calls_of_one_object_go_around_with_the_last_outermost() -> None:
    stock, owner, other = Calling.act, Calling(), Calling()
    changes = contract.Changes()
    changes.around(owner, "act", twice)
    changes.around(owner, "act", loud)
    assert owner.act("here") == owner.act(what="here") == "Calling HERE and Calling HERE"
    assert other.act("here") == copy.deepcopy(owner).act("here") == "Calling here"
    assert vars(owner) == vars(other) == {}
    assert owner.act.__doc__ == "Says who acted."
    assert around.is_put(owner, "act")
    changes.undo()
    assert Calling.act is stock
    assert not around.is_put(owner, "act")


def test_a_method_that_calls_its_parents_is_gone_around_once() -> None:
    stock, owner, above = CallingBelow.act, CallingBelow(), Calling()
    changes = contract.Changes()
    changes.around(owner, "act", twice)
    changes.around(above, "act", twice)
    assert owner.act("here") == "below: CallingBelow here and below: CallingBelow here"
    assert above.act("here") == "Calling here and Calling here"
    changes.undo()
    assert CallingBelow.act is stock


def test_what_somebody_put_on_the_object_is_gone_around_too() -> None:
    owner = Calling()
    owner.act = lambda what: f"mine {what}"  # type: ignore[method-assign]
    changes = contract.Changes()
    changes.around(owner, "act", twice)
    assert owner.act("here") == "mine here and mine here"
    changes.undo()
    assert owner.act("here") == "mine here"


def test_going_around_keeps_nothing_alive() -> None:
    owner, changes = Calling(), contract.Changes()
    changes.around(owner, "act", twice)
    contract.mark(owner, "test", changes)
    kept, method = weakref.ref(owner), owner.act
    del owner
    assert method("here") == "Calling here and Calling here"
    del method
    assert kept() is None
    changes.undo()
