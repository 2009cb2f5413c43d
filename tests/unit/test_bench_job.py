"""Tests of what `bench collectives` accepts, and how it says no."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepytorch_core.bench.job import (
    BenchError,
    CollectivesJob,
    DdpJob,
    Nodes,
    format_size,
    parse_names,
    parse_ranks_per_node,
    parse_size,
    parse_sizes,
)


def job(**changes):
    fields = {"ops": ("all_reduce",), "sizes": (1024,), "dtypes": ("float32",), "world_size": 2}
    return CollectivesJob(**{**fields, **changes})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512", 512), ("4K", 4096), ("1m", 1 << 20), ("2GiB", 2 << 30), ("8KB", 8192)],
)
def test_size(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-4K", "4T", "four"])
def test_what_is_no_size(text):
    with pytest.raises(BenchError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K:64K", (1024, 4096, 16384, 65536)),
        ("1K:8K:2", (1024, 2048, 4096, 8192)),
        ("1K:5K:4", (1024, 4096, 5120)),
        ("4K:4K", (4096,)),
        ("1M,4K,1M", (4096, 1 << 20)),
        ("1K:4K:2, 1M", (1024, 2048, 4096, 1 << 20)),
    ],
)
def test_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["64M:1K", "0:1K", "1K:2K:1", "1K:2K:x", "1K:2K:2:2"])
def test_what_is_no_range(text):
    with pytest.raises(BenchError):
        parse_sizes(text)


@given(st.integers(min_value=0, max_value=1 << 40))
def test_a_formatted_size_reads_back(num_bytes):
    assert parse_size(format_size(num_bytes)) == num_bytes


def test_names_once_each_in_order():
    assert parse_names("broadcast, all_reduce,broadcast,") == ("broadcast", "all_reduce")


def test_a_job_survives_its_way_to_the_ranks():
    original = job(sizes=(4, 8), dtypes=("float32", "int8"), registered=True, per_rank=True)
    assert CollectivesJob.from_json(original.to_json()) == original
    training = DdpJob(world_size=2, parameters=4096, library="/tmp/op.so")
    assert DdpJob.from_json(training.to_json()) == training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": ("all_reduse",)}, "all_reduse.*known: all_reduce"),
        ({"dtypes": ("float31",)}, "float31.*float32"),
        ({"device": "tpu"}, "tpu.*cpu, cuda"),
        ({"baseline": "ucc"}, "ucc.*gloo, nccl, nccl-symm, torch-symm, deepspeed-shm, mpi"),
        ({"baseline": "mpi", "device": "cuda"}, "MPI is for cpu only.*--baseline gloo"),
        ({"baseline": "mpi", "dtypes": ("bfloat16",)}, "MPI has no bfloat16: limit --dtype to"),
        (
            {"baseline": "deepspeed-shm", "ops": ("all_reduce", "broadcast")},
            "DeepSpeed.* has no broadcast: limit --ops to all_reduce, or use --baseline gloo",
        ),
        ({"baseline": "deepspeed-shm", "dtypes": ("int32",)}, "no int32: limit --dtype to float32"),
        ({"baseline": "nccl"}, "--baseline gloo, or --device cuda"),
        ({"baseline": "nccl-symm"}, "moves GPU memory only.*--device cuda"),
        ({"baseline": "torch-symm"}, "torch's symmetric memory moves GPU memory only"),
        (
            {"baseline": "torch-symm", "device": "cuda", "ops": ("all_gather",)},
            "no all_gather: limit --ops to all_reduce, reduce_scatter, or use --baseline nccl",
        ),
        (
            {"baseline": "torch-symm", "device": "cuda", "dtypes": ("float16",)},
            "no float16: limit --dtype to float32, bfloat16, or use --baseline nccl",
        ),
        ({"cuda_graph": True}, "^--cuda-graph captures work of GPUs: give --device cuda too$"),
        ({"cuda_graph": True, "device": "cuda"}, "gloo cannot be captured: use --baseline nccl"),
        (
            {"cuda_graph": True, "device": "cuda", "baseline": "nccl", "ops": ("barrier",)},
            "--cuda-graph: a barrier waits on the CPU: leave it out of --ops",
        ),
        ({"beside_compute": True}, "--beside-compute .* give --device cuda"),
        ({"world_size": 0}, "world-size"),
        ({"iterations": -1}, "iterations"),
        ({"sizes": ()}, "--sizes"),
    ],
)
def test_a_bad_job_says_what_to_change(changes, message):
    with pytest.raises(BenchError, match=message):
        job(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt"}, "gpt.*known: mlp"),
        ({"baseline": "mpi"}, "DistributedDataParallel has no 'mpi'.*--baseline gloo"),
        ({"world_size": 1}, "one rank reduces nothing"),
        ({"parameters": 10}, "--parameters must be at least"),
        ({"batch_size": 0}, "--batch-size"),
        ({"steps": 4}, "--steps must be at least 5"),
    ],
)
def test_a_bad_training_says_what_to_change(changes, message):
    with pytest.raises(BenchError, match=message):
        DdpJob(**{"world_size": 2, **changes})


def test_emulated_nodes_survive_their_way_to_the_ranks():
    nodes = Nodes(ranks_per_node=(4, 2), order="cyclic", link="1gbit", flow_cap="250mbit")
    original = job(world_size=6, nodes=nodes)
    assert CollectivesJob.from_json(original.to_json()) == original
    assert [seat.node for seat in original.seats] == [0, 1, 0, 1, 0, 0]
    assert [seat.device for seat in original.seats] == [0, 4, 1, 5, 2, 3]
    assert [seat.device for seat in job(world_size=3).seats] == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks_per_node": (2,), "link": "fast"}, "'fast' is no rate: write 250mbit"),
        ({"ranks_per_node": (2,), "delay": "1"}, "'1' is no time: write 1ms"),
        ({"ranks_per_node": (2,), "delay": "2s"}, "a delay of 2"),
        ({"ranks_per_node": (2,), "link": "1kbit"}, "between 100kbit and"),
        ({"ranks_per_node": (2,), "flow_cap": "1gbit"}, "a flow cap needs the link's rate"),
        ({"ranks_per_node": (2,), "order": "snake"}, "'snake'; known: block, cyclic, random"),
        ({"ranks_per_node": (2, 0)}, "at least one rank each"),
    ],
)
def test_bad_nodes_say_what_to_change(changes, message):
    with pytest.raises(BenchError, match=message):
        Nodes(**changes)


def test_nodes_must_fit_the_rest():
    with pytest.raises(BenchError, match="--world-size 2 is not what the nodes have, 2 \\+ 2"):
        job(nodes=Nodes(ranks_per_node=(2, 2)))
    with pytest.raises(BenchError, match="MPI does not reach emulated nodes: use --baseline gloo"):
        job(nodes=Nodes(ranks_per_node=(1, 1)), baseline="mpi")


@pytest.mark.parametrize(
    ("text", "num_nodes", "counts"), [("4", 2, (4, 4)), ("4,2", 2, (4, 2)), (" 3 ", 1, (3,))]
)
def test_ranks_per_node(text, num_nodes, counts):
    assert parse_ranks_per_node(text, num_nodes) == counts


@pytest.mark.parametrize(
    ("text", "num_nodes"), [("0", 2), ("x", 2), ("4,2", 3), ("", 2), ("4", -1)]
)
def test_what_are_no_ranks_per_node(text, num_nodes):
    with pytest.raises(BenchError, match="--ranks-per-node"):
        parse_ranks_per_node(text, num_nodes)


def test_ranks_of_different_nodes_share_gpus_where_there_are_no_more():
    nodes = Nodes(ranks_per_node=(2, 2), order="cyclic")
    run = job(nodes=nodes, world_size=4)
    assert [run.device_number(rank, 4) for rank in range(4)] == [0, 2, 1, 3]
    assert [run.device_number(rank, 2) for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(BenchError, match="--world-size 4 needs as many GPUs; this machine has 1"):
        run.device_number(0, 1)
    with pytest.raises(BenchError, match="needs as many GPUs"):
        job(world_size=4).device_number(0, 2)
    training = DdpJob(parameters=4096, batch_size=1, steps=5, nodes=nodes, world_size=4)
    with pytest.raises(BenchError, match="needs as many GPUs"):
        training.device_number(0, 2)
