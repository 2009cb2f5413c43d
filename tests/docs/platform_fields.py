"""The fields that each platform publishes for its files, as far as ours could have them.

Each table is written by hand from what stands above it; `check_platforms.py` compares ours with the
published packages themselves. "!" marks a field that must be there.
"""

from __future__ import annotations

from typing import Any

_TEXTS = {"*": str}
_QUANTITIES = {"*": (str, int)}
# kubernetes/api/core/v1: PodTemplateSpec.
_RESOURCES = {"limits": _QUANTITIES, "requests": _QUANTITIES, "claims": list}
_CONTAINER = {
    "name!": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [{"name!": str, "value": str, "valueFrom": dict}],
    "envFrom": list,
    "ports": [{"containerPort!": int, "name": str, "protocol": str}],
    "resources": _RESOURCES,
    "securityContext": dict,
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str}],
}
_VOLUME = {
    "name!": str,
    "emptyDir": {"medium": str, "sizeLimit": (str, int)},
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
    "hostPath": {"path!": str, "type": str},
}
_POD = {
    "metadata": {"labels": _TEXTS, "annotations": _TEXTS},
    "spec": {
        "containers!": [_CONTAINER],
        "initContainers": [_CONTAINER],
        "volumes": [_VOLUME],
        "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
        "serviceAccountName": str,
        "nodeSelector": _TEXTS,
        "tolerations": list,
        "affinity": dict,
        "restartPolicy": str,
    },
}
_METADATA = {"name!": str, "namespace": str, "labels": _TEXTS, "annotations": _TEXTS}
_HEAD = {"apiVersion!": str, "kind!": str, "metadata!": _METADATA}
_JOB = {
    "name!": str,
    "replicas": int,
    "dependsOn": list,
    "template!": {
        "metadata": {"labels": _TEXTS, "annotations": _TEXTS},
        "spec": {"template!": _POD, "backoffLimit": int, "completions": int, "parallelism": int},
    },
}
_GROUP = {"rayStartParams": _TEXTS, "template!": _POD}

OBJECTS = {
    # kubeflow/trainer: manifests/base/crds.
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): _HEAD
    | {
        "spec!": {
            "mlPolicy": {"numNodes": int, "torch": dict, "mpi": dict},
            "podGroupPolicy": dict,
            "template!": {
                "metadata": {"labels": _TEXTS, "annotations": _TEXTS},
                "spec": {"replicatedJobs!": [_JOB], "network": dict, "successPolicy": dict},
            },
        }
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _HEAD
    | {
        "spec!": {
            "runtimeRef!": {"name!": str, "apiGroup": str, "kind": str},
            "trainer": {
                "image": str,
                "command": [str],
                "args": [str],
                "env": [{"name!": str, "value": str, "valueFrom": dict}],
                "numNodes": int,
                "numProcPerNode": int,
                "resourcesPerNode": _RESOURCES,
            },
            "initializer": dict,
            "suspend": bool,
            "managedBy": str,
        }
    },
    # ray-project/kuberay: ray-operator/apis/ray/v1.
    ("ray.io/v1", "RayJob"): _HEAD
    | {
        "spec!": {
            "entrypoint": str,
            "runtimeEnvYAML": str,
            "rayClusterSpec": {
                "rayVersion": str,
                "enableInTreeAutoscaling": bool,
                "headGroupSpec!": _GROUP | {"serviceType": str},
                "workerGroupSpecs": [
                    _GROUP
                    | {"groupName!": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
                ],
            },
            "shutdownAfterJobFinishes": bool,
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "submissionMode": str,
            "suspend": bool,
        }
    },
}
# skypilot-org/skypilot: sky/utils/schemas.py, get_task_schema.
SKYPILOT = {
    "name": str,
    "num_nodes": int,
    "workdir": (str, dict),
    "resources": {
        "infra": str,
        "accelerators": (str, dict),
        "cpus": (str, int),
        "memory": (str, int),
        "use_spot": bool,
        "disk_size": (str, int),
        "image_id": (str, dict),
        "network_tier": str,
    },
    "envs": _TEXTS,
    "secrets": dict,
    "file_mounts": dict,
    "volumes": dict,
    "setup": str,
    "run": str,
}
# slurm: sbatch(1), the long options.
SBATCH = {
    "job-name": "name",
    "nodes": "number",
    "ntasks-per-node": "number",
    "gpus-per-node": "number",
    "cpus-per-task": "number",
    "mem": "size",
    "time": "time",
    "partition": "name",
    "account": "name",
    "output": "name",
    "signal": "signal",
    "requeue": "",
}


def check(value: Any, fields: Any, place: str) -> None:
    """Raise AssertionError, naming the place, for what the fields don't allow."""
    if isinstance(fields, dict):
        assert isinstance(value, dict), f"{place}: expected a mapping"
        known = {name.rstrip("!"): kind for name, kind in fields.items()}
        for name, item in value.items():
            kind = known.get(name, known.get("*"))
            assert kind is not None, f"{place}: there is no field {name}"
            check(item, kind, f"{place}.{name}")
        missing = {name[:-1] for name in fields if name.endswith("!")} - value.keys()
        assert not missing, f"{place}: {sorted(missing)} must be there"
    elif isinstance(fields, list):
        assert isinstance(value, list), f"{place}: expected a list"
        for number, item in enumerate(value):
            check(item, fields[0], f"{place}[{number}]")
    else:
        is_good = isinstance(value, fields) and (fields is bool or not isinstance(value, bool))
        assert is_good, f"{place}: {value!r} is of another type"
