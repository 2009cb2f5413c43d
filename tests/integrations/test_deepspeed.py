"""DeepSpeed's engines on deepytorch: the losses of stock DeepSpeed, by native collectives."""

from __future__ import annotations

import base64
import collections
import gc
import json
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepytorch
from deepytorch.integrations import deepspeed as adapter
from deepytorch.integrations.common import contract
from deepytorch.integrations.deepspeed import buckets
from deepytorch_core.base.patching import original_of
from deepytorch_core.c10d import deepspeed_flag
from deepytorch_core.c10d.patches import serving_name
from deepytorch_core.testing import assert_same_on_all_ranks, spawn_ranks

# One fixture trains in every mode, also on a busy machine.
pytestmark = pytest.mark.timeout(240)

NUM_STEPS = 8

OFFLOAD = {
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
# name -> (stage, more of the section zero_optimization, more of the configuration)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stage 0": (0, {}, {}),
    "stage 1": (1, {}, {}),
    "stage 2": (2, {}, {}),
    "stage 2, reduce_scatter": (2, {"use_multi_rank_bucket_allreduce": False}, {}),
    "stage 3": (3, {}, {}),
    "stage 3, offload": (3, OFFLOAD, {"zero_force_ds_cpu_optimizer": False}),
    "stage 2, accumulation": (2, {}, {"gradient_accumulation_steps": 2}),
    "stage 3, accumulation": (3, {}, {"gradient_accumulation_steps": 2}),
    "stage 0, bf16": (0, {}, BF16),
    "stage 1, bf16": (1, {}, BF16),
    "stage 2, fp16": (2, {}, FP16),
    "stage 3, bf16": (3, {}, BF16),
    "stage 3, fp16": (3, {}, FP16),
}
# Cases beside these have what is different in them.
EXTENDED = ("stage 1", "stage 0, bf16", "stage 3, bf16", "stage 3, fp16")
NATIVE = {
    0: {"all_reduce", "broadcast"},
    1: {"all_reduce", "all_gather", "broadcast"},
    2: {"all_reduce", "all_gather", "broadcast"},
    3: {"reduce_scatter", "all_gather", "broadcast"},
}


def configuration(name: str = "stage 2") -> dict[str, Any]:
    stage, zero, more = CASES[name]
    persistent = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **persistent, **zero},
        "gradient_clipping": 1.0,
        **more,
    }


def flagged(name: str = "stage 2", **options: Any) -> dict[str, Any]:
    return {**configuration(name), "deepytorch": {"enabled": True, **options}}


WHOLE = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8  # elements of the model


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    )


def engine(given: Any, initialize: Callable[..., Any] | None = None) -> Any:
    import deepspeed

    module = model()
    made, *_ = (initialize or deepspeed.initialize)(
        model=module, model_parameters=module.parameters(), config=given
    )
    return made


def train(made: Any, num_steps: int = NUM_STEPS, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    dtype = next(made.module.parameters()).dtype
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(4, 32, generator=generator).to(dtype)
        targets = torch.randn(4, 8, generator=generator).to(dtype)
        loss = torch.nn.functional.mse_loss(made(inputs), targets)
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses


def calls(*, native: bool) -> collections.Counter[str]:
    counted: collections.Counter[str] = collections.Counter()
    for row in deepytorch.report().rows:
        if (row.algorithm != "delegate") is native:
            counted[row.op] += row.calls
    return counted


def stock_group() -> None:
    """A group of torch's own; importing this module has activated deepytorch."""
    deepytorch.deactivate()
    dist.init_process_group("gloo")


def compare(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed asks oneDNN, which has fast fp16 on few CPUs; torch has it on all.
    get_accelerator().is_fp16_supported = lambda: True
    results = {}
    for name in names:
        stock = train(engine(configuration(name)))
        assert serving_name() == "gloo"
        before, delegated = calls(native=True), calls(native=False)
        ours = train(engine(flagged(name), adapter.initialize))
        results[name] = {
            "stock": stock,
            "ours": ours,
            "backend": serving_name(),
            "native": set(calls(native=True) - before),
            "delegated": set(calls(native=False) - delegated),
        }
        adapter.undo()
    return results


def continue_from_checkpoints(folder: Path) -> list[list[float]]:
    """For stages 2 and 3, saved by stock and by ours: further losses, and the loader's."""
    import deepspeed

    def initialize(with_ours: bool) -> Any:
        chosen = adapter.initialize if with_ours else original_of(deepspeed.initialize)
        return engine(configuration(name), chosen)

    continued = []
    for name in ("stage 2", "stage 3"):
        for saved_by_ours in (False, True):
            tag = f"{name} {saved_by_ours}"
            saver = initialize(saved_by_ours)
            train(saver, 3)
            saver.save_checkpoint(str(folder), tag=tag)
            continued.append(train(saver, 3, seed=1))
            adapter.undo()
            loader = initialize(not saved_by_ours)
            path, _ = loader.load_checkpoint(str(folder), tag=tag)
            assert path is not None
            continued.append(train(loader, 3, seed=1))
            adapter.undo()
    return continued


class Arguments:
    """Arguments as argparse makes them of `--deepspeed_config`."""

    def __init__(self, path: str) -> None:
        self.local_rank = -1
        self.deepspeed_config = path


def flag_wherever_it_is(folder: Path) -> dict[str, list[Any]]:
    import deepspeed

    path = str(folder / f"ds_config_{dist.get_rank()}.json")
    Path(path).write_text("# Hjson takes comments\n" + json.dumps(flagged(tune="force")))
    buckets.CANDIDATES = (1 << 8, 1 << 10, 1 << 12)
    given = flagged(tune="force")
    text = json.dumps(given)
    args = Arguments(path)
    ways: dict[str, dict[str, Any]] = {
        "dict": {"config": given},
        "file": {"config": path},
        "base64": {"config": base64.urlsafe_b64encode(text.encode()).decode()},
        "config_params": {"config_params": given},
        "args": {"args": args},
    }
    seen = {}
    for name, keywords in ways.items():
        deepspeed_flag.arm("test")
        module = model()
        made, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), **keywords
        )
        train(made, 1)
        size = made.zero_reduce_bucket_size()
        seen[name] = [serving_name(), made.config["deepytorch"]["enabled"], size]
        assert_same_on_all_ranks(size, name)
        adapter.undo()
    assert json.dumps(given) == text
    assert args.deepspeed_config == path
    assert args.local_rank == dist.get_rank()
    return seen


def bucket_sizes(folder: Path) -> list[tuple[int, int, int]]:
    buckets.CANDIDATES = (1 << 8, 1 << 10, 1 << 12)
    measured = []
    for options, sizes in (
        ({"tune": "force"}, {"reduce_bucket_size": 12345}),
        ({"tune": "force"}, {"reduce_bucket_size": "auto", "prefetch_bucket_size": "auto"}),
        ({"tune": "force", "deterministic": True}, {"reduce_bucket_size": "auto"}),
        ({"tune": "off"}, {}),
    ):
        given = flagged("stage 3", **options)
        given["zero_optimization"].update(sizes)
        made = engine(given, adapter.initialize)
        adapter.undo()
        measured.append(
            (
                made.zero_reduce_bucket_size(),
                made.zero_prefetch_bucket_size(),
                made.zero_allgather_bucket_size(),
            )
        )
    return measured


def state_of_deepspeed() -> dict[str, Any]:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import engine as engine_module

    owners = {
        "deepspeed": deepspeed,
        "comm": deepspeed.comm,
        "engine": engine_module.DeepSpeedEngine,
        "accelerator": get_accelerator(),
    }
    state = {
        f"{owner}.{name}": value
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
        # Built by use, whoever uses it.
        if name not in ("__warningregistry__", "dist", "cdb", "max_mem")
    }
    return {**state, "class": type(deepspeed), "loader": deepspeed.__spec__.loader}


def apply_and_undo(folder: Path) -> tuple[list[str], str, str, bool, list[str]]:
    def changed() -> list[str]:
        now = state_of_deepspeed()
        names = before.keys() | now.keys()
        return sorted(name for name in names if now.get(name) is not before.get(name))

    train(engine(configuration()), 1)
    before = state_of_deepspeed()
    for _ in range(2):
        deepspeed_flag.arm("test")
        for _ in range(2):  # twice is once
            train(engine(flagged()), 1)
        during, backend = changed(), serving_name()
        adapter.undo()
        adapter.undo()
    return during, backend, serving_name(), deepytorch.is_active(), changed()


def disabled(folder: Path) -> tuple[str, bool]:
    deepspeed_flag.arm("test")
    train(engine(flagged(enabled=False)), 1)
    adapter.undo()
    return serving_name(), deepytorch.is_active()


PARTS: tuple[Callable[..., Any], ...] = (
    compare,
    continue_from_checkpoints,
    flag_wherever_it_is,
    bucket_sizes,
    apply_and_undo,
    disabled,
)


def run_parts(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, Any]:
    stock_group()
    adapter.undo()
    results: dict[str, Any] = {}
    for function in PARTS:
        more = [names] if function is compare else []
        try:
            results[function.__name__] = function(Path(folder), *more)
        except Exception:
            results[function.__name__] = traceback.format_exc()
            break  # the ranks may be out of step
    return results


@pytest.fixture(scope="module")
def seen(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    deepspeeds_ranks: dict[str, Any],
) -> list[Any]:
    """Return what every rank saw in PARTS. One job serves all: DeepSpeed starts slowly."""
    folder = str(tmp_path_factory.mktemp("deepspeed"))
    asked = {item.name for item in request.session.items}
    names = [name for name in CASES if f"{COMPARING}[{name}]" in asked]
    return spawn_ranks(run_parts, 2, folder, names, **deepspeeds_ranks, timeout_s=200)


def part(seen: list[Any], function: Callable[..., Any]) -> list[Any]:
    results = [rank.get(function.__name__, "an earlier part failed") for rank in seen]
    for result in results:
        assert not isinstance(result, str), result
    return results


@pytest.mark.parametrize(
    "name",
    [pytest.param(case, marks=[pytest.mark.extended] * (case in EXTENDED)) for case in CASES],
)
def test_losses_are_those_of_stock_deepspeed(seen: list[Any], name: str) -> None:
    for results in part(seen, compare):
        result = results[name]
        assert result["ours"] == result["stock"]
        assert len(set(result["stock"])) > 1
        assert result["backend"] == "deepytorch"
        assert result["native"] >= NATIVE[CASES[name][0]]
        assert not result["delegated"]


COMPARING = test_losses_are_those_of_stock_deepspeed.__name__


def test_checkpoints_go_from_stock_to_ours_and_back(seen: list[Any]) -> None:
    for continued in part(seen, continue_from_checkpoints):
        for stage in (continued[:4], continued[4:]):
            assert stage[0] == stage[1] == stage[2] == stage[3]


def test_the_flag_is_seen_wherever_deepspeed_takes_its_configuration(seen: list[Any]) -> None:
    for ways in part(seen, flag_wherever_it_is):
        assert len(ways) == 5
        for backend, enabled, size in ways.values():
            assert (backend, enabled) == ("deepytorch", True)
            assert size in (1 << 8, 1 << 10, 1 << 12, WHOLE)


def test_only_open_bucket_sizes_are_filled_and_only_by_measuring(seen: list[Any]) -> None:
    default = (500_000_000, 50_000_000, 500_000_000)
    for given, auto, deterministic, off in part(seen, bucket_sizes):
        assert given[0] == 12345
        assert {given[1], *auto[:2]} <= {1 << 8, 1 << 10, 1 << 12}
        assert given[2] == auto[2] == default[2]
        assert deterministic == off == default


def test_one_function_is_replaced_and_undo_leaves_deepspeed_as_it_was(seen: list[Any]) -> None:
    expected = (["deepspeed.initialize"], "deepytorch", "gloo", False, [])
    assert part(seen, apply_and_undo) == [expected] * 2


def test_disabled_is_stock(seen: list[Any]) -> None:
    assert part(seen, disabled) == [("gloo", False)] * 2


def by_name(rank: int, world_size: int) -> tuple[str, set[str], set[str]]:
    deepytorch.deactivate()
    import deepspeed

    deepspeed.init_distributed(dist_backend="deepytorch")
    train(engine(configuration()), 2)
    return serving_name(), set(calls(native=True)), set(calls(native=False))


def test_the_backend_can_be_named_to_init_distributed(deepspeeds_ranks: dict[str, Any]) -> None:
    for backend, native, delegated in spawn_ranks(by_name, 2, **deepspeeds_ranks):
        assert backend == "deepytorch"
        assert native >= NATIVE[2]
        assert not delegated


def after_zero_init(rank: int, world_size: int) -> tuple[list[float], list[float], set[str]]:
    deepytorch.deactivate()
    import deepspeed

    def made(given: dict[str, Any]) -> Any:
        with deepspeed.zero.Init(config_dict_or_path=given):
            module = model()
        assert dist.is_initialized()
        return deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=given
        )[0]

    stock = train(made(configuration("stage 3")))
    deepspeed_flag.arm("test")
    assert serving_name() == "gloo"
    return stock, train(made(flagged("stage 3"))), set(calls(native=True))


def test_a_group_that_zero_init_has_made_is_upgraded(deepspeeds_ranks: dict[str, Any]) -> None:
    for stock, ours, native in spawn_ranks(after_zero_init, 2, **deepspeeds_ranks):
        assert ours == stock
        assert native >= NATIVE[3]


def fail_with(rank: int, world_size: int, sections: list[Any]) -> tuple[str, str]:
    stock_group()
    deepspeed_flag.arm("test")
    section = sections[rank]
    if None in sections:
        contract.here_limit_s = lambda: 0.5
    if section is None:
        return "", serving_name()
    with pytest.raises(contract.IntegrationError) as error:
        engine({**configuration(), "deepytorch": section})
    assert not deepytorch.is_active()
    return str(error.value), serving_name()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            [{"enabled": True, "colectives": "native"}] * 2,
            "unknown option 'colectives' (did you mean collectives?); valid options: enabled, co",
        ),
        ([{"tune": "perhaps"}] * 2, "deepspeed on rank 0: tune='perhaps': expected one of auto"),
        (["often"] * 2, "deepspeed on rank 0: enabled='often': expected one of true"),
        (
            [{"enabled": True}, {"enabled": False}],
            "rank 0 was given enabled=True and rank 1 enabled=False: give every rank the same",
        ),
        (
            [{"staging_mb": 8}, {"staging_mb": 16}],
            "rank 0 was given staging_mb=8 and rank 1 staging_mb=16: give every rank the same",
        ),
    ],
)
def test_a_wrong_section_is_the_same_line_on_every_rank(
    sections: list[Any], said: str, deepspeeds_ranks: dict[str, Any]
) -> None:
    for message, backend in spawn_ranks(fail_with, 2, sections, **deepspeeds_ranks):
        assert said in message
        assert "\n" not in message
        assert backend == "gloo"


def test_a_flag_on_some_ranks_only_names_the_others(deepspeeds_ranks: dict[str, Any]) -> None:
    seen = spawn_ranks(fail_with, 2, [{"enabled": True}, None], **deepspeeds_ranks)
    assert "deepspeed: rank(s) 1 did not call it within 0.5 s" in seen[0][0]


def flag_on_rank_0(rank: int, world_size: int, how: str) -> str:
    import deepspeed

    deepytorch.deactivate()
    if how != "not connected":
        dist.init_process_group("gloo")
    deepspeed_flag.arm("test")
    given = flagged() if rank == 0 or how == "switched off" else configuration()
    if how == "switched off":
        deepspeed_flag.switched_off = lambda: rank == 1
    with pytest.raises(contract.IntegrationError) as error:
        engine(given, adapter.initialize if how == "switched off" else deepspeed.initialize)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "has"),
    [
        ("connected", 'no section "deepytorch" in DeepSpeed\'s configuration'),
        ("not connected", 'no section "deepytorch" in DeepSpeed\'s configuration'),
        ("switched off", "deepytorch switched off (DEEPYTORCH_ENABLED=0)"),
    ],
)
def test_a_flag_on_some_ranks_only_is_the_same_line_on_every_rank(
    how: str, has: str, deepspeeds_ranks: dict[str, Any]
) -> None:
    seen = spawn_ranks(flag_on_rank_0, 2, how, **deepspeeds_ranks)
    said = f"deepspeed: rank 1 has {has}, and other ranks use deepytorch: give every rank the same"
    assert all(message.startswith(said) and "\n" not in message for message in seen)


def stock_in_turns(rank: int, world_size: int) -> tuple[list[float], bool]:
    stock_group()
    deepspeed_flag.arm("test")
    made = [engine(configuration()) for _ in range(2)][1]
    return train(made, 1), deepytorch.is_active()


def test_without_a_flag_on_any_rank_deepspeed_goes_on(deepspeeds_ranks: dict[str, Any]) -> None:
    results = spawn_ranks(stock_in_turns, 2, **deepspeeds_ranks)
    assert [active for _, active in results] == [False, False]


def switched_off(rank: int, world_size: int) -> tuple[str, bool, int]:
    stock_group()
    deepspeed_flag.arm("test")
    for more in ({}, {"no such option": 1}):
        train(engine(flagged(**more)), 1)
        train(engine(flagged(**more), adapter.initialize), 1)
    return serving_name(), deepytorch.is_active(), deepytorch.report().native_calls


def test_switched_off_is_stock(deepspeeds_ranks: dict[str, Any]) -> None:
    how = {**deepspeeds_ranks, "env": {**deepspeeds_ranks["env"], "DEEPYTORCH_ENABLED": "0"}}
    assert spawn_ranks(switched_off, 2, **how) == [("gloo", False, 0)] * 2


def test_a_version_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract.metadata, "version", lambda name: "0.99.1")
    with pytest.raises(contract.IntegrationError) as error:
        adapter.initialize(model=model(), config=configuration())
    assert f"deepspeed 0.99.1 is not known to this adapter, which is for {adapter.VERSIONS}" in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_without_deepspeed_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise contract.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(contract.metadata, "version", version)
    with pytest.raises(contract.IntegrationError, match="pip install 'deepspeed=="):
        adapter.initialize(model=model(), config=configuration())


def dropped(rank: int, world_size: int, folder: str) -> list[Any]:
    """The module, the optimizer and the monitor of engines that nobody has any more."""
    stock_group()
    place = {"enabled": True, "output_path": folder, "job_name": "dropped"}
    found = []
    for name in ("stage 0", "stage 2"):
        made = engine({**flagged(name), "csv_monitor": place})
        train(made, 2)
        parts = (made.module, made.optimizer, made.monitor)
        kept = [weakref.ref(part) for part in parts]
        made.destroy()
        del made, parts
        gc.collect()
        found.append([reference() for reference in kept])
    adapter.undo()
    return found


def test_dropped_engines_go(tmp_path: Path, deepspeeds_ranks: dict[str, Any]) -> None:
    for found in spawn_ranks(dropped, 2, str(tmp_path), **deepspeeds_ranks):
        assert found == [[None] * 3] * 2


def monitored(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Steps that were counted, and what DeepSpeed's monitor wrote, by file: rows of numbers."""
    found = []
    stock_group()
    for name in ("stage 2", "stage 3"):
        place = {"enabled": True, "output_path": str(folder), "job_name": name}
        made = engine({**flagged(name, tune="off", compile="off"), "csv_monitor": place})
        before = deepytorch.report().course["steps"]
        train(made)
        files = {
            path.name: [line.split(",") for line in path.read_text().splitlines()[1:]]
            for path in (folder / name).glob("*.csv")
            if rank == 0
        }
        steps = deepytorch.report().course["steps"] - before
        found.append({"steps": steps, "files": files})
    adapter.undo()
    assert "write_events" not in vars(made.monitor)
    return found


def test_deepspeeds_monitor_writes_figures(
    tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    first, second = spawn_ranks(monitored, 2, tmp_path, **deepspeeds_ranks)
    for report, other in zip(first, second, strict=True):
        # A step in pieces is one step. An engine's first one can't be told from the last
        # of an engine before it.
        assert report["steps"] == other["steps"]
        assert NUM_STEPS - 1 <= report["steps"] <= NUM_STEPS
        steps = [step for step, _ in report["files"]["Train_Samples_lr.csv"]]
        ours = report["files"]["deepytorch_step_ms.csv"]
        assert [step for step, _ in ours] == steps[-report["steps"] :]
        assert all(float(value) > 0 for _, value in ours)
