"""The results tables in the README and the gate that finds them stale."""

import os
import re
from pathlib import Path

import pytest

from deepytorch_core.base.provenance import write_record
from deepytorch_core.bench import tables
from deepytorch_core.bench.plot import plot, series
from deepytorch_core.bench.record import COLLECTIVE_FIELDS, DDP_FIELDS, SCRIPT_FIELDS, TRAIN_FIELDS


def row(num_bytes, **changes):
    fields = {
        "op": "all_reduce",
        "bytes": num_bytes,
        "bytes_per_rank": num_bytes,
        "per_rank": False,
        "dtype": "float32",
        "world_size": 2,
        "device": "cpu",
        "registered": False,
        "direct": False,
        "cuda_graph": False,
        "calls_per_graph": None,
        "compute_us": None,
        "algorithm": "one_shot",
        "tuned": [],
        "time_us": 10.0,
        "cpu_us": None,
        "baseline": "gloo",
        "baseline_algorithm": "",
        "baseline_time_us": 123.0,
        "baseline_cpu_us": None,
        "speedup": 12.3,
        "speedup_spread": [11.0, 13.2],
        "num_blocks": 8,
        "algbw_gbps": 0.1,
        "busbw_gbps": 0.1,
        "wrong": 0,
        "baseline_wrong": 0,
        "emulated": None,
        "baseline_settings": {},
        "machine": {"name": "2-core AMD EPYC"},
        "versions": {"torch": "2.13.0", "deepytorch": "0.1.0", "python": "3.11"},
        "commit": "abc123def",
    }
    assert set(fields) == set(COLLECTIVE_FIELDS)
    return {**fields, **changes}


def training(**changes):
    percentiles = {"p50": 1000.0, "p75": 1100.0, "p90": 1200.0, "p95": 1300.0}
    fields = {
        "bench": "ddp",
        "model": "mlp",
        "part": "collectives",
        "parameters": 4_200_000,
        "dtype": "float32",
        "precision": "fp32",
        "image_size": None,
        "batch_size": 8,
        "world_size": 2,
        "device": "cpu",
        "registered": True,
        "algorithm": "pipelined",
        "bytes_per_step": 16_800_000,
        "steps": 40,
        "num_blocks": 10,
        "step_time_us": percentiles,
        "samples_per_s": percentiles,
        "baseline": "gloo",
        "baseline_step_time_us": percentiles,
        "baseline_samples_per_s": percentiles,
        "speedup": 1.5,
        "speedup_spread": [1.4, 1.6],
        "improvement_percent": 50.0,
        "loss": 1.0,
        "baseline_loss": 1.0,
        "loss_difference": 0.0,
        "loss_check": "exact",
        "wrong": 0,
        "choices": {},
        "emulated": None,
        "baseline_settings": {},
        "machine": {"name": "2-core AMD EPYC"},
        "versions": {"torch": "2.13.0"},
        "commit": "abc123def",
    }
    assert set(fields) == set(DDP_FIELDS)
    return {**fields, **changes}


@pytest.fixture
def project(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    results = tmp_path / "results"
    write_record(results / "cpu.jsonl", row(1024))
    write_record(results / "cpu.jsonl", row(1 << 20, speedup=3.14, speedup_spread=[2.9, 3.3]))
    return readme, results


def run(action, readme, results):
    return tables.main([action, str(readme), "--results", str(results)])


def test_write_then_check(project, capsys):
    readme, results = project
    assert run("--check", readme, results) == 1
    assert "--write" in capsys.readouterr().err
    assert run("--write", readme, results) == 0
    assert run("--check", readme, results) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| operation | dtype | ranks | against | 1K | 1M |" in text
    assert "| all_reduce | float32 | 2 | gloo | **12** (11-13) | **3.1** (2.9-3.3) |" in text
    assert "2-core AMD EPYC" in text
    assert "abc123def" in text


def test_a_new_record_makes_it_stale(project):
    readme, results = project
    run("--write", readme, results)
    write_record(results / "cpu.jsonl", row(1024, world_size=4))
    assert run("--check", readme, results) == 1


def test_an_edited_table_is_stale(project):
    readme, results = project
    run("--write", readme, results)
    readme.write_text(readme.read_text().replace("**12**", "**21**"))
    assert run("--check", readme, results) == 1


def test_a_later_record_of_the_same_case_wins():
    text = tables.render({"cpu.jsonl": [row(1024), row(1024, speedup=0.5)]})
    assert "**0.50**" in text
    assert "**12**" not in text


def test_wrong_elements_are_shown():
    records = [row(1024, wrong=7), row(4096, baseline_wrong=1)]
    assert "8 wrong elements" in tables.render({"cpu.jsonl": records})


def test_sizes_outside_the_usual_columns_still_show():
    assert "| 2K |" in tables.render({"cpu.jsonl": [row(2048)]})


def test_barrier_and_registered_rows():
    records = [row(1024, registered=True), row(1024, direct=True), row(0, op="barrier")]
    text = tables.render({"cpu.jsonl": records})
    assert "all_reduce (registered)" in text
    assert "all_reduce (direct call)" in text
    assert "| barrier | float32 | 2 | gloo | **12** (11-13) |  |" in text


def test_baselines_have_rows_of_their_own():
    text = tables.render({"cpu.jsonl": [row(1024), row(1024, baseline="mpi", speedup=0.9)]})
    assert "| all_reduce | float32 | 2 | gloo | **12** (11-13) |" in text
    assert "| all_reduce | float32 | 2 | mpi | **0.90** (11-13) |" in text


def test_sizes_per_rank_are_columns_of_the_part():
    changes = {"op": "all_gather", "bytes_per_rank": 16 << 20, "per_rank": True}
    records = [row(1024), row(48 << 20, world_size=3, **changes), row(16 << 10, per_rank=True)]
    text = tables.render({"cpu.jsonl": records})
    assert "| against | 1K | 16K | 16M |" in text
    assert "| all_gather (size per rank) | float32 | 3 | gloo |" in text


def test_a_row_without_usual_sizes_is_not_left_out():
    text = tables.render({"cpu.jsonl": [row(1024), row(2048, op="broadcast")]})
    assert "| against | 1K | 2K |" in text
    assert "| broadcast | float32 | 2 | gloo |  | **12** (11-13) |" in text


def test_a_record_from_before_the_newer_fields_still_shows():
    record = row(1024)
    for field in ("bytes_per_rank", "per_rank", "num_blocks", "baseline_wrong"):
        del record[field]
    assert "| all_reduce | float32 | 2 | gloo | **12**" in tables.render({"cpu.jsonl": [record]})


def test_trainings_have_a_table():
    records = [row(1024), training(speedup=9.0), training()]
    records += [training(world_size=4, loss_difference=2e-6, loss_check="statistical")]
    text = tables.render({"cpu.jsonl": records})
    label = "| mlp, 4.2 M, batch 8, registered buckets"
    assert f"{label} | 2 | 16.8 MB | gloo | **1.50** (1.40-1.60) | equal |" in text
    assert f"{label} | 4 | 16.8 MB | gloo | **1.50** (1.40-1.60) | within 2e-06 |" in text
    assert "9.0" not in text
    assert "0 runs with differing losses" in text


def test_vision_models_have_a_row_for_each_part_and_network():
    emulated = {
        **{"nodes": 2, "ranks_per_node": [1, 1], "order": "block", "link_mbit": 24000.0},
        **{"flow_cap_mbit": None, "delay_ms": 0.0, "separate_processes": True},
    }
    model = {
        **{"model": "resnet50", "parameters": 25_557_032, "precision": "amp", "image_size": 224},
        **{"batch_size": 32, "registered": False, "device": "cuda", "baseline": "nccl"},
    }
    records = [
        training(**model, part=part, emulated=network)
        for part in ("collectives", "all")
        for network in (None, emulated)
    ]
    text = tables.render({"gpu.jsonl": [*records, training(**model, part="all", speedup=1.9)]})
    label = "| resnet50, 25.6 M, amp, 224 px, batch 32"
    network = "emulated 2 nodes of 1 rank, 24000 Mbit/s, each arm in processes of its own"
    assert f"{label}; ours: collectives and buckets | 2 | 16.8 MB | nccl | **1.50**" in text
    assert f"{label}; ours: all | 2 | 16.8 MB | nccl | **1.90**" in text
    for part in ("collectives and buckets", "all"):
        assert f"{label}, {network}; ours: {part} | 2 | 16.8 MB | nccl | **1.50**" in text
    assert text.count(label) == 4


def test_frameworks_on_emulated_nodes_have_rows_of_their_own():
    fields = {name: 1 for name in TRAIN_FIELDS}
    known = {**fields, "bench": "train", "framework": "fsdp2", "framework_version": "2.13.0"}
    known |= {"parameters": 4 << 20, "wrong": 0, "loss_difference": 0.0, "loss_check": "exact"}
    known |= {name: row(1024)[name] for name in ("machine", "versions", "commit")}
    known |= {"device": "cpu", "baseline": "gloo", "speedup": 1.5, "speedup_spread": [1.4, 1.6]}
    older = {name: value for name, value in known.items() if name != "emulated"}
    emulated = {
        **{"nodes": 2, "ranks_per_node": [1, 1], "order": "block", "link_mbit": 100.0},
        **{"flow_cap_mbit": None, "delay_ms": 0.0, "separate_processes": False},
    }
    records = [older, {**known, "emulated": None, "speedup": 1.7}, {**known, "emulated": emulated}]
    text = tables.render({"cpu.jsonl": records})
    label = "| fsdp2 (2.13.0), 4.2 M"
    assert f"{label} | 1 | 1 | gloo | **1.70** (1.40-1.60)" in text
    assert f"{label}, emulated 2 nodes of 1 rank, 100 Mbit/s | 1 | 1 | gloo | **1.50**" in text
    assert text.count(label) == 2, "a later run replaces an earlier one, also an older one"


def test_a_training_from_before_vision_models_still_shows():
    older = training()
    for field in ("part", "precision", "image_size", "choices", "emulated"):
        del older[field]
    newer = training(speedup=1.7)
    assert tables.render({"cpu.jsonl": [older]}) == tables.render({"cpu.jsonl": [training()]})
    assert tables.render({"cpu.jsonl": [older, newer]}).count("| mlp") == 1


def test_an_incomplete_training_is_an_error():
    record = training()
    del record["loss_check"]
    with pytest.raises(ValueError, match="lacks.*loss_check"):
        tables.render({"cpu.jsonl": [record]})


def test_a_record_that_no_table_shows_is_an_error(project, capsys):
    readme, results = project
    write_record(results / "other.jsonl", {"tokens_per_s": 1})
    assert run("--check", readme, results) == 1
    assert "other.jsonl, record 1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", tables.BEGIN, f"{tables.END} {tables.BEGIN}"])
def test_markers_are_needed(project, capsys, text):
    readme, results = project
    readme.write_text(text)
    assert run("--write", readme, results) == 1
    assert "results:begin" in capsys.readouterr().err
    assert readme.read_text() == text


def test_without_results_the_markers_stay_empty(project):
    readme, results = project
    assert run("--write", readme, results / "none") == 0
    assert readme.read_text() == f"before\n{tables.BEGIN}\n{tables.END}\nafter\n"


@pytest.mark.parametrize("file", ["README.md", "docs/results.md"])
def test_this_projects_tables_are_fresh(capsys, file):
    root = Path(__file__).parents[2]
    status = run("--check", root / file, root / "docs" / "results")
    assert status == 0, capsys.readouterr().err


def test_a_section_shows_what_it_names_with_links_from_where_it_stands(project):
    readme, results = project
    write_record(results / "cpu.jsonl", row(1024))
    write_record(results / "cpu.jsonl", training())
    page = readme.parent / "docs" / "page.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(
        f"<!-- results:begin ddp -->\nold\n{tables.END}\nbetween\n"
        f"<!-- results:begin gpu ddp collectives -->\n{tables.END}\n"
    )
    assert run("--write", page, results) == 0
    first, second = page.read_text().split("between")
    assert "old" not in first
    assert "| all_reduce |" not in first
    assert "| mlp, 4.2 M" in first
    assert "| all_reduce |" in second
    assert "| mlp, 4.2 M" in second
    link = os.path.relpath(results / "cpu.jsonl", page.parent)
    assert first.count(f"([cpu.jsonl]({link}))") == 1
    assert run("--check", page, results) == 0


def test_files_share_a_table_that_tells_their_rows_apart(project):
    readme, results = project
    other = {"machine": {"name": "8-core Xeon"}, "commit": "def456abc", "speedup": 2.05}
    write_record(results / "other.jsonl", row(1024, **{**other, "speedup_spread": [2.0, 2.1]}))
    readme.write_text(f"<!-- results:begin collectives in other cpu -->\n{tables.END}\n")
    assert run("--write", readme, results) == 0
    text = readme.read_text()
    assert text.count("| operation |") == 1
    assert "| **2.0** (2.0-2.1) |  | 8-core Xeon | def456abc |" in text
    assert "| **12** (11-13) | **3.1** (2.9-3.3) | 2-core AMD EPYC | abc123def |" in text
    assert run("--check", readme, results) == 0


@pytest.mark.parametrize(
    ("names", "message"),
    [("cpu gone", "no gone.jsonl"), ("cpu", "cpu.jsonl has no results of gpu")],
)
def test_a_section_of_absent_records_is_an_error(project, capsys, names, message):
    readme, results = project
    readme.write_text(f"<!-- results:begin gpu in {names} -->\n{tables.END}\n")
    assert run("--write", readme, results) == 1
    assert message in capsys.readouterr().err


def test_every_record_has_its_one_place_among_the_results():
    """A record that no table shows would look like a result that was left out."""
    page = (Path(__file__).parents[2] / "docs/results.md").read_text()
    files = tables.load(Path(__file__).parents[2] / "docs/results")
    shown = [
        (kind, name)
        for kinds, names in tables.sections(page, files)
        for kind in kinds
        for name in names
    ]
    there = {(tables.kind_of(record), name) for name, own in files.items() for record in own}
    there.remove(("forecast", "network-cpu-2-cores.jsonl"))  # docs/network.md has it
    assert sorted(shown) == sorted(there)


def test_the_results_begin_with_their_contents():
    page = (Path(__file__).parents[2] / "docs/results.md").read_text()
    contents, _, _ = page.partition("\n## ")
    assert re.findall(r"^\* \[(.*)\]\(#", contents, re.M) == re.findall(r"^## (.*)$", page, re.M)


def test_a_section_of_something_else_is_an_error(project, capsys):
    readme, results = project
    readme.write_text(f"<!-- results:begin collective -->\n{tables.END}\n")
    assert run("--write", readme, results) == 1
    assert "no results of collective: expected collectives, gpu, ddp" in capsys.readouterr().err


def test_emulated_rows_say_so(project):
    readme, results = project
    emulated = {"nodes": 2, "ranks_per_node": [4, 4], "order": "cyclic", "link_mbit": 1000.0}
    emulated |= {"flow_cap_mbit": 250.0, "delay_ms": 1.0, "separate_processes": True}
    write_record(results / "emulated.jsonl", row(1024, emulated=emulated))
    write_record(results / "emulated.jsonl", row(1024))
    assert run("--write", readme, results) == 0
    assert (
        "all_reduce (emulated 2 nodes of 4 ranks, 1000 Mbit/s, 250 Mbit/s a flow, 1 ms each way, "
        "cyclic order, each arm in processes of its own)" in readme.read_text()
    )


def on_gpus(num_bytes, **changes):
    fields = {"device": "cuda", "dtype": "bfloat16", "world_size": 4, "baseline": "nccl"}
    fields |= {"cuda_graph": True, "calls_per_graph": 20, "algorithm": "low_latency"}
    fields |= {"time_us": 7.14, "baseline_time_us": 123.4, "speedup": 2.05}
    fields |= {"speedup_spread": [2.0, 2.1], "machine": {"name": "64-core Xeon, 4x NVIDIA H200"}}
    return row(num_bytes, **{**fields, **changes})


def test_gpus_have_a_table_of_every_size_with_both_times():
    records = [
        on_gpus(1 << 10),
        on_gpus(1 << 30, algorithm="delegate", speedup=1.0, speedup_spread=[0.99, 1.01]),
        on_gpus(1 << 10, baseline="torch-symm"),
        on_gpus(2 << 10, cuda_graph=False, cpu_us=12.3, baseline_cpu_us=23.4, registered=True),
    ]
    text = tables.render({"collectives-4-h200.jsonl": records})
    assert "| operation | dtype | GPUs | against | timing | 1K | 2K | 1G |" in text
    cell = "**2.0** (2.0-2.1)<br>7.1 : 123"
    first = f"| all_reduce | bfloat16 | 4 | nccl | CUDA graph | {cell}<br>low_latency |  | "
    assert f"{first}**1.00** (0.99-1.01)<br>7.1 : 123<br>delegate |" in text
    eager = "all_reduce (registered) | bfloat16 | 4 | nccl | eager |  | "
    assert f"{eager}{cell}<br>CPU 12.3 : 23.4<br>low_latency |" in text
    assert "against | nccl" not in text
    assert "Times faster than nccl / torch-symm" in text


def test_gpus_and_emulated_nodes_have_tables_of_their_own():
    emulated = {"nodes": 2, "ranks_per_node": [1, 1], "order": "block", "link_mbit": None}
    emulated |= {"flow_cap_mbit": None, "delay_ms": 0.0, "separate_processes": True}
    records = [on_gpus(1024), on_gpus(1024, emulated=emulated)]
    text = tables.render({"mixed.jsonl": records})
    assert text.count("| operation |") == 2


def test_an_incomplete_record_of_gpus_is_an_error():
    record = on_gpus(1024)
    del record["time_us"]
    with pytest.raises(ValueError, match="lacks.*time_us"):
        tables.render({"collectives-2-h200.jsonl": [record]})


def test_series_are_ordered_and_leave_out_barriers():
    records = [row(4096), row(1024), row(0, op="barrier"), row(1024, speedup=9.0)]
    lines = series(records)
    assert list(lines) == ["all_reduce float32, 2 ranks"]
    assert [(r["bytes"], r["speedup"]) for r in lines["all_reduce float32, 2 ranks"]] == [
        (1024, 9.0),
        (4096, 12.3),
    ]


def test_plot_writes_a_picture(tmp_path):
    path = tmp_path / "bench.png"
    plot([row(1024), row(4096), row(4096, dtype="bfloat16")], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot([row(0, op="barrier")], tmp_path / "bench.png")


def script_row(**changes):
    fields = {name: None for name in SCRIPT_FIELDS} | {
        **{"bench": "scripts", "script": "nanogpt", "repository": "karpathy/nanoGPT"},
        **{"size": "full", "ranks": 1, "device": "NVIDIA H200", "wrong": 0, "kept": 3},
        **{f"{arm}_ms": [9.0, 10.0, 11.0] for arm in ("stock", "ours", "second")},
        **{"speedup": 1.5, "speedup_spread": [1.4, 1.6]},
        **{"second_speedup": 1.75, "second_speedup_spread": [1.7, 1.8]},
        **{"stock_busy": 0.5, "second_busy": 0.98, "ours_to_steady_s": 41.7},
        **{"stock_steady_from": 2, "ours_steady_from": 400, "remarks": []},
        **{"machine": {"name": "8-core EPYC, NVIDIA H200"}, "versions": {"torch": "2.11.0"}},
        **{"baseline": "stock", "commit": "abc123def"},
    }
    assert set(fields) == set(SCRIPT_FIELDS)
    return {**fields, **changes}


def test_public_scripts_have_a_table():
    records = [script_row(speedup=9.0), script_row(), script_row(script="other", wrong=1)]
    text = tables.render({"scripts.jsonl": records}, kinds=["scripts"])
    name = "| karpathy/nanoGPT: nanogpt | 10.0 ms | 10.0 ms"
    gain = "**1.50** (1.40-1.60), not steady: again | 1.75x (1.70-1.80)"
    assert f"{name} | {gain} | 50%: 98% | 42 s: ? | 3 |" in text
    assert "other | 10.0 ms | 10.0 ms | not claimed | not claimed |" in text
    assert "9.0" not in text
    beside = [script_row(), script_row(ranks=2, size="small")]
    text += tables.render({"scripts.jsonl": beside}, kinds=["scripts"])
    assert "| karpathy/nanoGPT: nanogpt (small, 2 ranks) | 10.0 ms" in text
    assert "Times faster than stock" in text
    assert "1 runs with differing losses" in text
    assert "Real tokens per second" not in text


def test_tokens_per_second_have_a_table():
    rates = {"per_s": 1759.4, "per_step": 6400.0, "matrix_share": 0.068}
    ours = {**rates, "per_s": 15111.0, "matrix_share": 0.58}
    peer = {"name": "packed, flex", "ms": [1.0] * 3, "tokens": {**rates, "per_s": 2241.0}}
    tokens = {"matrix_tflops": 790.0, "stock": rates, "ours": ours, "second": ours}
    record = script_row(tokens=tokens, peer=peer, stock_peak_gib=80.0, second_peak_gib=56.0)
    text = tables.render({"scripts.jsonl": [record, script_row(script="other")]})
    row = "| nanogpt | 1,759 | 15,111 | 15,111 | 2,241: packed, flex | 7%: 58% | 80.0: 56.0 |"
    assert row in text
    alone = tables.render({"scripts.jsonl": [{**record, "peer": None, "wrong": 1}]})
    assert "| nanogpt | not claimed | not claimed | not claimed | not measured |" in alone
