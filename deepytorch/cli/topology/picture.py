"""The machine in the terminal: a box for each NUMA node, a tree in it, and how GPUs are joined."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from deepytorch_core.topology import machine_map
from deepytorch_core.topology.machine_map import Links
from deepytorch_core.topology.model import Cache, Gpu, Nic, RdmaDevice, Topology, size_text

_SIDE_BY_SIDE = 110
_GPU, _NETWORK, _DIM, _PLAIN = "bold green", "cyan", "dim", "default not bold"


def picture(topology: Topology, width: int, *, boxes: bool = True) -> RenderableType:
    """All of it, for a terminal of `width` columns; without boxes, indented below headings."""
    nodes = machine_map.groups(topology)
    beside = boxes and len(nodes) > 1 and width >= _SIDE_BY_SIDE
    each = width // 2 - 1 if beside else None
    panels = [_panel(node, width=each, boxes=boxes) for node in nodes]
    parts: list[RenderableType] = [_headline(topology)]
    parts += [Columns(panels, padding=(0, 1))] if beside else panels
    if len(topology.gpus) > 1:
        found = machine_map.links(topology)
        parts += [Text("links between GPUs", style="bold"), _matrix(topology.gpus)]
        parts += [_legend(kind, len(topology.gpus)) for kind in found]
    elif not topology.gpus and topology.gpu_note:
        parts.append(Text(f"no GPUs: {topology.gpu_note}", style=_DIM))
    return Group(*parts)


def _headline(topology: Topology) -> Text:
    cores = topology.cores
    text = Text(topology.host_name or "unnamed machine", style="bold")
    text.append(f"  {cores.physical} cores, {cores.logical} threads", _PLAIN)
    text.append(f" ({cores.usable} usable), {size_text(topology.memory.total_bytes)}", "not bold")
    caches = " · ".join(_cache(cache) for cache in topology.caches)
    if caches:
        text.append(f"\n{caches}", style="dim not bold")
    return text


def _cache(cache: Cache) -> str:
    letter = "d" if cache.type == "data" else ""
    return f"L{cache.level}{letter} {cache.instances} x {size_text(cache.bytes)}"


def _panel(group: machine_map.NumaGroup, *, width: int | None, boxes: bool) -> RenderableType:
    title = "NUMA node unknown"
    if group.node is not None:
        node = group.node
        size = size_text(node.memory_bytes)
        title = f"NUMA node {node.index}: {machine_map.cpus_text(node)}, {size}"
    trees: list[RenderableType] = [_bridge(bridge) for bridge in group.bridges]
    trees += [_rdma(device) for device in group.rdma]
    trees += [_nic(nic) for nic in group.nics]
    body = Group(*trees) if trees else Text("no devices", style=_DIM)
    if not boxes:
        return Group(Text(title, style="bold"), Padding(body, (0, 0, 0, 2), expand=False))
    return Panel(body, title=escape(title), title_align="left", box=box.ROUNDED, width=width)


def _bridge(switches: Sequence[Sequence[Gpu]]) -> RenderableType:
    several = sum(len(switch) for switch in switches) > 1
    if not several:
        return _gpu(switches[0][0])
    if len(switches) == 1:
        return _switch(switches[0])
    tree = Tree(Text("PCIe bridge"), guide_style=_DIM)
    for switch in switches:
        tree.add(_switch(switch) if len(switch) > 1 else _gpu(switch[0]))
    return tree


def _switch(gpus: Sequence[Gpu]) -> Tree:
    tree = Tree(Text("PCIe switch"), guide_style=_DIM)
    for gpu in gpus:
        tree.add(_gpu(gpu))
    return tree


def _gpu(gpu: Gpu) -> Text:
    text = Text(f"GPU {gpu.index}", style=_GPU, overflow="fold")
    text.append(f"  {machine_map.short_name(gpu)}, {size_text(gpu.memory_bytes)}", _PLAIN)
    if gpu.pcie_mbps:
        text.append(f", PCIe {gpu.pcie_mbps / 8000:.3g} GB/s", _PLAIN)
    text.append(f"  {machine_map.short_pci(gpu.pci)}", "dim not bold")
    return text


def _rdma(device: RdmaDevice) -> Text:
    text = Text(device.name, style=_NETWORK, overflow="fold")
    ports = [
        f"{port.rate_mbps / 1000:g} Gbit/s {port.link_layer or 'RDMA'}"
        + ("" if port.state == "ACTIVE" else f" {port.state.lower()}")
        for port in device.ports
    ]
    text.append(f"  {', '.join(ports) or 'no port'}", "default")
    text.append(f"  {machine_map.short_pci(device.pci)}", _DIM)
    return text


def _nic(nic: Nic) -> Text:
    text = Text(nic.name, style=_NETWORK if nic.is_up else _DIM, overflow="fold")
    speed = f"{nic.speed_mbps / 1000:g} Gbit/s" if nic.speed_mbps else "speed unknown"
    state = "" if nic.is_up else ", down"
    text.append(f"  {speed}, mtu {nic.mtu}{state}", "default" if nic.is_up else _DIM)
    text.append(f"  {machine_map.short_pci(nic.pci)}", _DIM)
    return text


def _matrix(gpus: Sequence[Gpu]) -> Table:
    """nvidia-smi's words for each pair."""
    from deepytorch_core.topology.model import link_word

    table = Table(box=None, padding=(0, 1, 0, 0), show_header=True, header_style=_GPU)
    table.add_column("", style=_GPU, no_wrap=True)
    for gpu in gpus:
        table.add_column(str(gpu.index), justify="right", no_wrap=True)
    for gpu in gpus:
        row = {link.peer: link_word(link) for link in gpu.links}
        cells = ["-" if other is gpu else row.get(other.index, "?") for other in gpus]
        table.add_row(str(gpu.index), *(Text(cell, _style(cell)) for cell in cells))
    return table


def _style(word: str) -> str:
    if word.startswith("NV"):
        return "bold green"
    return {"PSB": "green", "PIX": "green", "PXB": "green", "SYS": "yellow", "-": "dim"}.get(
        word, "default"
    )


def _legend(links: Links, num_gpus: int) -> Text:
    text = Text(f"{links.word:<5}", style=_style(links.word))
    text.append(str(links), _PLAIN)
    text.append(f": {machine_map.pairs_text(links.pairs, num_gpus)}", "dim not bold")
    return text
