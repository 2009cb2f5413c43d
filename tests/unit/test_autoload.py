"""The entry points that torch calls: the name is known, nothing else happens, nothing raises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepytorch_core.c10d import autoload

ROOT = Path(__file__).parents[2]

ENTRY_POINTS = """\
[torch.backends]
deepytorch = deepytorch_core.c10d.autoload:register
[torch.distributed.backends]
deepytorch = deepytorch_core.c10d.autoload:register
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that makes deepytorch look installed: its metadata, and nothing more."""
    metadata = tmp_path / "deepytorch_train-0.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepytorch-train\nVersion: 0.0.0\n"
    )
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def run(program: str, *paths: Path, **variables: str) -> str:
    python_path = os.pathsep.join(str(path) for path in paths)
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": python_path, **variables},  # noqa: TID251
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_the_entry_points_are_declared_as_tested_here() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for line in ENTRY_POINTS.splitlines()[1::2]:
        _, target = line.split(" = ")
        assert project.count(f'deepytorch = "{target}"') == 2


@pytest.mark.parametrize(
    "variables", [pytest.param({}, marks=pytest.mark.extended), {"DEEPYTORCH_COLLECTIVES": "wrong"}]
)
def test_torch_knows_the_name_after_import_and_nothing_else_has_changed(
    installed: Path, variables: dict[str, str]
) -> None:
    """A wrong option does not break `import torch`."""
    output = run(
        "import sys, torch\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "assert 'deepytorch' in c10d.Backend.backend_list\n"
        "assert c10d.Backend.default_device_backend_map['cpu'] == 'gloo'\n"
        "assert not hasattr(c10d._new_process_group_helper, '__deepytorch_original__')\n"
        # Nothing that costs time was loaded: no facade, no core, no build machinery.
        "heavy = {'deepytorch', 'deepytorch_core.c10d.activation',\n"
        "         'deepytorch_core.c10d.adapter', 'deepytorch_core._core',\n"
        "         'deepytorch_c10d', 'torch.utils.cpp_extension'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n",
        installed,
        ROOT,
        **variables,
    )
    assert output.strip() == "loaded: []"


def test_an_error_in_it_does_not_break_import_torch(installed: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    package = broken / "deepytorch_core/c10d"
    package.mkdir(parents=True)
    source = (ROOT / "deepytorch_core/c10d/autoload.py").read_text()
    (broken / "deepytorch_core/__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "autoload.py").write_text(source)
    (package / "backend.py").write_text("raise RuntimeError('broken install')\n")
    assert run("import torch; print(torch.ones(2).sum().item())", installed, broken) == "2.0\n"


def test_it_takes_whatever_torch_may_pass() -> None:
    autoload.register()
    autoload.register(object(), name="deepytorch")
