"""Scripts that are written for torchrun, run by ranks that start in no time.

torchrun and each of its ranks import torch anew, and most of them transformers: seconds each, more
than a test's training takes. Here ranks are forks of one process that has imported all that.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepytorch_core.testing.pool import spawn_ranks


def run_script(
    script: str | Path,
    *arguments: str | Path,
    world_size: int = 2,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 100,
    env: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
) -> tuple[str, str]:
    """Run a script on every rank as torchrun would, but for what `preload` has imported before it.

    Args:
        script: the file, which becomes `__main__`.
        *arguments: its `sys.argv[1:]`.
        world_size: ranks.
        variables: of its environment, set before it begins.
        timeout_s: hard limit in seconds.
        env, preload: as for `spawn_ranks`.

    Returns what the ranks printed and their standard errors, rank by rank. Raises RankError, with
    the end of those, where a rank raised or left with a status other than 0.
    """
    words = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        launched = {"TORCHELASTIC_RUN_ID": Path(folder).name, "GROUP_RANK": "0"}
        spawn_ranks(
            _run,
            world_size,
            words,
            {**launched, **(variables or {})},
            folder,
            timeout_s=timeout_s,
            fresh=True,
            env=env,
            preload=preload,
        )
        return _read(folder, "out", world_size), _read(folder, "err", world_size)


def _read(folder: str, name: str, world_size: int) -> str:
    return "".join(Path(folder, f"{name}{rank}").read_text() for rank in range(world_size))


def _run(
    rank: int, world_size: int, words: list[str], variables: Mapping[str, str], folder: str
) -> None:
    os.environ.update(variables)  # noqa: TID251  for the script
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        # Beneath Python, as native code prints too.
        file = os.open(Path(folder, f"{name}{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(_ended(f"it left with status {end.code}", folder, rank)) from end
    except Exception as error:
        error.add_note(_ended("it printed:", folder, rank))
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _ended(what: str, folder: str, rank: int) -> str:
    sys.stdout.flush()
    printed = [Path(folder, f"{name}{rank}").read_text()[-2000:] for name in ("out", "err")]
    return "\n".join([what, *printed])
