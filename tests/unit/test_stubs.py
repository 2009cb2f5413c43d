"""deepytorch_core/_core.pyi says what the native module really has."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

STUB = Path(__file__).parents[2] / "deepytorch_core" / "_core.pyi"


def stub_functions(text: str) -> tuple[dict[str, list[str]], set[str]]:
    """Functions with their parameter names, and the other names, of a stub."""
    functions: dict[str, list[str]] = {}
    others: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            functions[node.name] = [
                argument.arg
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            others.add(node.target.id)
        elif isinstance(node, ast.ClassDef) and not _is_for_types_only(node):
            others.add(node.name)
    return functions, others


def _is_for_types_only(node: ast.ClassDef) -> bool:
    bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
    return bool(bases & {"TypedDict", "Protocol"})


def real_functions(module: object) -> tuple[dict[str, list[str]], set[str]]:
    """The same of a module, from the signatures that pybind11 writes into docstrings."""
    functions: dict[str, list[str]] = {}
    others: set[str] = set()
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("__") and name != "__version__":
            continue
        if callable(value) and not isinstance(value, type):
            functions[name] = _parameters((value.__doc__ or "").splitlines()[0], name)
        elif not isinstance(value, ModuleType):
            others.add(name)
    return functions, others


def _parameters(signature: str, name: str) -> list[str]:
    match = re.fullmatch(rf"{re.escape(name)}\((.*)\)(?: -> .*)?", signature.strip())
    assert match, f"{name}: no signature in its docstring: {signature!r}"
    # Commas within brackets separate types, not parameters.
    flat = match.group(1)
    while True:
        flatter = re.sub(r"[\[({][^\[\](){}]*[\])}]", "", flat)
        if flatter == flat:
            break
        flat = flatter
    parts = [part.partition(":")[0].strip() for part in flat.split(",")]
    return [part for part in parts if part and part not in {"*", "/"}]


def differences(text: str, module: object) -> list[str]:
    stub, stub_others = stub_functions(text)
    real, real_others = real_functions(module)
    found = [f"{name}: in the stub only" for name in stub.keys() - real.keys()]
    found += [f"{name}: in the module only" for name in real.keys() - stub.keys()]
    found += [f"{name}: in one of the two only" for name in stub_others ^ real_others]
    for name in stub.keys() & real.keys():
        if stub[name] != real[name]:
            found.append(f"{name}: the stub says {stub[name]}, the module {real[name]}")
    return found


def test_stub_matches_the_module() -> None:
    from deepytorch_core import _core

    found = differences(STUB.read_text(), _core)
    assert not found, "\n".join(found)


def _fake_module() -> SimpleNamespace:
    def reduce() -> None:
        """reduce(dtype: str, sources: list[tuple[int, float]], *, out: Buffer = None) -> None

        Reduces."""

    return SimpleNamespace(reduce=reduce, abi_version=1)


def test_differences_are_found() -> None:
    good = (
        "abi_version: int\n"
        "class Row(TypedDict):\n    calls: int\n"
        "def reduce(dtype: str, sources: list[int], *, out: int) -> None: ..."
    )
    assert not differences(good, _fake_module())
    for bad in (
        good.replace("dtype", "kind"),
        good.replace("reduce", "reduces"),
        good.replace(", *, out: int", ""),
        good.replace("abi_version: int", ""),
        good + "\ndef more() -> None: ...",
        good + "\nclass More: ...",
    ):
        assert differences(bad, _fake_module()), bad
