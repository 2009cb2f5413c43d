"""Exceptions of the Python engine.

A wrong argument or option is a ValueError, and a failed collective a
`torch.distributed.DistBackendError`; neither has a class of its own here.
"""

from __future__ import annotations

OFF_SWITCH = "DEEPYTORCH_ENABLED=0 turns deepytorch off"


class AdapterError(RuntimeError):
    """The compiled c10d adapter can't be had: no compiler, no place to keep it, a failed build."""


class TuneError(RuntimeError):
    """A script can't be tuned: nothing of it can be set, or there is no place for the result."""


class CompareError(RuntimeError):
    """A script can't be compared: it failed, ended too early, or would harm what was there."""


class IntegrationError(RuntimeError):
    """An adapter can't do what it was asked to; one line, with the way out, on every rank."""
