"""Settings in force in this process, for the seams and adapters that ask for them.

`deepytorch tune` sees from the settings asked for, and whether they could be set, what to search.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def put(setting: Setting | None) -> None:
    """Answer with these settings from now on; None: nothing was decided."""
    global _current
    _current = setting


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
        open_ones = [reason for reason in (known.why_fixed, why_fixed) if not reason]
        sizes = [size for size in (known.enough, enough) if size is not None]
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


def forget() -> None:
    """Forget the settings, and who asked for some."""
    put(None)
    _asked.clear()
