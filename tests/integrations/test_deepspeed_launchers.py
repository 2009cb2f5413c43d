"""DeepSpeed jobs as users start them: unchanged scripts, the flag in the JSON, any launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deepytorch_core.base import config
from deepytorch_core.testing import free_port, run_program, run_script

# Each job takes seconds to start, and many more of them on a busy machine.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
GETTING_STARTED = (
    str(EXAMPLES / "deepspeed_getting_started.py"),
    "--deepspeed",
    "--deepspeed_config",
    str(EXAMPLES / "deepspeed_config.json"),
)
TRAINER = ("--deepspeed", str(EXAMPLES / "deepspeed_trainer_config.json"), "--max_steps", "20")
OFF = {"DEEPYTORCH_ENABLED": "0"}


def run(*module_and_arguments: str, **variables: str) -> str:
    """Both outputs of `python -m module arguments`, which must succeed."""
    environment = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    result = run_program(
        [sys.executable, "-W", "ignore", "-m", *module_and_arguments],
        env=config.child_environment(**environment),
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.extended
def test_the_getting_started_example_with_the_deepspeed_launcher() -> None:
    # As the command `deepspeed` does. Its launcher needs a port that it can't choose itself.
    launcher = ("deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port()))
    output = run(*launcher, *GETTING_STARTED)
    epochs = re.findall(r"epoch \d: loss ([\d.]+), backend (\w+)", output)
    assert [backend for _, backend in epochs] == ["deepytorch"] * 2
    assert float(epochs[1][0]) < float(epochs[0][0])
    assert output.count("collectives of 2 ranks go through deepytorch for cpu tensors") == 1


@pytest.mark.extended
def test_the_cifar_example_with_torchrun() -> None:
    output = run(*TORCHRUN, str(EXAMPLES / "deepspeed_cifar.py"), "--stage", "2")
    accuracy = re.search(r"Accuracy of the network on the test images: (\d+) %", output)
    assert accuracy is not None
    assert int(accuracy.group(1)) > 50
    assert "collectives of 2 ranks go through deepytorch for cpu tensors" in output


def trainer(*before: str, **variables: str) -> tuple[list[float], str, str]:
    script = before or (str(EXAMPLES / "deepspeed_trainer.py"),)
    return losses_in(run(*TORCHRUN, *script, *TRAINER, **variables))


def forked_trainer(ranks: dict[str, Any], **variables: str) -> tuple[list[float], str, str]:
    given = {name: ranks[name] for name in ("env", "preload")}
    script = EXAMPLES / "deepspeed_trainer.py"
    return losses_in("".join(run_script(script, *TRAINER, variables=variables, **given)))


def losses_in(output: str) -> tuple[list[float], str, str]:
    """The losses, what served the groups, and all of the output."""
    found = re.search(r"losses \[([^]]*)\], backend gloo", output)
    assert found is not None, output
    served_by = "deepytorch" if "ranks go through deepytorch" in output else "gloo"
    return [float(loss) for loss in found.group(1).split(", ")], served_by, output


@pytest.fixture(scope="module")
def stock(deepspeeds_ranks: dict[str, Any]) -> list[float]:
    losses, backend, _ = forked_trainer(deepspeeds_ranks, **OFF)
    assert backend == "gloo"
    assert len(losses) == 20
    return losses


def test_an_unchanged_trainer_script_with_autoload(
    stock: list[float], deepspeeds_ranks: dict[str, Any]
) -> None:
    losses, backend, _ = forked_trainer(deepspeeds_ranks)
    assert (losses, backend) == (stock, "deepytorch")


@pytest.mark.extended
def test_an_unchanged_trainer_script_with_torchrun(stock: list[float]) -> None:
    losses, backend, _ = trainer()
    assert (losses, backend) == (stock, "deepytorch")


# test_deepspeed.py and test_transformers_modes.py train with the import too.
@pytest.mark.extended
def test_without_autoload_a_trainer_script_needs_the_import(
    stock: list[float], tmp_path: Path
) -> None:
    # One line, before or after those of the script.
    with_import = tmp_path / "with_import.py"
    with_import.write_text(
        "import runpy\n"
        "import deepytorch\n"
        f"runpy.run_path({str(EXAMPLES / 'deepspeed_trainer.py')!r}, run_name='__main__')\n"
        "print(deepytorch.report())\n"
    )
    losses, backend, output = trainer(str(with_import), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (losses, backend) == (stock, "deepytorch")
    assert re.search(r"\ball_gather +(?!delegate)\w+ ", output)
    assert re.search(r"\breduce_scatter +(?!delegate)\w+ ", output)


def test_ds_report_is_undisturbed() -> None:
    report = ("deepspeed.env_report",)
    ours = run(*report)
    assert "DeepSpeed general environment info" in ours
    timestamp = re.compile(r"^\[\d{4}-.*$", re.MULTILINE)
    stock = run(*report, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert timestamp.sub("", ours) == timestamp.sub("", stock)


def test_the_examples_do_not_mention_us_but_in_the_section() -> None:
    for script in sorted(EXAMPLES.glob("deepspeed_*.py")):
        code = script.read_text().split('"""', 2)[2]
        mentions = [line for line in code.splitlines() if "deepytorch" in line]
        assert mentions in ([], ['        "deepytorch": {"enabled": True},']), script
