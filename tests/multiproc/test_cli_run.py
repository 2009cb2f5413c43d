"""`deepytorch run` starts a program as torchrun would, and as Python would."""

import json
import os
import subprocess
import sys

import pytest

from deepytorch.cli import launcher
from deepytorch_core.testing.forked import ForkedProgram

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

    def job(*arguments):
        """`deepytorch run` by a fork that has imported torch; all that is printed is in stdout."""
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        words = [sys.executable, *command(*map(str, arguments))]
        program = ForkedProgram(words, log, dict(os.environ))  # noqa: TID251
        try:
            status = program.wait(100)
        finally:
            program.kill()
        seen = {path.stem: json.loads(path.read_text()) for path in outputs.iterdir()}
        for path in outputs.iterdir():
            path.unlink()
        return subprocess.CompletedProcess(words, status, log.read_text()), seen

    run.cwd = elsewhere
    run.job = job
    return run


def command(*arguments):
    return ("-m", "deepytorch.cli", "run", *arguments)


def test_a_script_keeps_its_arguments_on_every_rank(tmp_path, probe):
    folder = tmp_path / "project"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(PROBE)
    arguments = ["--nproc-per-node", "5", "-m", "two words", "--", "--help"]
    done, seen = probe.job("--nproc-per-node", "2", script, *arguments)
    assert done.returncode == 0, done.stdout
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


@pytest.mark.parametrize(
    ("ending", "alone", "as_rank"),
    [
        pytest.param("sys.exit(7)", 7, 7, marks=pytest.mark.extended),
        ("os.kill(os.getpid(), 9)", -9, 128 + 9),
        ("raise RuntimeError('from the script')", 1, 1),
    ],
)
def test_the_exit_status_is_the_scripts(tmp_path, probe, ending, alone, as_rank):
    """One process is no job unless it is asked to be."""
    script = tmp_path / "ends.py"
    script.write_text(f"{PROBE}\n{ending}\n")
    job, seen = probe.job("--nproc-per-node", "1", script)
    assert job.returncode == as_rank, job.stdout
    assert [(process["rank"], process["world_size"]) for process in seen.values()] == [("0", "1")]
    # A process that ends by itself gives its status to whoever waits for it.
    done, seen = probe.job(script) if as_rank > 128 else probe(*command(str(script)))
    assert done.returncode == alone, done
    assert [(process["rank"], process["world_size"]) for process in seen.values()] == [(None, None)]
    if as_rank == 1:
        by_python = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False
        )
        assert done.stderr == by_python.stderr
        assert f"{script} FAILED" in job.stdout
        assert "runner.py" not in job.stdout


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
    done, _ = probe.job("--nproc-per-node", "1", script)
    assert done.returncode == 1
    assert "mine KeyError 3" in done.stdout  # the script's line, torch's wrapper, main
    assert "KeyError: 'from main'" in done.stdout.partition("FAILED")[2]
    assert "runner.py" not in done.stdout


def test_a_mistyped_option_of_torchrun_is_suggested(probe):
    done, _ = probe.job("--nproc-per-ndoe", "2", "train.py")
    assert done.returncode == 2
    assert "did you mean --nproc-per-node?" in done.stdout


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


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.extended)])
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
    done, _ = probe.job("--nproc-per-node", "1", script)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("RuntimeError: this process, which the script has started, is to") == 2
