"""`deepytorch bench collectives` without measuring: what reaches the job, and what is shown."""

from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch_core.base.provenance import read_records
from deepytorch_core.bench import launch
from deepytorch_core.bench.record import COLLECTIVE_FIELDS


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


@dataclass
class FakeRun:
    """Stands in for `launch.run`: notes the job, gives one row."""

    wrong: int = 0
    baseline_wrong: int = 0
    job: object = None
    changes: dict = field(default_factory=dict)

    def __call__(self, job):
        self.job = job
        row = dict.fromkeys(COLLECTIVE_FIELDS, 1.5)
        row |= {"op": job.ops[0], "bytes": 4096, "dtype": "float32", "world_size": 2}
        row |= {"speedup_spread": [1.0, 2.0], "wrong": self.wrong, "algorithm": "one_shot"}
        row |= {"baseline_wrong": self.baseline_wrong, "emulated": None}
        row |= {"baseline": "gloo", "registered": False, "machine": {"name": "test"}}
        yield row | self.changes


def bench(monkeypatch, fake, *arguments):
    monkeypatch.setattr(launch, "run", fake)
    return invoke("bench", "collectives", *arguments)


@pytest.mark.parametrize("command", ["collectives", "ddp", "train", "compile"])
def test_bench_measures_nothing_that_it_can_not_write(monkeypatch, command, tmp_path):
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("it was measured"))
    result = invoke("bench", command, "--json", str(tmp_path))
    assert "is a folder: name a file" in str(result.exception)


def test_bench_options_reach_the_job(monkeypatch):
    fake = FakeRun()
    result = bench(
        monkeypatch,
        fake,
        *("--world-size", "4", "--ops", "all_gather,broadcast", "--sizes", "1K:4K:2"),
        *("--dtype", "bfloat16,float32", "--registered", "--iterations", "5"),
    )
    assert result.exit_code == 0, result.output
    assert fake.job.world_size == 4
    assert fake.job.ops == ("all_gather", "broadcast")
    assert fake.job.sizes == (1024, 2048, 4096)
    assert fake.job.dtypes == ("bfloat16", "float32")
    assert fake.job.registered
    assert not fake.job.per_rank
    assert fake.job.iterations == 5
    assert fake.job.ours == "deepytorch"


@pytest.mark.parametrize(
    ("device", "given", "expected", "apart"),
    [
        ("cpu", [], "gloo", False),
        ("cuda", [], "nccl", True),  # NCCL reads its settings once in a process
        ("cuda", ["--together"], "nccl", False),
        ("cuda", ["--baseline", "gloo"], "gloo", True),
    ],
)
def test_bench_on_emulated_nodes(monkeypatch, device, given, expected, apart):
    fake = FakeRun()
    result = bench(
        monkeypatch,
        fake,
        *("--device", device, "--nodes", "2", "--ranks-per-node", "2", "--link", "24gbit"),
        *("--flow-cap", "5gbit", "--delay", "1ms", "--order", "cyclic"),
        *given,
    )
    assert result.exit_code == 0, result.output
    assert fake.job.world_size == 4
    assert fake.job.baseline == expected
    assert apart == fake.job.APART
    assert fake.job.num_processes == (8 if apart else 4)
    assert fake.job.nodes.ranks_per_node == (2, 2)
    setting = fake.job.nodes.setting()
    assert (setting.rate_bps, setting.flow_cap_bps, setting.delay_s) == (24e9, 5e9, 1e-3)
    assert [seat.node for seat in fake.job.seats] == [0, 1, 0, 1]


def test_bench_gives_the_baseline_variables_of_its_own(monkeypatch):
    fake = FakeRun()
    variables = "NCCL_SOCKET_NTHREADS=4,NCCL_NSOCKS_PERTHREAD=4"
    result = bench(
        monkeypatch,
        fake,
        *("--device", "cuda", "--nodes", "2", "--ranks-per-node", "1", "--order", "cyclic"),
        *("--baseline-env", variables),
    )
    assert result.exit_code == 0, result.output
    ours, baseline = (fake.job.environment(process, ()) for process in (0, 2))
    assert "NCCL_SOCKET_NTHREADS" not in ours
    assert baseline["NCCL_SOCKET_NTHREADS"] == baseline["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert baseline["DEEPYTORCH_ENABLED"] == "0"
    assert ours["RANK"] == baseline["RANK"] == "0"
    assert fake.job.baseline_settings == dict.fromkeys(
        ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"), "4"
    )
    assert type(fake.job).from_json(fake.job.to_json()) == fake.job


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline-env", "A=1"], "--baseline-env needs processes of the baseline's own"),
        (
            ["--device", "cuda", "--nodes", "2", "--together", "--baseline-env", "A=1"],
            "with --nodes, without --together",
        ),
        (["--nodes", "2", "--together"], "both arms share their processes anyway"),
        (["--device", "cuda", "--together"], "both arms share their processes anyway"),
        (
            ["--device", "cuda", "--nodes", "2", "--baseline-env", "A"],
            "--baseline-env 'A': write NAME=VALUE",
        ),
        (["--link", "1gbit"], "--link is for emulated nodes: give --nodes too"),
        (["--ranks-per-node", "4"], "--ranks-per-node is for emulated nodes"),
        (["--nodes", "2", "--world-size", "3"], "--world-size 3 is not what the nodes have"),
    ],
)
def test_bench_refuses_options_of_nodes_that_do_not_fit(monkeypatch, arguments, message):
    result = bench(monkeypatch, FakeRun(), *arguments)
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_bench_in_graphs(monkeypatch):
    fake = FakeRun()
    result = bench(monkeypatch, fake, "--device", "cuda", "--cuda-graph")
    assert result.exit_code == 0, result.output
    assert fake.job.cuda_graph
    assert fake.job.baseline == "nccl"


@pytest.mark.parametrize("cpu_us", [None, 12.34])
def test_bench_shows_the_cpu_time_where_it_was_measured(monkeypatch, cpu_us):
    fake = FakeRun(changes={"cpu_us": cpu_us, "baseline_cpu_us": cpu_us})
    output = bench(monkeypatch, fake).output
    assert ("cpu us" in output) == ("12.3" in output) == (cpu_us is not None)


def test_bench_table_has_the_columns_of_nccl_tests_and_ours(monkeypatch):
    output = bench(monkeypatch, FakeRun()).output
    for column in ("size", "count", "type", "redop", "root", "time us", "algbw", "busbw"):
        assert column in output
    for column in ("#wrong", "gloo us", "speed-up"):
        assert column in output
    assert "1.50x (1.00-2.00)" in output


def test_bench_fails_on_wrong_elements(monkeypatch):
    result = bench(monkeypatch, FakeRun(wrong=3))
    assert result.exit_code == 1
    assert "3 WRONG ELEMENTS in the results of deepytorch" in result.output


def test_bench_fails_on_wrong_elements_of_the_baseline(monkeypatch):
    result = bench(monkeypatch, FakeRun(baseline_wrong=2), "--per-rank")
    assert result.exit_code == 1
    assert "2 WRONG ELEMENTS in the results of the baseline gloo" in result.output
    assert "deepytorch" not in result.output


def test_bench_ends_with_a_summary(monkeypatch):
    output = bench(monkeypatch, FakeRun()).output
    assert "all_reduce: worst 1.50x (4K float32), median 1.50x of 1" in output


def test_bench_writes_records_and_a_picture(monkeypatch, tmp_path):
    records, picture = tmp_path / "r.jsonl", tmp_path / "p.svg"
    result = bench(monkeypatch, FakeRun(), "--json", str(records), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert set(read_records(records)[0]) == {*COLLECTIVE_FIELDS, "command"}
    assert "<svg" in picture.read_text()
