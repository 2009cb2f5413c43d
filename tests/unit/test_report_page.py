"""The HTML page of a run's reports, and how long loaders are waited for."""

from __future__ import annotations

import json
import math
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
from deepytorch_core.base.patching import Patches
from deepytorch_core.c10d import activation
from deepytorch_core.metering import loader_waits
from deepytorch_core.report import page as report_page
from deepytorch_core.report import plots as report_plots
from deepytorch_core.report import summary as runs


def bucket(start_s: float, seconds: float, **spent: float) -> dict[str, Any]:
    none = dict.fromkeys(("exposed_s", "waited_s", "held_s", "data_s", "tuning_s"), 0.0)
    return {"start_s": start_s, "seconds": seconds, "steps": 10, **none, **spent}


def report(**changes: Any) -> dict[str, Any]:
    """Report a run of 10 s: 2.5 s waiting for data, 1 s measuring, 3 s in collectives besides."""
    row = {"group": "0", "op": "all_reduce", "reason": "small", "calls": 4, "bytes": 524288}
    plan = {
        "op": "all_reduce",
        "ranks": 2,
        "first_bytes": 131072,
        "last_bytes": 1 << 20,
        "algorithm": "pipelined",
        "chunk_bytes": 1 << 16,
        "reason": "fastest measured",
        "candidates": [
            {"algorithm": "pipelined", "median_us": 500.0, "chunk_bytes": 1 << 17},
            {"algorithm": "pipelined", "median_us": 400.0, "chunk_bytes": 1 << 16},
            {"algorithm": "pipelined", "median_us": 300.0, "chunk_bytes": 1 << 15},
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
    course = {
        **bucket(1000.0, 10.0, data_s=2.5, tuning_s=1.0, exposed_s=4.0),
        "steps": 21,
        "timed_steps": 20,
        "all_tuning_s": 2.25,
        "buckets": [bucket(1000.0, 5.0, held_s=1.0), bucket(1005.0, 5.0, waited_s=2.5)],
        "losses": [[1, 2.0], [10, 1.0], [20, 0.5]],
    }
    memory = {"host_peak_bytes": 3 << 30, "registered_bytes": 1 << 20, "devices": []}
    values = {
        "native_calls": 4,
        "delegated_calls": 1,
        "rows": [
            {**row, "algorithm": "pipelined", "time_us": 2e6, "calls": 1000, "bytes": 524288000},
            {**row, "algorithm": "delegate", "time_us": 0.0, "reason": "cuda tensors"},
        ],
        "decisions": [plan, choice],
        "loaders": [],
        "options": {"tune": "off", "timeout_s": None},
        "course": course,
        "memory": memory,
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


def page_of(tmp_path: Path, *args: Any) -> str:
    """The page, of which every tag is closed, and that neither loads nor runs anything."""
    path = tmp_path / "new" / "page.html"
    report_page.write(path, *args)
    page = path.read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert "http" not in page
    assert "<script" not in page
    return page


def test_the_page_says_where_the_time_goes_and_what_was_decided(tmp_path: Path) -> None:
    page = page_of(tmp_path, {"rank0": report(), "<rank1>": report(failures=2)})
    assert "21 steps of 500.0 ms, of it at most 30% exposed communication and 25% waiting" in page
    assert "10 collectives, 80% of them native; 1 choice faster than stock" in page
    assert "up to 2.50x. Native collectives took 0.6 s less than the stock" in page
    assert "2 operations ended in an error." in page
    for share, color, seconds in (
        (35, "compute", "3.50 s"),
        (30, "exposed", "3.00 s"),
        (25, "data", "2.50 s"),
        (10, "overhead", "1.00 s"),
    ):
        assert re.search(
            rf'width:{share}.00%;background:var\(--{color}\)" title="[^"]* {seconds}"', page
        ), color
    assert "10.0 s, exposed 30.0%, data 25.0%" in page
    assert "Measuring collectives took 2.2 s in all" in page
    assert "&lt;rank1&gt;" in page
    assert "all_reduce of 2 ranks, from 128 KiB" in page
    assert "2 in all: 2 kept, 0 left to stock." in page
    assert "<b>50 MiB</b>: &lt;fastest&gt;</p><p>dropped 1 GiB: out of memory" in page
    assert (
        "width:40.00%;background:var(--kept)" in page
    )  # pipelined, as it was chosen, against stock
    assert "2.50x stock&#x27;s speed" in page
    assert re.search(r"<th>tune</th><td>off</td>", page)
    assert "timeout_s" not in page
    assert "3 GiB, registered 1 MiB" in page


def test_a_gpus_memory_is_shown_as_a_share_of_it(tmp_path: Path) -> None:
    gpu = {"device": "cuda:1", "peak_bytes": 20 << 30, "reserved_bytes": 30 << 30}
    page = page_of(
        tmp_path, {"rank1": report(memory={"devices": [gpu | {"total_bytes": 80 << 30}]})}
    )
    assert "rank1, cuda:1" in page
    assert "20 GiB of 80 GiB" in page
    assert "width:25.00%;background:var(--memory)" in page
    assert "width:12.50%;background:var(--other)" in page
    assert "is part of computing here" in page


def test_losses_of_compared_arms_and_of_reports_lie_over_each_other(tmp_path: Path) -> None:
    found = {
        "verdicts": [{"arm": "ours", "speedup": 1.25, "spread": [1.2, 1.3], "word": "faster"}],
        "runs": [
            {"arm": "stock", "losses": [3.0, 2.0, None]},
            {"arm": "ours", "losses": [3.0, 2.0, 1.0]},
        ],
    }
    page = page_of(tmp_path, {"rank0": report(), "rank1": report(course={})}, [found])
    assert "ours: 1.25x stock&#x27;s speed (1.20 to 1.30), faster." in page
    plot = page[page.index("<h2>Losses") : page.index("<h2>Memory")]
    assert re.findall(r"<title>(.*?)</title>", plot) == ["stock", "ours", "rank0"]
    assert page_of(tmp_path, {}, [found]).count("<h2>") == 1


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, {"run": {"native_calls": 0, "delegated_calls": 0}})
    assert "0 collectives." in page
    assert "Nothing was timed" in page
    assert "Nothing had to be decided" in page
    assert "No waiting was seen" in page
    assert "<h2>Losses" not in page


def test_buckets_of_any_length_are_spread_over_the_time() -> None:
    buckets = [bucket(0.0, 3.0, waited_s=1.5), bucket(3.0, 1.0, waited_s=1.0)]
    found = report_plots.resampled(buckets, "waited_s", (0.0, 8.0), 8)
    assert found == pytest.approx([0.5, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0])
    found = report_plots.resampled(buckets, "waited_s", (0.0, 4.0), 2)
    assert found == pytest.approx([0.5, 0.75])
    assert sum(report_plots.resampled(buckets, "waited_s", (-1.0, 6.0), 13)) * 7 / 13 == (
        pytest.approx(2.5)
    )


def test_the_heat_map_shows_the_straggler() -> None:
    ranks = {
        "rank0": [bucket(0.0, 10.0), bucket(10.0, 10.0)],
        "rank1": [bucket(0.5, 10.0), bucket(10.5, 10.0, held_s=8.0)],
    }
    drawing = report_plots.heat_map(ranks, "held_s")
    assert "the darkest is 80% of the time" in drawing
    first, second = drawing.split('aria-label="')[1:]
    assert first.count("<rect") == 0
    columns = [int(at) for at in re.findall(r'<rect x="(\d+)"', second)]
    assert columns == list(range(30, 60))
    assert report_plots.heat_map(ranks, "waited_s") == ""
    many = {f"rank{rank}": [bucket(0.0, 9.0, held_s=1.0)] for rank in range(256)}
    assert len(report_plots.heat_map(many, "held_s")) < 1 << 20


def test_curves_of_what_is_no_number_or_one_point() -> None:
    assert report_plots.curves([("one", [(1.0, 2.0)]), ("nan", [(1.0, math.nan)] * 9)]) == ""
    flat = report_plots.curves([("flat", [(float(step), 2.0) for step in range(10_000)])])
    assert flat.count("L") < 500
    assert "nan" not in flat


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.09, 1.1), (1.0, 1e6), (-3e-5, 2e-5)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    found = report_plots.ticks(low, high)
    assert 3 <= len(found) <= 7
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    assert all(len(f"{value:g}") <= 8 for value in found)


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
    compared = tmp_path / "compared.json"
    compared.write_text(json.dumps({"verdicts": [], "runs": []}))
    result = CliRunner().invoke(cli.app, ["report", files[0], str(compared), "--html", str(page)])
    assert result.exit_code == 0, result.output
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
