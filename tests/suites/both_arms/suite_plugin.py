"""pytest plugin of a suite's run: what becomes of each test, in $SUITE_ROWS; children start fast.

A test has a line when it begins and another when it has ended. So a test that ends the process has
only the first. When pytest runs again with the same file it goes on behind that test.
"""

import json
import multiprocessing.popen_spawn_posix
import os
import sys
import time
from multiprocessing import popen_forkserver, spawn
from pathlib import Path

import pytest

_ROWS = Path(os.environ["SUITE_ROWS"])
_rows = {}
_exit = sys.exit
# Packages that forked children find imported, if the tests import them.
_SHARED = ("torch", "pytest", "accelerate", "transformers", "lightning", "deepspeed")


def pytest_configure(config):
    ours = os.environ["SUITE_ARM"] != "stock"
    if ("deepytorch" in sys.modules) != ours:
        raise RuntimeError("this process did not read the suite's sitecustomize.py")
    if os.environ["SUITE_START"] == "fork":
        _fork_instead_of_spawn()


def pytest_collection():
    sys.exit = _skip_file


def pytest_collection_finish():
    sys.exit = _exit


def _skip_file(code=None):
    """For files that end the process where they have nothing to test: others come behind them."""
    pytest.skip(f"sys.exit({code!r})", allow_module_level=True)


def pytest_collection_modifyitems(items):
    done = {json.loads(line)["test"] for line in _ROWS.read_text().splitlines()}
    items[:] = [item for item in items if item.nodeid not in done]
    imported = [name for name in sys.modules if name.partition(".")[0] in _SHARED]
    multiprocessing.set_forkserver_preload(imported)


def pytest_collectreport(report):
    if not report.passed:
        why = str(report.longrepr)[-4000:]
        _write({"test": report.nodeid, "outcome": report.outcome, "seconds": 0.0, "why": why})


def pytest_runtest_logstart(nodeid, location):
    _rows[nodeid] = {"test": nodeid, "outcome": "passed", "seconds": 0.0, "why": ""}
    _rows[nodeid]["began"] = time.time()
    _write({**_rows[nodeid], "outcome": None})


def pytest_runtest_logreport(report):
    row = _rows[report.nodeid]
    row["seconds"] += report.duration
    if report.outcome != "passed" and row["outcome"] == "passed":
        row["outcome"] = report.outcome
        row["why"] = str(report.longrepr)[-4000:]


def pytest_runtest_logfinish(nodeid, location):
    _write(_rows.pop(nodeid))


def _write(row):
    with _ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")


class _Preparation(dict):
    """Data that a multiprocessing child gets first, with its parent's environment of that time."""

    def __reduce__(self):
        return _prepare, (dict(os.environ), dict(self))


def _prepare(environ, preparation):
    os.environ.clear()
    os.environ.update(environ)
    return preparation


def _fork_instead_of_spawn():
    """Let the start method "spawn" fork a process that did nothing but import.

    Tests start thousands of children, and each would import torch for seconds.
    """
    data = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: _Preparation(data(name))
    multiprocessing.popen_spawn_posix.Popen = popen_forkserver.Popen
