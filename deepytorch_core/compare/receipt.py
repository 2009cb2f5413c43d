"""The receipt: one HTML file with the numbers, the loss curves and the step times."""

from __future__ import annotations

import html
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from deepytorch_core.compare.result import STOCK, Sample
from deepytorch_core.report import html_page


def write(
    path: Path,
    samples: Sequence[Sample],
    *,
    command: str,
    headline: str,
    rows: Sequence[tuple[str, str]],
) -> None:
    """Write the receipt to `path`; it refers to no other file.

    Args:
        path: where to write; its folder is made.
        samples: all runs, in their order.
        command: the command line that was compared.
        headline: the verdict in a sentence.
        rows: (name, value) of every finding.
    """
    body = (
        f"<pre>{html.escape(command)}</pre>\n"
        f'<p class="verdict">{html.escape(headline)}</p>\n'
        f"{html_page.fields(rows)}\n{_figure(samples)}"
    )
    html_page.write(path, title=headline, heading="deepytorch, compared with stock", body=body)


def _figure(samples: Sequence[Sample]) -> str:
    """Losses over the steps and times over the blocks, as SVG."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return (
            "<p>No plot: matplotlib is not installed (pip install 'deepytorch-train[recipes]').</p>"
        )
    arms = list(dict.fromkeys(sample.arm for sample in samples))
    colors = {arm: "0.6" if arm == STOCK else f"C{index}" for index, arm in enumerate(arms)}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curves, times = figure.subplots(1, 2)
    seen: set[str] = set()
    for sample in samples:
        label = sample.arm if sample.arm not in seen else None
        seen.add(sample.arm)
        color = colors[sample.arm]
        known = [(step + 1, loss) for step, loss in enumerate(sample.losses) if loss is not None]
        width = 4.0 if sample.arm == STOCK else 1.2
        if known:
            curves.plot(*zip(*known, strict=True), color=color, linewidth=width, label=label)
        blocks = range(1, len(sample.block_s) + 1)
        block_ms = [value * 1e3 for value in sample.block_s]
        times.plot(blocks, block_ms, "o-", color=color, linewidth=1, markersize=3, label=label)
    for arm in arms:
        median = statistics.median(run.step_s for run in samples if run.arm == arm)
        times.axhline(median * 1e3, color=colors[arm], linewidth=0.8, linestyle="--")
    curves.set(xlabel="optimizer step", ylabel="loss", title="losses of all runs")
    times.set(xlabel="block of steps", ylabel="ms a step", title="step times (dashed: median)")
    times.set_ylim(bottom=0)
    if curves.lines:
        curves.legend()
    times.legend()
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
