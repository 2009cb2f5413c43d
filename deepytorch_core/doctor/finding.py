"""Holds what a check found: one line for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any


class State(enum.StrEnum):
    """How bad it is; NOT_HERE is for what does not apply to this machine or job."""

    OKAY = "okay"
    WARN = "warn"
    FAIL = "fail"
    NOT_HERE = "not here"


@dataclass(frozen=True)
class Finding:
    """One line: the evidence, and the command that mends it where something is wrong.

    `check` and `node` are filled in by who runs the checks; `node` is "" for this machine.
    """

    state: State
    evidence: str
    remedy: str = ""
    check: str = ""
    node: str = ""

    def of(self, check: str) -> Finding:
        """The same, of the check of this name."""
        return replace(self, check=check)

    def to_dict(self) -> dict[str, str]:
        """Plain values, for JSON."""
        return {
            "check": self.check,
            "state": self.state.value,
            "evidence": self.evidence,
            "remedy": self.remedy,
            "node": self.node,
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Finding:
        """The other way round."""
        return cls(**{**fields, "state": State(fields["state"])})


def okay(evidence: str) -> Finding:
    """All is well, with what shows it."""
    return Finding(State.OKAY, evidence)


def warn(evidence: str, remedy: str) -> Finding:
    """It costs time, or will."""
    return Finding(State.WARN, evidence, remedy)


def fail(evidence: str, remedy: str) -> Finding:
    """It breaks training, or makes it far slower than the machine is."""
    return Finding(State.FAIL, evidence, remedy)


def not_here(reason: str) -> Finding:
    """Does not apply, with the reason."""
    return Finding(State.NOT_HERE, reason)
