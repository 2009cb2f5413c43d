"""`deepytorch run` on several nodes: how they find each other."""

from __future__ import annotations

import errno
import socket
from argparse import Namespace

import pytest

from deepytorch.cli import launcher
from deepytorch_core.base import config
from deepytorch_core.network import addresses


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is known by no name, at 10.0.0.2."""
    for name in ("NODE_RANK", "MASTER_ADDR", "RDZV_BACKEND", "RDZV_ENDPOINT"):
        monkeypatch.delenv(f"PET_{name}", raising=False)
    monkeypatch.setattr(addresses, "is_known_by", lambda name: False)
    monkeypatch.setattr(addresses, "address_towards", lambda host, port: "10.0.0.2")


def parse(*arguments: str) -> Namespace:
    whole = [*arguments, "train.py"]
    options = launcher.parse(whole, command="deepytorch run", default_processes="1")
    launcher.settle_meeting(options)
    return options


def test_an_endpoint_alone_is_enough() -> None:
    options = parse("--nnodes=2", "--rdzv-endpoint=10.0.0.1:29500")
    assert (options.rdzv_backend, options.node_rank) == ("c10d", 0)
    assert (options.local_addr, options.rdzv_conf) == ("10.0.0.2", "")


def test_the_node_of_the_endpoint_serves_the_others() -> None:
    options = parse("--nnodes=2", "--rdzv-endpoint=10.0.0.2:29500", "--rdzv-conf=timeout=30")
    assert options.rdzv_conf == "timeout=30,is_host=1"


@pytest.mark.parametrize(
    ("nnodes", "theirs", "expected"),
    [("1:2", None, "1"), ("1:2", "0", "0"), ("2", None, None), ("2:2", None, None)],
)
def test_nodes_may_join_later_where_their_number_may_change(
    monkeypatch: pytest.MonkeyPatch, nnodes: str, theirs: str | None, expected: str | None
) -> None:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.setenv(name, theirs or "")  # also so that it is as before afterwards
    if theirs is None:
        monkeypatch.delenv(name)
    parse(f"--nnodes={nnodes}", "--rdzv-endpoint=10.0.0.1:29500")
    assert config.child_environment().get(name) == expected


def test_numbered_nodes_stay_as_torchrun_has_them() -> None:
    options = parse("--nnodes=2", "--node-rank=1", "--rdzv-endpoint=10.0.0.1:29500")
    assert (options.rdzv_backend, options.node_rank) == ("static", 1)
    options = parse("--nnodes=2", "--node-rank=0", "--master-addr=10.0.0.1")
    assert (options.rdzv_backend, options.node_rank) == ("static", 0)
    assert options.local_addr is None


@pytest.mark.parametrize(
    "variables", [{"PET_MASTER_ADDR": "10.0.0.1"}, {"PET_RDZV_ENDPOINT": "10.0.0.1:29500"}]
)
def test_the_environment_may_say_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parse("--nnodes=2").rdzv_backend == ("c10d" if "RDZV" in str(variables) else "static")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert (parse("--nnodes=2").rdzv_backend, parse("--nnodes=2").node_rank) == ("static", 1)


def test_what_the_user_says_stays() -> None:
    endpoint = "--rdzv-endpoint=10.0.0.2:29500"
    options = parse("--nnodes=2", endpoint, "--local-addr=10.7.7.7", "--rdzv-conf=is_host=0")
    assert (options.local_addr, options.rdzv_conf) == ("10.7.7.7", "is_host=0")
    options = parse("--nnodes=2", endpoint, "--rdzv-conf=is_host=0")
    assert (options.local_addr, options.rdzv_conf) == ("10.0.0.2", "is_host=0")


def test_a_machine_with_a_name_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "is_known_by", lambda name: True)
    options = parse("--nnodes=1:4", "--rdzv-endpoint=10.0.0.2:29500")
    assert (options.rdzv_backend, options.local_addr, options.rdzv_conf) == ("c10d", None, "")


def test_nodes_that_could_not_meet_are_told() -> None:
    with pytest.raises(ValueError, match="--nnodes 2: where do the nodes meet"):
        parse("--nnodes=2")


def test_one_node_has_nobody_to_meet() -> None:
    options = parse()
    assert options.standalone
    assert (options.node_rank, options.local_addr) == (0, None)


def test_one_node_whose_processes_could_not_meet_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(ValueError, match="at localhost: .*Network is unreachable.*loopback"):
        parse()
    assert parse("--master-port=29511").master_port == 29511  # whose address is the user's
