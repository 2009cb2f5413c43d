"""`bench train`: what is refused before anything starts, who the processes are, what is printed."""

import pytest

from deepytorch import workloads
from deepytorch.cli import bench_train
from deepytorch.workloads import TrainJob
from deepytorch.workloads import worker as train_worker
from deepytorch_core.bench import worker
from deepytorch_core.bench.job import BenchError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"framework": "keras"}, "unknown framework 'keras'; known: ddp, fsdp1"),
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


@pytest.mark.parametrize(("world_size", "wrong"), [(2, 1), (3, 0)])
def test_the_order_of_sums_explains_a_difference_of_more_than_two_ranks(world_size, wrong):
    share = {"times": [[10.0], [12.0]], "adapter_us": 1.0, "losses": [1.0], "calls": {"ring": 2}}
    ours = [share] * world_size
    stock = [{**share, "losses": [1.0001], "calls": {}}] * world_size
    record = train_worker._record(TrainJob(world_size=world_size), ours, stock)
    assert record["wrong"] == wrong
    assert record["loss_difference"] == pytest.approx(1e-4, rel=1e-3)
    assert record["native_calls"] == 2 * world_size


@pytest.mark.parametrize("framework", sorted(workloads.WORKLOADS))
def test_every_workload_has_a_module_and_a_version(framework):
    assert callable(workloads.load(framework).build)
    assert workloads.version(framework)


def test_a_missing_framework_is_named(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "ddp", "no_such_module")
    with pytest.raises(BenchError, match="pip install 'deepytorch"):
        workloads.load("ddp")


def test_the_lines():
    lines = bench_train.train_lines(
        {
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
            "step_time_us": 10000.0,
            "baseline": "gloo",
            "baseline_step_time_us": 15000.0,
            "speedup": 1.5,
            "speedup_spread": [1.4, 1.6],
            "loss_difference": 0.0,
        }
    )
    assert "90 of 100 collectives native" in lines[0]
    assert lines[-1] == "speed-up 1.50x (quartiles 1.40 to 1.60), losses equal bit for bit"


def test_the_ranks_of_an_arm_share_the_cores_out():
    cores = [0, 1, 4, 5, 6, 7, 9]
    assert [worker.cores_of(rank, 3, cores) for rank in range(3)] == [[0, 1], [4, 5], [6, 7]]
    assert not worker.cores_of(0, 8, cores)
