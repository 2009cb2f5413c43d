"""`deepytorch run` starts a program as torchrun would, and as Python would."""

import json
import subprocess
import sys

import pytest

from deepytorch.cli import launcher

# The program prints all that it can tell of how it was started.
PROBE = """
import json, os, sys
from pathlib import Path

def f():
    return 1

seen = {
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "pickles": sys.modules["__main__"].f is f,
    "deepytorch": "deepytorch" in sys.modules,
    "rank": os.environ.get("RANK"),
    "world_size": os.environ.get("WORLD_SIZE"),
}
Path(os.environ["PROBE_OUT"], f"{seen['rank']}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Runs a command in an empty folder; returns its exit status and what each rank saw."""
    outputs = tmp_path / "out"
    elsewhere = tmp_path / "cwd"
    outputs.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("PROBE_OUT", str(outputs))

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], cwd=elsewhere, timeout=100, capture_output=True, text=True
        )
        seen = {path.stem: json.loads(path.read_text()) for path in outputs.iterdir()}
        for path in outputs.iterdir():
            path.unlink()
        return done, seen

    run.cwd = elsewhere
    return run


def command(*arguments):
    return ("-m", "deepytorch.cli", "run", *arguments)


def test_a_script_keeps_its_arguments_on_every_rank(tmp_path, probe):
    folder = tmp_path / "project"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(PROBE)
    arguments = ["--nproc-per-node", "5", "-m", "two words", "--", "--help"]
    done, seen = probe(*command("--nproc-per-node", "2", str(script), *arguments))
    assert done.returncode == 0, done.stderr
    assert sorted(seen) == ["0", "1"]
    for rank, facts in seen.items():
        assert facts["argv"] == [str(script), *arguments]
        assert facts["path"] == str(folder)
        assert facts["name"] == "__main__"
        assert facts["file"] == str(script)
        assert facts["pickles"]
        assert facts["deepytorch"]
        assert (facts["rank"], facts["world_size"]) == (rank, "2")


def test_a_module_starts_as_python_m_would(probe):
    (probe.cwd / "project").mkdir()
    (probe.cwd / "project" / "train.py").write_text(PROBE)
    done, seen = probe(*command("-m", "project.train", "--lr", "1"))
    assert done.returncode == 0, done.stderr
    (told,) = seen.values()
    assert told["argv"] == [str(probe.cwd / "project" / "train.py"), "--lr", "1"]
    assert told["path"] == str(probe.cwd)
    assert told["name"] == "__main__"


def test_one_process_is_no_job_unless_it_is_asked_to_be(tmp_path, probe):
    script = tmp_path / "train.py"
    script.write_text(PROBE)
    done, seen = probe(*command(str(script)))
    assert done.returncode == 0, done.stderr
    assert [(one["rank"], one["world_size"]) for one in seen.values()] == [(None, None)]
    done, seen = probe(*command("--nproc-per-node", "1", str(script)))
    assert done.returncode == 0, done.stderr
    assert [(one["rank"], one["world_size"]) for one in seen.values()] == [("0", "1")]


@pytest.mark.parametrize(
    ("ending", "alone", "as_rank"),
    [
        pytest.param("sys.exit(7)", 7, 7, marks=pytest.mark.extended),
        ("os.kill(os.getpid(), 9)", -9, 128 + 9),
        ("raise RuntimeError('from the script')", 1, 1),
    ],
)
def test_the_exit_status_is_the_scripts(tmp_path, probe, ending, alone, as_rank):
    script = tmp_path / "ends.py"
    script.write_text(f"import os, sys\n{ending}\n")
    done, _ = probe(*command(str(script)))
    assert done.returncode == alone, done.stderr
    job, _ = probe(*command("--nproc-per-node", "1", str(script)))
    assert job.returncode == as_rank, job.stderr
    if as_rank == 1:
        by_python = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False
        )
        assert done.stderr == by_python.stderr
        assert f"{script} FAILED" in job.stderr
        assert "runner.py" not in job.stderr


def test_a_programs_own_excepthook_and_error_file_work(tmp_path, probe):
    script = tmp_path / "ends.py"
    script.write_text(
        "import sys, traceback\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "sys.excepthook = lambda kind, error, trace: print(\n"
        "    'mine', kind.__name__, len(traceback.extract_tb(trace)), flush=True)\n"
        "@record\n"
        "def main():\n"
        "    raise KeyError('from main')\n"
        "main()\n"
    )
    done, _ = probe(*command("--nproc-per-node", "1", str(script)))
    assert done.returncode == 1
    assert "mine KeyError 3" in done.stdout  # the script's line, torch's wrapper, main
    assert "KeyError: 'from main'" in done.stderr.partition("FAILED")[2]
    assert "runner.py" not in done.stderr


def test_a_mistyped_option_of_torchrun_is_suggested(probe):
    done, _ = probe(*command("--nproc-per-ndoe", "2", "train.py"))
    assert done.returncode == 2
    assert "did you mean --nproc-per-node?" in done.stderr


def test_the_runner_matches_python_itself(tmp_path, probe):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(PROBE)
    link = probe.cwd / "linked.py"
    link.symlink_to(folder / "train.py")
    _, by_python = probe("linked.py", "a", "-b")
    _, by_runner = probe(str(launcher._RUNNER), "linked.py", "a", "-b")
    (facts,) = by_runner.values()
    (expected,) = by_python.values()
    assert facts == {**expected, "deepytorch": True}


def test_a_script_that_starts_its_own_ranks_is_told_how_to_be_started(tmp_path, probe):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.multiprocessing as mp\n"
        "mp.start_processes(print, nprocs=1, start_method='fork')\n"
    )
    done, _ = probe(str(launcher._RUNNER), str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"
    said = "deepytorch: the script starts processes itself; if these are its ranks, no launcher"
    assert done.stderr.count(said) == 1, done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_a_script_starts_itself_do_not_wait_for_each_other(tmp_path, probe, method):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def train(rank):\n"
        "    os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = '127.0.0.1', '29555'\n"
        "    dist.init_process_group('gloo', rank=rank, world_size=2)\n"
        "if __name__ == '__main__':\n"
        f"    mp.set_start_method({method!r})\n"
        "    ranks = [mp.Process(target=train, args=(rank,)) for rank in range(2)]\n"
        "    [rank.start() for rank in ranks]\n"
        "    [rank.join() for rank in ranks]\n"
        "    sys.exit(max(rank.exitcode for rank in ranks))\n"
    )
    done, _ = probe(*command("--nproc-per-node", "1", str(script)))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("RuntimeError: this process, which the script has started, is to") == 2
