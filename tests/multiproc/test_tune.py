"""`deepytorch tune` on a real script of two ranks, and the run after it that starts from it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli import compare, runner
from deepytorch.integrations.deepspeed.buckets import fill_bucket_sizes
from deepytorch_core.base import config
from deepytorch_core.testing import RankError, spawn_ranks
from deepytorch_core.tune import in_force, knobs, stored

# With buckets of 4 MiB a step takes less: which setting wins is no matter of chance. One kind of
# chunks trains something else, another fails.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
chunk = os.environ.get("DEEPYTORCH_CHUNK_BYTES")
for _ in range(int(sys.argv[1])):
    loss = model(torch.randn(8, 256)).square().mean() * (2 if chunk == "262144" else 1)
    if chunk == "65536":
        raise RuntimeError("no memory for such chunks")
    loss.backward()
    time.sleep(0.002 if model.bucket_bytes_cap == 4 << 20 else 0.03)
    optimizer.step()
    optimizer.zero_grad()
print(model.bucket_bytes_cap >> 20)
"""


# Imported once, not by each of many ranks.
PRELOAD = ("torch._dynamo", "torch.distributed.fsdp", "typer.testing")


def spawn(fn: Any, folder: Path, *args: Any) -> list[Any]:
    """Two new ranks, with the environment that a trial gives them."""
    env = {"DEEPYTORCH_ENABLED": "1", "DEEPYTORCH_PROFILE": str(folder / "own.json")}
    return spawn_ranks(fn, 2, *args, env=env, preload=PRELOAD, fresh=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


def run_script(
    rank: int, world_size: int, arguments: list[str], folder: str, tune: str = "off"
) -> dict[str, int]:
    """Run the program as torchrun starts it, in `deepytorch run`; return the settings it had."""
    config.set_current(config.Options.from_mapping({"tune": tune}, base=config.current()))
    os.chdir(folder)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # noqa: TID251  as torchrun does

    runner.main(arguments)
    return in_force.current()


@pytest.fixture
def by_forking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are forked with torch in them, where torchrun would take seconds for each run."""

    def launch(
        job: compare.Job,
        place: Path,
        variables: Mapping[str, str],
        log: Path,
        watch: compare.Watch | None,
    ) -> int:
        assert variables["DEEPYTORCH_PROFILE"] == str(folder / "own.json")
        plan = place / "plan.json"
        view = json.loads(plan.read_text())["workspace"]
        script = compare._arguments(job)[1:]  # after --nproc-per-node
        arguments = ["--compare", str(plan), *script]
        try:
            spawn(run_script, folder, arguments, view)
        except RankError as error:
            log.write_text(str(error))
            return 1
        return 0

    monkeypatch.setattr(compare, "_launch", launch)
    yield
    config.set_current(None)


def test_a_script_is_tuned_and_its_next_run_starts_from_it(
    by_forking: None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (folder / "train.py").write_text(SCRIPT)
    options = ["--budget-steps", "20", "--steps", "4", "--profile", "own.json", "--json", "r.json"]
    done = CliRunner().invoke(
        cli.app, ["tune", *options, "--nproc-per-node", "2", "--", "train.py", "1000"]
    )
    assert done.exit_code == 0, str(done.exception)

    record = json.loads((folder / "r.json").read_text())
    tried = [(trial["settings"], trial["problem"]) for trial in record["tried"]]
    assert [settings for settings, _ in tried] == [
        {},
        {"ddp_bucket_mb": 4},
        {"ddp_bucket_mb": 2},
        {"ddp_bucket_mb": 4, "chunk_bytes": 65536},
        {"ddp_bucket_mb": 4, "chunk_bytes": 262144},
    ]
    problems = [problem for _, problem in tried]
    assert problems[:3] == ["", "", ""]
    assert "no memory for such chunks" in problems[3]
    assert problems[4].startswith("another training")
    assert record["settings"] == {"ddp_bucket_mb": 4}
    assert record["for"]["script"] == "train.py"
    assert {name: len(rounds) for name, rounds in record["rounds"].items()} == {
        "defaults": 3,
        "tuned": 3,
    }
    assert record["loss_checked"]
    assert "all ranks are on one node" in done.output
    for shown in ("ddp_bucket_mb=4", "own.json", "r.json", "deepytorch run --nproc-per-node=2"):
        assert shown in done.output

    # The profile alone makes the next run start from it, whatever its arguments.
    script = [str(folder / "train.py"), "2"]
    assert spawn(run_script, folder, script, str(folder), "auto") == [{"ddp_bucket_mb": 4}] * 2
    assert "44" in "".join(capfd.readouterr().out.split())
    assert spawn(run_script, folder, script, str(folder), "off") == [{}, {}]
    assert "2525" in "".join(capfd.readouterr().out.split())


def different_profiles(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], list[str]]:
    """Each rank has a profile of its own, as on several nodes; rank 0's counts."""
    path = Path(folder) / f"{rank}.json"
    config.set_current(config.Options(profile=str(path)))
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # noqa: TID251  a rank of each node
    script = os.path.realpath(__file__)
    sys.argv[:] = [script]
    wanted = stored.key(script, world_size=world_size, local_world_size=1)
    sizes = {"fsdp2_prefetch": 2, "ddp_bucket_mb": 7 + rank, "zero_reduce_bucket": 1234}
    setting = knobs.checked({**sizes, "zero_prefetch_bucket": 99, "zero_reduce_to_owner": 1})
    stored.keep(wanted, stored.Tuned(setting, "faster", {}), {})
    dist.init_process_group("deepytorch")
    chosen = [str(decision["chosen"]) for decision in decisions_of(stored.WHAT)]
    return {**in_force.current(), **train_both()}, chosen


def decisions_of(what: str) -> list[dict[str, Any]]:
    from deepytorch_core.base import decisions

    return [decision for decision in decisions.made() if what in decision["what"]]


def train_both() -> dict[str, Any]:
    """The settings as torch's wrappers have them."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    own = DistributedDataParallel(nn.Linear(4, 4), bucket_cap_mb=3)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = nn.Sequential(*layers)
    for module in [*layers, model]:
        fully_shard(module)
    model(torch.ones(2, 8)).sum().backward()
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7}
    given = {"zero_optimization": zero}
    filled = fill_bucket_sizes(given, model, config.current(), torch.device("cpu"))
    assert given == {"zero_optimization": zero}
    owners = [
        fill_bucket_sizes({"zero_optimization": zero}, model, config.current(), torch.device("cpu"))
        for zero in (
            {"stage": 1, "reduce_bucket_size": 7},
            {"stage": 2, "reduce_bucket_size": 7, "use_multi_rank_bucket_allreduce": True},
            {"stage": 2, "reduce_bucket_size": 7, "reduce_scatter": False},
            zero,
        )
    ]
    key = "use_multi_rank_bucket_allreduce"
    first: Any = layers[0]
    last: Any = layers[-1]
    return {
        "all_reduce": [each["zero_optimization"].get(key) for each in owners],
        "ddp": ddp.bucket_bytes_cap >> 20,
        "own": own.bucket_bytes_cap >> 20,
        "reduce": filled["zero_optimization"]["reduce_bucket_size"],
        "prefetch": filled["zero_optimization"]["stage3_prefetch_bucket_size"],
        "forward": len(first._get_fsdp_state()._states_to_forward_prefetch),
        "backward": len(last._get_fsdp_state()._states_to_backward_prefetch),
    }


def test_rank_0s_profile_is_everybodys(folder: Path, tmp_path: Path) -> None:
    found = spawn(different_profiles, folder, str(tmp_path))
    settings = {"ddp_bucket_mb": 7, "fsdp2_prefetch": 2}
    settings |= {"zero_reduce_bucket": 1234, "zero_prefetch_bucket": 99, "zero_reduce_to_owner": 1}
    # Settings that the script gives itself stay.
    built = {"ddp": 7, "own": 3, "reduce": 1234, "prefetch": 7, "forward": 2, "backward": 2}
    built["all_reduce"] = [False, True, None, None]
    words = ", ".join(f"{name}={value}" for name, value in settings.items())
    assert found == [({**settings, **built}, [words])] * 2
