"""DeepSpeed's flag is noticed without deepspeed or an adapter being imported for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepytorch_core.testing import run_script

ROOT = Path(__file__).parents[2]

STAND_IN = """\
# `import deepspeed` imports torch first; that is where autoload runs.
from deepytorch_core.c10d import autoload
autoload.register()
{early}
def initialize(args=None, model=None, config=None, config_params=None):
    return "stock"
"""
ADAPTER = """\
import deepytorch_core.c10d.activation as activation
def take_over(original, args, kwargs):
    return "ours", original(*args, **kwargs), activation.is_active()
"""
ENTRY_POINTS = "[deepytorch.integrations]\ndeepspeed = stand_in_adapter:take_over\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with stand-ins for deepspeed and an installed adapter."""
    metadata = tmp_path / "deepytorch_train-0.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepytorch-train\nVersion: 0.0.0\n"
    )
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "deepspeed.py").write_text(STAND_IN.format(early=""))
    (tmp_path / "stand_in_adapter.py").write_text(ADAPTER)
    return tmp_path


def run(program: str, installed: Path, **variables: str) -> str:
    python_path = os.pathsep.join([str(installed), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": python_path, **variables}  # noqa: TID251
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def run_forked(program: str, installed: Path, **variables: str) -> str:
    """The same in a process that has imported torch already, without autoload."""
    (installed / "program.py").write_text(program)  # its folder comes first in sys.path
    env = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables}
    printed, _ = run_script(installed / "program.py", world_size=1, env=env)
    return printed.strip()


FLAGGED = "{'deepytorch': {'enabled': True}}"


@pytest.mark.parametrize(
    ("before", "start"),
    [
        ("import deepspeed", run),
        (
            "from deepytorch_core.c10d import autoload; autoload.register(); import deepspeed",
            run_forked,
        ),
        pytest.param("import torch, deepspeed", run, marks=pytest.mark.extended),
        (
            "import deepspeed; from deepytorch_core.c10d import deepspeed_flag; "
            "deepspeed_flag.arm('again')",
            run_forked,
        ),
        (
            "from deepspeed import initialize; import deepspeed; "
            "deepspeed.initialize is initialize",
            run_forked,
        ),
    ],
)
def test_the_section_leads_to_the_adapter_in_any_order_of_imports(
    installed: Path, before: str, start: Callable[..., str]
) -> None:
    program = f"{before}\nprint(deepspeed.initialize(config={FLAGGED}), type(deepspeed).__name__)"
    # Not active: what the adapter does next is its own affair.
    assert start(program, installed) == "('ours', 'stock', False) module"


CALLS = [
    "deepspeed.initialize()",
    "deepspeed.initialize(None, 'model', {'zero_optimization': {'stage': 2}})",
    "deepspeed.initialize(config='deepytorch')",
    "deepspeed.initialize(config='/no/such/file')",
    "deepspeed.initialize(config=17)",
    "deepspeed.initialize(config='x' * 5000)",
]


def test_without_the_section_nothing_of_ours_is_loaded(installed: Path) -> None:
    program = (
        f"import sys, deepspeed\nprint({', '.join(CALLS)})\n"
        "heavy = {'stand_in_adapter', 'deepytorch', 'deepytorch_core._core', 'torch',\n"
        "         'deepytorch_core.c10d.activation'}\n"
        "print(sorted(heavy & set(sys.modules) - {'torch'}))"
    )
    assert (
        run(program, installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        == " ".join(["stock"] * len(CALLS)) + "\n[]"
    )


def test_files_are_searched_for_the_key(installed: Path) -> None:
    (installed / "quoted.json").write_text('{"deepytorch" : {}}')
    (installed / "plain.hjson").write_text("{\n  deepytorch: {}\n}")
    (installed / "path.json").write_text('{"output": "/home/deepytorch/run"}')
    program = (
        "import deepspeed\n"
        "for name in ('quoted.json', 'plain.hjson', 'path.json'):\n"
        f"    print(deepspeed.initialize(config={str(installed)!r} + '/' + name)[0])"
    )
    assert run_forked(program, installed).split() == ["ours", "ours", "s"]


def test_the_off_switch_wins(installed: Path) -> None:
    program = f"import deepspeed; print(deepspeed.initialize(config={FLAGGED}))"
    assert run_forked(program, installed, DEEPYTORCH_ENABLED="0") == "stock"


def test_an_error_of_the_call_is_deepspeeds_own(installed: Path) -> None:
    program = (
        "import deepspeed\ntry: deepspeed.initialize(nonsense=1)\n"
        "except TypeError as error: print(error)"
    )
    assert "initialize() got an unexpected keyword argument" in run_forked(program, installed)


def test_without_an_adapter_the_error_says_so(installed: Path) -> None:
    (installed / "deepytorch_train-0.0.0.dist-info" / "entry_points.txt").write_text("")
    program = (
        "from importlib import metadata; metadata.entry_points = lambda **_: ()\n"
        f"import deepspeed\ntry: deepspeed.initialize(config={FLAGGED})\n"
        "except RuntimeError as error: print(error)"
    )
    assert "no adapter for it is installed" in run_forked(program, installed)


def test_disarming_takes_the_last_owner_and_leaves_no_trace(installed: Path) -> None:
    program = (
        "import deepspeed\nfrom deepytorch_core.c10d import deepspeed_flag as flag\n"
        f"def see(): print(deepspeed.initialize(config={FLAGGED})[0])\n"
        "flag.arm('a'); flag.arm('a'); flag.disarm('autoload'); see()\n"
        "flag.disarm('a'); see(); print(hasattr(deepspeed.initialize, '__wrapped__'))\n"
        "flag.arm('a'); see(); flag.disarm(); see(); print(type(deepspeed).__name__)"
    )
    expected = ["ours", "s", "False", "ours", "s", "module"]
    assert run_forked(program, installed).split() == expected


def test_what_looks_at_the_module_while_it_is_imported_sees_no_initialize_yet(
    installed: Path,
) -> None:
    early = "import sys; print(hasattr(sys.modules[__name__], 'initialize'))"
    (installed / "deepspeed.py").write_text(STAND_IN.format(early=early))
    program = (
        "import deepspeed\n"
        "own = lambda config=None: 'own'\n"
        "deepspeed.initialize = own\n"  # replaced before anybody looked
        f"print(deepspeed.initialize(config={FLAGGED}), type(deepspeed).__name__)"
    )
    output = run_forked(program, installed).splitlines()
    assert output[0] == "False"
    assert output[1] == "('ours', 'own', False) module"
