"""The builds of torch that an adapter can be compiled for: the installed one, or another's wheel.

Compiling needs a build's headers, its version and the names of its libraries, never a running
torch. So a wheel, unpacked in part, is enough: neither its CUDA libraries nor an environment of
its own are.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from deepytorch_core.base.errors import AdapterError

RELEASES = ("2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")
"""The releases of torch that `deepytorch build --all-torch` compiles for."""

_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_FETCH_LIMIT_S = 1800.0
# One commit of torch, built for CPUs or for some CUDA, has the same headers but for CUDA's own. The
# adapter does not include those: compiled with 2.13.0+cpu and 2.13.0+cu130 it has the same code and
# data, byte for byte. Other variants (ROCm, XPU) are told apart.
_EXCHANGEABLE = re.compile(r"\+(cpu|cu\d+)$")


@dataclass(frozen=True)
class TorchBuild:
    """One build of torch: `version` as torch says it, git commit, C++ ABI, and its folder."""

    version: str
    git: str
    cxx11_abi: int
    root: Path

    @property
    def name(self) -> str:
        """Equal for builds that an adapter can be exchanged between."""
        parts = (f"torch{_EXCHANGEABLE.sub('', self.version)}", self.git[:8])
        return "-".join(part for part in parts if part)

    def compile_flags(self) -> list[str]:
        include = self.root / "include"
        return [
            f"-D_GLIBCXX_USE_CXX11_ABI={self.cxx11_abi}",
            f"-ffile-prefix-map={include}=torch/include",
            "-isystem",
            str(include),
            "-isystem",
            str(include / "torch" / "csrc" / "api" / "include"),
        ]

    def link_flags(self) -> list[str]:
        # Not -lcudart or the like: the adapter uses torch's generic device interface only.
        return [f"-L{self.root / 'lib'}", *(f"-l{library}" for library in _LIBRARIES)]


def installed() -> TorchBuild:
    """The torch that this process imports."""
    import torch

    return TorchBuild(
        version=str(torch.__version__),
        git=torch.version.git_version or "",
        cxx11_abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
        root=Path(torch.__file__).parent,
    )


def fetch(version: str, into: Path) -> Path:
    """Path of the wheel of a release of torch for this Python, downloaded into the folder `into`.

    pip gets it from wherever it is set up to look, without what it depends on: half a gigabyte.
    Raises AdapterError with pip's last word.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(into), f"torch=={version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FETCH_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise AdapterError(f"pip had no wheel after {_FETCH_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        words = said[-1].removeprefix("ERROR: ") if said else done.stderr.strip()
        raise AdapterError(words.splitlines()[-1] if words else "pip failed without a word")
    return pick(version, into)


def pick(version: str, folder: Path) -> Path:
    """Path of the wheel of a release of torch for this Python in a folder; nothing is downloaded.

    Raises AdapterError when there is none.
    """
    from packaging import tags, utils
    from packaging import version as versions

    wanted, fitting = versions.Version(version), frozenset(tags.sys_tags())
    for path in sorted(folder.glob("torch-*.whl")):
        try:
            _, found, _, carried = utils.parse_wheel_filename(path.name)
        except utils.InvalidWheelFilename:
            continue
        if found.public == wanted.public and carried & fitting:
            return path
    raise AdapterError(f"no wheel of it for this Python in {folder}")


def unpack(wheel: Path, into: Path) -> TorchBuild:
    """Unpack the parts of a wheel of torch that compiling needs: headers, libraries, the version.

    Raises AdapterError for a file that is no such wheel.
    """
    wanted = tuple(f"torch/lib/lib{library}.so" for library in _LIBRARIES)
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.startswith("torch/include/") or name in wanted
            ]
            archive.extractall(into, names)
            words = _assignments(archive.read("torch/version.py").decode())
    except (zipfile.BadZipFile, KeyError, OSError, SyntaxError) as error:
        raise AdapterError(f"{wheel.name} is no wheel of torch: {error}") from None
    # Released wheels have the new ABI since 2.7.
    return TorchBuild(words["__version__"], words.get("git_version", ""), 1, into / "torch")


def _assignments(source: str) -> dict[str, str]:
    """The texts that a module assigns at its top, without running it."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    found[target.id] = node.value.value
    if "__version__" not in found:
        raise KeyError("torch/version.py has no __version__")
    return found
