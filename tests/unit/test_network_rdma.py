"""RDMA adapters as sysfs shows them, and what NCCL is told about them.

The trees are written down after the drivers' layout: a line for each file or link.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepytorch_core import _core
from deepytorch_core.network import rdma
from deepytorch_core.topology import model as topology

TREES = Path(__file__).parent / "data" / "sysfs"


def machine(name: str, root: Path, without: str | None = None) -> topology.Topology:
    """The tree laid out below `root` and discovered; lines with `without` are left out."""
    for line in (TREES / f"{name}.txt").read_text().splitlines():
        if line.startswith("#") or (without is not None and without in line):
            continue
        path, separator, rest = next(
            (path, separator, rest)
            for separator in (" -> ", " = ")
            for path, found, rest in [line.partition(separator)]
            if found
        )
        file = root / path.strip()
        file.parent.mkdir(parents=True, exist_ok=True)
        if separator == " -> ":
            file.symlink_to(rest)
        else:
            file.write_text(rest + "\n")
    return topology.Topology.from_json(_core.topology_json(root=str(root)))


def test_roce_adapters_are_discovered_with_their_addresses(tmp_path):
    found = machine("mlx5_roce", tmp_path)
    assert [device.name for device in found.rdma] == ["mlx5_0", "mlx5_1", "mlx5_bond_0"]
    first, second, bond = found.rdma
    assert {device.driver for device in found.rdma} == {"mlx5_core"}
    assert (first.pci, first.numa_node) == ("0000:18:00.0", 0)
    assert (second.pci, second.numa_node) == ("0000:9a:00.0", 1)
    (port,) = first.ports
    assert (port.number, port.state, port.link_layer) == (1, "ACTIVE", "Ethernet")
    assert port.rate_mbps == 400_000
    assert [gid.index for gid in port.gids] == [0, 1, 2, 3], "the unused entry is left out"
    assert port.gids[3].type == "RoCE v2"
    assert port.gids[3].interface == "ens0np0"
    assert bond.ports[0].rate_mbps == 25_000
    assert found.gpudirect == "nvidia_peermem"
    assert topology.Topology.from_json(found.to_json()) == found


def test_the_slow_bond_is_left_out_of_the_training(tmp_path):
    found = machine("mlx5_roce", tmp_path)
    assert [rdma.gid_index(device.ports[0]) for device in found.rdma] == [3, 3, 3]
    choice = rdma.choose(found, set())
    # The address is NCCL's own choice.
    assert choice.settings == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}
    assert choice.reasons == ("without mlx5_bond_0",)
    assert rdma.choose(found, {"NCCL_IB_HCA"}).settings == {}
    assert not rdma.remarks(found)


def test_infiniband_needs_nothing_but_a_cable(tmp_path):
    found = machine("infiniband", tmp_path)
    assert [port.state for device in found.rdma for port in device.ports] == ["ACTIVE"] * 3 + [
        "DOWN"
    ]
    assert found.rdma[3].ports[0].rate_mbps == 10_000
    assert rdma.gid_index(found.rdma[0].ports[0]) is None
    assert rdma.choose(found, set()).settings == {}
    assert rdma.remarks(found) == ["mlx5_3 port 1 is not active"]


def test_erdma_gets_its_ipv4_address(tmp_path):
    found = machine("erdma", tmp_path)
    assert [device.driver for device in found.rdma] == ["erdma", "erdma"]
    choice = rdma.choose(found, set())
    assert choice.settings == {"NCCL_IB_GID_INDEX": "1"}, "no module for GPU memory is loaded"
    assert rdma.choose(found, {"NCCL_IB_GID_INDEX"}).settings == {}


def test_erdma_reaches_gpu_memory_where_the_module_is_loaded(tmp_path):
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    found = machine("erdma", tmp_path)
    assert rdma.choose(found, set()).settings == {
        "NCCL_IB_GID_INDEX": "1",
        "NCCL_NET_GDR_LEVEL": "SYS",
    }
    assert "NCCL_NET_GDR_LEVEL" not in rdma.choose(found, {"NCCL_NET_GDR_LEVEL"}).settings


def test_erdma_ports_that_disagree_are_left_to_nccl(tmp_path):
    found = machine("erdma", tmp_path, without="erdma_1/ports/1/gid_attrs/types/1")
    assert "NCCL_IB_GID_INDEX" not in rdma.choose(found, set()).settings


def test_efa_is_not_for_nccls_own_transport(tmp_path):
    found = machine("efa", tmp_path)
    assert [port.link_layer for device in found.rdma for port in device.ports] == [
        "Unspecified",
        "Unspecified",
    ]
    assert not rdma.usable(found)
    assert rdma.choose(found, set()).settings == {}
    assert "only through the plugin aws-ofi-nccl" in rdma.remarks(found)[0]


@pytest.mark.parametrize("variable", ["NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"])
def test_who_decided_for_another_transport_is_left_alone(tmp_path, variable):
    assert rdma.choose(machine("mlx5_roce", tmp_path), {variable}).settings == {}


@pytest.mark.parametrize("name", ["mlx5_roce", "infiniband", "erdma", "efa"])
def test_the_picture_shows_the_adapters(tmp_path, name):
    found = machine(name, tmp_path)
    text = topology.describe(found)
    for device in found.rdma:
        assert f"{device.name}:1" in text
    assert ("GPU memory by nvidia_peermem" in text) == bool(found.gpudirect)


def test_a_rate_with_a_fraction(tmp_path):
    found = machine("efa", tmp_path, without="/rate = ")
    assert {port.rate_mbps for device in found.rdma for port in device.ports} == {0}
    rate = next(tmp_path.glob("sys/devices/**/ports/1")) / "rate"
    rate.write_text("2.5 Gb/sec (1X SDR)\n")
    again = topology.Topology.from_json(_core.topology_json(root=str(tmp_path)))
    assert 2500 in {port.rate_mbps for device in again.rdma for port in device.ports}
