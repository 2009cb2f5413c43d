"""`bench compile`: its workloads are real models that train, and its records say who was faster."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deepytorch.cli import app, bench
from deepytorch.workloads import compile_suite
from deepytorch.workloads.compile_worker import CompileJob, _steady, record_of
from deepytorch_core.base.provenance import provenance
from deepytorch_core.bench import launch, tables
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.record import COMPILE_FIELDS
from deepytorch_core.compile.phases import Spent


def share(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "times": [seconds, 1.1 * seconds, seconds],
        "losses": [2.0, 1.5],
        "samples": 4,
        "parameters": 1_000_000,
        "peak_gib": 0.5,
        "warmup_s": 3.0,
        "warmup_steps": 23,
        "warmup_phases_s": {"compiling": 2.5, "eager steps": 0.45, "trial of CUDA graphs": -0.01},
        "decisions": [],
        **more,
    }


def record(**ours: Any) -> dict[str, Any]:
    compiled = {"chosen": "inductor", "reason": "faster than eager", "dropped": {"x": "y"}}
    replayed = {"chosen": "replayed", "reason": "faster than launched"}
    job = CompileJob(world_size=1, ours="compile", workload="transformers/llama")
    shares = [
        share(0.1, decisions=[compiled, replayed], **ours),
        share(0.2),
        share(0.16, warmup_s=9.0),
    ]
    return {**record_of(job, shares), "baseline_settings": {}, **provenance()}


def test_compile_record_is_whole() -> None:
    row = record()
    assert set(row) == set(COMPILE_FIELDS)
    assert row["speedup"] == 2.0
    assert row["plain_speedup"] == 1.25
    assert row["ours_per_s"] == 40.0
    assert row["loss_max_diff"] == 0
    assert row["wrong"] == 0
    assert (row["kept"], row["dropped"]) == ("inductor, replayed", {"x": "y"})
    assert row["reason"] == "faster than eager; faster than launched"


def test_steps_by_themselves_are_as_fast_as_a_long_phase_was() -> None:
    spent = {"waiting for helpers": Spent(30.0, 3000), "eager steps": Spent(0.001, 10)}
    assert _steady([0.012, 0.013], spent) == 0.01  # ten queued steps say nothing
    assert _steady([0.009, 0.013], spent) == 0.009
    assert _steady([0.012], {}) == 0.012


def test_compile_record_with_differing_losses_is_wrong() -> None:
    assert record(losses=[2.0, 1.49])["wrong"] == 1
    assert record(losses=[2.0, None])["wrong"] == 1


def test_compile_lines_and_table() -> None:
    row = record()
    line = bench.compile_line(row)
    for part in ("2.00x (2.00-2.00)", "torch.compile 1.25x", "warm-up 3.0 s, theirs 9.0 s"):
        assert part in line
    assert line.endswith("; warm-up was compiling 2.5 s, eager steps 0.5 s")
    summary = bench.compile_summary([row, {**row, "speedup": 0.5, "workload": "slow"}])
    assert summary.startswith("2 workloads: ours 1.00x of eager, torch.compile 1.25x")
    assert summary.endswith("worst of ours 0.50x (slow)")
    wrong = {**row, "wrong": 1}
    assert "samples/s: not claimed, torch.compile 1.25x" in bench.compile_line(wrong)
    assert bench.compile_summary([row, wrong]).startswith("1 workloads: ours 2.00x of eager")
    assert "no speed-up is claimed" in bench.compile_summary([wrong])
    assert "| not claimed | 1.25x" in tables.render({"compile.jsonl": [wrong]})
    older = {name: value for name, value in row.items() if name != "warmup_phases_s"}
    assert tables.render({"compile.jsonl": [older]}) == tables.render({"compile.jsonl": [row]})
    table = tables.render({"compile.jsonl": [row]})
    assert "transformers/llama, 1.0 M" in table
    assert "1.25x" in table


def test_compile_suite_is_large_enough_and_named() -> None:
    assert len(compile_suite.names("default")) >= 14
    with pytest.raises(BenchError, match="unknown suite 'x'; known: default"):
        compile_suite.names("x")
    with pytest.raises(BenchError, match="unknown workload 'x'"):
        compile_suite.build("x", "cpu")
    with pytest.raises(BenchError, match="one rank, not 2"):
        CompileJob(world_size=2)
    if find_spec("diffusers") is None:
        with pytest.raises(BenchError, match="diffusers.*pip install diffusers"):
            compile_suite.build("diffusers/unet2d-condition", "cpu")


@pytest.mark.parametrize(
    "name",
    [
        name
        for suite in ("default", "fine-tuning")
        for name in compile_suite.names(suite)
        if name.startswith("transformers/")
    ],
)
def test_compile_workload_trains(name: str) -> None:
    torch.manual_seed(0)
    workload = compile_suite.build(name, "cpu")
    batch = workload.batch(torch.Generator().manual_seed(0))
    loss = workload.loss(workload.model.train(), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert any(
        bool(parameter.grad.any())
        for parameter in workload.model.parameters()
        if parameter.grad is not None
    )


@pytest.mark.parametrize("has_gpu", [True, False])
def test_it_trains_on_the_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    def run(job: CompileJob, **_: object) -> list[Any]:
        devices.append(job.device)
        raise BenchError("pip install something")

    devices: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(launch, "run", run)
    for given in ([], ["--device", "cpu"]):
        CliRunner().invoke(app, ["bench", "compile", "--only", "transformers/llama", *given])
    assert devices == ["cuda" if has_gpu else "cpu", "cpu"]


def test_a_workload_that_takes_too_long_is_ended_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    (tmp_path / "endless.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n{{child.pid}}\\n')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(CompileJob, "WORKER", "endless")
    names = ",".join(compile_suite.names("default")[:2])
    limit = ["--timeout-s", "2", "--only", names]
    result = CliRunner().invoke(app, ["bench", "compile", *limit])
    assert result.exit_code == 1
    for name in names.split(","):
        assert f"error: {name}: it did not end within 2 s: raise --timeout-s, or" in result.stderr
    started = pids.read_text().split()
    until = time.monotonic() + 20  # a killed process takes a moment to end
    while any(map(_is_running, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_is_running, started))


def test_no_arm_finds_what_was_compiled_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "told.py").write_text(
        "import os, sys\n"
        "names = ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')\n"
        f"open('{tmp_path}/' + sys.argv[1], 'w').write(' '.join(map(os.environ.get, names)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompileJob, "WORKER", "told")
    job = CompileJob(world_size=1, ours="compile")
    assert not list(launch.run(job))
    folders = {folder for arm in "012" for folder in (tmp_path / arm).read_text().split()}
    assert len(folders) == 6
    assert str(tmp_path) not in folders
    assert not any(Path(folder).exists() for folder in folders)


def _is_running(pid: str) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie has none
    except OSError:
        return False
