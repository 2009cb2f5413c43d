"""`bench train`: what is refused before anything starts, who the processes are, what is printed."""

import math

import pytest
from typer.testing import CliRunner

from deepytorch import workloads
from deepytorch.cli import app, bench_train
from deepytorch.workloads import TrainJob, rounds
from deepytorch_core.bench import launch, worker
from deepytorch_core.bench.job import BenchError, CollectivesJob, Nodes
from deepytorch_core.bench.record import TRAIN_FIELDS
from deepytorch_core.bench.timing import BASELINE, OURS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"framework": "keras"}, "unknown framework 'keras'; known: ddp, ddp-small-buckets, fsdp1"),
        ({"framework": "megatron"}, "megatron on CPUs: Megatron's models are for GPUs"),
        ({"framework": "accelerate-fsdp2"}, "use --framework fsdp2"),
        ({"device": "cuda"}, "over nccl: --baseline nccl"),
        ({"world_size": 1}, "one rank reduces nothing"),
        ({"parameters": 10}, "--parameters must be at least"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"steps": 4}, "--steps must be at least 5"),
    ],
)
def test_a_wrong_job_is_refused(changes, said):
    with pytest.raises(BenchError, match=said):
        TrainJob(**{"world_size": 2, **changes})


def test_the_arms_are_jobs_of_their_own():
    job = TrainJob(world_size=2)
    processes = [job.environment(number, [1234, 5678]) for number in range(job.num_processes)]
    assert [process["RANK"] for process in processes] == ["0", "1", "0", "1"]
    assert [process["MASTER_PORT"] for process in processes] == ["1234", "1234", "5678", "5678"]
    assert [process.get("DEEPYTORCH_ENABLED") for process in processes] == [None, None, "0", "0"]


def test_the_ranks_know_their_places_on_emulated_nodes():
    job = TrainJob(world_size=3, nodes=Nodes(ranks_per_node=(2, 1), link="1gbit"))
    processes = [job.environment(number, [1234, 5678]) for number in range(job.num_processes)]
    places = [
        tuple(process[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
        for process in processes
    ]
    one_arm = [("0", "0", "2", "0"), ("1", "1", "2", "0"), ("2", "2", "1", "1")]
    assert places == one_arm * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "1gbit"], "--link is of emulated nodes: give --nodes too"),
        (["--nodes", "2", "--world-size", "3"], "--world-size 3 does not divide among --nodes 2"),
        (["--nodes", "2", "--link", "fast"], "'fast' is no rate"),
    ],
)
def test_wrong_nodes_of_a_framework_are_refused(options, said):
    result = CliRunner().invoke(app, ["bench", "train", "--framework", "fsdp2", *options])
    assert isinstance(result.exception, BenchError)
    assert said in str(result.exception)


def test_a_framework_trains_on_the_nodes_that_were_asked_for(monkeypatch):
    asked = []

    def compare(job, **_):
        asked.append(job)
        raise BenchError("enough")

    monkeypatch.setattr(rounds, "compare", compare)
    options = ["--framework", "fsdp2", "--nodes", "2", "--link", "1gbit", "--world-size", "4"]
    CliRunner().invoke(app, ["bench", "train", *options])
    assert asked[0].nodes == Nodes(ranks_per_node=(2, 2), link="1gbit")


def share(times, *, losses=(1.0,), calls=()):
    """Return what one process found."""
    return {"times": times, "adapter_us": 1.0, "losses": losses, "calls": dict(calls)}


def found(ours, stock):
    """Return what all processes of a round found."""
    origin = {"baseline_settings": {}, "machine": {}, "versions": {}, "commit": "0"}
    return {"shares": [ours, stock], **origin}


ELEVEN = [share([[11.0], [11.0]])] * 2


@pytest.mark.parametrize(("world_size", "wrong"), [(2, 1), (3, 0)])
def test_the_order_of_sums_explains_a_difference_of_more_than_two_ranks(world_size, wrong):
    ours = [share([[10.0], [12.0]], losses=[1.0], calls={"ring": 2})] * world_size
    stock = [share([[10.0], [12.0]], losses=[1.0001])] * world_size
    record = rounds.record(TrainJob(world_size=world_size), [found(ours, stock)])
    assert record["wrong"] == wrong
    assert record["loss_difference"] == pytest.approx(1e-4, rel=1e-3)
    assert record["native_calls"] == 2 * world_size


def test_rounds_are_compared_together_and_each_for_itself():
    once = found([share([[10.0], [20.0]], calls={"ring": 3, "delegate": 1})] * 2, ELEVEN)
    # The slower rank counts, whichever it is.
    faster = [share([[5.0], [5.0]], calls={"ring": 4}), share([[2.0], [5.5]], calls={"ring": 4})]
    again = found(faster, ELEVEN)
    record = rounds.record(TrainJob(world_size=2), [once, again])
    assert record["round_speedups"] == [pytest.approx((11 / 10 + 11 / 20) / 2, abs=1e-3), 2.1]
    assert (record["steps"], record["num_blocks"]) == (4, 4)
    assert record["speedup"] == pytest.approx((11 / 10 + 2.0) / 2)
    assert (record["native_calls"], record["delegated_calls"]) == (14, 2)
    assert record["loss_check"] == "exact"
    assert set(record) == set(TRAIN_FIELDS)


def test_a_loss_that_differs_in_any_round_is_wrong():
    same = found([share([[1.0]])] * 2, [share([[1.0]])] * 2)
    other = found([share([[1.0]], losses=[math.nan])] * 2, [share([[1.0]])] * 2)
    record = rounds.record(TrainJob(world_size=2), [same, other])
    assert record["wrong"] == 1
    assert record["loss_difference"] is None


def test_the_arms_take_turns_in_starting_first(monkeypatch):
    started = []

    def run(job):
        started.append(job.first)
        yield found([share([[10.0]])] * 2, [share([[11.0]])] * 2)

    monkeypatch.setattr(launch, "run", run)
    said = []
    record = rounds.compare(TrainJob(world_size=2), rounds=3, say=said.append)
    assert started == [OURS, BASELINE, OURS]
    assert record["round_speedups"] == [1.1, 1.1, 1.1]
    assert len(said) == 3
    assert said[2].startswith("round 3/3  gloo 0.01 ms, deepytorch 0.01 ms a step: 1.10x")
    with pytest.raises(BenchError, match="--rounds must be at least 1, not 0"):
        rounds.compare(TrainJob(world_size=2), rounds=0, say=said.append)


def test_too_few_steps_for_the_rounds_are_refused():
    result = CliRunner().invoke(app, ["bench", "train", "--rounds", "3", "--steps", "14"])
    assert isinstance(result.exception, BenchError)
    assert "--steps must be at least 15 in 3 rounds, not 14" in str(result.exception)


def test_a_trace_is_of_a_framework(tmp_path):
    asked = ["bench", "train", "--workload", "bert-amp", "--trace", str(tmp_path)]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, BenchError)
    assert "--trace is of a framework: leave --workload out" in str(result.exception)


@pytest.mark.parametrize("framework", sorted(workloads.WORKLOADS))
def test_every_workload_has_a_module_and_a_version(framework):
    assert callable(workloads.load(framework).build)
    assert workloads.version(framework)


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "ddp", "no_such_module")
    with pytest.raises(BenchError, match="pip install 'deepytorch-train"):
        workloads.load("ddp")


def test_the_lines():
    row = {
        "framework": "fsdp2",
        "framework_version": "2.13.0",
        "parameters": 4 << 20,
        "batch_size": 8,
        "world_size": 2,
        "adapter_us": 3.5,
        "native_calls": 90,
        "delegated_calls": 10,
        "steps": 40,
        "num_blocks": 10,
        "round_speedups": [1.45, 1.55],
        "step_time_us": 10000.0,
        "baseline": "gloo",
        "baseline_step_time_us": 15000.0,
        "speedup": 1.5,
        "speedup_spread": [1.4, 1.6],
        "loss_difference": 0.0,
        "wrong": 0,
    }
    lines = bench_train.train_lines(row)
    assert "90 of 100 collectives native" in lines[0]
    assert lines[-1] == "speed-up 1.50x (quartiles 1.40 to 1.60), losses equal bit for bit"
    differing = bench_train.train_lines({**row, "wrong": 1, "loss_difference": 0.5})
    assert differing == [*lines[:-1], "speed-up not claimed, losses relative difference 0.5"]
    where = {**dict.fromkeys(("flow_cap_mbit", "delay_ms")), "link_mbit": 100.0, "order": "block"}
    row["emulated"] = {"nodes": 2, "ranks_per_node": [1, 1], **where}
    assert bench_train.train_lines(row) == ["emulated 2 nodes of 1 rank, 100 Mbit/s", *lines]
    row["emulated"]["gpus"] = 1
    title = "emulated 2 nodes of 1 rank, which share 1 GPU, 100 Mbit/s"
    assert bench_train.train_lines(row) == [title, *lines]


def test_shared_gpus_need_mps(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: 1)
    chosen = []
    monkeypatch.setattr(worker.torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(worker.os, "sched_setaffinity", lambda *_: None)
    cases = {"ops": ("all_reduce",), "sizes": (1024,), "dtypes": ("float32",)}
    nodes = Nodes(ranks_per_node=(1, 1))
    run = CollectivesJob(world_size=2, device="cuda", baseline="nccl", nodes=nodes, **cases)
    with pytest.raises(BenchError, match="2 ranks share 1 GPUs.*nvidia-cuda-mps-control -d"):
        worker.device_of(run, 1)
    (tmp_path / "control").touch()
    assert str(worker.device_of(run, 1)) == "cuda:0"
    assert chosen == [0]


def test_the_ranks_of_an_arm_share_the_cores_out():
    cores = [0, 1, 4, 5, 6, 7, 9]
    assert [worker.cores_of(rank, 3, cores) for rank in range(3)] == [[0, 1], [4, 5], [6, 7]]
    assert not worker.cores_of(0, 8, cores)
