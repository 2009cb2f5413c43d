"""Charts show only what can stand beside each other, and pages stay as fresh as their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deepytorch_core.base.provenance import write_record
from deepytorch_core.bench import charts, pairs, tables

ROOT = Path(__file__).parents[2]


def collective(num_bytes: int, **changes: Any) -> dict[str, Any]:
    return {
        **{"op": "all_reduce", "bytes": num_bytes, "baseline": "nccl", "registered": False},
        **{"cuda_graph": True, "speedup": 1.5, "speedup_spread": [1.4, 1.6], "wrong": 0},
        **{"machine": {"name": "64-core Xeon, 4x NVIDIA H200"}, "versions": {"torch": "2.11.0"}},
        **{"commit": "abc", "emulated": None},
        **changes,
    }


def select(*records: dict[str, Any], settings: str = "op=all_reduce") -> charts.Chart:
    return charts.select({"f.jsonl": records}, "f.jsonl", settings)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"baseline": "torch-symm"}, "compared with: nccl, torch-symm"),
        ({"registered": True}, "registration: False, True"),
        ({"cuda_graph": False}, "timing"),
        ({"machine": {"name": "64-core Xeon, 4x NVIDIA H100"}}, "machine: 64-core Xeon, 4x"),
        ({"commit": "abd"}, "commit: abc, abd"),
        ({"versions": {"torch": "2.12.0"}}, "torch: 2.11.0, 2.12.0"),
        ({"emulated": {"nodes": 2}}, "emulation"),
    ],
)
def test_bars_that_do_not_compare_are_refused(change: dict[str, Any], what: str) -> None:
    """Also where the other record's size is not its own, so that it would take a bar's place."""
    for size in (1 << 10, 1 << 20):
        with pytest.raises(ValueError, match=f"records differ in .*{what}.*choose some"):
            select(collective(1 << 20), collective(size, **change))


def test_a_setting_chooses_and_a_later_record_wins() -> None:
    chart = select(
        collective(1 << 20, speedup=9.0),
        collective(1 << 20, baseline="torch-symm", speedup=1.13),
        collective(1 << 20),
        collective(4 << 20, wrong=1),
        settings="op=all_reduce baseline=NCCL",
    )
    assert chart.rows == {"1M": ((1.5, 1.4, 1.6),)}
    assert chart.caption.startswith("Times faster than nccl, which is the dashed line")
    assert "64-core Xeon, 4x NVIDIA H200, torch 2.11.0, commit abc" in chart.caption


def test_what_can_not_be_drawn_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no other\.jsonl"):
        charts.select({}, "other.jsonl", "op=all_reduce")
    with pytest.raises(ValueError, match="no record of"):
        select(collective(1024, wrong=1))


def compiled(**changes: Any) -> dict[str, Any]:
    return {
        **collective(0, bench="compile", workload="transformers/llama", stock="eager"),
        **{"plain_speedup": 2.0, "plain_speedup_spread": [1.9, 2.2], **changes},
    }


def test_plain_and_tuned_stand_in_one_chart(tmp_path: Path) -> None:
    record = compiled()
    del record["op"]
    chart = select(record, settings="bench=compile")
    assert chart.series == ("torch.compile (tuned)", "deepytorch")
    assert chart.rows == {"transformers/llama": ((2.0, 1.9, 2.2), (1.5, 1.4, 1.6))}
    drawing = ElementTree.fromstring(charts.svg(chart))
    texts = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert texts == ["torch.compile (tuned)", "deepytorch", "transformers/llama", "2.00x", "1.50x"]
    widths = [
        float(element.get("width", 0)) for element in drawing.iter() if element.tag.endswith("rect")
    ]
    assert widths[3] / widths[4] == pytest.approx(2.0 / 1.5, rel=1e-3)


def test_a_page_is_stale_until_its_picture_is_drawn(tmp_path: Path) -> None:
    page, results = tmp_path / "README.md", tmp_path / "results"
    write_record(results / "gpu.jsonl", {**_whole(), "bytes": 1024})
    page.write_text(
        f"<!-- chart:begin gpu.jsonl op=all_reduce to=chart.svg -->\n{charts.END}\n"
        f"{tables.BEGIN}\n{tables.END}\n"
    )

    def run(action: str) -> int:
        return tables.main([action, str(page), "--results", str(results)])

    assert run("--write") == run("--check") == 0
    assert "](chart.svg)\n\nTimes faster than nccl" in page.read_text()
    drawn = (tmp_path / "chart.svg").read_text()
    (tmp_path / "chart.svg").write_text(drawn.replace("1.50x", "2.50x"))
    assert run("--check") == 1
    (tmp_path / "chart.svg").unlink()
    assert run("--check") == 1
    page.write_text(page.read_text().replace(charts.END, ""))
    assert run("--check") == 1


def _whole() -> dict[str, Any]:
    times = {"time_us": 1.0, "baseline_time_us": 1.5, "cpu_us": None, "baseline_cpu_us": None}
    more = {"device": "cuda", "dtype": "bfloat16", "world_size": 4, "algorithm": "packet"}
    return {**collective(1024), **times, **more}


def test_the_median_lies_within_the_quartiles_of_the_same_pairs() -> None:
    # The sums' ratio, 1.04, would lie above: one slow step of the first arm, one of the second.
    slow, fast = [[100.0, 98.0, 99.0, 180.0]], [[101.0, 99.0, 100.0, 158.0]]
    median, low, high = pairs.speedup(slow, fast)
    assert low <= median <= high
    assert sum(slow[0]) / sum(fast[0]) > 1.04 > median
    assert pairs.speedup([[3.0], [2.0]], [[1.0], [1.0]]) == [2.5, 2.25, 2.75]
    assert pairs.speedup([[3.0]], [[2.0]]) == [1.5, 1.5, 1.5]
    with pytest.raises(ValueError, match="shorter"):
        pairs.speedup([[1.0, 2.0]], [[1.0]])


def test_no_record_of_this_project_says_otherwise() -> None:
    files = tables.load(ROOT / "docs/results")
    for name, records in files.items():
        for record in [row for whole in records for row in (whole, *whole.get("rows", ()))]:
            for prefix in ("", "plain_", "second_"):
                spread = record.get(f"{prefix}speedup_spread")
                if spread and "arms" not in record:
                    assert spread[0] <= record[f"{prefix}speedup"] <= spread[1], name
            if "arms" in record:
                for arm in ("plain", record["tuned"]):
                    ratio = pairs.of_record(record, arm, "ours")
                    assert ratio is None or ratio[1] <= ratio[0] <= ratio[2], name


def test_workloads_of_few_steps_are_no_result() -> None:
    arms = {"plain": {"samples_us": [[1.0, 2.0, 3.0]]}}
    with pytest.raises(ValueError, match="llama has 3 steps of plain: measure 4 or more"):
        pairs.refuse_few("f.jsonl", [{"workload": "llama", "arms": arms}])
