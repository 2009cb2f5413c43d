"""The command: see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import operator
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepytorch_core.base import provenance
from deepytorch_core.testing import strangers
from deepytorch_core.testing.failures import RankError
from deepytorch_core.testing.pool import close_idle_workers, spawn_ranks
from soak.job import Counts, cycles, operations, operations_beside_gloo
from soak.watch import Held

_ROUND_S = 60.0
_PATIENCE_S = 120.0  # beyond a round's time, for what is under way
_CYCLES_PER_S = 5.0  # at least, on a busy machine
# Stock gloo keeps 2.5 KB of each of its groups, of which a cycle has three; the rest is room.
_MOST_BYTES_PER_CYCLE = 16384
_MOST_BYTES_PER_ROUND = 64 << 20  # from its middle on: caches of the interpreter and of drivers
_MOST_MAPPINGS = 20  # the allocator's own come and go


def main(arguments: Sequence[str]) -> int:
    """0 if every result was right and nothing was left behind."""
    parser = argparse.ArgumentParser(prog="python -m soak")
    parser.add_argument("--minutes", type=float, default=30.0, help="of random operations")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one round")
    parser.add_argument("--cycles", type=int, default=1000, help="of making groups, at the end")
    parser.add_argument("--seed", type=int, help="run the round with this seed alone")
    parser.add_argument("--nodes", default="", help="with --seed: a letter per rank, such as aabb")
    parser.add_argument(
        "--attack",
        action="store_true",
        help="another user attacks the job's sockets, and gloo carries out a share as well (root)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the result to FILE")
    options = parser.parse_args(arguments)
    on_gpus = options.device == "cuda"
    if on_gpus and options.ranks > (found := torch.cuda.device_count()):
        parser.error(f"NCCL takes one rank per GPU: use --ranks {found} or fewer")
    if options.attack and (on_gpus or strangers.missing_privilege()):
        parser.error("--attack is for CPUs and needs root, to be two users")
    nodes = [""] if on_gpus else ["", _two_nodes(options.ranks)]
    done, sent = Counts(), strangers.Sent()
    held: list[Held] = []
    bad: list[str] = []
    deadline = time.monotonic() + options.minutes * 60
    number = 0
    while time.monotonic() < deadline and (options.seed is None or number == 0):
        seed = random.randrange(1 << 30) if options.seed is None else options.seed
        place = options.nodes if options.seed is not None else nodes[number % len(nodes)]
        seconds = min(math.inf if on_gpus else _ROUND_S, deadline - time.monotonic())
        number += 1
        try:
            with strangers.attacked() if options.attack else contextlib.nullcontext(sent) as now:
                told = _round(seed, seconds, place, options)
            done = functools.reduce(operator.add, (counts for counts, _ in told), done)
            held = [each for _, each in told]
        except RankError as error:
            bad.append(f"--seed {seed} --nodes {place or 'none'}: {error}")
            _say(bad[-1])
        if options.attack:
            sent.datagrams += now.datagrams
            sent.connections += now.connections
            _say(f"{done.by_gloo} by gloo as well; {sent}")
        _say(f"round {number}, seed {seed}, nodes {place or 'one'}: {_in_words(done)}")
    if on_gpus:
        bad += _leaks(held)
    left = _cycles(options.ranks, options.cycles, options.device)
    bad += _failures(left, options.cycles)
    close_idle_workers()
    _say(f"{_in_words(done)}, {len(bad)} failures: {dict(sorted(done.collectives.items()))}")
    if options.json:
        result = {
            "ranks": options.ranks,
            "collectives": dict(done.collectives),
            "participations": dict(done.participations),
            "cycles": options.cycles,
            "bytes_per_cycle": [round(each["bytes_per_cycle"], 1) for each in left],
            "failures": bad,
        }
        if options.attack:
            result["by_gloo"] = done.by_gloo
            result["attack"] = dataclasses.asdict(sent)
        if on_gpus:
            result["device"] = options.device
            result["held"] = [dataclasses.asdict(each) for each in held]
        provenance.write_record(
            options.json, {"bench": "soak", **result, **provenance.provenance()}
        )
    return int(bool(bad))


def _two_nodes(ranks: int) -> str:
    return "a" * (ranks - ranks // 2) + "b" * (ranks // 2)


def _in_words(done: Counts) -> str:
    return (
        f"{done.collectives.total()} collectives of two or more ranks "
        f"({done.participations.total()} participations)"
    )


def _round(
    seed: int, seconds: float, nodes: str, options: argparse.Namespace
) -> list[tuple[Counts, Held]]:
    """Run a round and return what each rank tells; see `job.operations`."""
    env = {"DEEPYTORCH_TUNE": "off"}
    if nodes:
        env["DEEPYTORCH_NODE_ID"] = ",".join(nodes)
    what = (seed, seconds) if options.attack else (seed, seconds, options.device)
    return spawn_ranks(
        operations_beside_gloo if options.attack else operations,
        options.ranks,
        *what,
        backend="deepytorch",
        timeout_s=seconds + _PATIENCE_S,
        env=env,
        fresh=True,
    )


def _leaks(held: Sequence[Held]) -> list[str]:
    """Say how much a round's second half added to what its ranks hold, if too much."""
    bad = []
    for rank, each in enumerate(held):
        _say(f"rank {rank}, operations per second in each tenth, and from the middle on: {each}")
        grown = max(each.grown_bytes, each.gpu_grown_bytes)
        if each.left or grown > _MOST_BYTES_PER_ROUND:
            bad.append(f"half a round left on rank {rank}: {each}")
    return bad


def _cycles(ranks: int, count: int, device: str) -> list[dict[str, Any]]:
    """Run cycles and return what each rank tells; see `job.cycles`."""
    if count == 0:
        return []
    limit_s = _PATIENCE_S + count / _CYCLES_PER_S
    return spawn_ranks(
        cycles, ranks, count, device, fresh=True, timeout_s=limit_s, env={"DEEPYTORCH_TUNE": "off"}
    )


def _failures(told: Sequence[dict[str, Any]], count: int) -> list[str]:
    """Say what `count` cycles left behind, if too much."""
    bad = []
    for rank, each in enumerate(told):
        _say(f"{count} cycles, rank {rank}: {each}")
        if each["left"] or each["mappings"] > _MOST_MAPPINGS:
            bad.append(f"{count} cycles left on rank {rank}: {each}")
        if each["bytes_per_cycle"] > _MOST_BYTES_PER_CYCLE:
            bad.append(
                f"{count} cycles left {each['bytes_per_cycle']:.0f} bytes each on rank {rank}, "
                f"the limit is {_MOST_BYTES_PER_CYCLE}"
            )
    return bad


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
