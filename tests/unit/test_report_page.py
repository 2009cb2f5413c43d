"""The HTML page of a run's reports, and how long loaders are waited for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch_core import activation, loader_waits, report_page
from deepytorch_core import report as runs
from deepytorch_core.patching import Patches


def report(**changes: Any) -> dict[str, Any]:
    row = {"group": "0", "op": "all_reduce", "reason": "small", "calls": 4, "bytes": 4096}
    plan = {
        "op": "all_reduce",
        "ranks": 2,
        "first_bytes": 131072,
        "algorithm": "pipelined",
        "reason": "fastest measured",
        "candidates": [
            {"algorithm": "pipelined", "median_us": 500.0},
            {"algorithm": "pipelined", "median_us": 400.0},
            {"algorithm": "delegate", "median_us": 1000.0},
        ],
    }
    choice = {
        "what": "DDP buckets",
        "chosen": "50 MiB",
        "reason": "<fastest>",
        "times_ms": {"25 MiB": 12.0, "50 MiB": 10.0},
        "dropped": {"1 GiB": "out of memory"},
    }
    loader = {"elapsed_s": 10.0, "waited_s": 2.5, "num_workers": 0}
    values = {
        "native_calls": 4,
        "delegated_calls": 1,
        "rows": [
            {**row, "algorithm": "one_shot", "time_us": 2e6},
            {**row, "algorithm": "delegate", "time_us": 0.0, "reason": "cuda tensors"},
        ],
        "decisions": [plan, choice],
        "loaders": [loader],
        "options": {"tune": "off", "timeout_s": 600.0},
    }
    return {**values, **changes}


class Tags(HTMLParser):
    """Every tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_says_where_the_time_goes_and_what_was_decided(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    report_page.write(path, {"rank0": report(), "<rank1>": report(loaders=[])})
    page = path.read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert "http" not in page
    assert "<script" not in page
    assert "10 collectives, 80% of them native; 1 choice faster than stock" in page
    assert "up to 2.50x; at most 25.0% of the time waits for data." in page
    assert "2.50 s, 2.00 s, 5.50 s" in page
    assert 'width:25.00%;background:#e0a33e" title="waiting for data 2.50 s"' in page
    assert "&lt;rank1&gt;" in page
    assert "all_reduce of 2 ranks, from 128 KiB" in page
    assert "<b>50 MiB</b>: &lt;fastest&gt;<br>dropped 1 GiB: out of memory" in page
    assert "width:40.00%;background:#3a8f2e" in page  # pipelined, its best, against stock
    assert re.search(r"<th>tune</th><td>off</td>", page)
    assert "timeout_s" not in page


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    empty: dict[str, Any] = {"native_calls": 0, "delegated_calls": 0}
    report_page.write(tmp_path / "page.html", {"run": empty})
    page = (tmp_path / "page.html").read_text()
    assert "0 collectives." in page
    assert "Nothing was timed" in page
    assert "Nothing had to be decided" in page


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        files.append(str(folder / "run.json"))
        Path(files[-1]).write_text(json.dumps(report()))
    page = tmp_path / "page.html"
    result = CliRunner().invoke(cli.app, ["report", *files, "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert files[0] in page.read_text()
    assert files[1] in page.read_text()
    result = CliRunner().invoke(cli.app, ["report", "--html", str(page)])
    assert "needs a run's saved reports" in str(result.exception)


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Slow(Dataset[torch.Tensor]):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self._clock.now += 1.0
        return torch.tensor(float(index))


@pytest.fixture
def inactive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As before `import deepytorch`, and no loader known."""
    monkeypatch.setattr(loader_waits, "_known", {})
    was_active = activation.is_active()
    activation.deactivate()
    yield
    activation.deactivate()
    if was_active:
        activation.activate()


@pytest.mark.usefixtures("inactive")
def test_waits_are_those_for_all_batches_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(loader_waits, "time", clock)
    patches = Patches()
    loader_waits.install(dataloader, patches)
    try:
        for _ in range(2):
            seen = []
            for batch in DataLoader(Slow(clock), batch_size=2):
                seen.append(batch.tolist())
                clock.now += 3.0
            assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    finally:
        patches.undo()
    (found,) = loader_waits.report()
    assert (found["batches"], found["num_workers"], found["pin_memory"]) == (4, 0, False)
    assert (found["waited_s"], found["elapsed_s"]) == (4 * 2.0, 4 * (2.0 + 3.0))
    list(DataLoader(Slow(clock), batch_size=2))
    assert loader_waits.report() == (found,), "undone"


@pytest.mark.usefixtures("inactive")
def test_activation_times_loaders() -> None:
    activation.activate()
    list(DataLoader(Slow(Clock()), batch_size=1))
    (found,) = runs.report().loaders
    assert found["batches"] == 5
    activation.deactivate()
    list(DataLoader(Slow(Clock()), batch_size=1))
    assert runs.report().loaders == (found,)
