"""Target of the entry points `torch.backends` and `torch.distributed.backends`.

It runs inside `import torch` (`torch.backends`), or when the name is first used (torch 2.14 and
newer). An exception here would break `import torch` for everyone who installed deepytorch, so
there is none; and nothing is changed but that the backend's name is known, and that a flag in
DeepSpeed's configuration will be noticed.
"""

from __future__ import annotations

import contextlib
from typing import Any


def register(*_args: Any, **_kwargs: Any) -> None:
    """Make the name "deepytorch" known to torch.distributed, and notice flags; never raises."""
    with contextlib.suppress(Exception):
        from deepytorch_core.c10d import backend

        backend.register()
    with contextlib.suppress(Exception):
        from deepytorch_core.c10d import deepspeed_flag

        deepspeed_flag.arm("autoload")
