"""The rules of which backend argument becomes which."""

from __future__ import annotations

import pytest

from deepytorch_core.c10d import rewrite
from deepytorch_core.c10d.rewrite import Capabilities

GPU = Capabilities(accelerator="cuda", has_nccl=True)
CPU = Capabilities(accelerator="cpu", has_nccl=False)
XPU = Capabilities(accelerator="xpu", has_nccl=False)


@pytest.mark.parametrize(
    ("asked", "on_gpu", "on_cpu"),
    [
        ("undefined", "cuda:deepytorch", "cpu:deepytorch"),
        ("nccl", "cuda:deepytorch", None),  # stock torch says what is missing
        ("NCCL", "cuda:deepytorch", None),
        ("gloo", "cpu:deepytorch,cuda:gloo", "cpu:deepytorch"),
        ("cpu:gloo,cuda:nccl", "cpu:deepytorch,cuda:deepytorch", "cpu:deepytorch,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:deepytorch,cpu:deepytorch", "cuda:nccl,cpu:deepytorch"),
        ("cpu:gloo", "cpu:deepytorch", "cpu:deepytorch"),
        ("cuda:gloo", None, None),  # its delegate would be NCCL, which is not what was asked for
        ("cpu:gloo,cuda:ucc", "cpu:deepytorch,cuda:ucc", "cpu:deepytorch,cuda:ucc"),
        ("cpu:gloo,hpu:hccl", None, None),
        ("deepytorch", None, None),
        ("cpu:gloo,cuda:deepytorch", "cpu:deepytorch,cuda:deepytorch", None),
        ("mpi", None, None),
        ("ucc", None, None),
        ("fake", None, None),
        ("somebody-elses", None, None),
    ],
)
def test_default_group(asked: str, on_gpu: str | None, on_cpu: str | None) -> None:
    assert rewrite.default_group(asked, GPU) == on_gpu
    if asked != "cpu:gloo,cuda:deepytorch":
        assert rewrite.default_group(asked, CPU) == on_cpu


def test_without_argument_other_accelerators_keep_their_own() -> None:
    assert rewrite.default_group("undefined", XPU) is None


@pytest.mark.parametrize(
    ("asked", "default_config", "default_asked", "expected"),
    [
        # Nothing given: as the default group, device by device.
        (
            "undefined",
            "cpu:deepytorch,cuda:deepytorch",
            "undefined",
            "cpu:deepytorch,cuda:deepytorch",
        ),
        ("undefined", "cpu:deepytorch,cuda:gloo", "undefined", "cpu:deepytorch,cuda:gloo"),
        ("nccl", "cuda:deepytorch", "nccl", "cuda:deepytorch"),
        ("nccl", "cpu:deepytorch,cuda:deepytorch", "deepytorch", "cuda:deepytorch"),
        # gloo beside something else is there for what only gloo does.
        ("gloo", "cuda:deepytorch", "nccl", None),
        ("gloo", "cpu:deepytorch,cuda:deepytorch", "deepytorch", None),
        ("gloo", "cpu:deepytorch,cuda:deepytorch", "undefined", None),
        ("gloo", "cpu:deepytorch,cuda:gloo", "gloo", "cpu:deepytorch,cuda:gloo"),
        ("cpu:gloo,cuda:nccl", "cuda:deepytorch", "nccl", "cpu:deepytorch,cuda:deepytorch"),
        ("deepytorch", "cuda:deepytorch", "nccl", None),
        ("mpi", "cuda:deepytorch", "nccl", None),
    ],
)
def test_sub_group(
    asked: str, default_config: str, default_asked: str, expected: str | None
) -> None:
    chosen = rewrite.sub_group(
        asked, GPU, default_config=default_config, default_asked=default_asked
    )
    assert chosen == expected


def test_rewriting_twice_changes_nothing_more() -> None:
    for asked in ("nccl", "gloo", "undefined", "cpu:gloo,cuda:nccl"):
        once = rewrite.default_group(asked, GPU)
        assert once is not None
        assert rewrite.default_group(once, GPU) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cpu:gloo,cuda:gloo", "cpu:deepytorch,cuda:gloo"),
        ("cuda:nccl", "cuda:deepytorch"),
        ("cpu:gloo,cuda:nccl", "cpu:deepytorch,cuda:deepytorch"),
        ("cpu:mpi", None),
        ("cpu:gloo,hpu:hccl", None),
    ],
)
def test_existing_group(config: str, expected: str | None) -> None:
    assert rewrite.upgraded(config, GPU) == expected


def test_reason_for_leaving_a_foreign_backend_alone() -> None:
    assert "hccl (for hpu)" in str(rewrite.why_not_beside({"cpu": "deepytorch", "hpu": "hccl"}))
    assert rewrite.why_not_beside({"cpu": "gloo", "cuda": "nccl"}) is None
