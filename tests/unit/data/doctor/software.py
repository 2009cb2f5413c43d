"""Facts of packages, variables, networks and limits with planted faults: `test_doctor_checks`."""

from __future__ import annotations

import dataclasses
from typing import Any

from deepytorch_core.doctor.checks import (
    adapter,
    cache,
    compiler,
    container,
    core,
    data,
    extensions,
    files,
    frameworks,
    interface,
    link,
    memlock,
    mtu,
    nccl,
    package,
    ranks,
    shm,
    torch,
    variables,
)
from deepytorch_core.doctor.finding import State
from deepytorch_core.doctor.torch_facts import TorchFacts
from deepytorch_core.network.link import Link
from deepytorch_core.network.path_mtu import PathMtu
from deepytorch_core.topology.model import Nic

FAIL, WARN = State.FAIL, State.WARN


def nic(name: str, **changes: Any) -> Nic:
    known = {
        "speed_mbps": 10_000,
        "mtu": 1500,
        "addresses": ("192.0.2.1",),
        "is_up": True,
        "numa_node": 0,
        "pci": "0000:3b:00.0",
    }
    return Nic(name=name, **{**known, **changes})


PATH = PathMtu(0, 1, "eth0", "192.0.2.2", 9000, 9000, 9000)
WIDE = Link((9e9, 9.2e9, 9.3e9, 9.3e9), 1e-4, 0.2, 8.0)
CAPPED = Link((2e9, 4e9, 8e9, 9e9), 1e-4, 0.2, 8.0)
TORCH = TorchFacts(version="2.13.0+cu128", cuda="12.8")

CASES: dict[Any, tuple[Any, list[tuple[dict[str, Any], State, str, str]]]] = {
    torch: (
        torch.TorchInstallFacts(TORCH, "2.13.0+cu128"),
        [
            ({"torch": TorchFacts(error="x"), "installed": ""}, FAIL, "not installed", "pip"),
            (
                {"torch": TorchFacts(error="ImportError: libcudart.so.13: no such file")},
                FAIL,
                "libcudart",
                "pip install --force-reinstall 'torch==2.13.0'",
            ),
            (
                {"torch": TorchFacts(error="no answer within 9 s", doing="loading torch")},
                WARN,
                "did not load: no answer",
                "import torch",
            ),
            (
                {"torch": TorchFacts(version="2.4.1")},
                FAIL,
                "2.4.1 is too old",
                "pip install 'torch>=2.11,<2.16'",
            ),
            (
                {"torch": TorchFacts(version="2.16.0a0+git12")},
                WARN,
                "newer than what is tested",
                "pip install 'torch>=2.11,<2.16'",
            ),
        ],
    ),
    nccl: (
        nccl.NcclFacts(
            {"nvidia-nccl-cu12": "2.27.5"},
            ("/env/nvidia/nccl/lib/libnccl.so.2",),
            (),
            ("/usr/lib/x86_64-linux-gnu/libnccl.so.2",),
            "2.27.5",
            "2.27.5",
            "12.8",
        ),
        [
            (
                {"packages": {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.28.3"}},
                FAIL,
                "two NCCLs are installed in one folder",
                "pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13 && "
                "pip install nvidia-nccl-cu12==2.27.5",
            ),
            (
                {"loaded": ("/env/libnccl.so.2", "/usr/lib64/libnccl.so.2")},
                FAIL,
                "loads 2 NCCLs: /env/libnccl.so.2, /usr/lib64/libnccl.so.2",
                "unset LD_LIBRARY_PATH",
            ),
            (
                {"others": ("/opt/nccl/lib/libnccl.so.2",)},
                WARN,
                "another NCCL before torch's: /opt/nccl/lib",
                "unset LD_LIBRARY_PATH",
            ),
            (
                {"running": "2.18.1"},
                WARN,
                "built with NCCL 2.27.5 and runs with 2.18.1",
                "pip install nvidia-nccl-cu12==2.27.5",
            ),
        ],
    ),
    compiler: (
        compiler.CompilerFacts("g++", "/usr/bin/g++", "", True, ""),
        [
            ({"command": "", "path": ""}, FAIL, "no C++ compiler", "apt install g++"),
            (
                {"command": "", "path": "", "adapter": "/there.so"},
                WARN,
                "adapter for this torch is there",
                "apt install g++",
            ),
            ({"command": "", "path": "", "asked": "icpc"}, FAIL, "CXX=icpc", "unset CXX"),
            ({"has_headers": False}, FAIL, "Python's headers", "apt install python3-dev"),
        ],
    ),
    adapter: (
        adapter.AdapterFacts("2.13.0", "torch2.13.0-a", "/cache/torch2.13.0-a/x.so", (), ""),
        [
            ({"path": ""}, WARN, "not compiled yet for torch 2.13.0", "deepytorch build"),
            (
                {"path": "", "others": ("torch2.12.0-b",)},
                WARN,
                "compiled for torch2.12.0, but this is torch 2.13.0",
                "deepytorch build",
            ),
            (
                {"path": "", "others": ("torch2.13.0-b",)},
                WARN,
                "another Python, C library or release",
                "deepytorch build",
            ),
            (
                {"path": "", "tag": "", "error": "sources are missing"},
                FAIL,
                "sources are missing",
                "pip install --force-reinstall",
            ),
            (
                {"path": "", "tag": "", "error": "no answer within 9 s", "was_slow": True},
                WARN,
                "not looked for: no answer",
                "deepytorch build",
            ),
        ],
    ),
    cache: (
        cache.CacheFacts("/home/me/.cache/deepytorch", "", "/tmp/deepytorch-0", "", 1 << 33),
        [
            ({"problem": "/c can't be used"}, WARN, "decisions are lost", "DEEPYTORCH_CACHE"),
            (
                {"problem": "/c can't be used", "fallback_problem": "/tmp can't be used"},
                FAIL,
                "/c can't be used; /tmp can't be used",
                "export DEEPYTORCH_CACHE_DIR=",
            ),
            ({"free_bytes": 1 << 20}, WARN, "1 MiB free", "df -h"),
        ],
    ),
    extensions: (
        extensions.ExtensionFacts("/home/me/.cache/torch_extensions", ()),
        [
            (
                {"left": ("/e/py311_cpu/fused_adam/lock",)},
                FAIL,
                "whatever needs fused_adam waits",
                "rm /e/py311_cpu/fused_adam/lock",
            ),
        ],
    ),
    package: (
        package.PackageFacts("0.1.0", ""),
        [
            (
                {"theirs": "0.0.0"},
                FAIL,
                "the package deepytorch 0.0.0 is somebody else's",
                "pip uninstall -y deepytorch && pip install --force-reinstall --no-deps "
                "deepytorch-train",
            ),
        ],
    ),
    core: (
        core.CoreFacts("0.1.0", "0.1.0", "avx512", ""),
        [
            ({"error": "GLIBC_2.38 not found"}, FAIL, "GLIBC_2.38", "--force-reinstall"),
            ({"core": "0.0.9"}, FAIL, "of version 0.0.9, deepytorch of 0.1.0", "reinstall"),
        ],
    ),
    frameworks: (
        frameworks.FrameworkFacts({"deepspeed": "<0.20,>=0.17"}, {"deepspeed": "0.19.8+cu128"}),
        [
            (
                {"installed": {"deepspeed": "0.14.0"}},
                WARN,
                "deepspeed 0.14.0 is not known",
                "pip install 'deepspeed<0.20,>=0.17'",
            ),
        ],
    ),
    variables: (
        variables.VariableFacts({}, ("eth0", "ib0"), True, True, 8, 64, 8),
        [
            ({"variables": {"DEEPYTORCH_TUNNE": "off"}}, WARN, "did you", "unset DEEPYTORCH_T"),
            ({"variables": {"DEEPYTORCH_TUNE": "of"}}, FAIL, "expected", "unset DEEPYTORCH_TU"),
            (
                {"variables": {"DEEPYTORCH_ENABLED": "0", "DEEPYTORCH_TUNE": "off"}},
                WARN,
                "DEEPYTORCH_TUNE do nothing",
                "unset DEEPYTORCH_ENABLED",
            ),
            (
                {"variables": {"NCCL_SOCKET_IFNAME": "ens"}},
                FAIL,
                "NCCL_SOCKET_IFNAME=ens: there are eth0, ib0",
                "unset NCCL_SOCKET_IFNAME",
            ),
            (
                {"variables": {"GLOO_SOCKET_IFNAME": "eth"}},  # gloo takes whole names only
                FAIL,
                "GLOO_SOCKET_IFNAME=eth",
                "unset GLOO_SOCKET_IFNAME",
            ),
            (
                {"variables": {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "eth0"}},
                WARN,
                "different networks",
                "export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0",
            ),
            ({"variables": {"NCCL_P2P_DISABLE": "1"}}, FAIL, "NVLinks unused", "unset NCCL_P2"),
            ({"variables": {"NCCL_P2P_LEVEL": "LOC"}}, WARN, "forbids", "unset NCCL_P2P_LEVEL"),
            (
                {"variables": {"NCCL_SHM_DISABLE": "1"}, "has_nvlink": False},
                WARN,
                "over the network",
                "unset NCCL_SHM_DISABLE",
            ),
            ({"variables": {"NCCL_IB_DISABLE": "1"}}, WARN, "left unused", "unset NCCL_IB"),
            (
                {"variables": {"NCCL_NET": "IB"}, "has_rdma": False},
                FAIL,
                "no RDMA",
                "unset NCCL_N",
            ),
            (
                {"variables": {"NCCL_SOCKET_NTHREADS": "8", "NCCL_NSOCKS_PERTHREAD": "16"}},
                FAIL,
                "is 128, NCCL allows 64",
                "unset NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD",
            ),
            (
                {"variables": {"NCCL_ALGO": "Ring", "DEEPYTORCH_NCCL_TABLE": "/t.json"}},
                WARN,
                "NCCL_ALGO win over the measured table",
                "unset NCCL_ALGO",
            ),
            (
                {"variables": {"NCCL_ASYNC_ERROR_HANDLING": "1"}},
                WARN,
                "new name",
                "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
            ),
            ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, WARN, "every kernel", "unset CUDA"),
            ({"variables": {"TORCH_NCCL_BLOCKING_WAIT": "1"}}, WARN, "every coll", "unset TORCH"),
            ({"variables": {"NCCL_DEBUG": "TRACE"}}, WARN, "every call", "unset NCCL_DEBUG"),
            ({"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}, WARN, "checked", "unset TORCH"),
            (
                {
                    "variables": {
                        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
                        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                    }
                },
                WARN,
                "differ",
                "unset PYTORCH_CUDA_ALLOC_CONF",
            ),
            (
                {"variables": {"OMP_NUM_THREADS": "64"}},
                WARN,
                "OMP_NUM_THREADS=64 x 8 ranks on 64 usable CPUs",
                "export OMP_NUM_THREADS=8",
            ),
            ({"variables": {"OMP_NUM_THREADS": "0"}}, FAIL, "1 or more", "unset OMP_NUM"),
        ],
    ),
    interface: (
        interface.InterfaceFacts((nic("eth0"),), "eth0", "", False),
        [
            ({"nics": (nic("eth0", is_up=False),)}, FAIL, "eth0 is to carry", "ip link set eth0"),
            (
                {"nics": (nic("eth0"), nic("docker0", pci="", speed_mbps=0)), "chosen": "docker0"},
                WARN,
                "docker0 is virtual",
                "export DEEPYTORCH_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0",
            ),
            (
                {"nics": (nic("eth0", speed_mbps=1000), nic("eth1", speed_mbps=100_000))},
                WARN,
                "eth0 with 1 Gbit/s would carry the job, eth1 has 100 Gbit/s",
                "NCCL_SOCKET_IFNAME=eth1",
            ),
            ({"chosen": "", "error": "no route"}, WARN, "no route", "IFNAME=eth0"),
        ],
    ),
    mtu: (
        mtu.MtuFacts((nic("eth0", mtu=9000),), "eth0", (PATH,), ()),
        [
            (
                {"paths": (dataclasses.replace(PATH, largest=1500),)},
                FAIL,
                "from rank 0 to rank 1 packets of 9000 bytes are lost, of 1500 arrive",
                "sudo ip link set eth0 mtu 1500",
            ),
            (
                {"paths": (dataclasses.replace(PATH, largest=None),)},
                WARN,
                "no packet arrived",
                "ping -M do -s 8972 192.0.2.2",
            ),
            (
                {"paths": (dataclasses.replace(PATH, mtu=1500, largest=1500),)},
                WARN,
                "MTUs are 1500 and 9000",
                "mtu 1500",
            ),
            ({"errors": ("rank 1: no address",)}, WARN, "no address", "--only interface"),
            (
                {"nics": (nic("eth0", mtu=9000), nic("eth1"))},
                WARN,
                "eth0 mtu 9000, eth1 mtu 1500",
                "sudo ip link set eth1 mtu 9000",
            ),
            (
                {"nics": (nic("eth0", speed_mbps=100_000),)},
                WARN,
                "100 Gbit/s but an MTU of 1500",
                "mtu 9000",
            ),
        ],
    ),
    link: (
        link.LinkFacts(WIDE, True, (), 10_000, frozenset(), False, False),
        [
            ({"speed_mbps": 100_000}, WARN, "the adapter has 100 Gbit/s", "iperf3"),
            ({"link": CAPPED}, WARN, "2 Gbit/s a connection", "export NCCL_MIN_NCHANNELS="),
            ({"link": None, "errors": ("rank 1 left",)}, WARN, "rank 1 left", "torchrun"),
            ({"errors": ("rank 3: closed",)}, WARN, "rank 3: closed", "torchrun"),
        ],
    ),
    ranks: (
        ranks.RankFacts({"a (rank 0)": {"torch": "2.13.0"}, "b (rank 8)": {"torch": "2.13.0"}}),
        [
            (
                {"versions": {"a": {"torch": "2.13.0+cu128"}, "b": {"torch": "2.12.1"}}},
                FAIL,
                "torch differs: a 2.13.0+cu128, b 2.12.1",
                "pip install torch==2.13.0 ",
            ),
            (
                {"versions": {"a": {"python": "3.12.1"}, "b": {"python": "3.11.9"}}},
                FAIL,
                "python differs",
                "use Python 3.12.1",
            ),
        ],
    ),
    shm: (
        shm.ShmFacts(16 << 30, 15 << 30, ""),
        [
            ({"total_bytes": 64 << 20}, FAIL, "64 MiB", "--shm-size=16g"),
            ({"free_bytes": 100 << 20}, WARN, "100 MiB free", "ls -lS /dev/shm"),
            ({"error": "read-only"}, FAIL, "read-only", "remount,rw"),
        ],
    ),
    memlock: (
        memlock.MemlockFacts(None, False, 2),
        [({"limit_bytes": 8 << 20}, FAIL, "only 8 MiB may be locked", "ulimit -l unlimited")],
    ),
    files: (
        files.FileFacts(65536, 1 << 20, 8),
        [
            ({"soft": 1024, "world_size": 64}, FAIL, "64 ranks take up to", "ulimit -n 65536"),
            ({"soft": 1024}, WARN, "1024 files", "ulimit -n 65536"),
            ({"soft": 1024, "hard": 4096}, WARN, "1024 files", "ulimit -n 4096"),
        ],
    ),
    container: (
        container.ContainerFacts(8, None, 0.0, 64 << 30, 10 << 30, 0, None),
        [
            ({"quota_cpus": 2.5}, WARN, "2.5 CPUs where 8", "export OMP_NUM_THREADS=2"),
            (
                {"quota_cpus": 2.0, "throttled": 0.4, "threads": "2"},
                WARN,
                "cut off in 40% of all periods",
                "docker update --cpus",
            ),
            ({"memory_used": 63 << 30}, FAIL, "63.0 of 64.0 GiB", "docker update --memory"),
            ({"num_killed": 2}, WARN, "2 processes were killed", "fewer workers"),
        ],
    ),
    data: (
        data.DataFacts((data.Loader(100, 20.0, 0.1, 8, True, 2, True),), 16),
        [
            (
                {"loaders": (data.Loader(100, 20.0, 5.0, 0, True, None, False),)},
                WARN,
                "25% of the time waits for data",
                "num_workers=4",
            ),
            (
                {"loaders": (data.Loader(100, 20.0, 5.0, 4, False, 2, True),), "has_gpu": True},
                WARN,
                "25% of the time waits for data",
                "pin_memory=True",
            ),
            (
                {"loaders": (data.Loader(100, 20.0, 5.0, 16, True, 2, True),)},
                WARN,
                "16 workers",
                "prefetch_factor=4",
            ),
        ],
    ),
}
