"""Pages that refer to no other file: the receipt of a comparison, the page of a run's report.

They have the reader's own fonts, follow the system's choice of light or dark, and fit narrow
windows. Colours are named in the style, `var(--data)`, so that both choices have theirs.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2126; --faint: #646c76; --line: #d8dce1;
  --soft: #f1f3f5; --track: #e9ecef; --compute: #7fb77e; --exposed: #4c86c6; --data: #e0a33e;
  --overhead: #a487c4; --kept: #3a8f2e; --other: #b4bac1; --heat: #c2410c; --memory: #5b8f99;
  --curve0: #7d858e; --curve1: #c2410c; --curve2: #2f6fb5; --curve3: #3a8f2e; --curve4: #8b5fbf;
  --curve5: #b08800; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e4e7ea; --faint: #98a1ab;
  --line: #363c43; --soft: #1e2226; --track: #272c32; --compute: #5f9a63; --exposed: #5c97d8;
  --data: #d39a3c; --overhead: #9c80bd; --kept: #57ab4a; --other: #5d656e; --heat: #ff7a3c;
  --memory: #5f9aa6; --curve0: #9aa3ad; --curve1: #ff8a50; --curve2: #6ba7ea; --curve3: #62b957;
  --curve4: #b590e0; --curve5: #d6b13c; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 0 auto;
  padding: 1.5em 1em 3em; background: var(--page); color: var(--ink); }
h1 { font-size: 1.5em; margin: 0 0 .4em; } h2 { font-size: 1.15em; margin: 2em 0 .5em; }
h3 { font-size: 1em; margin: 1.4em 0 .3em; } p { margin: .5em 0; }
pre { background: var(--soft); padding: .6em; overflow-x: auto; border-radius: 4px; }
.note { color: var(--faint); } .verdict { font-size: 1.15em; }
table { border-collapse: collapse; } td, th { padding: .2em 1em .2em 0; text-align: left; }
th { font-weight: 600; vertical-align: top; } svg { max-width: 100%; height: auto; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } .wide td { white-space: nowrap; }
.wide td:last-child { white-space: normal; min-width: 12em; }
.bar { display: flex; height: 1.2em; background: var(--track); border-radius: 3px;
  overflow: hidden; }
.bar span { display: block; height: 100%; }
.keys { display: flex; flex-wrap: wrap; gap: .1em 1.2em; margin: .5em 0; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.rows { display: grid; grid-template-columns: max-content minmax(0, 1fr) max-content;
  gap: .35em .9em; align-items: center; }
.rows > .name { font-weight: 600; overflow-wrap: anywhere; }
.rows > .words { color: var(--faint); font-variant-numeric: tabular-nums; }
.cells { display: block; width: 100%; height: 1.3em; background: var(--track);
  border-radius: 3px; shape-rendering: crispEdges; }
.choice { border-top: 1px solid var(--line); padding: .7em 0 .8em; }
.choice p { margin: 0 0 .4em; } .what { font-weight: 600; }
.tag { border-radius: 3px; padding: 0 .45em; background: var(--soft); color: var(--faint);
  font-size: .9em; white-space: nowrap; }
.tag.kept { background: var(--kept); color: var(--page); }
.plot text { font-size: 12px; fill: var(--faint); } .plot { width: 100%; min-width: 42em; }
.plot path { fill: none; stroke-width: 1.6; } .plot .axis { stroke: var(--line); }
.light { background: #fff; }
@media (max-width: 38em) { .rows { grid-template-columns: 1fr; gap: .1em; }
  .rows > .words { margin-bottom: .6em; font-size: .93em; } body { padding-top: 1em; } }
"""


def write(path: Path, *, title: str, heading: str, body: str) -> None:
    """Write a page; its folder is made.

    Args:
        path: where to.
        title: of the browser's window, plain text.
        heading: at its top, plain text.
        body: HTML, with what is not ours escaped.
    """
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{html.escape(heading)}</h1>\n{body}\n</body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of files may be no text.
    path.write_text(page, encoding="utf-8", errors="replace")


def fields(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values, both plain text."""
    cells = "\n".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>\n{cells}\n</table>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a line of headings, all plain text; what is a number stands to the right."""
    numbers = [
        any(row[at][:1].isdigit() for row in rows)
        and all(row[at][:1].isdigit() or not row[at] for row in rows)
        for at in range(len(columns))
    ]
    kinds = [' class="number"' if is_number else "" for is_number in numbers]
    head = "".join(
        f"<th{kind}>{html.escape(name)}</th>" for kind, name in zip(kinds, columns, strict=True)
    )
    lines = []
    for row in rows:
        cells = zip(kinds, row, strict=True)
        lines.append("".join(f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in cells))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def bar(parts: Sequence[tuple[float, str, str]]) -> str:
    """A bar of parts of a whole: share (0 to 1), colour, and the words that a mouse shows."""
    spans = "".join(
        f'<span style="width:{100 * max(0.0, min(1.0, share)):.2f}%;background:{color}"'
        f' title="{html.escape(words)}"></span>'
        for share, color, words in parts
    )
    return f'<div class="bar">{spans}</div>'


def rows(lines: Sequence[tuple[str, str, str]]) -> str:
    """Lines of a name (plain text), a drawing (HTML) and words (plain text), below each other."""
    cells = "\n".join(
        f'<div class="name">{html.escape(name)}</div><div>{drawing}</div>'
        f'<div class="words">{html.escape(words)}</div>'
        for name, drawing, words in lines
    )
    return f'<div class="rows">\n{cells}\n</div>'


def keys(entries: Sequence[tuple[str, str]]) -> str:
    """Return the key to the colours: colour and words (plain text) of each."""
    spans = "".join(
        f'<span><span class="key" style="background:{color}"></span>{html.escape(words)}</span>'
        for color, words in entries
    )
    return f'<div class="keys">{spans}</div>'
