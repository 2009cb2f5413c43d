"""The machine's picture, in the terminal and as a figure, of recorded machines.

The files in `data/machines` are written down after what is published of such machines.
"""

from __future__ import annotations

import io
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from deepytorch import cli
from deepytorch.cli.topology import figure as topology_figure
from deepytorch.cli.topology import picture as topology_picture
from deepytorch_core.topology import machine_map
from deepytorch_core.topology import model as topology
from deepytorch_core.topology.model import Topology

MACHINES = {
    file.stem: topology.load(file)
    for file in sorted((Path(__file__).parent / "data" / "machines").glob("*.json"))
}
SWITCHED, PCIE = MACHINES["8xh100_nvswitch"], MACHINES["4x4090_two_nodes"]
BRIDGED, MESH = MACHINES["4xa6000_bridged_pairs"], MACHINES["8xv100_hybrid_mesh"]
FILES = Path(__file__).parent / "data" / "machines"


def drawn(machine: Topology, width: int, **settings: Any) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, **settings)
    console.print(topology_picture.picture(machine, width))
    return text.getvalue()


@pytest.mark.parametrize("width", [44, 60, 80, 109, 110, 200])
@pytest.mark.parametrize("name", MACHINES)
def test_every_device_is_there_and_no_line_is_too_long(name: str, width: int) -> None:
    machine = MACHINES[name]
    text = drawn(machine, width)
    assert max(map(len, text.splitlines())) <= width
    for gpu in machine.gpus:
        assert text.count(f"GPU {gpu.index} ") == 1
    for device in (*machine.rdma, *machine.nics):
        shown = isinstance(device, topology.RdmaDevice) or device.pci or device.is_up
        assert (f" {device.name} " in text) == bool(shown), device.name
    assert all(f"NUMA node {node.index}" in text for node in machine.numa_nodes)


def test_links_are_said_with_their_speed() -> None:
    assert "NV18 450 GB/s at most, 18 NVLinks: all pairs" in drawn(SWITCHED, 80)
    text = drawn(PCIE, 80)
    assert "NODE 11.4 GB/s measured, PCIe host bridges of one NUMA node: 0-1, 2-3" in text
    text = drawn(BRIDGED, 80)
    assert "NV4  56.2 GB/s at most, 4 NVLinks: 0-1, 2-3" in text
    assert "PHB  31.5 GB/s at most, a PCIe host bridge: 0-2, 0-3, 1-2, 1-3" in text
    assert "1 NVLink: 0-1" in drawn(MESH, 80)


def test_boxes_stand_beside_each_other_where_there_is_room() -> None:
    assert "╮ ╭" in drawn(SWITCHED, 120)
    assert "╮ ╭" not in drawn(SWITCHED, 80)


def test_switches_are_found_by_the_distances() -> None:
    (group,) = machine_map.groups(BRIDGED)
    shape = [[[gpu.index for gpu in switch] for switch in bridge] for bridge in group.bridges]
    assert shape == [[[0, 1], [2, 3]]]
    first, second, unknown = machine_map.groups(MESH)
    assert [gpu.index for gpu in first.gpus] == [0, 1, 2, 3]
    assert [gpu.index for gpu in second.gpus] == [4, 5, 6, 7]
    assert (unknown.node, [nic.name for nic in unknown.nics]) == (None, ["veth12345"])


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in drawn(SWITCHED, 80, force_terminal=True, color_system="truecolor")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = drawn(SWITCHED, 80, force_terminal=True)
    for color in range(30, 38):
        assert f"\x1b[{color}m" not in plain
        assert f";{color}m" not in plain
    assert "\x1b[" not in drawn(SWITCHED, 80)  # into a file


def test_measured_rates_go_to_both_ends_by_uuid() -> None:
    uuids = [gpu.uuid for gpu in BRIDGED.gpus]
    rates = {(uuids[0], uuids[1]): 48.25, (uuids[1], uuids[0]): 47.0, (uuids[2], uuids[3]): 50.0}
    found = machine_map.links(machine_map.with_measured(BRIDGED, rates))
    assert (found[0].word, found[0].pairs, found[0].is_measured) == ("NV4", ((0, 1), (2, 3)), True)
    assert found[0].speed == "47 to 50 GB/s measured"
    assert not any(link.is_measured for link in found[1:])


def test_a_machine_without_anything() -> None:
    fields = {"version": 3, "host_name": "", "boot_id": "", "gpudirect": "", "gpu_note": "none"}
    empty = Topology(
        **fields,
        cores=topology.Cores(0, 0, 1),
        caches=(),
        numa_nodes=(),
        memory=topology.Memory(0, 0),
        nics=(),
        rdma=(),
        gpus=(),
    )
    assert "no GPUs: none" in drawn(empty, 60)
    check_figure(empty)


def check_figure(machine: Topology) -> Figure:
    """No two texts overlap, none leaves the figure, and none is wider than its device's box."""
    figure = topology_figure.draw(machine)
    renderer = FigureCanvasAgg(figure).get_renderer()
    (axes,) = figure.axes
    whole = figure.bbox
    places = [(text.get_text(), text.get_window_extent(renderer)) for text in axes.texts]
    for text, box in places:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
        assert inside, f"{text!r} is cut"
    for (label, box), (other, second) in itertools.combinations(places, 2):
        assert not box.overlaps(second), f"{label!r} overlaps {other!r}"
    return figure


@pytest.mark.parametrize("name", MACHINES)
def test_texts_of_the_figure_neither_overlap_nor_are_cut(name: str) -> None:
    machine = MACHINES[name]
    figure = check_figure(machine)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert [text for text in texts if text.startswith("GPU ")] == [
        f"GPU {gpu.index}" for gpu in machine.gpus
    ]
    device_width = (topology_figure.CELL - topology_figure.GAP) * figure.dpi
    for text in figure.axes[0].texts:
        if text.get_text() in {machine_map.short_name(gpu) for gpu in machine.gpus}:
            assert text.get_window_extent().width < device_width


def test_the_command_draws_a_recorded_machine(tmp_path: Path) -> None:
    file = str(FILES / "8xh100_nvswitch.json")
    svg, png = tmp_path / "new" / "machine.svg", tmp_path / "machine.png"
    arguments = ["topology", "--from", file, "--svg", str(svg), "--png", str(png)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "dgx-h100" in result.output
    assert "450 GB/s" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    printed = CliRunner().invoke(cli.app, ["topology", "--from", file, "--json"])
    assert Topology.from_json(printed.stdout) == SWITCHED


def test_without_matplotlib_the_error_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"pip install 'deepytorch-train\[recipes\]'"):
        topology_figure.save(PCIE, tmp_path / "a.png", "png")


def test_measuring_needs_two_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(FILES / "8xh100_nvswitch.json")
    result = CliRunner().invoke(cli.app, ["topology", "--from", file, "--measure"])
    assert result.exit_code == 2
    monkeypatch.setattr(topology, "discover", lambda: MACHINES["4x4090_two_nodes"])
    monkeypatch.setattr("deepytorch_core.doctor.torch_facts.ask", lambda limit: _facts())
    result = CliRunner().invoke(cli.app, ["topology", "--measure"])
    assert "NODE 20 GB/s measured" in result.output


def _facts() -> Any:
    from deepytorch_core.doctor.torch_facts import Device, GpuPair, TorchFacts

    gpus = PCIE.gpus
    # torch numbers them the other way round.
    devices = tuple(Device(3 - gpu.index, gpu.name, "8.9", gpu.uuid) for gpu in gpus)
    pairs = tuple(
        GpuPair(
            source,
            target,
            False,
            20.0 if {source, target} in ({0, 1}, {2, 3}) else 15.0,
            12.0,
            True,
        )
        for source, target in itertools.permutations(range(4), 2)
    )
    return TorchFacts(devices=devices, pairs=pairs)
