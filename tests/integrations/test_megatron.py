"""Megatron-core over the factory's groups: the losses of gloo, native operations, nothing left.

Megatron trains on GPUs only; `megatron_on_cpu` stands in for them. The ranks have their own pool of
workers because of it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepytorch_core import testing
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import rank_store, spawn_ranks

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "docs" / "examples"
# Workers that no other tests use.
PRELOAD = (str(HERE / "megatron_preloaded.py"),)

Layout = dict[str, int]


def ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    return spawn_ranks(function, world_size, *args, preload=PRELOAD, timeout_s=110)


@contextlib.contextmanager
def stock_world(rank: int, world_size: int, name: str = "world") -> Any:
    """Torch's own gloo, on CPUs that Megatron takes for GPUs; all is put back at the end."""
    if not hasattr(sys, "megatron_on_cpu"):
        runpy.run_path(str(HERE / "megatron_on_cpu.py"))["install"]()
        sys.megatron_on_cpu = True  # type: ignore[attr-defined]
    from megatron.core import parallel_state

    import deepytorch

    deepytorch.deactivate()
    store = rank_store(name)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield parallel_state
    finally:
        parallel_state.destroy_model_parallel()


def pretend_gpus() -> None:
    """With a deepytorch that is imported and not active."""
    runpy.run_path(str(HERE / "megatron_on_cpu.py"))["install"]()
    import deepytorch

    deepytorch.deactivate()


def train(collection: Any, **kwargs: Any) -> list[float]:
    losses: list[float] = runpy.run_path(str(HERE / "megatron_gpt.py"))["train"](
        collection, **kwargs
    )
    return losses


def backends_of(collection: Any) -> dict[str, str]:
    return {
        name: serving_name(group)
        for name, group in vars(collection).items()
        if isinstance(group, dist.ProcessGroup)
    }


def train_stock(
    rank: int, world_size: int, layout: Layout, distributed_optimizer: bool
) -> list[float]:
    from megatron.core.process_groups_config import ProcessGroupCollection

    with stock_world(rank, world_size) as parallel_state:
        parallel_state.initialize_model_parallel(
            layout.get("tensor", 1), layout.get("pipeline", 1), create_gloo_process_groups=False
        )
        collection = ProcessGroupCollection.use_mpu_process_groups()
        assert set(backends_of(collection).values()) == {"gloo"}
        return train(collection, distributed_optimizer=distributed_optimizer)


def train_ours(
    rank: int, world_size: int, layout: Layout, distributed_optimizer: bool
) -> tuple[list[float], set[str], int]:
    """Losses, the operations that deepytorch carried out between ranks, how many it did not."""
    with stock_world(rank, world_size):
        import deepytorch
        from deepytorch.integrations.megatron import ProcessGroupFactory
        from deepytorch_core import _core

        factory = ProcessGroupFactory(**layout)
        collection = factory.build(create_gloo_process_groups=False)
        assert set(backends_of(collection).values()) == {"deepytorch"}
        _core.reset_statistics()
        losses = train(collection, distributed_optimizer=distributed_optimizer)
        report = deepytorch.report()
        native = {row.op for row in report.rows if row.algorithm not in ("delegate", "local")}
        factory.undo()
        return losses, native, report.delegated_calls


@pytest.mark.parametrize(
    ("layout", "distributed_optimizer", "native"),
    [
        ({"tensor": 2}, False, {"all_reduce"}),
        pytest.param({"data": 2}, False, {"all_reduce"}, marks=pytest.mark.extended),
        ({"data": 2}, True, {"all_reduce", "all_gather", "reduce_scatter"}),
        ({"pipeline": 2}, False, {"send", "recv"}),
        pytest.param({"tensor": 2, "data": 2}, False, {"all_reduce"}, marks=pytest.mark.extended),
        pytest.param(
            {"tensor": 2, "data": 2},
            True,
            {"all_reduce", "all_gather", "reduce_scatter"},
            marks=pytest.mark.extended,
        ),
    ],
    ids=["tp2", "dp2", "dp2-optimizer", "pp2", "tp2-dp2", "tp2-dp2-optimizer"],
)
def test_losses_are_gloos(layout: Layout, distributed_optimizer: bool, native: set[str]) -> None:
    world_size = 4 if len(layout) > 1 else 2
    stock = ranks(train_stock, world_size, layout, distributed_optimizer)
    ours = ranks(train_ours, world_size, layout, distributed_optimizer)
    # The last rank is in a pipeline's last stage: it has the losses.
    assert len(stock[-1]) == 20 * 2
    assert stock[-1][-1] != stock[-1][0]
    for expected, (losses, done, delegated) in zip(stock, ours, strict=True):
        if world_size == 2:
            assert losses == expected
        else:
            assert losses == pytest.approx(expected, rel=1e-5)
        assert native <= done
        assert delegated == 0


CHOICES: list[tuple[dict[str, str], dict[str, str]]] = [
    (
        {"pp": "gloo", "dp": "stock", "mp": "gloo"},
        {"tp": "deepytorch", "pp": "gloo", "dp": "gloo", "dp_cp": "gloo", "intra_dp_cp": "gloo"}
        | {"mp": "gloo", "tp_dp_cp": "deepytorch"},
    ),
    (
        {"default": "stock", "tp": "deepytorch", "dp": "deepytorch", "dp_cp": "stock"},
        {"tp": "deepytorch", "dp": "deepytorch", "dp_cp": "gloo", "pp": "gloo", "ep": "gloo"},
    ),
]


def chosen(rank: int, world_size: int, choice: dict[str, str]) -> dict[str, str]:
    with stock_world(rank, world_size):
        from deepytorch.integrations.megatron import ProcessGroupFactory

        factory = ProcessGroupFactory(tensor=2, backend_for=choice)
        collection = factory.build()
        assert factory.build() is collection
        value = torch.ones(3)
        dist.all_reduce(value, group=collection.tp)
        dist.all_reduce(value, group=collection.mp)
        assert value.tolist() == [4.0] * 3
        found = backends_of(collection)
        factory.undo()
        return found


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_each_group_has_the_backend_chosen_for_it(
    choice: dict[str, str], expected: dict[str, str]
) -> None:
    for found in ranks(chosen, 2, choice):
        assert {name: found[name] for name in expected} == expected


def installed(rank: int, world_size: int) -> tuple[dict[str, str], list[str], bool]:
    with stock_world(rank, world_size) as parallel_state:
        from megatron.core.process_groups_config import ProcessGroupCollection

        from deepytorch.integrations.megatron import IntegrationError, ProcessGroupFactory

        functions = (parallel_state.create_group, parallel_state.initialize_model_parallel)
        factory = ProcessGroupFactory(tensor=2, backend_for={"pp": "stock"})
        factory.install()
        factory.install()
        messages = []
        for call in (
            {"pipeline_model_parallel_size": 2},
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_comm_backend": "ucc"},
        ):
            with pytest.raises(IntegrationError) as error:
                parallel_state.initialize_model_parallel(**call)
            messages.append(str(error.value))
        parallel_state.initialize_model_parallel(2)
        # Code that reads the globals.
        found = {
            "tp": serving_name(parallel_state.get_tensor_model_parallel_group()),
            "pp": serving_name(parallel_state.get_pipeline_model_parallel_group()),
            "dp": serving_name(parallel_state.get_data_parallel_group()),
        }
        collection = ProcessGroupCollection.use_mpu_process_groups()
        assert collection.tp is parallel_state.get_tensor_model_parallel_group()
        factory.undo()
        assert parallel_state.is_initialized()  # what the framework made is the framework's
        after = (parallel_state.create_group, parallel_state.initialize_model_parallel)
        return found, messages, after == functions


def test_a_framework_that_initialises_by_itself_gets_the_chosen_groups() -> None:
    for found, messages, restored in ranks(installed, 2):
        assert found == {"tp": "deepytorch", "pp": "gloo", "dp": "deepytorch"}
        assert messages[0].startswith(
            "megatron: initialize_model_parallel got tensor_model_parallel_size=1 and "
            "ProcessGroupFactory tensor=2: give both the same sizes"
        )
        assert "give one of them" in messages[1]
        assert restored


def undone(rank: int, world_size: int) -> list[str]:
    from torch.distributed import distributed_c10d as c10d

    with stock_world(rank, world_size) as parallel_state:
        from deepytorch.integrations.megatron import ProcessGroupFactory

        before = dict(vars(parallel_state))
        groups = list(c10d._world.pg_map)
        factory = ProcessGroupFactory(tensor=2)
        first = factory.build()
        factory.undo()
        factory.undo()
        after = dict(vars(parallel_state))
        different = [
            name for name in {**before, **after} if before.get(name) is not after.get(name)
        ]
        assert list(c10d._world.pg_map) == groups
        assert serving_name() == "gloo"
        assert factory.build() is not first
        factory.undo()
        return different


def test_undo_leaves_parallel_state_as_found() -> None:
    assert ranks(undone, 2) == [[], []]


def switched_off(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, str]:
    if not options:
        os.environ["DEEPYTORCH_ENABLED"] = "0"  # noqa: TID251
    with stock_world(rank, world_size):
        from deepytorch.integrations.megatron import ProcessGroupFactory

        factory = ProcessGroupFactory(tensor=2, backend_for={"pp": "deepytorch"}, **options)
        found = backends_of(factory.build())
        factory.undo()
        os.environ.pop("DEEPYTORCH_ENABLED", None)  # noqa: TID251
        return {**found, "world": serving_name()}


@pytest.mark.parametrize("options", [{"enabled": False}, {"collectives": "stock"}, {}])
def test_switched_off_all_groups_are_stock(options: dict[str, Any]) -> None:
    for found in ranks(switched_off, 2, options):
        assert set(found.values()) == {"gloo"}


def refused(rank: int, world_size: int, given: list[dict[str, Any]]) -> str:
    with stock_world(rank, world_size) as parallel_state:
        from deepytorch.integrations.megatron import IntegrationError, ProcessGroupFactory

        arguments = dict(given[rank])
        for_build = arguments.pop("build", {})
        before = dict(vars(parallel_state))
        with pytest.raises(IntegrationError) as error:
            ProcessGroupFactory(**arguments).build(**for_build)
        assert dict(vars(parallel_state)) == before
        assert serving_name() == "gloo"
        return str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"tensor": 3}] * 2, "tensor 3 x pipeline 1 x context 1 = 3 ranks, which does not divide"),
        ([{"tensor": 2, "data": 2}] * 2, "x data 2 = 4 ranks, and the job has 2: change the sizes"),
        ([{"expert": 4}] * 2, "tensor 1 x expert 4 x pipeline 1"),
        ([{"tensor": 0}] * 2, "tensor=0: expected a whole number of ranks above 0"),
        (
            [{"backend_for": {"ddp": "stock"}}] * 2,
            "backend_for has no group 'ddp' (did you mean dp?); valid groups: tp, pp,",
        ),
        (
            [{}, {"backend_for": {"dp": "deeptorch"}}],
            "megatron on rank 1: backend_for['dp']='deeptorch' (did you mean deepytorch?); valid "
            "backends: deepytorch, stock, gloo",
        ),
        ([{"backend_for": {"pp": "nccl"}}] * 2, "'pp']='nccl': this torch was built without it"),
        (
            [{"backend_for": {"intra_dp_cp": "stock"}}] * 2,
            "names intra_dp_cp, which this layout doesn't make: leave it out; groups that it makes",
        ),
        ([{"colectives": "auto"}] * 2, "unknown option 'colectives' (did you mean collectives?)"),
        (
            [{"tensor": 2}, {"pipeline": 2}],
            "rank 0 was given tensor=2 and rank 1 tensor=1: give every rank the same options",
        ),
        (
            [{"build": {"ordr": "tp-dp"}}] * 2,
            "no argument 'ordr'; initialize_model_parallel takes:",
        ),
        (
            [{"build": {"tensor_model_parallel_size": 2}}] * 2,
            "no argument 'tensor_model_parallel_size'; give sizes to ProcessGroupFactory",
        ),
    ],
)
def test_bad_input_is_one_line_with_the_remedy_on_every_rank(
    given: list[dict[str, Any]], said: str
) -> None:
    for message in ranks(refused, 2, given):
        assert said in message
        assert message.startswith("megatron")
        assert "\n" not in message


def refused_twice(rank: int, world_size: int) -> list[str]:
    with stock_world(rank, world_size) as parallel_state:
        from deepytorch.integrations.megatron import IntegrationError, ProcessGroupFactory

        messages = []
        factory = ProcessGroupFactory(tensor=2)
        factory.build()
        with pytest.raises(IntegrationError) as error:
            ProcessGroupFactory(tensor=2).build()
        messages.append(str(error.value))
        factory.undo()
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        with pytest.raises(IntegrationError) as error:
            factory.build()
        messages.append(str(error.value))
        return messages


def test_groups_that_exist_already_are_an_error() -> None:
    for second, initialised in ranks(refused_twice, 2):
        assert "another ProcessGroupFactory is in force: call its undo() first" in second
        assert "parallel_state has groups already: call build() in place of" in initialised


def with_nccl_options(rank: int, world_size: int) -> str:
    with stock_world(rank, world_size):
        from deepytorch.integrations.megatron import ProcessGroupFactory

        # Builds of torch without NCCL don't have the class, which Megatron makes an object of.
        torch.distributed.ProcessGroupNCCL = SimpleNamespace(Options=SimpleNamespace)  # type: ignore[misc]
        try:
            collection = ProcessGroupFactory(tensor=2).build(high_priority_stream_groups=["tp"])
        finally:
            del torch.distributed.ProcessGroupNCCL
        value = torch.ones(3)
        dist.all_reduce(value, group=collection.tp)
        assert value.tolist() == [2.0] * 3
        return serving_name(collection.tp)


def test_options_for_nccl_are_tolerated() -> None:
    assert ranks(with_nccl_options, 2) == ["deepytorch"] * 2


def in_two_worlds(rank: int, world_size: int) -> list[str]:
    from deepytorch.integrations.megatron import ProcessGroupFactory

    found = []
    lost = ProcessGroupFactory(tensor=2, backend_for={"tp": "stock"})
    for number, factory in enumerate((lost, ProcessGroupFactory(tensor=2), lost)):
        with stock_world(rank, world_size, f"world {number}"):  # nothing is undone
            found.append(serving_name(factory.build().tp))
        dist.destroy_process_group()
    return found


def test_a_factory_that_lost_its_world_is_not_in_the_way() -> None:
    assert ranks(in_two_worlds, 2) == [["gloo", "deepytorch", "gloo"]] * 2


def on_a_grid(rank: int, world_size: int) -> tuple[str, list[float], set[str]]:
    with stock_world(rank, world_size):
        from megatron.core.hyper_comm_grid import HyperCommGrid

        import deepytorch
        from deepytorch_core import _core

        deepytorch.activate()
        grid = HyperCommGrid([1, 2], ["tp", "dp"], backend="deepytorch")
        group = grid.create_pg("dp")
        _core.reset_statistics()
        value = torch.full((3,), float(rank))
        dist.all_reduce(value, group=group)
        done = {row.algorithm for row in deepytorch.report().rows}
        return serving_name(group), value.tolist(), done


def test_a_grid_takes_our_name_as_its_backend() -> None:
    assert ranks(on_a_grid, 2) == [("deepytorch", [1.0] * 3, {"one_shot"})] * 2


def with_experts(rank: int, world_size: int) -> dict[str, int]:
    with stock_world(rank, world_size):
        from deepytorch.integrations.megatron import ProcessGroupFactory

        factory = ProcessGroupFactory(
            context=2, expert=2, backend_for={"ep": "deepytorch", "expt_dp": "stock"}
        )
        collection = factory.build(create_gloo_process_groups=False)
        assert serving_name(collection.ep) == "deepytorch"
        assert serving_name(collection.expt_dp) == "gloo"
        sizes = {name: getattr(collection, name).size() for name in ("cp", "dp", "ep", "expt_dp")}
        factory.undo()
        return sizes


def test_context_and_expert_groups() -> None:
    expected = {"cp": 2, "dp": 2, "ep": 2, "expt_dp": 2}
    assert ranks(with_experts, 4) == [expected] * 4


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("0.99.0", "megatron-core 0.99.0 is not known to this adapter, which is for >=0.16,<0.20"),
        (None, "megatron-core is not installed: pip install 'megatron-core=="),
    ],
)
def test_a_wrong_version_is_named(
    found: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepytorch.integrations.megatron import IntegrationError, ProcessGroupFactory

    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(IntegrationError, match=re.escape(said)):
        ProcessGroupFactory().build()


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    from deepytorch.integrations.megatron import IntegrationError, ProcessGroupFactory

    with pytest.raises(IntegrationError, match="call init_process_group"):
        ProcessGroupFactory().build()


def test_the_factorys_example_runs() -> None:
    factory = EXAMPLES / "megatron_factory.py"
    said, _ = testing.run_script(HERE / "megatron_on_cpu.py", factory, preload=PRELOAD)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert re.search(r"reduce_scatter +(pipelined|one_shot)", said), said


def run_script(rank: int, world_size: int, script: str) -> tuple[str, int]:
    """Run a script written for torchrun; return what it prints and its number of native calls."""
    pretend_gpus()
    from deepytorch_core import _core

    _core.reset_statistics()
    init = dist.init_process_group
    # These ranks meet at a store that has seen other worlds; torchrun's is new for each script.
    place = {"store": rank_store("script"), "rank": rank, "world_size": world_size}
    dist.init_process_group = functools.partial(init, **place)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_path(script, run_name="__main__")
    finally:
        dist.init_process_group = init
    native = sum(row["calls"] for row in _core.statistics() if row["algorithm"] != "delegate")
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return said.getvalue(), native


@pytest.mark.extended
def test_megatrons_simple_loop_differs_in_one_line(tmp_path: Path) -> None:
    ours = EXAMPLES / "megatron_simple_gpt.py"
    stock = tmp_path / "stock.py"
    text, changes = re.subn(
        r"ProcessGroupFactory\(\s*tensor=(\w+), pipeline=(\w+)\s*\)\.build\(\)",
        r"parallel_state.initialize_model_parallel(\1, \2)",
        ours.read_text(),
    )
    assert changes == 1
    stock.write_text(text)
    (expected, no_calls), _ = ranks(run_script, 2, str(stock))
    (said, calls), _ = ranks(run_script, 2, str(ours))
    assert said == expected
    assert said.count("Losses reduced") == 5
    assert "Successfully loaded the model" in said
    assert (no_calls, calls > 0) == (0, True)
