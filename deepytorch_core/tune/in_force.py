"""The settings of `deepytorch tune` that are in force in this process, and who asked for them.

A framework's settings are asked for where the framework takes them: by a seam, or by its adapter.
"""

from __future__ import annotations

from deepytorch_core.base import config
from deepytorch_core.tune import asking, seams
from deepytorch_core.tune.asking import Asked, ask, asked, current, is_decided, leave
from deepytorch_core.tune.knobs import Setting, knob

__all__ = ["Asked", "ask", "asked", "current", "is_decided", "leave", "put_in_force", "reset"]


def put_in_force(setting: Setting) -> None:
    """Use these settings in this process, before its first process group is made.

    A variable that is set already stays as it is. Also with no settings at all: then nothing is
    taken from the profile later, and what the frameworks ask for is noted.
    """
    asking.put(setting)
    variables = {knob(name).variable: str(value) for name, value in setting}
    config.set_where_unset({name: value for name, value in variables.items() if name})
    seams.install()


def reset() -> None:
    """Forget everything, and give the frameworks their functions back."""
    seams.undo()
    asking.forget()
