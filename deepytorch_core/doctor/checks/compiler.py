"""A C++ compiler and Python's headers, to compile the adapter where none is prebuilt."""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from deepytorch_core.base import config
from deepytorch_core.doctor.finding import Finding, fail, okay, warn
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class CompilerFacts:
    """`command`: the compiler; `asked`: CXX; `adapter`: one that fits is there already."""

    command: str
    path: str
    asked: str
    has_headers: bool
    adapter: str


def gather(machine: Machine) -> CompilerFacts:
    command = config.compiler()
    return CompilerFacts(
        command=" ".join(command or ()),
        path=(shutil.which(command[0]) or "") if command else "",
        asked=machine.environment.get("CXX", ""),
        has_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        adapter=machine.torch.adapter,
    )


def judge(facts: CompilerFacts) -> list[Finding]:
    # Without an adapter there is no way to one; with it, only the next torch needs a compiler.
    worse = warn if facts.adapter else fail
    spare = "; the adapter for this torch is there already" if facts.adapter else ""
    if facts.asked and not facts.path:
        return [worse(f"CXX={facts.asked}: there is no such compiler{spare}", "unset CXX")]
    if not facts.path:
        text = f"no C++ compiler (c++, g++ or clang++) on the PATH{spare}"
        return [worse(text, "sudo apt install g++   # or: deepytorch build on such a machine")]
    if not facts.has_headers:
        text = f"Python's headers are missing{spare}"
        return [worse(text, "sudo apt install python3-dev")]
    return [okay(f"{facts.command} ({facts.path}) and Python's headers")]
