"""The topology model: discovery, fake machines, the JSON format and the picture."""

import json
import os
from pathlib import Path

import pytest

from deepytorch_core import _core
from deepytorch_core.topology import model as topology

FAKE_MACHINE = Path(__file__).parent / "data" / "machine_8_gpus.json"


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_round_trip_keeps_every_field(tmp_path):
    machine = topology.load(FAKE_MACHINE)
    topology.dump(machine, tmp_path / "copy.json")
    assert topology.load(tmp_path / "copy.json") == machine
    assert (tmp_path / "copy.json").read_text() == FAKE_MACHINE.read_text()


def test_fake_machine_has_its_gpus_and_links():
    machine = topology.load(FAKE_MACHINE)
    assert [gpu.index for gpu in machine.gpus] == list(range(8))
    for gpu in machine.gpus:
        assert sorted([link.peer for link in gpu.links] + [gpu.index]) == list(range(8))
        assert {link.nvlinks for link in gpu.links} == {18}
    assert machine.gpus[0].links[-1].distance == "system"
    assert machine.numa_nodes[1].cpus[0] == 48
    assert machine.nics[0].addresses == ("192.0.2.10", "2001:db8::10")


def test_this_machine_is_sane():
    machine = topology.discover()
    assert topology.Topology.from_json(machine.to_json()) == machine
    assert 1 <= machine.cores.physical <= machine.cores.logical
    assert 1 <= machine.cores.usable <= len(os.sched_getaffinity(0))
    assert machine.cores.usable == _core.usable_cores()
    assert 0 < machine.memory.available_bytes <= machine.memory.total_bytes
    assert machine.host_name
    assert machine.boot_id
    assert all(nic.name != "lo" for nic in machine.nics)
    assert bool(machine.gpus) != bool(machine.gpu_note)


def test_usable_cores_follow_the_affinity():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert _core.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["host_name"], 7, "host_name: expected a string, found an integer"),
        (["cores", "physical"], "4", "cores.physical: expected an integer, found a string"),
        (["cores", "physical"], -1, "cores.physical: expected an integer from 0"),
        (["cores"], [], "cores: expected an object, found an array"),
        (["caches", 2, "bytes"], None, "caches[2].bytes: expected an integer, found null"),
        (["numa_nodes", 1, "cpus", 3], True, "numa_nodes[1].cpus[3]: expected an integer"),
        (["nics", 0, "is_up"], 1, "nics[0].is_up: expected a boolean, found an integer"),
        (["nics", 1, "mtu"], 1.5, "nics[1].mtu: expected an integer, found a number"),
        (["nics", 1, "mtu"], 2**40, "nics[1].mtu: expected an integer from 0 to 2147483647"),
        (["nics", 1, "numa_node"], -2, "nics[1].numa_node: expected an integer from -1"),
        (["gpus", 0, "memory_bytes"], 2**70, "gpus[0].memory_bytes: expected an integer"),
        (["gpus", 1, "links", 0, "peer"], "0", "gpus[1].links[0].peer: expected an integer"),
        (["gpus", 1, "links", 0, "peer"], 8, "gpus[1].links[0].peer: expected the index of"),
        (["gpus", 1, "links", 0, "peer"], 1, "gpus[1].links[0].peer: expected the index of"),
        (["gpus", 1, "links", 1, "peer"], 0, "gpus[1].links[1].peer: expected the index of"),
        (["gpus", 1, "links", 0, "distance"], "far", "gpus[1].links[0].distance: expected one of"),
        (["gpus", 3, "index"], 2, "gpus[3].index: GPU 2 appears twice"),
        (["gpus", 3, "color"], "green", "gpus[3].color: is not a field"),
        (["version"], 1, "version: this release reads version 3, found 1"),
    ],
)
def test_a_wrong_field_is_named(path, value, message):
    machine = json.loads(FAKE_MACHINE.read_text())
    parent = machine
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        topology.Topology.from_json(json.dumps(machine))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (["boot_id"], "boot_id: is missing"),
        (["memory", "total_bytes"], "memory.total_bytes: is missing"),
        (["gpus", 7, "links", 6, "nvlinks"], "gpus[7].links[6].nvlinks: is missing"),
    ],
)
def test_a_missing_field_is_named(path, message):
    machine = json.loads(FAKE_MACHINE.read_text())
    parent = machine
    for step in path[:-1]:
        parent = parent[step]
    del parent[path[-1]]
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        topology.Topology.from_json(json.dumps(machine))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: expected a value"),
        ("[1, 2", "line 1, column 6: expected ',' or ']'"),
        ('{"a": 1,\n "a": 2}', 'line 2, column 5: key "a" appears twice'),
        ("{} {}", "line 1, column 4: text after the end"),
        ('{"a": 01}', "expected ',' or '}'"),
        ('{"a": "\\x"}', "an unknown escape"),
        ('{"a": "\\ud800"}', "half a surrogate pair"),
        ('{"a": "\n"}', "a control character"),
        ('{"a": "', "without its closing quote"),
        ("[" * 100 + "]" * 100, "nested too deeply"),
        ("[]", "(root): expected an object, found an array"),
    ],
)
def test_text_that_is_no_json_is_located(text, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is checked below)
        topology.Topology.from_json(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name", ['quote " backslash \\', "tab\tnewline\n", "naïve 😀 \x01", "\x7f/"]
)
def test_strings_survive(name):
    machine = json.loads(FAKE_MACHINE.read_text()) | {"host_name": name}
    for ensure_ascii in (True, False):
        text = json.dumps(machine, ensure_ascii=ensure_ascii)
        assert topology.Topology.from_json(text).host_name == name


def test_discovery_reads_sysfs_and_procfs(tmp_path):
    cpus = "sys/devices/system/cpu"
    files = {
        "proc/sys/kernel/hostname": "fake",
        "proc/sys/kernel/random/boot_id": "0000-1111",
        "proc/meminfo": "MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB",
        f"{cpus}/online": "0-3",
        "sys/devices/system/node/online": "0-1",
        "sys/devices/system/node/node0/cpulist": "0,2",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:     600 kB",
        "sys/devices/system/node/node1/cpulist": "",
        "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:     424 kB",
        "sys/class/net/lo/type": "772",
        "sys/class/net/tun9/type": "65534",
        "sys/class/net/tun9/operstate": "unknown",
        "sys/class/net/tun9/flags": "0x1",
        "sys/bus/pci/devices/0000:3b:00.1/numa_node": "1",
    }
    for cpu in range(4):
        files |= {
            f"{cpus}/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}",
            f"{cpus}/cpu{cpu}/cache/index0/level": "1",
            f"{cpus}/cpu{cpu}/cache/index0/type": "Data",
            f"{cpus}/cpu{cpu}/cache/index0/size": "48K",
            f"{cpus}/cpu{cpu}/cache/index0/shared_cpu_list": f"{cpu % 2},{cpu % 2 + 2}",
            f"{cpus}/cpu{cpu}/cache/index1/type": "Instruction",
        }
    device = "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.1/virtio2"
    files |= {
        f"{device}/net/fake9/type": "1",
        f"{device}/net/fake9/operstate": "up",
        f"{device}/net/fake9/speed": "25000",
        f"{device}/net/fake9/mtu": "9000",
    }
    write_tree(tmp_path, files)
    (tmp_path / device / "net/fake9/device").symlink_to("../..")
    (tmp_path / "sys/class/net/fake9").symlink_to(tmp_path / device / "net/fake9")

    machine = topology.Topology.from_json(_core.topology_json(root=str(tmp_path)))

    assert machine.host_name == "fake"
    assert machine.boot_id == "0000-1111"
    assert machine.memory == topology.Memory(1024 * 1024, 512 * 1024)
    assert (machine.cores.physical, machine.cores.logical) == (2, 4)
    assert machine.caches == (topology.Cache(1, "data", 48 * 1024, 2, 2),)
    assert machine.numa_nodes == (
        topology.NumaNode(0, (0, 2), 600 * 1024),
        topology.NumaNode(1, (), 424 * 1024),
    )
    assert machine.nics == (
        topology.Nic("fake9", 25000, 9000, (), True, 1, "0000:3b:00.1"),
        topology.Nic("tun9", 0, 0, (), True, -1, ""),
    )


def test_an_empty_machine_is_all_unknown(tmp_path):
    machine = topology.Topology.from_json(_core.topology_json(root=str(tmp_path)))
    assert machine.host_name == ""
    assert machine.cores.logical == 0
    assert machine.cores.usable == len(os.sched_getaffinity(0))
    assert machine.nics == ()
    assert "unknown" in topology.describe(machine)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"},
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "100000 100000"},
        {"proc/self/cgroup": "0::/only/on/the/host", "sys/fs/cgroup/cpu.max": "1000 100000"},
        {
            "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_a_cgroup_quota_limits_the_usable_cores(tmp_path, files):
    write_tree(tmp_path, files)
    machine = topology.Topology.from_json(_core.topology_json(root=str(tmp_path)))
    assert machine.cores.usable == 1


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "1000000000 100000"},
        {"proc/self/cgroup": "3:cpuset:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "1000"},
        {
            "proc/self/cgroup": "4:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_no_quota_leaves_the_affinity(tmp_path, files):
    write_tree(tmp_path, files)
    machine = topology.Topology.from_json(_core.topology_json(root=str(tmp_path)))
    assert machine.cores.usable == len(os.sched_getaffinity(0))


def test_the_picture_shows_every_part():
    text = topology.describe(topology.load(FAKE_MACHINE))
    for part in (
        "fake-8-gpus",
        "48 usable of 192 hardware threads on 96 physical cores",
        "L3 2 x 105 MiB, each shared by 96 threads",
        "node 1: CPUs 48-95,144-191, 1 TiB",
        "100 Gbit/s",
        "NVIDIA H100 80GB HBM3",
        "NVn: n NVLinks",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if "NV18" in line]
    assert len(rows) == 8
    assert all(row.count("NV18") == 7 for row in rows)


def test_the_picture_explains_pcie_paths_and_missing_links():
    machine = json.loads(FAKE_MACHINE.read_text())
    for gpu in machine["gpus"]:
        gpu["links"] = [link | {"nvlinks": 0} for link in gpu["links"] if link["peer"] != 7]
    text = topology.describe(topology.Topology.from_json(json.dumps(machine)))
    assert "SYS: the link between NUMA nodes" in text
    assert "NODE: PCIe host bridges of one NUMA node" in text
    assert "?: unknown" in text
    assert "NVn" not in text


def test_without_gpus_the_picture_says_why():
    machine = json.loads(FAKE_MACHINE.read_text()) | {"gpus": [], "gpu_note": "no driver"}
    text = topology.describe(topology.Topology.from_json(json.dumps(machine)))
    assert "GPUs      no driver" in text
    assert "links" not in text
