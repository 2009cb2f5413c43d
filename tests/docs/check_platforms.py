"""Files of docs/platforms beside published packages (Kubeflow, Ray): `make test-docs`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_platforms import FILES, documents, environment, losses, stock_losses

__all__ = ["stock_losses"]


def exact(model: Any, value: dict[str, Any]) -> None:
    """The model takes the value, and knows each of its fields."""
    assert model.from_dict(value).to_dict() == value


def test_kubeflows_models_know_every_field() -> None:
    from kubeflow_trainer_api import models

    runtime, job = documents("trainjob.yaml")
    exact(models.TrainerV1alpha1TrainingRuntime, runtime)
    exact(models.TrainerV1alpha1TrainJob, job)
    (ray,) = documents("rayjob.yaml")
    cluster = ray["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        exact(models.IoK8sApiCoreV1PodTemplateSpec, group["template"])
    job["spec"]["trainer"]["nprocPerNode"] = 8
    with pytest.raises(AssertionError):
        exact(models.TrainerV1alpha1TrainJob, job)


@pytest.mark.timeout(600)
def test_ray_trains(tmp_path: Path, stock_losses: list[str]) -> None:
    command = [sys.executable, str(FILES / "ray_train.py"), "--workers", "2"]
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(tmp_path, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Ray puts the worker's name, in colour, before what it prints. Some lines are in both streams,
    # so one is read.
    name = re.compile(r"^.*\(RayTrainWorker pid=\d+\)\S* ", re.M)
    printed = name.sub("", done.stdout if "on 2 ranks" in done.stdout else done.stderr)
    assert losses(printed) == stock_losses
    native = [int(found) for found in re.findall(r"^(\d+) native collectives", printed, re.M)]
    assert max(native) >= 60
