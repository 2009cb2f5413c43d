"""The names users rely on. Changing one of these tables is a decision, and a CHANGELOG entry."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import typer.main

import deepytorch
import deepytorch_core.testing
from deepytorch import cli
from deepytorch_core import _core
from deepytorch_core.base.config import VARIABLES, Options

ROOT = Path(__file__).parents[2]
FACADE = {
    "activate": "(**options)",
    "compile": "(model, policy, budget_s, steps, is_patient)",
    "deactivate": "()",
    "is_active": "()",
    "report": "()",
}
OPTIONS: dict[str, Any] = {
    "enabled": True,
    "collectives": "auto",
    "compile": "auto",
    "cuda_graphs": "auto",
    "padding_free": "auto",
    "tokens_per_step": "auto",
    "token_balance": "auto",
    "kernels": "auto",
    "tune": "auto",
    "patience": "auto",
    "profile": None,
    "timeout_s": None,
    "log": "info",
    "debug": False,
    "deterministic": False,
    "error_handling": "abort",
    "staging_mb": None,
    "reduce_threads": None,
    "ifname": None,
    "compile_budget_s": 120.0,
    "metrics": None,
    "report": None,
}
OUR_VARIABLES = {
    "DEEPYTORCH_CACHE_DIR",
    "DEEPYTORCH_CHUNK_BYTES",
    "DEEPYTORCH_GPU_CHANNELS",
    "DEEPYTORCH_NCCL_TABLE",
    "DEEPYTORCH_NUM_SOCKETS",
    "DEEPYTORCH_SOCKET_BYTES",
    "DEEPYTORCH_TCP_CHECKSUM",
    "DEEPYTORCH_TCP_CONGESTION",
    "DEEPYTORCH_NODE_ID",
    "DEEPYTORCH_EMULATE_LINKS",
}
COMMANDS: dict[str, dict[str, Any]] = {
    "build": {
        "--output": None,
        "--force": False,
        "--torch": None,
        "--all-torch": False,
        "--torch-wheels": None,
    },
    "run": {
        "--nproc-per-node": None,
        "--nnodes": None,
        "--module": False,
        "--report": None,
        "--compare": False,
        "--steps": 60,
        "--rounds": 2,
        "--split": False,
        "--total-steps": 0,
        "--timeout-s": 1800.0,
        "--html": Path("deepytorch-compare.html"),
        "--json": None,
    },
    "test": {},
    "config": {"file": Path("deepytorch.yaml"), "--default": False},
    "train": {
        "recipe": None,
        "settings": None,
        "--config": None,
        "--nproc-per-node": None,
        "--compare": False,
        "--dry-run": False,
    },
    "doctor": {"--only": None, "--report": None, "--json": False},
    "topology": {
        "--from": None,
        "--measure": False,
        "--svg": None,
        "--png": None,
        "--plain": False,
        "--json": False,
    },
    "explain": {
        "operation": None,
        "size": None,
        "--world-size": None,
        "--dtype": "float32",
        "--measure": False,
        "--nodes": 0,
        "--ranks-per-node": "1",
        "--link": "",
        "--flow-cap": "",
        "--delay": "",
        "--order": "block",
        "--json": False,
    },
    "tune": {
        "--nproc-per-node": None,
        "--module": False,
        "--budget-steps": 100,
        "--steps": 6,
        "--profile": None,
        "--timeout-s": 1800.0,
        "--nodes": 0,
        "--ranks-per-node": "1",
        "--link": "",
        "--flow-cap": "",
        "--delay": "",
        "--json": None,
    },
    "report": {
        "files": None,
        "--html": None,
        "--hang": False,
        "--pid": None,
        "--job": None,
        "--json": False,
        "--flight-recorder": None,
    },
    "bench collectives": {
        "--device": "cpu",
        "--world-size": 2,
        "--ops": "all_reduce",
        "--sizes": "1K:64M",
        "--per-rank": False,
        "--dtype": "float32",
        "--baseline": None,
        "--registered": False,
        "--direct": False,
        "--cuda-graph": False,
        "--beside-compute": False,
        "--nodes": 0,
        "--ranks-per-node": "1",
        "--link": "",
        "--flow-cap": "",
        "--delay": "",
        "--order": "block",
        "--baseline-env": "",
        "--together": False,
        "--forecast": "",
        "--iterations": 0,
        "--json": None,
        "--plot": None,
    },
    "bench ddp": {
        "--device": "cpu",
        "--world-size": 2,
        "--model": "mlp",
        "--parameters": "4M",
        "--precision": "fp32",
        "--image-size": 0,
        "--batch-size": 8,
        "--steps": 40,
        "--rounds": 2,
        "--compress": "",
        "--baseline": "gloo",
        "--nodes": 0,
        "--ranks-per-node": "1",
        "--link": "",
        "--flow-cap": "",
        "--delay": "",
        "--json": None,
    },
    "bench train": {
        "--framework": "ddp",
        "--workload": "",
        "--scale": "full",
        "--rounds": 2,
        "--split": False,
        "--arms": "",
        "--together": False,
        "--layers": 0,
        "--nodes": 0,
        "--link": "",
        "--device": "cpu",
        "--world-size": 2,
        "--parameters": "4M",
        "--batch-size": 8,
        "--steps": 40,
        "--trace": None,
        "--json": None,
        "--report": None,
    },
    "bench compile": {
        "--suite": "default",
        "--only": None,
        "--device": None,
        "--policy": "auto",
        "--blocks": 7,
        "--timeout-s": 3600.0,
        "--json": None,
    },
    "bench nccl": {
        "--world-size": 2,
        "--ops": "all_reduce,all_gather,reduce_scatter",
        "--sizes": "16K:64M",
        "--nodes": 0,
        "--ranks-per-node": "1",
        "--link": "",
        "--flow-cap": "",
        "--delay": "",
        "--write": None,
        "--json": None,
    },
    "bench scripts": {
        "--checkouts": Path("checkouts"),
        "--only": None,
        "--size": None,
        "--seconds": "60,150,60",
        "--rounds": 0,
        "--nproc-per-node": 1,
        "--timeout-s": 1200.0,
        "--json": None,
    },
    "bench groups": {"--count": 64, "--world-size": 4, "--json": None},
}
INTEGRATIONS = {
    "accelerate": {"DeepytorchPlugin", "DeepytorchAccelerator", "undo"},
    "ddp": {"prepare_ddp", "tune_buckets", "undo"},
    "deepspeed": {"initialize", "undo"},
    "fsdp": {"register_comm_hook", "apply_fsdp2", "undo"},
    "horovod": {
        *("init", "shutdown", "rank", "size", "local_rank", "local_size", "cross_rank"),
        *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce"),
        *("allgather", "broadcast", "alltoall", "reducescatter", "join", "barrier"),
        *("poll", "synchronize", "Compression", "DistributedOptimizer", "broadcast_parameters"),
        *("broadcast_optimizer_state", "broadcast_object", "elastic"),
    },
    "horovod_tensorflow": {
        *("init", "rank", "size", "allreduce", "allgather"),
        *("DistributedGradientTape", "broadcast_variables"),
    },
    "megatron": {"ProcessGroupFactory"},
    "transformers": {
        *("BATCH_KEY", "DeepytorchMixin", "DeepytorchTrainer", "IntegrationError"),
        *("accelerate_trainer", "pack_batches", "undo"),
    },
}
"""Names of each adapter; it may have more."""
TESTING = {
    "RankError",
    "RankTimeoutError",
    "assert_same_on_all_ranks",
    "close_idle_workers",
    "free_port",
    "needs_gpus",
    "rank_store",
    "run_program",
    "run_script",
    "spawn_ranks",
}
STATISTICS = {"group", "op", "algorithm", "reason", "calls", "bytes", "time_us"}


def changes(frozen: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what differs, in words; a default differs also by its type."""
    lines = [f"{name} is gone" for name in frozen if name not in found]
    lines += [f"{name} is new" for name in found if name not in frozen]
    for name in frozen.keys() & found.keys():
        if repr(frozen[name]) != repr(found[name]):
            lines.append(f"{name}: {frozen[name]!r} became {found[name]!r}")
    return lines


def parameters(command: Any) -> dict[str, Any]:
    """Name (the long spelling with dashes) -> default of a command's parameters."""
    found = {}
    for parameter in command.params:
        names = [name for name in parameter.opts if "_" not in name] or parameter.opts
        if "--help" not in names:
            found[max(names, key=len)] = parameter.default
    return found


def commands(group: Any, prefix: str = "") -> dict[str, dict[str, Any]]:
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found.update(commands(command, f"{prefix}{name} "))
        else:
            found[prefix + name] = parameters(command)
    return found


def test_facade() -> None:
    found = {}
    for name in deepytorch.__all__:
        signature = inspect.signature(getattr(deepytorch, name))
        shown = [
            ("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name
            for parameter in signature.parameters.values()
        ]
        found[name] = f"({', '.join(shown)})"
    assert not changes(FACADE, found)


def test_options_and_their_defaults() -> None:
    found = {option.name: option.default for option in dataclasses.fields(Options)}
    assert not changes(OPTIONS, found)
    assert list(found) == list(OPTIONS), "reports and help show them in this order"


def test_environment_variables() -> None:
    assert {name for name in VARIABLES if name.startswith("DEEPYTORCH_")} == OUR_VARIABLES


def test_commands_and_their_options() -> None:
    found = commands(typer.main.get_command(cli.app))
    assert not changes(dict.fromkeys(COMMANDS), dict.fromkeys(found))
    for name, frozen in COMMANDS.items():
        assert not changes(frozen, found[name]), f"deepytorch {name}"


def test_testing_helpers() -> None:
    assert set(deepytorch_core.testing.__all__) == TESTING


def test_statistics_rows() -> None:
    assert set(inspect.get_annotations(_statistics_row())) == STATISTICS
    assert isinstance(_core.statistics(), list)


def _statistics_row() -> type:
    namespace: dict[str, Any] = {}
    stub = (inspect.getsourcefile(deepytorch_core) or "").replace("__init__.py", "_core.pyi")
    with open(stub) as file:
        exec(compile(file.read(), stub, "exec"), namespace)
    row: type = namespace["StatisticsRow"]
    return row


@pytest.mark.parametrize(
    "found",
    [
        {"timeout_s": 600, "log": "info"},
        {"timeout_s": 600.0},
        {"timeout_s": 600.0, "log": "info", "more": 1},
        {"timeout_s": 600.0, "log": None},
    ],
)
def test_changes_are_found(found: dict[str, Any]) -> None:
    frozen = {"timeout_s": 600.0, "log": "info"}
    assert changes(frozen, found)
    assert not changes(frozen, dict(frozen))


@pytest.mark.parametrize("adapter", sorted(INTEGRATIONS))
def test_adapters(adapter: str) -> None:
    """By their source: importing them all would import every framework."""
    package = ROOT / "integrations" / adapter
    file = package / "__init__.py" if package.is_dir() else package.with_suffix(".py")
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    assert not INTEGRATIONS[adapter] - found
