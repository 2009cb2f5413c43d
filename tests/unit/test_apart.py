"""When ranks count as training apart: two of them over one store, told what went between them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core.base.patching import Patches, original_of
from deepytorch_core.metering import apart, counts

LINE = "seem to train apart"
SIZE = 1000  # bytes of a model below: 4 * 250


class Rank:
    """A rank with a model; what it gives to others is what the test says."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.watch = apart.ApartWatch()
        self.model = model or torch.nn.Linear(250, 1, bias=False)
        self.given = 0
        self.optimizer = self.optimizer_of(self.model)

    @staticmethod
    def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, steps: int, given: int = 0, every: int = 1, first: int = 0) -> Rank:
        """Steps before which so many bytes went to others, at each or every few."""
        self.given += first
        for step in range(1, steps + 1):
            self.given += given if step % every == 0 else 0
            self.watch.stepped(self.optimizer, self.given)
            told = self.watch._telling
            if told is not None:
                told.join()
        return self


class Group:
    """A process group that is not ours, and its backend."""

    _device_types = ("cpu",)

    def __init__(self) -> None:
        self.operations = 0

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.operations


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch's c10d of two ranks, whose store both of the test's ranks use."""
    made = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        _world=SimpleNamespace(pg_map={}),
        PrefixStore=dist.PrefixStore,
        store=dist.HashStore(),
    )
    made._get_default_store = lambda: made.store
    monkeypatch.setattr(apart, "_C10D", "c10d of this test")
    monkeypatch.setitem(sys.modules, "c10d of this test", made)
    monkeypatch.setattr(apart, "_END_LIMIT_S", 0.01)
    monkeypatch.setattr(apart, "_is_at_exit", True)
    return made


@pytest.fixture
def lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, job: SimpleNamespace
) -> Callable[[list[Rank]], int]:
    """Ends the training of these ranks, and tells how many lines were printed until then."""

    def count(ranks: list[Rank]) -> int:
        for rank in ranks:
            monkeypatch.setattr(counts, "given_bytes", lambda rank=rank: rank.given)
            rank.watch.end()
        return capsys.readouterr().err.count(LINE)

    return count


def pair(train: Callable[[Rank], object], *models: Callable[[], torch.nn.Module]) -> list[Rank]:
    made = models or (lambda: None, lambda: None)
    ranks = [Rank(model()) for model in made]
    for rank in ranks:
        train(rank)
    return ranks


def no_sync_never_left(rank: Rank) -> None:
    rank.train(20, given=SIZE).train(1100)


TRAIN_APART = {
    "three steps": lambda rank: rank.train(3),
    "a DDP made before": lambda rank: rank.train(3, first=SIZE),
    "a long training": lambda rank: rank.train(3000),
    "no_sync never left": no_sync_never_left,
}


@pytest.mark.parametrize("train", TRAIN_APART.values(), ids=TRAIN_APART)
def test_ranks_that_train_apart_are_told_once(
    train: Callable[[Rank], object], lines: Callable[[list[Rank]], int]
) -> None:
    assert lines(pair(train)) == 1


def test_a_long_training_hears_of_it_on_the_way(
    capsys: pytest.CaptureFixture[str], job: SimpleNamespace
) -> None:
    pair(lambda rank: rank.train(1000))
    assert LINE not in capsys.readouterr().err
    pair(lambda rank: rank.train(1026))
    told = capsys.readouterr().err
    assert told.count(LINE) == 1
    assert all(word in told for word in ("DistributedDataParallel", ".module", "no_sync()", "LOG="))


def test_steps_that_take_long_need_not_be_as_many(
    capsys: pytest.CaptureFixture[str], job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(apart, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def train(rank: Rank) -> None:
        for _ in range(140):
            now[0] += 120.0
            rank.train(1)

    pair(train)
    assert capsys.readouterr().err.count(LINE) == 1


def large() -> torch.nn.Module:
    return torch.nn.Linear(5000, 2000, bias=False)


@pytest.mark.parametrize(("given", "every"), [(500, 1), (30_000, 100)])
def test_metrics_are_no_gradients(
    given: int, every: int, lines: Callable[[list[Rank]], int]
) -> None:
    ranks = pair(lambda rank: rank.train(300, given=given, every=every), large, large)
    assert lines(ranks) == 1


def test_gradients_may_be_compressed_further_than_averages(
    lines: Callable[[list[Rank]], int],
) -> None:
    assert lines(pair(lambda rank: rank.train(30, given=8_000), large, large)) == 0


@pytest.mark.parametrize(("at", "num_lines"), [((), 1), (range(20), 0), ((5,), 0), ((19,), 0)])
def test_groups_of_gloo_count_their_operations(
    at: Collection[int],
    num_lines: int,
    lines: Callable[[list[Rank]], int],
    job: SimpleNamespace,
) -> None:
    job.ProcessGroupGloo = Group
    group = Group()
    job._world.pg_map[group] = None
    ranks = [Rank(), Rank()]
    for step in range(20):
        group.operations += step in at
        for rank in ranks:
            rank.train(1)
    assert lines(ranks) == num_lines


def average_each(period: int) -> Callable[[Rank], object]:
    return lambda rank: rank.train(3003, given=SIZE, every=period)


def one_average_at_the_end(rank: Rank) -> None:
    rank.train(30)
    rank.given += SIZE


def another_optimizer_after(rank: Rank) -> None:
    rank.train(20, given=SIZE)
    rank.optimizer = rank.optimizer_of(torch.nn.Linear(8, 8))
    rank.train(3000)


def an_optimizer_for_each_sample(rank: Rank) -> None:
    for given in (0, 0, 100):
        rank.optimizer = rank.optimizer_of(torch.nn.Linear(1000, 1000))
        rank.train(300, given=given)


def synchronised_late(rank: Rank) -> None:
    rank.train(10).train(10, given=SIZE)


FINE = {
    "gradients at each step": lambda rank: rank.train(3000, given=SIZE),
    "compressed gradients": lambda rank: rank.train(3000, given=SIZE // 1000),
    "local SGD": average_each(4),
    "post-local SGD": lambda rank: rank.train(100, given=SIZE).train(300, given=SIZE, every=16),
    "DiLoCo": average_each(500),
    "DiLoCo, slow": average_each(1000),
    "DiLoCo in parts of 4 bits": lambda rank: rank.train(3000, given=SIZE // 64, every=12),
    "one average": one_average_at_the_end,
    "a probe of what was trained": another_optimizer_after,
    "an optimizer for each sample": an_optimizer_for_each_sample,
    "two steps": lambda rank: rank.train(2),
    "DDP after some steps": synchronised_late,
}


@pytest.mark.parametrize("train", FINE.values(), ids=FINE)
def test_no_false_alarm(
    train: Callable[[Rank], object], lines: Callable[[list[Rank]], int]
) -> None:
    assert lines(pair(train)) == 0


def frozen() -> torch.nn.Module:
    return torch.nn.Linear(8, 8).requires_grad_(False)


def temperature() -> torch.nn.Module:
    model = torch.nn.Module()
    model.temperature = torch.nn.Parameter(torch.ones(()))
    return model


def shared() -> torch.nn.Module:
    return torch.nn.Linear(8, 8).share_memory()


@pytest.mark.parametrize("model", [frozen, temperature, shared])
def test_what_is_no_model_of_a_ranks_own(
    model: Callable[[], torch.nn.Module], lines: Callable[[list[Rank]], int]
) -> None:
    assert lines(pair(lambda rank: rank.train(1100), model, model)) == 0


def test_one_rank_that_trains_beside_others(lines: Callable[[list[Rank]], int]) -> None:
    assert lines([Rank().train(3000), Rank()]) == 0


def test_ranks_with_models_of_their_own(lines: Callable[[list[Rank]], int]) -> None:
    ranks = pair(lambda rank: rank.train(3000), lambda: None, lambda: torch.nn.Linear(8, 8))
    assert lines(ranks) == 0


def test_steps_before_the_group_do_not_count(
    job: SimpleNamespace, lines: Callable[[list[Rank]], int]
) -> None:
    job.is_initialized = lambda: False
    ranks = pair(lambda rank: rank.train(1000))
    job.is_initialized = lambda: True
    for rank in ranks:
        rank.train(300).train(5, given=SIZE)
    assert lines(ranks) == 0


def of_one_rank(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    job.get_world_size = lambda: 1


def without_group(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    job.is_initialized = lambda: False


def with_a_foreign_backend(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    job._world.pg_map[Group()] = None


def with_rpc(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    rpc = SimpleNamespace(_is_current_rpc_agent_set=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc.api", rpc)


def with_mpi(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace())


def with_a_store_of_few_functions(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Few(dist.Store):
        pass

    job.store = Few()


def with_a_store_that_is_gone(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Any:
        raise ValueError("Default process group has not been initialized")

    job._get_default_store = gone


@pytest.mark.parametrize(
    "prepare",
    [
        *(of_one_rank, without_group, with_a_foreign_backend, with_rpc, with_mpi),
        *(with_a_store_of_few_functions, with_a_store_that_is_gone),
    ],
)
def test_what_is_not_seen_means_silence(
    prepare: Callable[[SimpleNamespace, pytest.MonkeyPatch], None],
    job: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    lines: Callable[[list[Rank]], int],
) -> None:
    prepare(job, monkeypatch)
    assert lines(pair(lambda rank: rank.train(1100))) == 0


@pytest.mark.parametrize("collectives", [True, False])
def test_graphs_that_hold_collectives(
    collectives: bool, monkeypatch: pytest.MonkeyPatch, lines: Callable[[list[Rank]], int]
) -> None:
    given = [0]

    class CUDAGraph:
        def capture_begin(self) -> None:
            given[0] += 100 if collectives else 0

        def capture_end(self) -> None:
            pass

    monkeypatch.setattr(counts, "given_bytes", lambda: given[0])
    patches = Patches()
    apart.install_graphs(SimpleNamespace(CUDAGraph=CUDAGraph), patches)
    ranks = [Rank(), Rank()]
    for rank in ranks:
        monkeypatch.setattr(apart, "_watch", rank.watch)
        graph = CUDAGraph()
        graph.capture_begin()
        graph.capture_end()
        rank.train(1100)
    assert lines(ranks) == (0 if collectives else 1)


def test_torchs_graphs_and_groups_are_watched() -> None:
    from torch.cuda import graphs
    from torch.distributed import distributed_c10d as c10d

    seams = [
        (graphs.CUDAGraph, "capture_begin"),
        (graphs.CUDAGraph, "capture_end"),
        (c10d, "_update_default_pg"),
    ]
    patches = Patches()
    apart.install_graphs(graphs, patches)
    apart.install(c10d, patches)
    try:
        # Maybe by an activation before this test.
        for owner, name in seams:
            assert original_of(getattr(owner, name)) is not getattr(owner, name)
    finally:
        patches.undo()


def test_nothing_is_kept_alive(job: SimpleNamespace) -> None:
    rank = Rank().train(5)
    watch, parameter = rank.watch, weakref.ref(next(rank.model.parameters()))
    del rank
    gc.collect()
    assert parameter() is None
    assert watch._over is False
