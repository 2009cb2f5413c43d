"""Tests of parts replaced in other libraries: listed, given back; one asked for by name wins."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deepytorch.cli import explain_patches
from deepytorch_core.base import config
from deepytorch_core.testing import run_program, run_script

# Modules whose attributes, and those of their classes, are compared.
COMPARED = """
import importlib, json, sys
NAMES = [
    "torch", "torch.nn.parallel.distributed", "torch.optim.optimizer", "torch.cuda.graphs",
    "torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh",
    "torch.distributed.nn.functional", "torch.utils.data.dataloader", "torch._C._distributed_c10d",
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook", "torch.nn.modules.module",
    "torch.amp.grad_scaler", "accelerate.accelerator", "accelerate.data_loader",
]
def held():
    found = {}
    for module in map(importlib.import_module, NAMES):
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                for own, inner in list(vars(value).items()):
                    found[f"{value.__module__}.{value.__qualname__}", own] = inner
    hooks = importlib.import_module("torch.optim.optimizer")
    for name in ("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"):
        found["hooks", name] = len(getattr(hooks, name))
    for name, value in vars(importlib.import_module("torch.nn.modules.module")).items():
        if name.startswith("_global_") and hasattr(value, "__len__"):
            found["hooks", name] = len(value)
    found["sys", "meta_path"] = len(sys.meta_path)
    return found
def differing(old, new):
    # Functions of torch that count how often something was asked for, and caches, are none of ours.
    return sorted(
        key for key in old if key in new and old[key] is not new[key] and old[key] != new[key]
    )
"""
TRAIN = """
import torch
from accelerate import Accelerator
def train():
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(4, 1)
    own = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(net, own)
    plain = torch.nn.Linear(4, 1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(4):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        plain(torch.ones(2, 4)).sum().backward()
        other.step()
    return accelerator, model, plain
"""


def given(folder: Path, **variables: str) -> dict[str, str]:
    return {
        "DEEPYTORCH_PATIENCE": "off",
        "DEEPYTORCH_COMPILE": "aot-eager",
        "DEEPYTORCH_PROFILE": str(folder / "profile.json"),
        "ACCELERATE_USE_CPU": "true",
        **variables,
    }


def told(program: str, folder: Path, **variables: str) -> dict[str, Any]:
    environment = config.child_environment(**given(folder, **variables))
    done = run_program([sys.executable, "-c", program], env=environment)
    assert done.returncode == 0, done.stderr
    return read(done.stdout, done.stderr)


def told_forked(
    program: str, folder: Path, ranks: dict[str, Any], **variables: str
) -> dict[str, Any]:
    """The same in a process that has imported what others need; it says its last lines, too."""
    (folder / "program.py").write_text(f"{program}\nimport atexit\natexit._run_exitfuncs()\n")
    how = {name: ranks[name] for name in ("env", "preload")}
    variables = given(folder, **variables)
    script = folder / "program.py"
    return read(*run_script(script, world_size=1, variables=variables, **how))


def read(printed: str, said: str) -> dict[str, Any]:
    (line,) = [text for text in printed.splitlines() if text.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return {**found, "stderr": said}


def test_every_attribute_that_is_replaced_is_listed_and_given_back(tmp_path: Path) -> None:
    found = told(
        COMPARED
        + TRAIN
        # Torch replaces some of its own as its compiler comes in.
        + "train()\n"
        + "torch.compile(torch.nn.Linear(1, 1), backend='eager')(torch.ones(1, 1))\n"
        + "before = held()\n"
        + "import deepytorch\n"
        + "from deepytorch_core.base.patching import replaced\n"
        + "kept = train()\n"
        + "on = differing(before, held())\n"
        + "listed = [(patch.owner, patch.name, patch.why) for patch in replaced()]\n"
        + "deepytorch.deactivate()\n"
        + "print(json.dumps({'on': on, 'listed': listed, 'off': differing(before, held())}))\n",
        tmp_path,
    )
    listed = {(owner, name) for owner, name, _ in found["listed"]}
    assert all(why for _, _, why in found["listed"])
    assert ("accelerate.accelerator.Accelerator", "__init__") in listed
    changed = {tuple(patch) for patch in found["on"]} - {
        ("hooks", "_global_optimizer_post_hooks"),
        ("sys", "meta_path"),
    }
    # Modules of torch.distributed have the same functions by the same names.
    unlisted = {
        patch
        for patch in changed
        if patch not in listed and patch[1] not in {name for _, name in listed}
    }
    assert unlisted == set()
    assert found["off"] == []
    # Patches that came with the models are in the command's list as well.
    assert {("accelerate.accelerator.Accelerator", "prepare")} <= listed
    later = {patch[:2] for patch in explain_patches.LATER}
    at_once = [patch for patch in listed if patch not in later]
    assert ("accelerate.accelerator.Accelerator", "__init__") in at_once
    assert {name for _, name in listed} & {"prepare", "send_to_device"} <= {
        name for _, name in later
    }


def test_the_last_line_says_what_was_switched_on(
    tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    program = "import deepytorch\n" + TRAIN + "train()\nprint('{}')\n"
    said = told(program, tmp_path)["stderr"]
    (line,) = re.findall(r"^deepytorch: switched on: .*$", said, re.MULTILINE)
    assert said.rstrip().endswith(line)
    assert "compile of Linear: aot-eager" in line
    assert "DEEPYTORCH_ENABLED=0" in line
    ranks = deepspeeds_ranks
    assert "switched on" in told_forked(program, tmp_path, ranks)["stderr"]
    off = told_forked(program, tmp_path, ranks, DEEPYTORCH_ENABLED="0")
    assert "switched on" not in off["stderr"]
    untrained = told_forked("import deepytorch\nprint('{}')", tmp_path, ranks)
    assert "switched on" not in untrained["stderr"]


def test_what_is_asked_for_by_name_wins_before_and_after(
    tmp_path: Path, deepspeeds_ranks: dict[str, Any]
) -> None:
    found = told_forked(
        "import deepytorch, json, torch\n"
        "from deepytorch_core.compile import compilation_of\n"
        "def trained(before=lambda net: None, after=lambda net: None):\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))\n"
        "    before(net)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    for step in range(8):\n"
        "        if step == 5:\n"
        "            after(net)\n"
        "        net(torch.ones(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
        "    found = compilation_of(net)\n"
        "    return None if found is None else found.policy\n"
        "off = lambda net: deepytorch.compile(net, 'off')\n"
        "auto = lambda net: deepytorch.compile(net, 'auto')\n"
        "print(json.dumps({'nobody': trained(), 'off before': trained(off),\n"
        "    'off after': trained(after=off), 'auto before': trained(auto),\n"
        "    'auto after': trained(after=auto)}))\n",
        tmp_path,
        deepspeeds_ranks,
    )
    assert {name: value for name, value in found.items() if name != "stderr"} == {
        "nobody": "aot-eager",
        "off before": None,
        "off after": None,
        "auto before": "auto",
        "auto after": "auto",
    }


@pytest.mark.extended
def test_an_adapters_own_call_takes_back_what_came_unasked(tmp_path: Path) -> None:
    found = told(
        "import deepytorch, json, torch\n"
        "from accelerate import Accelerator\n"
        "from deepytorch.integrations.common import contract as _contract\n"
        "from deepytorch.integrations.seams import arm as _seams\n"
        "from deepytorch.integrations.accelerate import DeepytorchPlugin\n"
        "def decided(*handlers):\n"
        "    accelerator = Accelerator(cpu=True, kwargs_handlers=list(handlers))\n"
        "    net = torch.nn.Linear(4, 1)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    net, optimizer = accelerator.prepare(net, optimizer)\n"
        "    for _ in range(6):\n"
        "        accelerator.backward(net(torch.ones(2, 4)).sum())\n"
        "        optimizer.step()\n"
        "    from deepytorch_core.compile import compilation_of\n"
        "    return compilation_of(net) is not None\n"
        "off = DeepytorchPlugin(compile='off', kernels='off', padding_free='off')\n"
        "print(json.dumps({'unasked': decided(), 'by name': decided(off)}))\n",
        tmp_path,
    )
    assert (found["by name"], found["unasked"]) == (False, True)


def test_a_seam_that_has_moved_is_a_line_and_stock(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").write_text("")
    (tmp_path / "accelerate" / "accelerator.py").write_text("class Moved: pass\n")
    found = told(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import deepytorch, accelerate.accelerator, json\n"
        "print(json.dumps({'is_there': accelerate.accelerator.Moved.__name__}))\n",
        tmp_path,
    )
    assert found["is_there"] == "Moved"
    assert found["stderr"].count("Accelerate's prepare stays as it is: AttributeError") == 1


def test_importing_it_imports_no_framework(tmp_path: Path) -> None:
    found = told(
        "import json, sys, deepytorch\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'numpy'}\n"
        "print(json.dumps({'heavy': sorted(heavy & set(sys.modules))}))\n",
        tmp_path,
    )
    assert found["heavy"] == []
