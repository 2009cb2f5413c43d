"""`deepytorch doctor` on faults that are real: in namespaces of the network and of mounts.

What the remedy says is then done, to the letter, and the line is fine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deepytorch_core.base import config
from deepytorch_core.network import path_mtu
from deepytorch_core.testing.emulation import Network, links

DOCTOR = f"{sys.executable} -m deepytorch.cli doctor"
SECRET = bytes(range(path_mtu.SECRET_BYTES))


def set_mtu(interface: str, mtu: int) -> None:
    with links.netlink() as ip:
        (index,) = ip.link_lookup(ifname=interface)
        ip.link("set", index=index, mtu=mtu)


def largest(network: Network, sender: int, receiver: int, mtu: int) -> int | None:
    address = network.address(receiver)
    echo = network.run(receiver, lambda: path_mtu.Echo(address, SECRET))
    try:
        target = (address, echo.port)
        return network.run(sender, lambda: path_mtu.largest(target, SECRET, mtu))
    finally:
        echo.close()


def job(network: Network, checks: str) -> list[dict[str, Any]]:
    """The command on two nodes, a rank each; what rank 0 printed."""
    command = [*DOCTOR.split(), "--json", *f" {checks}".replace(" ", " --only ").split()]
    programs = []
    for rank in range(2):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29500",  # of a network of its own
        }
        environment = config.child_environment(**place)
        programs.append(network.start(rank, command, env=environment, stdout=subprocess.PIPE))
    printed = [program.communicate(timeout=100)[0] for program in programs]
    assert not printed[1], "only rank 0 speaks"
    found: list[dict[str, Any]] = json.loads(printed[0])
    failed = any(finding["state"] == "fail" for finding in found)
    assert [program.returncode for program in programs] == [int(failed), 0]
    return found


def test_a_path_that_swallows_large_packets_is_found_and_mended() -> None:
    with Network(2) as network:
        assert largest(network, 0, 1, 1500) == 1500
        network.on_switch(lambda: set_mtu("p1", 1300))  # a tunnel on the way
        found = job(network, "mtu ranks")
        lost = [finding for finding in found if finding["state"] == "fail"]
        assert [finding["evidence"] for finding in lost] == [
            f"from rank {end} to rank {1 - end} packets of 1500 bytes are lost, of 1280 arrive"
            for end in range(2)
        ]
        assert lost[0]["remedy"].startswith(f"sudo ip link set {links.INTERFACE} mtu 1280 ")
        (versions,) = [finding for finding in found if finding["check"] == "ranks"]
        assert versions["evidence"].startswith("2 nodes, ")
        for node in range(2):
            network.run(node, lambda: set_mtu(links.INTERFACE, 1280))
        assert largest(network, 0, 1, 1280) == 1280
        assert largest(network, 1, 0, 1280) == 1280


def test_a_path_without_an_answer_has_no_size() -> None:
    with Network(2) as network:
        network.set_blackhole(1, True)
        assert largest(network, 0, 1, 1500) is None


def test_ipv6_and_strangers() -> None:
    with Network(2) as network:
        address = network.address6(1)
        echo = network.run(1, lambda: path_mtu.Echo(address, SECRET))
        target = (address, echo.port)
        try:
            assert network.run(0, lambda: path_mtu.largest(target, SECRET, 1500)) == 1500
            assert network.run(0, lambda: path_mtu.largest(target, SECRET[::-1], 1500)) is None
        finally:
            echo.close()


def in_own_mounts(script: str) -> list[dict[str, Any]]:
    """Runs a shell script where mounts are its own; the findings that it prints, one list each."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
    )
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value[0])
        text = text[end:].strip()
    assert found, done.stderr
    return found


def test_a_small_shared_memory_is_found_and_the_remedy_works() -> None:
    script = f"""
        mount -t tmpfs -o size=64m tmpfs /dev/shm
        {DOCTOR} --only shm --json | tee /dev/shm/found
        sudo() {{ "$@"; }}
        eval "$(sed -n 's/.*"remedy": "\\(.*\\)",/\\1/p' /dev/shm/found)"
        {DOCTOR} --only shm --json
        mount -o remount,ro /dev/shm
        {DOCTOR} --only shm --json
    """
    small, mended, read_only = in_own_mounts(script)
    assert small["state"] == "fail"
    assert "/dev/shm has 64 MiB" in small["evidence"]
    assert mended["state"] == "okay"
    assert "16.0 GiB" in mended["evidence"]
    assert (read_only["state"], "read-only" in read_only["evidence"]) == ("fail", True)


def test_a_read_only_cache_is_found_and_another_folder_mends_it(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    script = f"""
        mount -t tmpfs -o ro tmpfs {tmp_path}/cache
        DEEPYTORCH_CACHE_DIR={tmp_path}/cache {DOCTOR} --only cache --json
        DEEPYTORCH_CACHE_DIR={tmp_path}/own {DOCTOR} --only cache --json
    """
    found, mended = in_own_mounts(script)
    assert found["state"] == "warn"
    assert f"{tmp_path}/cache" in found["evidence"]
    assert "export DEEPYTORCH_CACHE_DIR=" in found["remedy"]
    assert mended["state"] == "okay"
