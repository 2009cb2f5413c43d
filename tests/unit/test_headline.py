"""The headline table's workloads: what they are, what is refused, and how arms are compared."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deepytorch.cli import app
from deepytorch.workloads import headline
from deepytorch.workloads.headline import diffusion, page, run, vision
from deepytorch.workloads.headline.job import ArmJob, TogetherJob, layers_that_fit, lengths
from deepytorch.workloads.headline.precision import Precision
from deepytorch.workloads.headline.vision import ImageArm
from deepytorch_core.bench import tables
from deepytorch_core.bench.job import BenchError, Nodes
from deepytorch_core.bench.record import WORKLOAD_FIELDS

# The names that records of other benchmarks have for the two arms.
OURS_AND_STOCK = (
    *("engine", "stock", "stock_per_s", "ours_per_s", "speedup", "speedup_spread"),
    *("loss_max_diff", "stock_peak_gib", "ours_peak_gib"),
)


def job(workload: str = "llama-1b-varlen", **words: Any) -> ArmJob:
    return ArmJob(workload=workload, **{"scale": "tiny", "world_size": 2, **words})


def test_the_rows_of_the_headline_table_are_there() -> None:
    assert {
        *("llama2-13b-zero2", "qwen2-14b-zero2", "llama-65b-zero3-offload", "sd21-dreambooth"),
        "sd21-dreambooth-loop",
        *("resnet50-amp", "bert-amp", "llama-1b-varlen", "llama-1b-fsdp2"),
        *("llama-1b-zero2", "llama-1b-zero3"),
    } <= headline.ROWS.keys()
    claims = {name: row.claim for name, row in headline.ROWS.items() if row.claim}
    assert claims["resnet50-amp"] == 1.89
    assert len(claims) == 7


def test_instructions_have_the_lengths_of_instruction_data() -> None:
    drawn = lengths("instructions", 5000, 1024)
    assert 135 <= statistics.median(drawn) <= 165
    assert max(drawn) == 1024
    assert drawn == lengths("instructions", 5000, 1024)
    assert drawn[:9] != lengths("instructions", 9, 1024, seed=1)
    halves = lengths("half", 5000, 512)
    assert 0.47 <= sum(halves) / (5000 * 512) <= 0.53
    assert lengths("full", 3, 7) == [7, 7, 7]


@pytest.mark.parametrize(
    ("name", "world_size", "low", "high"),
    [("llama2-13b-zero2", 4, 35, 40), ("llama2-13b-zero2", 2, 25, 35)],
)
def test_layers_are_cut_to_what_fits(name: str, world_size: int, low: int, high: int) -> None:
    row = headline.ROWS[name]
    assert low <= layers_that_fit(row, 4, world_size, 141e9) <= high
    assert layers_that_fit(row, 4, world_size, 1e15) == 40
    assert layers_that_fit(row, 4, world_size, 1e9) == 1


def test_arms_differ_by_their_variables_alone() -> None:
    assert headline.environment("plain") == headline.environment("tuned-compile")
    assert headline.environment("plain")["DEEPYTORCH_ENABLED"] == "0"
    assert headline.environment("ours") == {}
    assert headline.environment("ours-compute") == {"DEEPYTORCH_COLLECTIVES": "stock"}
    assert job(arm="ours").environment(1, [])["LOCAL_RANK"] == "1"
    names = ("DEEPYTORCH_PROFILE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    arms = [job(arm=arm, scratch="/x").environment(0, []) for arm in ("ours", "tuned-compile")]
    assert all(variables[name].startswith("/x/") for variables in arms for name in names)
    assert len({variables[name] for variables in arms for name in names}) == 6
    row = headline.ROWS["bert-amp"]
    assert headline.arms_of(row, split=False) == ("plain", "tuned-compile", "ours")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"workload": "llama"}, "unknown workload 'llama'; known: llama2-13b-zero2"),
        ({"scale": "huge"}, "unknown scale 'huge'"),
        ({"scale": "full"}, "at full scale needs GPUs: use --scale tiny"),
        ({"steps": 1}, "--steps must be at least 2"),
        ({"workload": "qwen2-14b-zero2", "world_size": 1}, "shards over ranks"),
    ],
)
def test_what_cannot_run_says_why(words: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        job(**words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"workload": "llama-1b-zero2"}, "for what DDP trains, and llama-1b-zero2 is not"),
        ({"workload": "llama-1b-fsdp2"}, "for what DDP trains, and llama-1b-fsdp2 is not"),
        ({"world_size": 1}, "one rank reduces nothing: --world-size 1"),
        ({"nodes": Nodes(ranks_per_node=(1, 1), link="1gbit")}, "leave --nodes out"),
    ],
)
def test_arms_in_one_process_are_for_ddp_on_one_machine(
    words: dict[str, Any], message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        TogetherJob(**{"workload": "bert-amp", "scale": "tiny", "world_size": 2, **words})


def test_arms_in_one_process_are_neither_switched_off_nor_chosen() -> None:
    together = TogetherJob(workload="bert-amp", scale="tiny", world_size=2)
    assert together.environment(0, [])["DEEPYTORCH_ENABLED"] == "1"
    for words, message in (
        (["--workload", "bert-amp", "--scale", "tiny", "--split"], "has its own arms"),
        (["--workload", "bert-amp", "--scale", "tiny", "--arms", "plain"], "has its own arms"),
        (["--framework", "ddp"], "--together is of a workload"),
    ):
        done = CliRunner().invoke(app, ["bench", "train", "--together", *words])
        assert message in str(done.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="full scale would train here")
def test_full_scale_is_of_gpus_unless_told_otherwise() -> None:
    done = CliRunner().invoke(app, ["bench", "train", "--workload", "bert-amp"])
    assert "full scale needs GPUs and torch sees none here: use --scale tiny" in str(done.exception)


def test_unknown_arms_are_refused_before_anything_starts() -> None:
    with pytest.raises(BenchError, match=r"has no arm fast; it has plain, tuned-compile, .*ours"):
        run.compare(job(), rounds=1, split=False, say=print, only=("plain", "fast"))


def measured(times: list[float], losses: list[float]) -> dict[str, Any]:
    return {
        "step_time_us": times,
        "units": 1000,
        "losses": losses,
        "peak_memory_gb": 1.0,
        "warmup_memory_gb": 1.5,
        "warmup_s": 2.0,
        "warmup_steps": 9,
        "parameters": 10**6,
        "native_calls": 1,
        "delegated_calls": 0,
        "decisions": [],
        "machine": {"name": "2-core", "cpu": "c", "cores": 2, "gpus": [], "kernel": "Linux 6"},
        "versions": {"deepytorch": "1", "torch": "2", "python": "3"},
        "commit": "c",
    }


def test_the_faster_tuned_arm_counts_and_the_tables_show_it(tmp_path: Path) -> None:
    samples = {
        "plain": [measured([300.0, 500.0], [2.0, 1.0]), measured([320.0, 480.0], [2.0, 1.0])],
        "tuned-compile": [measured([210.0, 390.0], [2.0, 1.001])] * 2,
        "tuned-flatten": [measured([900.0, 900.0], [2.0, 1.0])] * 2,
        "ours": [measured([200.0, 300.0], [2.0, 1.0])] * 2,
    }
    record = run._record(job(), samples, rounds=2)
    assert set(record) == set(WORKLOAD_FIELDS)
    assert record["tuned"] == "tuned-compile"
    # The ratios are 1.5, 1.667, 1.6, 1.6 and 1.05, 1.3, 1.05, 1.3.
    assert record["against_plain"] == [1.6, 1.575, 1.617]
    assert record["against_tuned"] == [1.175, 1.05, 1.3]
    assert record["collectives_only"] is None
    assert record["loss_difference"] == 0.001
    assert record["wrong"] == 0
    assert {name: record[name] for name in OURS_AND_STOCK} == {
        **{"engine": "deepytorch", "stock_per_s": 1_250_000.0, "ours_per_s": 2_000_000.0},
        "stock": "DistributedDataParallel, bf16, its own example unchanged",
        **{"speedup": 1.6, "speedup_spread": record["against_plain"][1:], "loss_max_diff": 0.0},
        **{"stock_peak_gib": 0.931, "ours_peak_gib": 0.931},
    }
    (first, *_), last = run.lines(record), run.lines(record)[-1]
    assert "2 ranks on cpu, 1.0 M parameters, 2 rounds of 20 steps" in first
    assert "0.10%" in last
    for suffix, beginning in (
        (".md", b"| workload"),
        (".png", b"\x89PNG"),
        (".html", b"<!doctype"),
    ):
        page.write([record, record], tmp_path / f"table{suffix}")
        assert (tmp_path / f"table{suffix}").read_bytes().startswith(beginning)
    text = (tmp_path / "table.html").read_text()
    assert text.count("llama-1b-varlen (tiny)") == 1
    assert "1.60x (" in text
    with pytest.raises(BenchError, match=r"end it in \.md, \.png, \.html"):
        page.check(tmp_path / "table.pdf")
    table = tables.render({"f.jsonl": [record]})
    assert "1.60x" in table
    assert "1.18x (1.05-1.30)" in table
    assert "(tiny)" in table
    older = {name: value for name, value in record.items() if name not in OURS_AND_STOCK}
    assert tables.render({"f.jsonl": [older]}) == table


def test_ours_and_stock_are_left_empty_where_an_arm_was_left_out() -> None:
    record = run._record(job(), {"ours": [measured([3.0, 2.0], [2.0, 1.0])]}, rounds=1)
    empty = {name for name in OURS_AND_STOCK if record[name] is None}
    assert set(OURS_AND_STOCK) - empty == {"engine", "stock", "ours_per_s", "ours_peak_gib"}


def test_a_record_of_parts_alone_has_a_table_of_its_own() -> None:
    samples = {
        "plain": [measured([300.0, 500.0], [2.0, 1.0])],
        "ours-collectives": [measured([250.0, 390.0], [2.0, 1.0])],
    }
    record = run._record(job(), samples, rounds=1)
    network = {"nodes": 2, "ranks_per_node": [1, 1], "order": "block", "link_mbit": 1000.0}
    network |= {"flow_cap_mbit": None, "delay_ms": 0.0, "separate_processes": False}
    files = {"f.jsonl": [record, {**record, "emulated": network}]}
    assert tables.render(files, kinds=["workload"]) == ""
    first, second = tables.render(files, kinds=["parts"]).splitlines()[-4:-2]
    assert first.endswith("| 2 | 1,250,000 tokens/s | 1.24x (1.22-1.26) |  |")
    assert "(tiny); emulated 2 nodes of 1 rank, 1000 Mbit/s |" in second


def test_a_record_of_arms_in_one_process_stands_beside_that_of_arms_apart(tmp_path: Path) -> None:
    samples = {
        "plain": [measured([300.0, 500.0], [2.0, 1.0])],
        "ours-collectives": [measured([250.0, 390.0], [2.0, 1.0])],
    }
    apart = run._record(job(), samples, rounds=1)
    both = {**apart, "together": True}
    rows = tables.render({"f.jsonl": [apart, both, both]}, kinds=["parts"]).splitlines()[-4:-2]
    assert ["both arms in each process" in row for row in rows] == [False, True]
    assert ["both arms" in line for line in run.lines(both)].count(True) == 1
    page.write([apart, both, both], tmp_path / "table.html")
    assert (tmp_path / "table.html").read_text().count("llama-1b-varlen (tiny") == 2


@pytest.mark.parametrize("losses", [[2.0, 1.1], [2.0, float("nan")]])
def test_differing_losses_are_wrong(losses: list[float], tmp_path: Path) -> None:
    samples = {
        "plain": [measured([3.0, 3.0], [2.0, 1.0])],
        "ours": [measured([1.0, 1.0], losses)],
    }
    record = run._record(job(), samples, rounds=1)
    assert record["wrong"] == 1
    json.dumps(record, allow_nan=False)
    assert ("a loss is not a number: [2.0, None]" in run.lines(record)[-1]) == (losses[1] != 1.1)
    shown = [*run.lines(record), tables.render({"f.jsonl": [record]})]
    page.write([record], tmp_path / "table.html")
    for text in ("\n".join(shown), (tmp_path / "table.html").read_text()):
        assert "not claimed" in text
        assert "3.00x" not in text
        assert "3.000x" not in text
    page.write([record], tmp_path / "table.png")  # without a bar


def test_the_list_is_printed() -> None:
    done = CliRunner().invoke(app, ["bench", "train", "--workload", "list"])
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == len(headline.ROWS)


def test_a_cache_saves_the_encoders_and_changes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    device = torch.device("cpu")
    loops = []
    for arm in ("plain", "ours"):
        torch.manual_seed(0)
        drawing_job = job("sd21-dreambooth-loop", world_size=1, arm=arm)
        loops.append(
            diffusion.Pipeline(
                ImageArm(drawing_job, device, Precision("fp32", device), layout=False)
            )
        )
    first = loops[0].batch(0)
    encoded: list[list[int]] = [[], []]
    for loop, counted in zip(loops, encoded, strict=True):
        loop._vae.encoder.register_forward_hook(lambda *_, counted=counted: counted.append(1))
    for number in range(6):
        plain, ours = (loop.batch(number) for loop in loops)
        assert plain.keys() == ours.keys()
        for name, value in plain.items():
            assert torch.equal(value, ours[name]), (number, name)
        # The same images have the same posterior, but not the same draw from it.
        assert torch.equal(plain["sample"], first["sample"]) == (number == 0)
    assert [len(counted) for counted in encoded] == [6, 2]  # two batches of images


class _Watched(vision.Classifier):
    """Says where its batches are asked for, as encoders would compute otherwise there."""

    def __init__(self, arm: ImageArm) -> None:
        super().__init__(arm)
        self.under_autocast: list[bool] = []

    def batch(self, number: int) -> vision.Batch:
        self.under_autocast.append(torch.is_autocast_enabled("cpu"))
        return super().batch(number)


@pytest.mark.usefixtures("quiet_profile")
def test_batches_are_made_outside_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    made: list[_Watched] = []

    def family(arm: ImageArm) -> _Watched:
        made.append(_Watched(arm))
        return made[0]

    monkeypatch.setattr(vision, "_family", family)
    vision_job = job("resnet50-amp", world_size=1, arm="ours")
    vision.build(vision_job, torch.device("cpu")).train(0)
    assert made[0].under_autocast == [False, False]  # the one that decides, and the step's
