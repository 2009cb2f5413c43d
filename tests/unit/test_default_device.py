"""Tensors of ours name their device and dtype: a program's defaults are for its own tensors."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _device

ROOT = Path(__file__).parents[2]
FOLDERS = ("deepytorch_core", "integrations", "deepytorch")
# Programs of their own: nobody sets defaults in them.
OWN_PROGRAMS = ("deepytorch_core/testing", "deepytorch_core/bench", "deepytorch/workloads")
OWN_PROGRAMS += ("deepytorch/examples",)
# Draws what models draw, where they draw it.
AS_THE_PROGRAM = {("deepytorch_core/compile/host_draws.py", "torch.rand([])")}

FACTORIES = {factory.__name__ for factory in _device._device_constructors()}
# Their dtype does not follow the default one, or is that of what they are given.
WITHOUT_DTYPE = {"randint", "randperm", "tril_indices", "triu_indices", "as_tensor", "asarray"}
WITHOUT_DTYPE |= {name for name in FACTORIES if name.startswith("sparse_")}
NATIVE = re.compile(r"\b(?:at|torch)::(\w+)\(((?:[^()]|\([^()]*\))*)\)")


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return [path for path in sorted(found) if not name_of(path).startswith(OWN_PROGRAMS)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def unnamed(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, call, and what it does not name."""
    for call in ast.walk(tree):
        if isinstance(call, ast.ImportFrom) and call.module == "torch":
            for alias in call.names:
                if alias.name in FACTORIES:
                    yield call.lineno, ast.unparse(call), "torch"
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        owner, name = ast.unparse(call.func.value), call.func.attr
        named = {keyword.arg for keyword in call.keywords}
        if None in named:  # **place
            continue
        if owner in ("torch", "torch.fft") and name in FACTORIES:
            wanted = {"device"} if name in WITHOUT_DTYPE else {"device", "dtype"}
        elif owner in ("nn", "torch.nn") and takes_device(name):
            wanted = {"device", "dtype"}
        else:
            continue
        for missing in sorted(wanted - named):
            yield call.lineno, ast.unparse(call), missing


def takes_device(name: str) -> bool:
    module = getattr(nn, name, None)
    return inspect.isclass(module) and "device" in inspect.signature(module).parameters


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_python_names_device_and_dtype(path: Path) -> None:
    found = [
        f"{name_of(path)}:{line}: {call} does not name its {missing}"
        for line, call, missing in unnamed(ast.parse(path.read_text()))
        if (name_of(path), call) not in AS_THE_PROGRAM
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("torch.empty(3)", ["device", "dtype"]),
        ("torch.tensor([1.0], device=x.device)", ["dtype"]),
        ("torch.as_tensor(values)", ["device"]),
        ("torch.randint(0, 3, (2,), generator=g)", ["device"]),
        ("nn.Linear(2, 2, dtype=torch.float32)", ["device"]),
        ("from torch import arange", ["torch"]),
        ("torch.full((2,), 1.0, **place)", []),
        ("nn.Identity()", []),
        ("x.new_empty(3)", []),
        ("torch.empty_like(x)", []),
    ],
)
def test_the_search_finds(code: str, missing: list[str]) -> None:
    assert [what for *_, what in unnamed(ast.parse(code))] == missing


def test_native_code_gives_options() -> None:
    found = [
        f"{name_of(path)}: {match[0]}"
        for path in sorted((ROOT / "csrc" / "c10d").glob("*.cpp"))
        for match in NATIVE.finditer(path.read_text())
        if match[1] in FACTORIES and "ptions" not in match[2]
    ]
    assert found == []


@pytest.fixture(params=["device meta", "dtype float64", "dtype float16", "context"])
def defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    what, _, value = request.param.partition(" ")
    before = torch.get_default_dtype()
    if what == "context":
        with torch.device("meta"):
            yield
        return
    if what == "device":
        torch.set_default_device(value)
    else:
        torch.set_default_dtype(getattr(torch, value))
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(before)
