"""`bench nccl` on GPUs: NCCL goes by each candidate, and by the table that comes of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepytorch_core.base import config
from deepytorch_core.base.provenance import read_records
from deepytorch_core.bench.nccl_choices import ChoicesJob
from deepytorch_core.network import nccl_table

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_nccl_goes_by_each_candidate(tmp_path: Path) -> None:
    table, record = tmp_path / "table.json", tmp_path / "out.jsonl"
    arguments = ["--sizes", "64K,4M", "--write", str(table), "--json", str(record)]
    subprocess.run(
        [sys.executable, "-m", "deepytorch.cli", "bench", "nccl", *arguments],
        env=config.child_environment(
            NCCL_DEBUG="INFO",
            NCCL_DEBUG_SUBSYS="TUNING",
            NCCL_DEBUG_FILE=str(tmp_path / "nccl.%p"),
        ),
        check=True,
        timeout=300,
    )
    said = "".join(file.read_text(errors="replace") for file in tmp_path.glob("nccl.*"))
    used = {
        (algorithm.lower(), protocol.lower())
        for algorithm, protocol in re.findall(r"Algo (\w+) proto (\w+)", said)
    }
    assert {("tree", "simple"), ("tree", "ll"), ("ring", "simple"), ("ring", "ll")} <= used
    (result,) = read_records(record)
    assert {row["op"] for row in result["rows"]} == set(ChoicesJob.ops)
    assert {row["bytes"] for row in result["rows"]} == {64 << 10, 4 << 20}
    assert len(nccl_table.read(table)) == len(result["choices"])
