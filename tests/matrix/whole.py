"""Tests an installed deepytorch in a fresh environment: `python whole.py ADAPTER`.

ADAPTER is `prebuilt` where the wheel carries one, when nothing may be compiled, else `compiled`.
Runs collectives and a DDP training on two ranks, doctor, topology and report, then uninstalls
deepytorch and looks for what it left. Ends with one line that names versions and outcome.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# ruff: noqa: TID251
HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
CACHE = Path(os.environ["DEEPYTORCH_CACHE_DIR"])


def run(*command: str | Path, statuses: tuple[int, ...] = (0,)) -> str:
    """Return what the command prints; fail, showing all of it, when its exit status is another."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=600
    )
    shown = f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode in statuses, shown
    print(shown)
    return done.stdout


def doctor(adapter: str) -> None:
    """It runs, and finds that the adapter is there."""
    found = json.loads(run(BIN / "deepytorch", "doctor", "--json", statuses=(0, 1)))
    states = {finding["check"]: finding["state"] for finding in found}
    assert states["core"] == "okay", found
    assert states["adapter"] == "okay", found
    if adapter == "prebuilt":
        assert shutil.which("c++") is None
        assert shutil.which("nvcc") is None
        assert not list(CACHE.glob("adapter-*/*/*.so")), "something was compiled"


def uninstall() -> list[str]:
    """Names of what stays in the cache on purpose; fails when a file of the package stays."""
    distribution = importlib.metadata.distribution("deepytorch-train")
    installed = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    assert len(installed) > 100
    run(sys.executable, "-m", "pip", "uninstall", "-y", "deepytorch-train")
    packages = Path(sysconfig.get_paths()["purelib"])
    left = [str(path) for path in installed if path.exists()]
    left += [str(path) for path in packages.glob("deepytorch*")]
    left += [str(path) for path in BIN.glob("deepytorch*")]
    assert not left, left
    return sorted(path.name for path in CACHE.glob("*"))


def main(adapter: str) -> None:
    torch = importlib.metadata.version("torch")
    run(BIN / "deepytorch", "--help")
    smoke = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", HERE / "smoke.py")
    (line,) = [line for line in smoke.splitlines() if line.startswith("smoke: ")]
    doctor(adapter)
    assert json.loads(run(BIN / "deepytorch", "topology", "--json"))["cores"]
    run(BIN / "deepytorch", "topology")
    report = run(BIN / "deepytorch", "report")
    assert f"{adapter}: " in report, report
    run(BIN / "deepytorch", "explain", "all_reduce", "64K", "--world-size", "2")
    kept = uninstall()
    version = line.partition("torch ")[2].partition(",")[0]
    assert version.startswith(torch.partition("+")[0]), (version, torch)
    calls = line.partition(": ")[2].partition(": ")[2]
    print(f"cell: {platform.python_version()} | {version} | {adapter} | ok: {calls}")
    print(f"left in the cache by design: {', '.join(kept) or 'nothing'}")


if __name__ == "__main__":
    main(sys.argv[1])
