"""tests/suites: what its command says of tests that behave in each way there is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.base import config

SUITES = Path(__file__).parents[1] / "suites"
COMMAND = SUITES / "torch_distributed.py"
TESTS = """
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

ON = "deepytorch" in sys.modules


def imports_deepytorch(queue):
    queue.put(("deepytorch" in sys.modules, os.environ.get("SAID")))


def test_passes():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_fails():
    raise AssertionError("in both")


def test_is_skipped():
    pytest.skip("in both")


def test_differs():
    assert not ON


def test_differs_once():
    if ON and not Path("before").exists():
        Path("before").touch()
        raise AssertionError("the first time")


def test_ends_the_process():
    os._exit(0)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_children_are_of_the_arm(way, monkeypatch):
    monkeypatch.setenv("SAID", way)
    context = multiprocessing.get_context(way)
    queue = context.Queue()
    child = context.Process(target=imports_deepytorch, args=(queue,))
    child.start()
    assert queue.get() == (ON, way)
    child.join()
    assert child.exitcode == 0
"""


STANDS_STILL = """
import sys
import time


def test_stands_still():
    time.sleep(600 if "deepytorch" in sys.modules else 0)
"""
FILE = "distributed/test_each.py::"


def told_of(tests: str, checkout: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Return what the command writes and says of a checkout with this one file of tests."""
    folder = checkout / "test" / "distributed"
    folder.mkdir(parents=True)
    (folder / "test_each.py").write_text(tests)
    (folder / "test_broken.py").write_text("import not_there")
    outcomes = checkout / "outcomes.json"
    command = [sys.executable, str(COMMAND), str(checkout), "--files", "test_*.py"]
    command += ["--json", str(outcomes), "--logs", str(checkout / "logs"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, env=config.child_environment())
    assert (ended.returncode, ended.stderr) == (1, ""), ended.stdout
    return json.loads(outcomes.read_text()), ended.stdout


def outcomes_of(told: dict[str, Any], arm: str) -> dict[str, str]:
    found = {name.removeprefix(FILE): row["outcome"] for name, row in told[arm].items()}
    assert found.pop("distributed/test_broken.py") == "failed"
    return found


@pytest.mark.extended
def test_tells_what_differs_and_what_was_taken_over(tmp_path: Path) -> None:
    told, said = told_of(TESTS, tmp_path)
    same = {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_ends_the_process": "crashed",
        "test_children_are_of_the_arm[fork]": "passed",
        "test_children_are_of_the_arm[spawn]": "passed",
    }
    ways = ("test_differs", "test_differs_once")
    assert outcomes_of(told, "stock") == {**same, **dict.fromkeys(ways, "passed")}
    assert outcomes_of(told, "deepytorch") == {**same, **dict.fromkeys(ways, "failed")}
    assert told["differing"] == [FILE + "test_differs"]
    assert told["groups"] == {FILE + "test_passes": 1}
    assert f"unsteady: {FILE}test_differs_once" in said


@pytest.mark.extended
def test_a_test_that_stands_still_is_ended(tmp_path: Path) -> None:
    told, _ = told_of(STANDS_STILL, tmp_path, "--limit", "2", "--grace", "0")
    assert outcomes_of(told, "stock") == {"test_stands_still": "passed"}
    assert outcomes_of(told, "deepytorch") == {"test_stands_still": "timeout"}
    assert told["differing"] == [FILE + "test_stands_still"]


TRAINS = """
import sys

import torch
from accelerate import Accelerator


def test_trains():
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(4, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(torch.ones(2, 4)).sum())
    optimizer.step()


def test_differs():
    assert "deepytorch" not in sys.modules
"""


@pytest.mark.extended
def test_a_peers_tests_run_with_compute_on(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_each.py").write_text(TRAINS)
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, str(SUITES / "peers.py"), str(tmp_path), "accelerate"]
    command += ["--patience", "off", "--json", str(outcomes), "--logs", str(tmp_path / "logs")]
    ended = subprocess.run(command, capture_output=True, text=True, env=config.child_environment())
    assert (ended.returncode, ended.stderr) == (1, ""), ended.stdout
    told, differing = json.loads(outcomes.read_text()), "tests/test_each.py::test_differs"
    assert told["differing"] == [differing]
    passed = [name for name, row in told["line"].items() if row["outcome"] == "passed"]
    assert passed == ["tests/test_each.py::test_trains"]
    assert set(told["decisions"]) == {"SGD", "compile of Linear"}
    assert f"1 of 2 tests differ; what they print is in {tmp_path / 'logs'}" in ended.stdout
    assert "    SGD: " in ended.stdout
