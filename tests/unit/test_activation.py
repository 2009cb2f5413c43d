"""`import deepytorch` in fresh processes: when it acts, what it prints, how it is undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepytorch_core.testing import run_program, run_script

ROOT = Path(__file__).parents[2]

# One rank is enough for everything that is not about ranks. A gloo group of torch's own is
# destroyed before the process ends. Left to the interpreter's end, it aborts about 1 of 80
# processes ("terminate called"), also with torch alone.
INIT = """
import atexit

def destroy_gloo():
    if dist.is_initialized() and served()[0] == "gloo":
        dist.destroy_process_group()

def served():
    from torch.distributed import distributed_c10d as c10d
    from deepytorch_core.c10d import patches as c10d_patches, rewrite
    devices = c10d_patches.served(c10d, c10d._get_default_group())
    return c10d_patches.serving_name(), rewrite.join(devices)

def init(backend=None, **kwargs):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **kwargs)
    atexit.register(destroy_gloo)
    dist.all_reduce(torch.ones(1))
    return served()
"""


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}  # noqa: TID251
    return run_program([sys.executable, "-c", program], env=environment)


def output(program: str, **variables: str) -> list[str]:
    """Return the lines that the program printed; it must succeed."""
    result = run(program, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def forked(program: str, folder: Path, **variables: str) -> tuple[str, str]:
    """The same where torch has been imported before: what it printed, and its errors."""
    script = folder / "program.py"
    script.write_text(program)
    return run_script(script, world_size=1, variables=variables)


def test_before_torch_it_neither_imports_torch_nor_prints() -> None:
    result = run(
        "import sys, deepytorch\n"
        "assert 'torch' not in sys.modules\n"
        "assert deepytorch.is_active()\n"
        "deepytorch.deactivate()\n"
        "assert not deepytorch.is_active()\n"
        "import torch\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "assert not hasattr(c10d._new_process_group_helper, '__deepytorch_original__')\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""


@pytest.mark.parametrize(
    "imports",
    [
        "import deepytorch, torch, torch.distributed as dist\n",
        pytest.param(
            "import torch, torch.distributed as dist, deepytorch\n", marks=pytest.mark.extended
        ),
        "import torch, torch.distributed as dist\n"
        "from torch.distributed import init_process_group\n"
        "dist.init_process_group = init_process_group\n"
        "import deepytorch\n",
    ],
    ids=["before torch", "after torch", "after a name was taken from torch"],
)
def test_it_acts_whenever_it_is_imported(imports: str) -> None:
    again = "dist.destroy_process_group()\nprint(*init('gloo'))\n"
    result = run(imports + INIT + "print(*init('gloo'))\n" + again)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "deepytorch cpu:deepytorch\n" * 2
    # One line at the start, with the off switch.
    (line,) = [line for line in result.stderr.splitlines() if "compil" not in line]
    assert "collectives of 1 rank go through deepytorch for cpu tensors" in line
    assert "DEEPYTORCH_ENABLED=0" in line


def test_without_argument_the_group_serves_every_device() -> None:
    """Groups with processes outside of the job are left alone: torch's helper, without a world.

    Trainers make them that send weights to an inference server.
    """
    lines = output(
        "import deepytorch, torch, torch.distributed as dist\n"
        "from torch.distributed.distributed_c10d import _new_process_group_helper, _world\n"
        "from datetime import timedelta\n"
        "group, _ = _new_process_group_helper(\n"
        "    1, 0, [], 'gloo', dist.HashStore(), group_name='weights',\n"
        "    timeout=timedelta(seconds=9))\n"
        "print(_world.pg_backend_config[group])\n"
        "group, _ = _new_process_group_helper(\n"
        "    group_size=1, group_rank=0, global_ranks_in_group=[], backend='gloo',\n"
        "    store=dist.HashStore(), group_name='by name', timeout=timedelta(seconds=9))\n"
        "print(_world.pg_backend_config[group])\n" + INIT + "print(*init(None))\n"
    )
    assert lines == ["cpu:gloo,cuda:gloo"] * 2 + ["deepytorch cpu:deepytorch"]


def test_switched_off_it_does_nothing_at_all() -> None:
    program = (
        "import sys, deepytorch\n"
        "before = list(sys.meta_path)\n"
        "import torch, torch.distributed as dist\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "assert not deepytorch.is_active()\n"
        "assert not hasattr(c10d._new_process_group_helper, '__deepytorch_original__')\n"
        "assert 'deepytorch_core.c10d.patches' not in sys.modules\n"
        + INIT
        + "print(*init('gloo'))\n"
    )
    result = run(program, DEEPYTORCH_ENABLED="0")
    assert (result.stdout, result.stderr) == ("gloo cpu:gloo,cuda:gloo\n", "")


def test_switched_off_an_explicit_name_still_works_through_gloo_itself(tmp_path: Path) -> None:
    printed, _ = forked(
        "import sys, torch, torch.distributed as dist\n"
        "from deepytorch_core.c10d import backend\n"
        "backend.register()\n"
        + INIT
        + "print(*init('deepytorch'))\n"
        + "group = dist.distributed_c10d._get_default_group()\n"
        + "print(type(group._get_backend(torch.device('cpu'))).__name__)\n"
        + "assert 'deepytorch_c10d' not in sys.modules\n",
        tmp_path,
        DEEPYTORCH_ENABLED="0",
        CXX="/nonexistent/c++",
        DEEPYTORCH_CACHE_DIR="/nonexistent/cache",
    )
    assert printed.splitlines() == ["deepytorch cpu:deepytorch", "ProcessGroupGloo"]


def test_stock_collectives_leave_groups_alone_but_not_the_explicit_name(tmp_path: Path) -> None:
    printed, _ = forked(
        "import deepytorch, torch, torch.distributed as dist\n"
        + INIT
        + "print(*init('gloo'))\n"
        + "dist.destroy_process_group()\n"
        + "print(*init('deepytorch'))\n"
        + "report = deepytorch.report()\n"
        + "print(report.native_calls, report.delegated_calls)\n",
        tmp_path,
        DEEPYTORCH_COLLECTIVES="stock",
    )
    assert printed.splitlines() == ["gloo cpu:gloo,cuda:gloo", "deepytorch cpu:deepytorch", "0 1"]


def test_without_a_compiler_stock_collectives_are_kept_with_one_line(tmp_path: Path) -> None:
    result = run(
        "import deepytorch, torch, torch.distributed as dist\n"
        + INIT
        + "print(*init('gloo'), flush=True)\n"
        + "dist.destroy_process_group()\n"
        # Only the explicit name insists.
        + "init('deepytorch')\n",
        TMPDIR=str(tmp_path),
        CXX="/nonexistent/c++",
        DEEPYTORCH_CACHE_DIR=str(tmp_path),
    )
    assert result.stdout == "gloo cpu:gloo,cuda:gloo\n", result.stderr
    line, error, *_ = result.stderr.splitlines()
    assert error.endswith("Traceback (most recent call last):")
    assert "keeping torch's own collectives" in line
    assert "g++" in line
    assert "AdapterError: no C++ compiler" in result.stderr


def test_a_wrong_option_is_a_value_error_at_import() -> None:
    result = run("import deepytorch", DEEPYTORCH_TUNE="sometimes")
    assert "ValueError: DEEPYTORCH_TUNE='sometimes': expected one of" in result.stderr


def test_a_misspelt_variable_is_told() -> None:
    result = run("import deepytorch", DEEPYTORCH_TIMEOUT="60")
    assert "did you mean DEEPYTORCH_TIMEOUT_S?" in result.stderr


def test_options_change_and_reset() -> None:
    lines = output(
        "import deepytorch\n"
        "from deepytorch_core.base import config\n"
        "deepytorch.activate(timeout_s=5)\n"
        "deepytorch.activate(log='error')\n"
        "print(config.current().timeout_s, config.current().log)\n"
        "deepytorch.activate(enabled=False)\n"
        "print(deepytorch.is_active())\n"
        "deepytorch.activate(enabled=True)\n"
        "print(deepytorch.is_active(), config.current().timeout_s)\n"
        "deepytorch.deactivate(); deepytorch.deactivate()\n"
        "print(config.current().log)\n"
        "try:\n"
        "    deepytorch.activate(collective='auto')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    assert lines[:4] == ["5.0 error", "False", "True None", "info"]
    assert "did you mean collectives?" in lines[4]


def test_deactivating_leaves_torch_as_it_was(tmp_path: Path) -> None:
    printed, _ = forked(
        "import torch, torch.distributed as dist, torch.distributed.nn.functional as functional\n"
        "from torch.distributed import distributed_c10d as c10d, device_mesh\n"
        "def state():\n"
        "    functions = {}\n"
        "    for module in (dist, c10d, device_mesh, functional):\n"
        "        functions |= {(module.__name__, k): v for k, v in vars(module).items()}\n"
        "    for cls in (functional._AllGather, functional._AllGatherBase, functional._AlltoAll):\n"
        "        for k in ('forward', 'backward'):\n"
        "            functions[cls.__name__, k] = getattr(cls, k)\n"
        "    return functions\n"
        "before = state()\n"
        "import deepytorch\n"
        "during = state()\n"
        "changed = sorted({key[1] for key in before if before[key] is not during[key]})\n"
        "print(*changed)\n"
        "deepytorch.deactivate()\n"
        "after = state()\n"
        "print([key for key in before if before[key] is not after[key]])\n"
        + INIT
        + "print(*init('gloo'))\n",
        tmp_path,
    )
    lines = printed.splitlines()
    assert lines[0].split() == [
        "_abort_process_group",
        "_add_ephemeral_timeout_for_all_pgs",
        "_new_group_with_tag",
        "_new_process_group_helper",
        "_set_pg_timeout",
        "_update_default_pg",
        "backward",
        "batch_isend_irecv",
        "forward",
        "monitored_barrier",
        "rendezvous",
        "split_group",
    ]
    assert lines[1:] == ["[]", "gloo cpu:gloo,cuda:gloo"]


def test_a_torch_that_is_not_as_expected_is_left_alone() -> None:
    # Inside `import torch` nothing of ours may raise.
    result = run(
        "import deepytorch\n"
        "from deepytorch_core.c10d import backend\n"
        "def broken():\n"
        "    raise AttributeError('no such thing in this torch')\n"
        "backend.register = broken\n"
        "import torch, torch.distributed as dist\n" + INIT + "print(*init('gloo'))\n"
    )
    assert result.stdout == "gloo cpu:gloo,cuda:gloo\n"
    assert "not active" in result.stderr
    assert "no such thing in this torch" in result.stderr


def test_an_existing_group_that_cannot_be_upgraded_says_why(tmp_path: Path) -> None:
    printed, said = forked(
        "import torch, torch.distributed as dist\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)\n"
        "import deepytorch\n"
        "print(dist.get_backend())\n",
        tmp_path,
    )
    assert printed == "fake\n"
    assert "keeps fake:" in said


def test_report_before_anything_has_happened() -> None:
    lines = output(
        "import sys, deepytorch\n"
        "report = deepytorch.report()\n"
        "print(report)\n"
        "assert 'torch' not in sys.modules\n"
        "import json; json.dumps(report.to_dict())\n"
        "assert report.active and report.options['timeout_s'] is None\n"
    )
    assert lines == ["deepytorch active: 0 native and 0 delegated collectives"]
