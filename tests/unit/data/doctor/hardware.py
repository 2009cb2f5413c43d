"""Facts of GPUs, buses and clocks with planted faults; see `test_doctor_checks`."""

from __future__ import annotations

from typing import Any

from deepytorch_core.doctor import pci
from deepytorch_core.doctor.checks import (
    clocks,
    connections,
    driver,
    iommu,
    kernels,
    numa,
    nvlink,
    p2p,
    pcie,
)
from deepytorch_core.doctor.finding import State
from deepytorch_core.doctor.smi import GpuState
from deepytorch_core.doctor.torch_facts import Device, GpuPair
from deepytorch_core.topology.model import Gpu, GpuLink

FAIL, WARN = State.FAIL, State.WARN


def gpu(index: int, nvlinks: list[int], name: str = "NVIDIA H100 80GB HBM3") -> Gpu:
    links = tuple(
        GpuLink(peer, count, "system") for peer, count in enumerate(nvlinks) if peer != index
    )
    return Gpu(index, f"GPU-{index}", name, 80 << 30, f"0000:{index:02x}:00.0", 0, 504_123, links)


def pair(source: int, target: int, **changes: Any) -> GpuPair:
    known = {"can_access": True, "direct_gbps": 22.0, "host_gbps": 11.0, "is_right": True}
    return GpuPair(source, target, **{**known, **changes})


def pci_link(**changes: Any) -> pci.PciLink:
    known = {
        "address": "0000:18:00.0",
        "kind": "GPU",
        "speed": 16.0,
        "max_speed": 16.0,
        "width": 16,
        "max_width": 16,
        "slot_speed": 16.0,
        "slot_width": 16,
    }
    return pci.PciLink(**{**known, **changes})


def smi_state(**changes: Any) -> GpuState:
    known = {
        "index": 0,
        "pci": "0000:18:00.0",
        "power_state": "P0",
        "celsius": 60.0,
        "clock_mhz": 1980.0,
        "max_clock_mhz": 1980.0,
        "held_down_by": 0,
        "uncorrected_errors": 0,
    }
    return GpuState(**{**known, **changes})


H100 = (Device(0, "NVIDIA H100 80GB HBM3", "9.0"),)

CASES: dict[Any, tuple[Any, list[tuple[dict[str, Any], State, str, str]]]] = {
    driver: (
        driver.DriverFacts(8, "570.86", "2.13.0+cu128", "12.8", 8, "", None),
        [
            (
                {"driver": "", "num_devices": 0},
                FAIL,
                "8 NVIDIA GPUs on PCI, but no driver",
                "modprobe nvidia",
            ),
            ({"torch": ""}, WARN, "torch did not answer", "nvidia-smi"),
            ({"cuda": ""}, FAIL, "built for CPUs only", "download.pytorch.org/whl/cu126"),
            ({"cuda": "13.0"}, FAIL, "too old for CUDA 13.0", "driver 580.65 or newer"),
            ({"error": "unknown error"}, FAIL, "does not start: unknown", "nvidia-smi"),
            ({"visible": "", "num_devices": 0}, FAIL, "hides all", "unset CUDA_VISIBLE_DEVICES"),
        ],
    ),
    kernels: (
        kernels.KernelFacts("80-real 90a-real 90-virtual", H100),
        [
            ({"built": ""}, WARN, "built without nvcc", "CMAKE_CUDA_ARCHITECTURES='90'"),
            (
                {"devices": (Device(0, "T4", "7.5"),)},
                FAIL,
                "none that runs on compute capability 7.5",
                "CMAKE_CUDA_ARCHITECTURES='75'",
            ),
        ],
    ),
    connections: (
        connections.ConnectionFacts(None, {"deepspeed": "0.19.8"}, ("9.0",)),
        [
            ({"value": "many"}, FAIL, "expected 1 to 32", "unset CUDA_DEVICE_MAX"),
            ({"value": "1"}, WARN, "FSDP and ZeRO", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
            (
                {"frameworks": {"megatron-core": "0.16.1"}},
                WARN,
                "needs 1",
                "export CUDA_DEVICE_MAX_CONNECTIONS=1",
            ),
        ],
    ),
    p2p: (
        p2p.P2pFacts(2, (pair(0, 1), pair(1, 0)), "", 0.0, "", False),
        [
            (
                {"pairs": (pair(0, 1, is_right=False), pair(1, 0))},
                FAIL,
                "wrong bytes: GPUs 0-1",
                "NCCL_P2P_DISABLE=1",
            ),
            (
                {
                    "pairs": (),
                    "doing": "copying from GPU 0 to GPU 1",
                    "stuck_s": 5.0,
                    "error": "no answer within 9 s",
                },
                FAIL,
                "copying from GPU 0 to GPU 1 did not end within 5 s",
                "deepytorch doctor --only iommu",
            ),
            (
                {"pairs": (pair(0, 1),), "error": "CUDA error: out of memory"},
                WARN,
                "1 pairs were measured, then: CUDA error: out of memory",
                "deepytorch topology --measure",
            ),
            (
                # Many GPUs and a slow start: what is on its way does not hang.
                {
                    "pairs": (pair(0, 1),),
                    "doing": "copying from GPU 1 to GPU 0",
                    "stuck_s": 0.01,
                    "error": "no answer within 9 s",
                },
                WARN,
                "then: no answer within 9 s",
                "deepytorch topology --measure",
            ),
            (
                {"pairs": (pair(0, 1, direct_gbps=5.0), pair(1, 0))},
                WARN,
                "slower than the way by the host: GPUs 0-1 5 GB/s (host 11)",
                "NCCL_P2P_LEVEL=PXB",
            ),
        ],
    ),
    iommu: (
        iommu.IommuFacts(
            gpus=("0000:18:00.0", "0000:3b:00.0"),
            acs={"0000:17:00.0": 0, "0000:15:01.0": None},
            unread=(),
            types={"0000:18:00.0": "identity", "0000:3b:00.0": ""},
            by_nvlink=False,
            has_rdma=False,
        ),
        [
            (
                {"acs": {"0000:17:00.0": 0x1D, "0000:15:01.0": None}},
                FAIL,
                "ACS sends peer traffic through the root at 0000:17:00.0",
                "for b in 0000:17:00.0; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done",
            ),
            ({"acs": {"0000:17:00.0": 0x1D}, "by_nvlink": True}, WARN, "ACS sends", "setpci"),
            ({"types": {"0000:18:00.0": "DMA-FQ"}}, WARN, "0000:18:00.0", "iommu=pt"),
        ],
    ),
    pcie: (
        pcie.PcieFacts((pci_link(),), {"0000:18:00.0": "P0"}),
        [
            ({"links": (pci_link(width=8),)}, WARN, "8 lanes of 16", "reseat"),
            (
                {"links": (pci_link(width=4, slot_width=4),)},
                WARN,
                "all that its slot has",
                "a slot with more lanes",
            ),
            ({"links": (pci_link(speed=5.0),)}, WARN, "generation 2, made for", "BIOS"),
            (
                {"links": (pci_link(speed=8.0, slot_speed=8.0),), "power_states": {}},
                WARN,
                "generation 3, made for generation 4; its slot is generation 3",
                "newer slot",
            ),
            (
                {"links": (pci_link(kind="network adapter", speed=8.0),)},
                WARN,
                "network adapter 0000:18:00.0: PCIe generation 3",
                "lspci -vv -s 0000:18:00.0",
            ),
        ],
    ),
    nvlink: (
        nvlink.NvlinkFacts(tuple(gpu(index, [18] * 4) for index in range(4))),
        [
            (
                {"gpus": tuple(gpu(i, [18, 18, 18, 0] if i < 3 else [0] * 4) for i in range(4))},
                FAIL,
                "GPU 3 has 0 NVLinks to a neighbour, the others have 18",
                "nvidia-smi nvlink --status -i 3",
            ),
            (
                {"gpus": tuple(gpu(i, [18] * 4 if i else [12] * 4) for i in range(4))},
                WARN,
                "GPU 0 has 12",
                "nvidia-smi nvlink --status -i 0",
            ),
            (
                {"gpus": tuple(gpu(i, [0] * 2, "NVIDIA A100-SXM4-80GB") for i in range(2))},
                FAIL,
                "without one NVLink",
                "systemctl restart nvidia-fabricmanager",
            ),
        ],
    ),
    numa: (
        numa.NumaFacts(
            nodes={0: frozenset(range(4)), 1: frozenset(range(4, 8))},
            allowed=frozenset(range(8)),
            gpus={0: 0, 1: 1},
            mine=None,
            local_size=1,
            balances=False,
        ),
        [
            (
                {"allowed": frozenset({0, 1}), "mine": 1, "local_size": 2},
                WARN,
                "node 0 only, GPU 1 is on node 1",
                "numactl --cpunodebind=1 --membind=1",
            ),
            ({"allowed": frozenset({5})}, WARN, "GPU 0 is on node 0", "--numa-binding=node"),
            (
                {"mine": 0, "local_size": 2},
                WARN,
                "ranks may run on nodes 0, 1",
                "torchrun --numa-binding=node",
            ),
            ({"gpus": {0: -1, 1: -1}}, WARN, "does not say", "BIOS"),
            ({"balances": True}, WARN, "numa_balancing=1", "sysctl kernel.numa_balancing=0"),
        ],
    ),
    clocks: (
        clocks.ClockFacts(
            (smi_state(),), (clocks.Cpu("performance", "acpi-cpufreq", 3000, 3000, 8),)
        ),
        [
            (
                {"gpus": (smi_state(held_down_by=0x48, clock_mhz=900.0, celsius=91.0),)},
                FAIL,
                "GPU 0 runs 900 of 1980 MHz: hardware slowdown, too hot (hardware), 91 C",
                "nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i 0",
            ),
            ({"gpus": (smi_state(uncorrected_errors=3),)}, FAIL, "3 memory errors", "-r -i 0"),
            (
                {"cpus": (clocks.Cpu("performance", "x", 2_000_000, 3_000_000, 8),)},
                WARN,
                "8 cores may run at 2.00 GHz of 3.00",
                "cpupower frequency-set -u 3000000",
            ),
            (
                {"cpus": (clocks.Cpu("powersave", "acpi-cpufreq", 3000, 3000, 8),)},
                WARN,
                "governor powersave",
                "cpupower frequency-set -g performance",
            ),
        ],
    ),
}
