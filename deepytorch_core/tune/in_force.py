"""The settings of `deepytorch tune` that are in force in this process, and who asked for them.

A framework's settings are asked for where the framework takes them: by a seam, or by its adapter.
What was asked for, and whether it could be set, tells `deepytorch tune` what there is to search.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core import config
from deepytorch_core.tune.knobs import DEFAULTS, Setting, as_dict, knob


@dataclass(frozen=True)
class Asked:
    """A framework's knob that this process met.

    Args:
        why_fixed: why it can't be set; "" if it can.
        enough: from this value on all values mean the same; None if that is not known.
    """

    why_fixed: str = ""
    enough: int | None = None


_current: Setting | None = None
_asked: dict[str, Asked] = {}


def put_in_force(setting: Setting) -> None:
    """Use these settings in this process, before its first process group is made.

    A variable that is set already stays as it is. Also with no settings at all: then nothing is
    taken from the profile later, and what the frameworks ask for is noted.
    """
    global _current
    from deepytorch_core.tune import seams

    _current = setting
    variables = {knob(name).variable: str(value) for name, value in setting}
    config.set_where_unset({name: value for name, value in variables.items() if name})
    seams.install()


def is_decided() -> bool:
    """Whether settings, or their absence, were put in force in this process."""
    return _current is not None


def current() -> dict[str, int]:
    """Names and values of what is in force."""
    return as_dict(_current or DEFAULTS)


def ask(name: str, *, why_fixed: str = "", enough: int | None = None) -> int | None:
    """The value in force of a framework's knob, for who is about to pass it on; None: the default.

    Args:
        name: see `knobs.KNOBS`.
        why_fixed: why it can't be set here, such as a size that the script gives. Then None.
        enough: from this value on all values mean the same.
    """
    knob(name)
    _asked[name] = Asked(why_fixed, enough)
    return None if why_fixed else current().get(name)


def asked() -> dict[str, Asked]:
    """The frameworks' knobs that this process met, by name."""
    return dict(_asked)


def reset() -> None:
    """Forget everything, and give the frameworks their functions back."""
    global _current
    from deepytorch_core.tune import seams

    seams.undo()
    _current = None
    _asked.clear()
