"""Bars of measured ratios: records of docs/results as a drawing that goes into a page."""

from __future__ import annotations

import html
import re
from pathlib import Path

from deepytorch_core.bench import charts, tables

ROOT = Path(__file__).resolve().parents[2]


def draw(file: str, settings: str) -> str:
    """Rows of boxes whose widths are shares of the widest, so that they fit any screen.

    Raises ValueError as `deepytorch_core.bench.charts.select` does.
    """
    chart = charts.select(tables.load(ROOT / "docs/results"), file, settings)
    widest = chart.widest
    title = html.escape(f"{chart.title}: times faster than {chart.baseline}")
    parts = [f'<div class="chart" role="img" aria-label="{title}">']
    names = ["only"] if len(chart.series) == 1 else [f"s{i}" for i in range(len(chart.series))]
    if len(names) > 1:
        legend = "".join(
            f'<span><i class="{name}"></i>{html.escape(series)}</span>'
            for name, series in zip(names, chart.series, strict=True)
        )
        parts.append(f'<div class="legend">{legend}</div>')
    for label, bars in chart.rows.items():
        for number, (name, bar) in enumerate(zip(names, bars, strict=True)):
            ratio, low, high = (100 * value / widest for value in bar)
            # A long name breaks where a reader would break it.
            text = re.sub("([/_])", r"\1<wbr>", html.escape(label)) if number == 0 else ""
            parts.append(
                f'<div class="row{" first" * (number == 0)}"><span class="label">{text}</span>'
                f'<span class="track"><i class="bar {name}" style="width:{ratio:.1f}%"></i>'
                f'<i class="spread" style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
                f'<i class="stock" style="left:{100 / widest:.1f}%"></i></span>'
                f'<span class="value">{bar[0]:.2f}×</span></div>'
            )
    parts += ["</div>", f'<p class="caption">{html.escape(chart.caption)}</p>']
    return "\n".join(parts)
