"""Tests what the checks see of planted files, packages and variables, and of this machine."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli import console
from deepytorch_core.base import config
from deepytorch_core.c10d import adapter as adapters
from deepytorch_core.doctor import machine as machines
from deepytorch_core.doctor import pci, registry, smi, torch_facts, torch_probe
from deepytorch_core.doctor.checks import (
    adapter,
    cache,
    clocks,
    compiler,
    container,
    driver,
    extensions,
    frameworks,
    iommu,
    nccl,
    numa,
    pcie,
)
from deepytorch_core.doctor.checks import torch as known_torch
from deepytorch_core.doctor.finding import Finding, State
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.doctor.torch_facts import TorchFacts
from deepytorch_core.topology import model as topology

GPU, NIC = "0000:18:00.0", "0000:19:00.0"
PORT, SWITCH, FIRST, SECOND = "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:17:01.0"


def plant(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content + "\n")


def bridge_config(control: int) -> bytes:
    """A configuration space with error reporting at 0x100 and ACS behind it at 0x148."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    config[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(config)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two GPUs and an adapter below one switch, as a server of two GPUs has them."""
    top = f"sys/devices/pci0000:15/{PORT}/{SWITCH}"
    places = {
        PORT: f"sys/devices/pci0000:15/{PORT}",
        SWITCH: top,
        FIRST: f"{top}/{FIRST}",
        SECOND: f"{top}/{SECOND}",
        GPU: f"{top}/{FIRST}/{GPU}",
        NIC: f"{top}/{SECOND}/{NIC}",
        "0000:1a:00.0": f"{top}/{SECOND}/0000:1a:00.0",
    }
    link = {
        "current_link_speed": "16.0 GT/s PCIe",
        "max_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "16",
        "max_link_width": "16",
    }
    for address, place in places.items():
        kind = {GPU: "0x030200", "0000:1a:00.0": "0x030200", NIC: "0x020000"}
        files: dict[str, str | bytes] = {f"{place}/{name}": text for name, text in link.items()}
        files[f"{place}/class"] = kind.get(address, "0x060400")
        files[f"{place}/vendor"] = "0x15b3" if address == NIC else "0x10de"
        files[f"{place}/config"] = bridge_config(0)
        plant(tmp_path, files)
        device = tmp_path / "sys/bus/pci/devices" / address
        device.parent.mkdir(parents=True, exist_ok=True)
        device.symlink_to(tmp_path / place)
    plant(tmp_path, {"sys/kernel/iommu_groups/7/type": "identity"})
    (tmp_path / places[GPU] / "iommu_group").symlink_to(tmp_path / "sys/kernel/iommu_groups/7")
    return tmp_path


def file_of(tree: Path, address: str, name: str) -> Path:
    return tree / "sys/bus/pci/devices" / address / name


def found(module: Any, machine: Machine) -> list[Finding]:
    return module.judge(module.gather(machine))


def only(module: Any, machine: Machine) -> Finding:
    (finding,) = found(module, machine)
    return finding


def test_devices_and_the_bridges_above_them(tree: Path) -> None:
    machine = Machine(tree)
    assert pci.gpus(machine) == [GPU, "0000:1a:00.0"]
    assert pci.network_adapters(machine) == [NIC]
    assert pci.above(machine, GPU) == [PORT, SWITCH, FIRST]


def test_acs_is_read_from_the_bridges_registers(tree: Path) -> None:
    assert only(iommu, Machine(tree)).state == State.OKAY
    config = file_of(tree, FIRST, "config")
    config.write_bytes(bridge_config(0x001D))
    finding = only(iommu, Machine(tree))
    assert finding.state == State.FAIL
    assert f"for b in {FIRST}; do sudo setpci" in finding.remedy
    config.write_bytes(bridge_config(0))  # what the remedy writes
    assert only(iommu, Machine(tree)).state == State.OKAY
    for address in (PORT, SWITCH, FIRST, SECOND):  # as others than root see it
        file_of(tree, address, "config").write_bytes(bridge_config(0x1D)[:64])
    finding = only(iommu, Machine(tree))
    assert "ACS of 4 bridges not read" in finding.evidence


def test_a_translating_iommu_is_seen(tree: Path) -> None:
    kind = tree / "sys/kernel/iommu_groups/7/type"
    kind.write_text("DMA-FQ\n")
    finding = only(iommu, Machine(tree))
    assert (finding.state, GPU in finding.evidence) == (State.WARN, True)
    kind.write_text("identity\n")
    assert only(iommu, Machine(tree)).state == State.OKAY


@pytest.mark.parametrize("config", [b"", bytes(64), bytes(4096), b"\xff" * 4096])
def test_a_configuration_without_acs(config: bytes) -> None:
    assert pci.acs_control(config) is None


def test_a_list_of_capabilities_that_goes_in_circles_ends() -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert pci.acs_control(bytes(config)) is None


def test_lanes_and_generations_are_read(tree: Path) -> None:
    machine = Machine(tree)
    machine.__dict__["gpu_states"] = ()
    assert only(pcie, machine).evidence == (
        "2 x GPU with 16 lanes of generation 4, 1 x network adapter with 16 lanes of generation 4"
    )
    file_of(tree, GPU, "current_link_width").write_text("4\n")
    file_of(tree, NIC, "current_link_speed").write_text("2.5 GT/s PCIe\n")
    texts = [finding.evidence for finding in found(pcie, machine)]
    assert any(f"GPU {GPU}: 4 lanes of 16" in text for text in texts)
    assert any(f"{NIC}: PCIe generation 1, made for generation 4" in text for text in texts)
    # 255 lanes and "Unknown" are how the kernel writes that there is no link.
    for name, text in (("current_link_width", "255"), ("max_link_speed", "Unknown")):
        for address in (GPU, NIC, "0000:1a:00.0"):
            file_of(tree, address, name).write_text(text + "\n")
    assert only(pcie, machine).state == State.NOT_HERE


def test_a_gpu_without_a_driver(tree: Path) -> None:
    machine = Machine(tree)
    machine.__dict__["torch"] = TorchFacts(version="2.13.0+cu128", cuda="12.8")
    assert only(driver, machine).state == State.FAIL
    plant(
        tree,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
            "570.86.15  Thu Jan 23\nGCC version:  gcc version 13.3.0"
        },
    )
    machine.__dict__["torch"] = TorchFacts(
        version="2.13.0+cu128", cuda="12.8", devices=(torch_facts.Device(0, "H100", "9.0"),)
    )
    assert only(driver, machine).evidence.startswith("driver 570.86.15, CUDA 12.8, torch sees 1")
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build"
    plant(tree, {"proc/driver/nvidia/version": text})
    assert only(driver, machine).evidence.startswith("driver 575.57.08, ")
    (tree / "proc/driver/nvidia/version").unlink()  # hidden in some containers
    assert only(driver, machine).evidence.startswith("driver of unknown version, CUDA 12.8")


def test_the_gpu_of_a_rank_is_the_one_that_it_sees() -> None:
    machine = Machine(environment={})
    file = Path(__file__).parent / "data" / "machines" / "4x4090_two_nodes.json"
    machine.__dict__["topology"] = topology.load(file)
    machine.__dict__["affinity"] = frozenset(range(16))  # of node 0

    def look(**variables: str) -> list[str]:
        machine.environment = variables
        return [finding.evidence for finding in found(numa, machine)]

    def ranked(rank: int) -> dict[str, str]:
        size = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), **size}

    assert look(**ranked(1)) == ["2 NUMA nodes, this process may run on 0"]
    assert "GPU 2 is on node 1" in look(**ranked(2))[0]
    assert "GPU 3 is on node 1" in look(**ranked(1), CUDA_VISIBLE_DEVICES="0,3,1,2")[0]
    assert look(**ranked(3), CUDA_VISIBLE_DEVICES="1") == look(**ranked(1))
    assert len(look()) == 2, "outside a job it may use all"


def test_two_nccl_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia_nccl_cu12-2.27.5", "nvidia_nccl_cu13-2.28.3"):
        text = f"Metadata-Version: 2.1\nName: {name[:16].replace('_', '-')}\n"
        plant(tmp_path, {f"{name}.dist-info/METADATA": f"{text}Version: {name[17:]}"})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def look() -> list[Finding]:
        machine = Machine()
        machine.__dict__["torch"] = TorchFacts(nccl="2.27.5", running_nccl="2.27.5", cuda="12.8")
        return found(nccl, machine)

    (finding,) = look()
    assert finding.state == State.FAIL
    assert "nvidia-nccl-cu12 2.27.5, nvidia-nccl-cu13 2.28.3" in finding.evidence
    removed = tmp_path / "nvidia_nccl_cu13-2.28.3.dist-info"
    removed.rename(tmp_path / "gone")
    assert [finding.state for finding in look()] == [State.OKAY]


def test_a_second_nccl_on_the_library_path(tmp_path: Path) -> None:
    plant(tmp_path, {"opt/nccl/lib/libnccl.so.2": ""})
    machine = Machine(tmp_path, {"LD_LIBRARY_PATH": "/usr/none:/opt/nccl/lib"})
    machine.__dict__["torch"] = TorchFacts(nccl="2.27.5")
    finding = only(nccl, machine)
    assert finding.state == State.WARN
    assert "opt/nccl/lib/libnccl.so.2" in finding.evidence
    machine = Machine(tmp_path, {})
    machine.__dict__["torch"] = TorchFacts(nccl="2.27.5")
    assert only(nccl, machine).state == State.OKAY


def test_no_compiler_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = Machine()
    machine.__dict__["torch"] = TorchFacts()
    assert only(compiler, machine).state == State.FAIL
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    assert "Python's headers" in only(compiler, machine).evidence


def test_an_adapter_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(tmp_path))
    # Adapters are kept there when no cache can be written, also by other tests.
    monkeypatch.setattr(config, "temporary_dir", lambda: tmp_path / "temporary")
    tag = adapters.tag(adapters.Sources.find())
    other = f"torch2.12.0-{tag.partition('-')[2]}"
    folder = adapters.cache_folders()[0]
    plant(folder, {f"{other}/deepytorch_c10d.so": ""})
    machine = Machine()
    machine.__dict__["torch"] = TorchFacts(version=str(torch.__version__), adapter_tag=tag)
    finding = only(adapter, machine)
    assert finding.evidence.startswith("compiled for torch2.12.0, but this is torch")
    assert finding.remedy == "deepytorch build"


def test_a_cache_that_can_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(tmp_path / "file"))
    finding = only(cache, Machine())
    assert finding.state == State.WARN
    assert str(tmp_path / "file") in finding.evidence
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(tmp_path / "own"))
    assert only(cache, Machine()).state == State.OKAY


@pytest.mark.parametrize("is_default", [False, True])
def test_a_lock_of_a_killed_build_is_told_from_one_that_is_held(
    is_default: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "torch_extensions"
    names = [f"py311_cpu/{name}" if is_default else name for name in ("killed", "built", "whole")]
    for name in names:
        (folder / name).mkdir(parents=True)
    environment = {"TORCH_EXTENSIONS_DIR": str(folder)}
    machine = Machine(environment={"XDG_CACHE_HOME": str(tmp_path)} if is_default else environment)
    assert only(extensions, machine).state == State.OKAY
    killed = folder / names[0] / "lock"
    killed.touch()
    with (folder / names[1] / "lock").open("w"):
        finding = only(extensions, machine)
    assert finding.state == State.FAIL
    assert finding.remedy == f"rm {killed}"
    killed.unlink()
    (folder / names[1] / "lock").unlink()
    assert only(extensions, machine).state == State.OKAY


def test_a_machine_without_extensions(tmp_path: Path) -> None:
    for environment in ({}, {"HOME": str(tmp_path)}):
        assert only(extensions, Machine(environment=environment)).state == State.NOT_HERE


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_control_group(tmp_path: Path, version: int) -> None:
    cpu, memory = "sys/fs/cgroup/cpu/job", "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/job\n5:memory:/job",
        f"{cpu}/cpu.cfs_quota_us": "150000",
        f"{cpu}/cpu.cfs_period_us": "100000",
        f"{cpu}/cpu.stat": "nr_periods 1000\nnr_throttled 400",
        f"{memory}/memory.limit_in_bytes": str(1 << 30),
        f"{memory}/memory.usage_in_bytes": str(1 << 30),
        f"{memory}/memory.stat": f"inactive_file {1 << 20}",
        f"{memory}/memory.oom_control": "oom_kill_disable 0\noom_kill 3",
        "proc/meminfo": "MemTotal:  8388608 kB",
    }
    if version == 2:
        job = "sys/fs/cgroup/job"
        files = {
            "proc/self/cgroup": "0::/job",
            f"{job}/cpu.max": "150000 100000",
            f"{job}/cpu.stat": "nr_periods 1000\nnr_throttled 400",
            f"{job}/memory.max": str(1 << 30),
            f"{job}/memory.current": str(1 << 30),
            f"{job}/memory.stat": f"inactive_file {1 << 20}",
            f"{job}/memory.events": "oom 3\noom_kill 3",
            "proc/meminfo": "MemTotal:  8388608 kB",
        }
    plant(tmp_path, files)
    machine = Machine(tmp_path, {})
    machine.__dict__["affinity"] = frozenset(range(4))
    texts = [finding.evidence for finding in found(container, machine)]
    assert texts == [
        "a quota of 1.5 CPUs where 4 are seen: cut off in 40% of all periods",
        "1.0 of 1.0 GiB are in use: the next process may be killed",
        "3 processes were killed here for want of memory",
    ]


def test_clocks_of_the_cores(tmp_path: Path) -> None:
    for cpu in range(2):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        plant(
            tmp_path,
            {
                f"{folder}/scaling_governor": "powersave",
                f"{folder}/scaling_driver": "acpi-cpufreq",
                f"{folder}/scaling_max_freq": "3000000",
                f"{folder}/cpuinfo_max_freq": "3000000",
            },
        )
    machine = Machine(tmp_path)
    machine.__dict__["gpu_states"] = ()
    assert only(clocks, machine).evidence.startswith("2 cores stay at their lowest clock")
    for cpu in range(2):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        plant(tmp_path, {f"{folder}/scaling_governor": "performance"})
    assert only(clocks, machine).state == State.OKAY


def test_lines_of_nvidia_smi() -> None:
    text = (
        "0, 00000000:18:00.0, P0, 91, 900, 1980, 0, 0x0000000000000048\n"
        "1, 00000000:3B:00.0, P8, 30, 210, 2520, [N/A], 0x0000000000000001\n"
        "No devices were found\n"
    )
    hot, idle = smi.parse(text)
    assert (hot.pci, hot.celsius, hot.held_down_by) == (GPU, 91.0, 0x48)
    assert (idle.pci, idle.power_state, idle.uncorrected_errors) == ("0000:3b:00.0", "P8", 0)
    assert [f.state for f in clocks.judge(clocks.ClockFacts((hot, idle), ()))] == [State.FAIL]
    assert [f.state for f in clocks.judge(clocks.ClockFacts((idle,), ()))] == [State.OKAY]


def test_ranges_of_frameworks_are_those_of_the_adapters() -> None:
    """The package's metadata is what `frameworks` goes by; the adapters have their own."""
    declared = frameworks.gather(Machine()).ranges
    assert set(declared) == {"deepspeed", "megatron-core", "accelerate", "transformers"}
    integrations = Path(__file__).parents[2] / "integrations"
    source = "".join(file.read_text() for file in integrations.rglob("*.py"))
    ends = (known_torch.OLDEST, known_torch.FIRST_UNKNOWN)
    oldest, unknown = (".".join(map(str, version)) for version in ends)
    assert f'"torch", ">={oldest},<{unknown}"' in source
    for name, known in declared.items():
        parts = sorted(known.split(","), reverse=True)  # as one writes it: ">=1,<2"
        assert f'"{",".join(parts)}"' in source, name


def test_a_torch_that_hangs_and_one_that_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plant(tmp_path, {"torch.py": "import time; time.sleep(600)"})
    for limit_s in (3, 60):  # a busy machine may need more to start Python at all
        facts = torch_facts.ask(float(limit_s))
        if facts.doing:
            break
    assert facts.doing == "loading torch"
    assert facts.error == f"no answer within {limit_s} s"
    assert 0 < facts.stuck_s <= 60
    plant(tmp_path, {"torch.py": "raise ImportError('libcudart.so.13: cannot open')"})
    facts = torch_facts.ask(60.0)
    assert facts.version == facts.doing == ""
    assert "libcudart.so.13: cannot open" in facts.error


def test_what_torch_says_of_this_machine() -> None:
    facts = torch_facts.ask(100.0)
    assert facts.version == str(torch.__version__)
    assert facts.error == facts.doing == ""
    assert facts.adapter_tag == adapters.tag(adapters.Sources.find())
    assert len(facts.devices) == torch.cuda.device_count()


def fake_cuda(*, corrupt: bool) -> Any:
    """Return what the probe uses of torch, with memory of the host as that of two GPUs."""

    def zeros(size: int, *, dtype: torch.dtype, device: str) -> Any:
        made = torch.zeros(size, dtype=dtype)
        if corrupt:  # what is copied there never arrives
            return SimpleNamespace(copy_=lambda data, non_blocking: None, cpu=lambda: made)
        return made

    def randint(low: int, high: int, size: Any, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.randint(low, high, size, dtype=dtype)

    return SimpleNamespace(
        uint8=torch.uint8,
        empty=lambda size, *, dtype, device, pin_memory: torch.empty(size, dtype=dtype),
        empty_like=torch.empty_like,
        randint=randint,
        zeros=zeros,
        equal=torch.equal,
        cuda=SimpleNamespace(
            synchronize=lambda index: None,
            device_count=lambda: 2,
            can_device_access_peer=lambda source, target: source < target,
        ),
    )


@pytest.mark.parametrize("corrupt", [False, True])
def test_every_pair_of_gpus_is_measured(
    corrupt: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_probe, "_BYTES", 1 << 16)
    torch_probe._copies(fake_cuda(corrupt=corrupt), 2)
    facts = torch_facts.parse(capsys.readouterr().out, error="", in_time=True)
    assert [(pair.source, pair.target) for pair in facts.pairs] == [(0, 1), (1, 0)]
    assert [pair.can_access for pair in facts.pairs] == [True, False]
    assert all(pair.direct_gbps > 0 and pair.host_gbps > 0 for pair in facts.pairs)
    assert all(pair.is_right is not corrupt for pair in facts.pairs)


def test_output_that_was_cut_off_says_what_was_being_done() -> None:
    said = '{"doing": "copying from GPU 0 to GPU 1"}\nnoise\n{"version": "2.1'
    facts = torch_facts.parse(said, error="no answer", in_time=False)
    assert facts.doing == "copying from GPU 0 to GPU 1"


def test_a_check_that_raises_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(machine: Machine) -> None:
        raise KeyError("odd")

    checks = [registry.Check("odd", explode, lambda facts: [], "")]
    (finding,) = registry.examine(Machine(), checks)
    assert (finding.state, finding.check) == (State.WARN, "odd")
    assert "KeyError" in finding.evidence


def test_an_empty_machine_raises_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {}, limit_s=60.0)
    machine.__dict__["torch"] = TorchFacts(error="none")
    machine.__dict__["gpu_states"] = ()
    findings = list(registry.examine(machine, registry.CHECKS))
    assert {finding.check for finding in findings} == {check.name for check in registry.CHECKS}
    assert not [finding for finding in findings if "not checked" in finding.evidence]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


def test_the_command_and_its_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nonesuch")
    result = run("--only", "variables", "--only", "files")
    assert result.exit_code == 1
    assert "FAIL  variables" in result.output
    assert "unset NCCL_SOCKET_IFNAME" in result.output
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    result = run("--only", "files", "--json")
    assert result.exit_code == 0
    (finding,) = json.loads(result.output)
    assert (finding["check"], finding["state"], finding["node"]) == ("files", "okay", "")
    report = tmp_path / "run.json"
    loader = {"num_workers": 0, "pin_memory": False, "prefetch_factor": None}
    loader |= {"persistent_workers": False, "batches": 50, "elapsed_s": 10.0, "waited_s": 4.0}
    report.write_text(json.dumps({"native_calls": 0, "loaders": [loader]}))
    result = run("--only", "data", "--report", str(report))
    assert "40% of the time waits for data" in result.output
    assert "num_workers=" in result.output


def test_an_unknown_check_is_named() -> None:
    result = run("--only", "shmm")
    assert isinstance(result.exception, ValueError)
    assert "no check 'shmm'; known: torch, driver" in str(result.exception)


def test_the_limit_leaves_ten_seconds() -> None:
    assert machines.LIMIT_S < 10


@pytest.mark.parametrize("known", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_nvidia_smi_is_asked_in_the_words_that_it_knows(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    line = "0, 00000000:18:00.0, P0, 60, 1980, 1980, 0, 0x0"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in *{known}.active*) echo "{line}" ;; *) exit 2 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(smi, "_LIMIT_S", 60.0)
    (state,) = smi.ask()
    assert (state.pci, state.clock_mhz) == (GPU, 1980.0)
    program.write_text("#!/bin/sh\nexit 9\n")
    assert smi.ask() == ()


@pytest.mark.parametrize("width", [40, 80])
def test_findings_fit_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nonesuch")
    text = io.StringIO()
    screen = Console(file=text, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "out", lambda: screen)
    assert run("--only", "variables").exit_code == 1
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("FAIL variables    NCCL_SOCKET_IFNAME")
    assert max(map(len, lines)) <= width
    assert any(line.startswith(f"{'':<18}unset") for line in lines)
