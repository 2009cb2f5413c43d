"""Horovod's own tests of its torch API, run with this project's: what passes there and not here.

    python tests/suites/horovod.py CHECKOUT [--stock] [-k PART] [--ranks 2] [--file FILE]

CHECKOUT is a clone of github.com/horovod/horovod. Every test has ranks of its own, forked, which
meet under horovodrun's variables; `horovod.torch` is `deepytorch.integrations.horovod` in them.
With `--stock` each test also runs with the Horovod that is installed, built for gloo; without it,
a test that is not skipped counts as one that Horovod passes. Ends with status 1 below 98 %.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import itertools
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import types
import unittest
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
WANTED = 0.98
LIMIT_S = 120.0
# These take no vectors, such as a bias. The tests, which are older, give vectors to every optimizer
# there is, and fail with Horovod's own library too.
NEWER_OPTIMIZERS = ("Muon",)

_jobs = itertools.count(1)
Outcome = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--stock", action="store_true", help="compare with the installed Horovod")
    parser.add_argument("-k", dest="part", default="", help="only tests with this in their name")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--file", type=Path, default=Path("test/parallel/test_torch.py"))
    asked = parser.parse_args()
    # This file's folder: `horovod` is not to be found there.
    sys.path[:] = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]
    file = asked.checkout / asked.file
    theirs = Stock(asked.ranks) if asked.stock else None
    # The ranks are forks of this process: what all of them import is imported once.
    importlib.import_module("deepytorch.integrations.horovod")
    counts: Counter[tuple[str, str]] = Counter()
    for name in names_in(file):
        if asked.part not in name:
            continue
        ours, why = run(file, name, our_variables(asked.ranks), use_ours)
        stock = PASSED if ours != SKIPPED else SKIPPED
        if theirs is not None:
            stock = run(file, name, theirs.variables(), use_stock)[0]
        counts[stock, ours] += 1
        if ours != stock:
            print(f"{name}: {stock} with Horovod, {ours} here\n    {why}", flush=True)
    both, there = counts[PASSED, PASSED], sum(n for (at, _), n in counts.items() if at == PASSED)
    skipped = counts[SKIPPED, SKIPPED]
    print(f"{both} of the {there} tests that Horovod passes pass here, {skipped} are skipped")
    return 0 if both >= WANTED * there else 1


def names_in(file: Path) -> list[str]:
    """The tests of a file, as Class.test, without importing it."""
    names = []
    kind = ""
    for line in file.read_text().splitlines():
        word = line.split("(")[0].split(":")[0]
        if word.startswith("class "):
            kind = word.removeprefix("class ")
        elif word.startswith("    def test_"):
            names.append(f"{kind}.{word.removeprefix('    def ')}")
    return names


def our_variables(ranks: int) -> list[dict[str, str]]:
    """Return what horovodrun tells each rank; the port tells one job from another here."""
    job = f"{os.getpid()}{next(_jobs):04}"
    return [{**place(rank, ranks), "HOROVOD_GLOO_RENDEZVOUS_PORT": job} for rank in range(ranks)]


def place(rank: int, ranks: int) -> dict[str, str]:
    """A rank's place on the one node, as horovodrun tells it."""
    whole = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks}
    facts = {**whole, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {f"HOROVOD_{name}": str(value) for name, value in facts.items()}


class Stock:
    """The installed Horovod, and the server at which its ranks meet."""

    def __init__(self, ranks: int) -> None:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        self._plan = get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks)
        self._server = RendezvousServer(0)
        self._port = self._server.start()
        self._ranks = ranks
        for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
            del sys.modules[name]

    def variables(self) -> list[dict[str, str]]:
        """Return what horovodrun tells each rank of the next job."""
        self._server.init(self._plan)
        meeting = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._port),
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_HOSTNAME": "localhost",
        }
        return [{**place(rank, self._ranks), **meeting} for rank in range(self._ranks)]


def use_ours() -> None:
    """Let `import horovod.torch` give this project's, and what the tests import beside it."""
    ours = importlib.import_module("deepytorch.integrations.horovod")
    for name in ("horovod", "horovod.runner", "horovod.runner.util"):
        package = types.ModuleType(name)
        package.__path__ = []
        sys.modules[name] = package
    threads = types.ModuleType("horovod.runner.util.threads")
    threads.in_thread = None  # type: ignore[attr-defined]
    sys.modules[threads.__name__] = threads
    sys.modules["horovod.torch"] = sys.modules["horovod"].torch = ours  # type: ignore[attr-defined]


def use_stock() -> None:
    """Let `import horovod.torch` be the installed one, which is imported in the ranks only."""


def run(
    file: Path, name: str, variables: list[dict[str, str]], prepare: Callable[[], None]
) -> Outcome:
    """One test in forked ranks: how it ended, and what the first rank that did not pass said."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank, told in enumerate(variables):
            output = Path(folder, f"output{rank}")
            ranks[fork(lambda told=told: in_rank(file, name, told, prepare), output)] = output
        ended = dict(ends(set(ranks)))
        said = [outcome_of(output, ended[pid]) for pid, output in ranks.items()]
    return max(said, key=lambda outcome: [PASSED, SKIPPED, FAILED].index(outcome[0]))


def fork(program: Callable[[], Outcome], output: Path) -> int:
    """Run in a child whose output goes to a file; the child's last line there is its outcome."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.dump_traceback_later(0.9 * LIMIT_S)
        print("\n" + json.dumps(program()), flush=True)
        status = 0
    finally:
        os._exit(status)


def in_rank(
    file: Path, name: str, variables: dict[str, str], prepare: Callable[[], None]
) -> Outcome:
    """The part of a rank: what unittest says of one test."""
    os.environ.update(variables)  # noqa: TID251  the tests read it
    prepare()
    for library, instead in (("cloudpickle", pickle), ("mock", unittest.mock)):
        if importlib.util.find_spec(library) is None:
            sys.modules[library] = instead
    for kind in NEWER_OPTIMIZERS:
        if hasattr(torch.optim, kind):
            getattr(torch.optim, kind).__module__ = "newer"  # the tests look for torch.optim's
    spec = importlib.util.spec_from_file_location("tests_of_horovod", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    test = unittest.defaultTestLoader.loadTestsFromName(name, module)
    method = getattr(module, name.split(".")[0]).__dict__[name.split(".")[1]]
    if any(mark.name == "skip" for mark in getattr(method, "pytestmark", ())):
        return SKIPPED, "marked in the file"
    result: Any = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return SKIPPED, result.skipped[0][1]
    wrong = result.errors + result.failures
    return (FAILED, wrong[0][1]) if wrong else (PASSED, "")


def ends(ranks: set[int]) -> Iterator[tuple[int, int | None]]:
    """Each rank and the signal that ended it, 0 for none and None for a rank that stalled."""
    until = time.monotonic() + LIMIT_S
    watched = {os.pidfd_open(pid): pid for pid in ranks}
    while watched:
        ready, _, _ = select.select(watched, [], [], max(0.0, until - time.monotonic()))
        for descriptor in ready or list(watched):
            pid = watched.pop(descriptor)
            os.close(descriptor)
            if not ready:
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            yield pid, os.WTERMSIG(status) if ready else None


def outcome_of(output: Path, ended_by: int | None) -> Outcome:
    """Return what a rank said in the end, or how it ended without a word."""
    text = output.read_text(errors="replace") if output.exists() else ""
    if ended_by == 0 and text.strip():
        last = text.strip().splitlines()[-1]
        if last.startswith("["):
            outcome, why = json.loads(last)
            return outcome, why.strip().replace("\n", "\n    ")
    how = f"stalled for {LIMIT_S:g} s" if ended_by is None else f"ended by signal {ended_by}"
    return FAILED, f"{how}:\n{text[-3000:]}"


if __name__ == "__main__":
    sys.exit(main())
