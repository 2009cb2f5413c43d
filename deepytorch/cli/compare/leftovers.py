"""What a run leaves outside the view of its folder: cleared where it is of no use, and told."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence

from deepytorch_core.compare.result import Sample

# A long list of paths says less than its beginning.
_MOST_FOLDERS = 3


def clear(sample: Sample, began: float) -> list[str]:
    """Remove the checkpoints that a run has made elsewhere; remarks about what stays there.

    Args:
        sample: the run, which is over.
        began: when it did, in seconds since the epoch.
    """
    redirected = Counter(os.path.dirname(path) for path in sample.redirected)
    for folder in sorted({*redirected} & {*sample.made_folders}, key=len, reverse=True):
        _remove_checkpoint(folder, began)
    for folder in sorted(sample.made_folders, key=len, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    left = [one for one in sample.made_folders if os.path.isdir(one) and "/.cache/" not in one]
    remarks = []
    if left:
        remarks.append(f"the script also made {_some(left)}, and left files there")
    if redirected:
        counted = [f"{folder} ({_files(count)})" for folder, count in sorted(redirected.items())]
        remarks.append(f"checkpoints not written: in {_some(counted)}")
    return remarks


def _remove_checkpoint(folder: str, began: float) -> None:
    """Remove what the run has made, whose weights went elsewhere: nothing could resume from it.

    A later training, also this comparison's next run, would take it for its last checkpoint. It
    stays if something in it is older than the run.
    """
    files = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
    with contextlib.suppress(OSError):
        if all(os.lstat(file).st_mtime >= began for file in files):
            shutil.rmtree(folder)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_FOLDERS
    return ", ".join(names[:_MOST_FOLDERS]) + (f" and {rest} more" if rest > 0 else "")


def _files(count: int) -> str:
    return f"{count} file{'s' if count > 1 else ''}"
