"""Records: JSON lines there and back, and what they say of the machine."""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
import types
from importlib import metadata

import pytest

from deepytorch_core.base import distribution, provenance
from deepytorch_core.bench import record


def test_versions_name_what_workloads_are_built_on():
    found = provenance.provenance()["versions"]
    for name in ("transformers", "accelerate", "deepspeed", "diffusers"):
        assert found[name] == metadata.version(name)
    assert ("triton" in found) == (importlib.util.find_spec("triton") is not None)


def test_records_read_back_in_order(tmp_path):
    path = tmp_path / "new" / "runs.jsonl"
    rows = [{"op": "all_reduce", "speedup_spread": [1.0, 2.0]}, {"op": "broadcast"}]
    for row in rows:
        provenance.write_record(path, row)
    read = provenance.read_records(path)
    assert [{**each, "command": None} for each in rows] == [
        {**each, "command": None} for each in read
    ]
    assert len(path.read_text().splitlines()) == 2


def test_what_json_has_no_form_for_is_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "runs.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        provenance.write_record(path, {"speedup": math.inf})
    assert not path.exists()


def test_a_record_says_how_it_was_made_and_names_no_place(tmp_path, monkeypatch):
    words = ["bench", "collectives", "--sizes", "1K,2 K", "--json", "/a/b", "--plot=c", "/home/x/y"]
    monkeypatch.setattr("sys.argv", ["/opt/bin/deepytorch", *words])
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    environment = {
        "NCCL_P2P_DISABLE": "1",
        "DEEPYTORCH_PROFILE": "/home/x/p.json",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_VERSION": "2.28.3-1",
        "HOME": "/home/x",
    }
    monkeypatch.setattr(provenance.config, "child_environment", lambda: environment)
    path = tmp_path / "runs.jsonl"
    provenance.write_record(path, {"op": "broadcast"})
    (row,) = provenance.read_records(path)
    assert row == {
        "op": "broadcast",
        "command": "CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_P2P_DISABLE=1 "
        "deepytorch bench collectives --sizes '1K,2 K' y",
    }


@pytest.mark.parametrize("line", ["{broken", "[1, 2]"])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"op": "broadcast"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl:3"):
        provenance.read_records(path)


def test_provenance_is_complete_and_names_no_host():
    import platform

    origin = provenance.provenance()
    assert set(origin) == {"machine", "versions", "commit"}
    assert origin["machine"]["name"].startswith(f"{origin['machine']['cores']}-core ")
    assert {"deepytorch", "torch", "python"} <= set(origin["versions"])
    host = platform.node()
    assert not host or host not in json.dumps(origin["machine"])


def test_machine_name_counts_equal_gpus():
    gpus = ["NVIDIA H200"] * 8 + ["NVIDIA T4"]
    name = provenance.machine_name("AMD EPYC 9554", 64, gpus)
    assert name == "64-core AMD EPYC 9554, 8x NVIDIA H200, NVIDIA T4"


def test_a_machine_that_stands_for_one_without_peer_access_says_so(monkeypatch):
    monkeypatch.setattr(provenance, "_gpu_names", lambda: ["A", "A"])
    name = provenance.machine_info.__wrapped__()["name"]
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert provenance.machine_info.__wrapped__()["name"] == f"{name}, emulated: no peer access"


def test_a_machine_whose_links_are_masked_says_so(monkeypatch):
    monkeypatch.setattr(provenance, "_gpu_names", lambda: ["A", "A"])
    name = provenance.machine_info.__wrapped__()["name"]
    monkeypatch.setenv("DEEPYTORCH_EMULATE_LINKS", "-p,p-")
    assert provenance.machine_info.__wrapped__()["name"] == f"{name}, emulated: links -p,p-"


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("AMD EPYC 9554 64-Core Processor", "AMD EPYC 9554"),
        ("Intel(R) Xeon(R) Platinum 8275CL CPU @ 3.00GHz", "Intel Xeon Platinum 8275CL"),
    ],
)
def test_cpu_model_without_noise(model, short):
    cpuinfo = f"processor\t: 0\nmodel name\t: {model}\nflags\t: fpu\n"
    assert provenance._cpu_model(cpuinfo) == short


def test_memory_in_gib():
    assert provenance._memory_gib("MemTotal:       16318480 kB\nMemFree: 1 kB\n") == 16


@pytest.fixture
def repository(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.fail("these tests need git")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*arguments):
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "README.md").write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(provenance, "_SOURCE", tmp_path.resolve())
    provenance.commit.cache_clear()
    yield tmp_path
    provenance.commit.cache_clear()


def test_commit_of_a_clean_tree_ignores_documents(repository):
    (repository / "README.md").write_text("2\n")
    assert len(provenance.commit()) == 9


def test_commit_says_dirty(repository):
    (repository / "code.py").write_text("2\n")
    assert provenance.commit().endswith("-dirty")


def test_commit_inside_another_project_is_the_version(repository, monkeypatch):
    inner = repository / "venv"
    inner.mkdir()
    monkeypatch.setattr(provenance, "_SOURCE", inner.resolve())
    assert provenance.commit() == f"v{distribution.version()}"


def test_commit_outside_any_repository_is_the_version(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_SOURCE", tmp_path)
    provenance.commit.cache_clear()
    assert provenance.commit() == f"v{distribution.version()}"
    provenance.commit.cache_clear()


@pytest.mark.parametrize(
    ("rate", "text"),
    [(6733.4, "6,733 images/s"), (10.0, "10 images/s"), (6.34, "6.3 images/s"), (None, "")],
)
def test_rate_in_words(rate: float | None, text: str) -> None:
    arms = {} if rate is None else {"ours": {"units_per_s": rate}}
    assert record.describe_rate({"unit": "images", "arms": arms}, "ours") == text
