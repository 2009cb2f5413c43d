"""The profile's entry of one model's trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepytorch_core import guard
from deepytorch_core.base import config, console
from deepytorch_core.compile.policies import AUTO


class Kept:
    """Keeps a trial's outcome for the next run, or notes it for people.

    Args:
        what: the decision's name.
        policy: the one asked for.
    """

    def __init__(self, what: str, policy: str) -> None:
        self._what = what
        self._policy = policy
        self._facts: dict[str, str] = {}

    def look_at(self, root: nn.Module, device: torch.device) -> None:
        """Have the entry be that of a model as it is now."""
        self._facts = {"module": guard.fingerprint(root), "device": device.type}

    def find(self, num_ranks: int) -> dict[str, Any] | None:
        """Find the entry of an earlier run of as many ranks."""
        if config.current().tune == "force":
            return None
        return guard.profile.find(self._key(num_ranks))

    def keep(self, entry: dict[str, Any], *, num_ranks: int, is_final: bool) -> None:
        """Keep the outcome; where it is not final, the next run is to find out by itself."""
        if console.global_rank() != 0:
            return
        if entry["times_ms"] and is_final:
            guard.profile.keep(self._key(num_ranks), entry)
        else:
            asked = {} if self._policy == AUTO else {"policy": self._policy}
            guard.profile.note({**self._key(num_ranks), **asked}, entry)

    def _key(self, num_ranks: int) -> dict[str, Any]:
        return guard.profile.key(self._what, self._facts, world_size=num_ranks)
