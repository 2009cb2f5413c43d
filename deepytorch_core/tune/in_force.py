"""The settings of `deepytorch tune` that are in force in this process, and who asked for them.

A framework's settings are asked for where the framework takes them: by a seam, or by its adapter.
What was asked for, and whether it could be set, tells `deepytorch tune` what there is to search.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepytorch_core.base import config
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
    known = _asked.get(name)
    if known is not None:
        # Several models: one that takes it is enough, and the largest needs most.
        open_ones = [one for one in (known.why_fixed, why_fixed) if not one]
        sizes = [one for one in (known.enough, enough) if one is not None]
        _asked[name] = Asked("" if open_ones else why_fixed, max(sizes, default=None))
    else:
        _asked[name] = Asked(why_fixed, enough)
    return None if why_fixed else current().get(name)


def leave(name: str, why: str) -> None:
    """A framework's knob is somebody else's to set in this process, whoever asks for it."""
    knob(name)
    _asked[name] = Asked(why)


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
