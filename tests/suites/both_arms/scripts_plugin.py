"""pytest plugin for suites of scripts: each is one test for every number of processes.

A script passes if torchrun's status is 0. Both numbers go through torchrun, as the scripts expect
what it sets.
"""

import subprocess
import sys

import pytest

_NUM_PROCESSES = (1, 2)


def pytest_collect_file(file_path, parent):
    if file_path.suffix == ".py":
        return _Script.from_parent(parent, path=file_path)
    return None


class _Script(pytest.File):
    def collect(self):
        for number in _NUM_PROCESSES:
            yield _Run.from_parent(self, name=str(number), number=number)


class _Run(pytest.Item):
    def __init__(self, *, number, **given):
        super().__init__(**given)
        self._number = number

    def runtest(self):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self._number}", str(self.path)]
        ended = subprocess.run(command, capture_output=True, text=True)
        print(ended.stdout, ended.stderr)
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]

    def reportinfo(self):
        return self.path, None, f"{self.path.name}, {self._number} processes"
