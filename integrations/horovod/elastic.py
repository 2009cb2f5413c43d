"""Horovod's elastic names. None of them does anything: each says what to use.

Ranks can't come and go while a job runs. torchrun starts a job again with the ranks that are left,
and the script goes on from its last checkpoint.
"""

from __future__ import annotations

from typing import Any

from deepytorch.integrations._horovod_common import no_such_feature

_INSTEAD = (
    "save a checkpoint every few steps, load the last one at the start, and let torchrun restart "
    "the job: torchrun --nnodes=1:4 --max-restarts=3 --rdzv-backend=c10d ..."
)


def run(func: Any) -> Any:
    """Not supported: raises IntegrationError."""
    raise no_such_feature("elastic.run", _INSTEAD)


class State:
    """Not supported: raises IntegrationError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise no_such_feature(f"elastic.{type(self).__name__}", _INSTEAD)


class ObjectState(State):
    """Not supported: raises IntegrationError."""


class TorchState(State):
    """Not supported: raises IntegrationError."""


class ElasticSampler(State):
    """Not supported: raises IntegrationError."""
