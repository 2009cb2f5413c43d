"""The baselines in symmetric memory: which kernel is taken, and what an older torch is told."""

from types import SimpleNamespace

import pytest
import torch

from deepytorch_core.bench import baselines, rivals
from deepytorch_core.bench.baselines import nccl_symm, torch_symm
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.ops import Buffers


class Kernels:
    """torch.ops.symm_mem with the kernels that are named; notes what was called."""

    def __init__(self, *names):
        self.called = []
        for name in names:
            setattr(self, name, lambda *arguments, name=name: self.called.append(name))


def trials(op, kernels):
    value = torch.ones(4)
    return torch_symm.trials(op, Buffers(value, value), torch.empty(4), "group", kernels)


def test_kernels_with_multicast_are_never_offered():
    names = [name for ways in torch_symm.OFFERED.values() for name in ways]
    assert names
    assert not [name for name in names if "multimem" in name]
    assert set(torch_symm.OFFERED) == set(rivals.LIMITS["torch-symm"].ops)


def test_this_torch_has_the_kernels():
    for op, ways in torch_symm.OFFERED.items():
        found = torch_symm.trials(op, Buffers(torch.ones(4), torch.ones(4)), torch.empty(4), "g")
        assert len(found) == len(ways)


def test_multicast_stays_off_in_the_ranks():
    with baselines.prepare("torch-symm", 2) as setup:
        assert setup.environment == {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        assert setup.settings == setup.environment
    with baselines.prepare("nccl-symm", 2) as setup:
        assert not setup.environment  # NCCL's variables are the user's


@pytest.mark.parametrize(("times", "way"), [((7.0, 9.0), "one_shot"), ((99.0, 9.0), "two_shot")])
def test_the_fastest_kernel_is_taken(times, way):
    kernels = Kernels(*torch_symm.OFFERED["all_reduce"])
    answers = iter(times)
    taken = torch_symm.fastest(trials("all_reduce", kernels), lambda call: next(answers))
    assert taken.way == way
    assert kernels.called == list(torch_symm.OFFERED["all_reduce"])
    assert (taken.buffers.output is taken.buffers.input) == (way == "two_shot")


def test_a_kernel_that_refuses_is_left_out():
    kernels = Kernels("one_shot_all_reduce_out", "two_shot_all_reduce_")

    def refuse(*_):
        raise RuntimeError("size must be 4-byte aligned\nat somewhere")

    kernels.one_shot_all_reduce_out = refuse
    assert torch_symm.fastest(trials("all_reduce", kernels), lambda call: 1.0).way == "two_shot"
    kernels.two_shot_all_reduce_ = refuse
    message = "one_shot: size must be 4-byte aligned; two_shot: .*use --baseline nccl here$"
    with pytest.raises(BenchError, match=message):
        torch_symm.fastest(trials("all_reduce", kernels), lambda call: 1.0)


def test_a_torch_without_the_kernel_is_told():
    kernels = Kernels("one_shot_all_reduce_out")
    assert [trial.way for trial in trials("all_reduce", kernels)] == ["one_shot"]
    with pytest.raises(BenchError, match="no reduce_scatter in symmetric memory.*--ops"):
        trials("reduce_scatter", kernels)


def test_a_torch_without_a_pool_of_nccl_is_told():
    with pytest.raises(BenchError, match="nccl-symm needs torch 2.9 .*mem_allocator.*update"):
        nccl_symm.make_pool(SimpleNamespace())


def test_a_torch_without_symmetric_registration_is_told():
    def register(pool):
        """torch before 2.9."""

    backend = SimpleNamespace(register_mem_pool=register)
    with pytest.raises(BenchError, match="nccl-symm needs torch 2.9 .*symm.*--baseline nccl"):
        nccl_symm.register(backend, object())


def test_the_pool_is_registered_as_symmetric():
    seen = []
    backend = SimpleNamespace(register_mem_pool=lambda pool, *, symm: seen.append((pool, symm)))
    nccl_symm.register(backend, "pool")
    assert seen == [("pool", True)]
