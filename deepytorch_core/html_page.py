"""Pages that refer to no other file: the receipt of a comparison, the page of a run's report."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } pre { background: #f4f4f4; padding: .6em; overflow-x: auto; }
h2 { font-size: 1.1em; margin-top: 1.6em; } .note { color: #666; }
table { border-collapse: collapse; } td, th { padding: .2em 1em .2em 0; text-align: left; }
th { font-weight: 600; vertical-align: top; } svg { max-width: 100%; height: auto; }
td.number { text-align: right; } .verdict { font-size: 1.15em; }
.bar { display: flex; height: 1.2em; background: #eee; border-radius: 3px; overflow: hidden;
  min-width: 18em; }
.bar span { display: block; height: 100%; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
.wide { overflow-x: auto; }
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
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{html.escape(heading)}</h1>\n{body}\n</body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def fields(rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values, both plain text."""
    cells = "\n".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>\n{cells}\n</table>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a line of headings, all plain text; what is a number stands to the right."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = []
    for row in rows:
        kinds = (' class="number"' if cell[:1].isdigit() else "" for cell in row)
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
