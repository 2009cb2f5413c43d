"""Reports what a run has made outside the view of its folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from deepytorch_core.compare.result import Sample

# A long list of paths says less than its beginning.
_MOST_FOLDERS = 3


def remarks(sample: Sample) -> list[str]:
    """About a run that is over and cleared: which checkpoints were not kept, and what stays."""
    redirected = Counter(os.path.dirname(path) for path in sample.redirected)
    left = [
        folder
        for folder in sample.made_folders
        if os.path.isdir(folder) and "/.cache/" not in folder
    ]
    found = []
    if left:
        found.append(f"the script also made {_some(left)}, and left files there")
    if redirected:
        counted = [f"{folder} ({_files(count)})" for folder, count in sorted(redirected.items())]
        found.append(f"checkpoints not kept: in {_some(counted)}")
    return found


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_FOLDERS
    return ", ".join(names[:_MOST_FOLDERS]) + (f" and {rest} more" if rest > 0 else "")


def _files(count: int) -> str:
    return f"{count} file{'s' if count > 1 else ''}"
