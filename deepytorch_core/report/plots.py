"""The drawings on a report's page: heat maps of ranks over time, and curves of losses."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepytorch_core.report import html_page

_COLUMNS = 60
_MOST_CELLS = 6000
_CURVES = 6  # colours in the style
_MOST_POINTS = 400
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 260, 56, 34, 10

Buckets = Sequence[Mapping[str, Any]]


def resampled(buckets: Buckets, name: str, span: tuple[float, float], columns: int) -> list[float]:
    """A series over evenly spaced stretches of time.

    Args:
        buckets: stretches of a run as `deepytorch_core.metering.step_timer` gives them, of any
            lengths.
        name: which of their values, in seconds.
        span: from when to when, on the wall clock.
        columns: how many stretches.

    Returns what went into `name` in each stretch, as a share of it: a bucket's seconds are spread
    evenly over it.
    """
    first, last = span
    width = (last - first) / columns
    found = [0.0] * columns
    for bucket in buckets:
        if bucket["seconds"] <= 0:
            continue
        begin, end = bucket["start_s"], bucket["start_s"] + bucket["seconds"]
        low = max(0, int((begin - first) / width))
        high = min(columns - 1, int((end - first) / width))
        for column in range(low, high + 1):
            left = first + column * width
            overlap = min(end, left + width) - max(begin, left)
            if overlap > 0:
                found[column] += bucket[name] * overlap / bucket["seconds"] / width
    return found


def heat_map(ranks: Mapping[str, Buckets], name: str) -> str:
    """A line for each rank, time to the right; the darker, the larger the share of `name`.

    Returns "" when nothing of it was seen on any rank.
    """
    known = [bucket for buckets in ranks.values() for bucket in buckets if bucket["seconds"] > 0]
    if not any(bucket[name] for bucket in known):
        return ""
    first = min(bucket["start_s"] for bucket in known)
    last = max(bucket["start_s"] + bucket["seconds"] for bucket in known)
    columns = max(12, min(_COLUMNS, _MOST_CELLS // len(ranks)))
    series = {
        rank: resampled(buckets, name, (first, last), columns) for rank, buckets in ranks.items()
    }
    most = max(max(values) for values in series.values())
    step = (last - first) / columns
    lines = []
    for rank, values in series.items():
        cells = "".join(
            f'<rect x="{column}" y="0" width="1" height="1" fill="var(--heat)" '
            f'fill-opacity="{value / most:.2f}"><title>{column * step:.1f} s: {value:.0%}</title>'
            "</rect>"
            for column, value in enumerate(values)
            if value / most >= 0.005
        )
        drawing = (
            f'<svg class="cells" viewBox="0 0 {columns} 1" preserveAspectRatio="none" role="img" '
            f'aria-label="{html.escape(rank)}">{cells}</svg>'
        )
        total = sum(bucket[name] for bucket in ranks[rank])
        lines.append((rank, drawing, f"{total:.2f} s"))
    legend = f"{last - first:.1f} s from left to right; the darkest is {most:.0%} of the time."
    return f'{html_page.rows(lines)}\n<p class="note">{legend}</p>'


def curves(named: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """Losses over steps, laid over each other; those of one name have one colour.

    Returns "" when there is no curve of at least two points.
    """
    finite = [
        (name, [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)])
        for name, points in named
    ]
    drawn = [(name, _thinned(points)) for name, points in finite if len(points) > 1]
    if not drawn:
        return ""
    every = [point for _, points in drawn for point in points]
    frame = _Frame(
        (min(x for x, _ in every), max(x for x, _ in every)),
        (min(y for _, y in every), max(y for _, y in every)),
    )
    names = list(dict.fromkeys(name for name, _ in drawn))
    colors = {name: f"var(--curve{at % _CURVES})" for at, name in enumerate(names)}
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="losses over '
        'steps">',
        *frame.axes(),
    ]
    for name, points in drawn:
        path = "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)
        # The first lies below the others: it is drawn wider, so that it shows where they are equal.
        width = ' style="stroke-width:4.5"' if name == names[0] and len(names) > 1 else ""
        parts.append(
            f'<path d="M{path}" stroke="{colors[name]}"{width}>'
            f"<title>{html.escape(name)}</title></path>"
        )
    legend = html_page.keys([(colors[name], name) for name in names])
    drawing = "\n".join([*parts, "</svg>"])
    return f'{legend}\n<div class="wide">{drawing}</div>'


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = -(-len(points) // _MOST_POINTS)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


class _Frame:
    """Places numbers in a plot."""

    def __init__(self, across: tuple[float, float], up: tuple[float, float]) -> None:
        self._across, self._up = _opened(across), _opened(up)

    def x(self, value: float) -> float:
        low, high = self._across
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - 8)

    def y(self, value: float) -> float:
        low, high = self._up
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    def axes(self) -> list[str]:
        """Lines with their numbers, and the word below."""
        parts = []
        for value in ticks(*self._up):
            at = self.y(value)
            parts.append(f'<path class="axis" d="M{_LEFT} {at:.1f}H{_WIDTH - 8}"/>')
            parts.append(
                f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>'
            )
        below = _HEIGHT - _BOTTOM + 15
        parts += [
            f'<text x="{self.x(value):.1f}" y="{below}" text-anchor="middle">{value:g}</text>'
            for value in ticks(*self._across)
        ]
        middle = (_LEFT + _WIDTH) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 3}" text-anchor="middle">step</text>')
        return parts


def _opened(span: tuple[float, float]) -> tuple[float, float]:
    """With room between its ends."""
    low, high = span
    room = max(abs(low), abs(high), 1e-9) * 1e-6
    return (low, high) if high - low > room else (low - room - 0.5, high + room + 0.5)


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` of them."""
    rough = (high - low) / max(1, most - 1)
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]
