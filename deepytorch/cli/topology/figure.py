"""The machine as a figure: networks above, processors in the middle, GPUs and their links below.

Lengths are inches, so that text of a fixed size fits the boxes that are made for it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core.topology import machine_map
from deepytorch_core.topology.machine_map import Links, NumaGroup
from deepytorch_core.topology.model import Gpu, Nic, RdmaDevice, Topology, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL, GAP, _PAD = 1.62, 0.14, 0.2  # a device's box with its margin; between; inside a node
_DEVICE_H, _BAR_H, _LEVEL_H = 0.72, 0.62, 0.3
_COLORS = {"gpu": "#d8efd3", "network": "#d5e8f7", "node": "#f6f6f6", "bar": "#fdeecb"}
_LINK, _EDGE, _FAINT = "#3a8f2e", "#555555", "#888888"
_MAX_CHARS = 20


@dataclass(frozen=True)
class _Node:
    """Place of a NUMA node in the drawing: its left edge, its width, and its GPUs' middles."""

    group: NumaGroup
    left: float
    width: float
    networks: tuple[tuple[Nic | RdmaDevice, ...], ...]


def save(topology: Topology, path: Path, kind: str) -> None:
    """Draw into a file of `kind` "svg" or "png".

    Raises RuntimeError when matplotlib is not installed, OSError when the file can't be written.
    """
    try:
        figure = draw(topology)
    except ModuleNotFoundError:
        raise RuntimeError(
            "drawing into a file needs matplotlib: pip install 'deepytorch-train[recipes]'"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format=kind)


def draw(topology: Topology) -> Figure:
    """The figure. Raises ModuleNotFoundError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    nodes = _place(topology)
    found = machine_map.links(topology)
    levels = _levels(topology, found)
    width = nodes[-1].left + nodes[-1].width + _PAD if nodes else 4.0
    caption = _caption(topology, found, max(60, int(width * 13)))
    rows = max((len(node.networks) for node in nodes), default=0)
    # From below: caption, links, GPUs, gap with the PCIe lines, bar, networks, headline.
    gpus_at = 0.22 + 0.2 * len(caption) + _below(topology, levels)
    bar_at = gpus_at + (_DEVICE_H + 0.55 if topology.gpus else 0.0)
    top = bar_at + _BAR_H + rows * (_DEVICE_H + 0.12) + 0.25
    figure = Figure(figsize=(width, top + 0.55), dpi=120)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(0, top + 0.55))
    axes.axis("off")
    _headline(axes, topology, top)
    middles: dict[int, float] = {}
    for node in nodes:
        _draw_node(axes, node, bottom=gpus_at - 0.1, bar_at=bar_at, top=top)
        middles |= _draw_gpus(axes, node, gpus_at=gpus_at, bar_at=bar_at)
    known = [node for node in nodes if node.group.node is not None]
    for left, right in zip(known, known[1:], strict=False):
        ends = (left.left + left.width - _PAD, right.left + _PAD)
        axes.plot(ends, [bar_at + _BAR_H / 2] * 2, color=_EDGE, linewidth=2.5, zorder=3)
    _draw_links(axes, topology, levels, middles=middles, gpus_at=gpus_at)
    for number, line in enumerate(reversed(caption)):
        axes.text(_PAD, 0.14 + 0.2 * number, line, fontsize=8, color=_EDGE, va="bottom")
    return figure


def _place(topology: Topology) -> list[_Node]:
    """NUMA nodes side by side, as wide as what they hold."""
    left, nodes = _PAD, []
    for group in machine_map.groups(topology):
        devices: list[Nic | RdmaDevice] = [*group.rdma, *group.nics]
        columns = max(len(group.gpus), min(len(devices), 4), 2)
        rows = tuple(
            tuple(devices[start : start + columns]) for start in range(0, len(devices), columns)
        )
        width = columns * CELL + 2 * _PAD
        nodes.append(_Node(group, left, width, rows))
        left += width + 2 * _PAD
    return nodes


def _headline(axes: Axes, topology: Topology, top: float) -> None:
    cores = topology.cores
    text = f"{cores.physical} cores, {cores.logical} threads ({cores.usable} usable), "
    text += size_text(topology.memory.total_bytes)
    name = topology.host_name or "unnamed machine"
    axes.text(_PAD, top + 0.36, name, fontsize=12, weight="bold", va="center")
    axes.text(_PAD, top + 0.12, text, fontsize=9, color=_EDGE, va="center")


def _draw_node(axes: Axes, node: _Node, *, bottom: float, bar_at: float, top: float) -> None:
    _box(axes, (node.left, bottom, node.width, top - bottom - 0.08), color="node", zorder=0)
    numa_node = node.group.node
    lines = ["NUMA node unknown"]
    if numa_node is not None:
        lines = [f"NUMA node {numa_node.index}, {size_text(numa_node.memory_bytes)}"]
        lines.append(machine_map.cpus_text(numa_node))
    bar = (node.left + _PAD, bar_at, node.width - 2 * _PAD, _BAR_H)
    _box(axes, bar, color="bar")
    room = int((node.width - 2 * _PAD) * 13)
    text = "\n".join(textwrap.shorten(line, room, placeholder=" ...") for line in lines)
    axes.text(
        bar[0] + bar[2] / 2, bar_at + _BAR_H / 2, text, fontsize=8.5, ha="center", va="center"
    )
    for row, devices in enumerate(node.networks):
        at = bar_at + _BAR_H + 0.12 + row * (_DEVICE_H + 0.12)
        for column, device in enumerate(devices):
            middle = node.left + _PAD + (column + 0.5) * CELL
            axes.plot([middle] * 2, [bar_at + _BAR_H, at], color=_EDGE, linewidth=1, zorder=1)
            is_up = not isinstance(device, Nic) or device.is_up
            _device(axes, middle, at, _network(device), color="network", faint=not is_up)


def _network(device: Nic | RdmaDevice) -> list[str]:
    if isinstance(device, Nic):
        speed = f"{device.speed_mbps / 1000:g} Gbit/s" if device.speed_mbps else "speed unknown"
        return [device.name, speed if device.is_up else "down", f"mtu {device.mtu}"]
    rates = sorted({port.rate_mbps for port in device.ports}, reverse=True)
    kinds = dict.fromkeys(port.link_layer or "RDMA" for port in device.ports)
    states = {port.state for port in device.ports}
    speed = f"{rates[0] / 1000:g} Gbit/s" if rates and rates[0] else "speed unknown"
    is_up = "ACTIVE" in states
    return [device.name, speed if is_up else "not active", ", ".join(kinds) or "no port"]


def _draw_gpus(axes: Axes, node: _Node, *, gpus_at: float, bar_at: float) -> dict[int, float]:
    """Draws the GPUs with their ways to the processor; returns the middle of each."""
    middles = {}
    column = 0
    for bridge in node.group.bridges:
        for switch in bridge:
            first = node.left + _PAD + (column + 0.5) * CELL
            last = first + (len(switch) - 1) * CELL
            shared = bar_at - 0.2
            if len(switch) > 1:
                center = (first + last) / 2
                axes.plot([center] * 2, [shared, bar_at], color=_EDGE, linewidth=1.2, zorder=1)
                axes.plot([first, last], [shared] * 2, color=_EDGE, linewidth=3, zorder=1)
                _text(axes, (center + 0.07, shared + 0.1), "PCIe switch", color=_FAINT)
            for place, gpu in enumerate(switch):
                middle = first + place * CELL
                middles[gpu.index] = middle
                end = shared if len(switch) > 1 else bar_at
                above = gpus_at + _DEVICE_H
                axes.plot([middle] * 2, [above, end], color=_EDGE, linewidth=1.2, zorder=1)
                if gpu.pcie_mbps:
                    rate = f"{gpu.pcie_mbps / 8000:.3g} GB/s"
                    _text(axes, (middle + 0.07, above + 0.15), rate, color=_FAINT)
                _device(axes, middle, gpus_at, _gpu(gpu), color="gpu")
            column += len(switch)
    return middles


def _gpu(gpu: Gpu) -> list[str]:
    return [f"GPU {gpu.index}", machine_map.short_name(gpu), size_text(gpu.memory_bytes)]


def _levels(topology: Topology, found: Sequence[Links]) -> dict[tuple[int, int], int]:
    """How deep below the GPUs each pair's NVLinks are drawn, so that no two lines meet.

    Nothing where NVLink joins all GPUs: then one bar says it.
    """
    pairs = [pair for kind in found if kind.nvlinks for pair in kind.pairs]
    if _is_switched(topology):
        return {}
    order = [gpu.index for group in machine_map.groups(topology) for gpu in group.gpus]
    place = {index: number for number, index in enumerate(order)}
    levels: dict[tuple[int, int], int] = {}
    spans: list[tuple[int, int, int]] = []
    for pair in sorted(pairs, key=lambda pair: abs(place[pair[0]] - place[pair[1]])):
        low, high = sorted((place[pair[0]], place[pair[1]]))
        level = 0
        while any(level == its and low <= end and start <= high for start, end, its in spans):
            level += 1
        spans.append((low, high, level))
        levels[pair] = level
    return levels


def _is_switched(topology: Topology) -> bool:
    links = [link.nvlinks for gpu in topology.gpus for link in gpu.links]
    return len(topology.gpus) > 2 and all(links)


def _below(topology: Topology, levels: dict[tuple[int, int], int]) -> float:
    """The room that the links between GPUs take."""
    if _is_switched(topology):
        return 0.85
    return 0.2 + _LEVEL_H * (max(levels.values()) + 1) if levels else 0.2


def _draw_links(
    axes: Axes,
    topology: Topology,
    levels: dict[tuple[int, int], int],
    *,
    middles: dict[int, float],
    gpus_at: float,
) -> None:
    found = machine_map.links(topology)
    if _is_switched(topology):
        bar = (min(middles.values()) - 0.6, gpus_at - 0.75)
        width = max(middles.values()) + 0.6 - bar[0]
        _box(axes, (*bar, width, 0.4), color="gpu", edge=_LINK)
        text = "; ".join(f"{kind.nvlinks} links, {kind.speed}" for kind in found)
        place = (bar[0] + width / 2, bar[1] + 0.2)
        _text(axes, place, f"NVLink between all GPUs: {text}", fontsize=9, ha="center")
        for middle in middles.values():
            axes.plot([middle] * 2, [bar[1] + 0.4, gpus_at], color=_LINK, linewidth=2.5, zorder=1)
        return
    label = {
        pair: f"{kind.nvlinks} x NVLink, {kind.speed}" for kind in found for pair in kind.pairs
    }
    used: dict[int, int] = dict.fromkeys(middles, 0)
    for pair, level in sorted(levels.items(), key=lambda item: item[1]):
        depth = gpus_at - 0.26 - level * _LEVEL_H
        ends = []
        for index in pair:
            ends.append(middles[index] + 0.14 * used[index] - 0.28)
            used[index] += 1
        axes.plot(
            [ends[0], ends[0], ends[1], ends[1]],
            [gpus_at, depth, depth, gpus_at],
            color=_LINK,
            linewidth=2,
            zorder=1,
        )
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        _text(axes, (sum(ends) / 2, depth - 0.12), label[pair], ha="center", bbox=white)


def _caption(topology: Topology, found: Sequence[Links], room: int) -> list[str]:
    """Say what the drawing does not show: pairs without NVLink, and why there are no GPUs."""
    if not topology.gpus:
        return textwrap.wrap(f"no GPUs: {topology.gpu_note}", room) if topology.gpu_note else []
    lines = []
    for kind in found:
        if not kind.nvlinks:
            pairs = machine_map.pairs_text(kind.pairs, len(topology.gpus))
            lines += textwrap.wrap(f"{'' if 'pairs' in pairs else 'GPUs '}{pairs}: {kind}", room)
    return lines


def _device(
    axes: Axes, middle: float, bottom: float, lines: list[str], *, color: str, faint: bool = False
) -> None:
    """A box of a device with its name in bold and up to two lines below it."""
    width = CELL - GAP
    _box(axes, (middle - width / 2, bottom, width, _DEVICE_H), color="node" if faint else color)
    ink = _FAINT if faint else "black"
    for number, line in enumerate(lines):
        axes.text(
            middle,
            bottom + _DEVICE_H - 0.17 - 0.2 * number,
            line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…",
            fontsize=8.5 if number == 0 else 7.5,
            weight="bold" if number == 0 else "normal",
            color=ink,
            ha="center",
            va="center",
            zorder=4,
        )


def _text(axes: Axes, place: tuple[float, float], text: str, **style: Any) -> None:
    axes.text(*place, text, **{"fontsize": 7, "va": "center", "zorder": 4, **style})


def _box(axes: Axes, place: tuple[float, float, float, float], *, color: str, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, bottom, width, height = place
    shape = FancyBboxPatch(
        (left + 0.04, bottom + 0.04),
        width - 0.08,
        height - 0.08,
        boxstyle="round,pad=0.04",
        facecolor=_COLORS[color],
        edgecolor=style.get("edge", _EDGE),
        linewidth=0.8,
        zorder=style.get("zorder", 2),
    )
    axes.add_patch(shape)
