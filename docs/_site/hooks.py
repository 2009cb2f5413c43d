"""What mkdocs does beyond Markdown: the package as installed, drawings, inline figures.

In a page `<!-- chart: FILE ... -->` stands for a drawing of records in docs/results. Figures in
docs/assets are put into the page itself, so that they take its colours. Each of notebooks/ is
a page of notebooks/, with the output that it was saved with.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import charts  # noqa: E402

_CHART = re.compile(r"<!-- chart: (?P<file>[\w.-]+) (?P<settings>[^>]+) -->")
_FIGURE = re.compile(r"^!\[(?P<text>[^\]]*)\]\((?:\.\./)*(?P<path>assets/[\w.-]+\.svg)\)$", re.M)
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"?(?:https?:)?//[^>]*>"
    r"|<link\b(?![^>]*rel=\"?canonical)[^>]*\shref=\"?(?:https?:)?//[^>]*>"
)
_TABLE = re.compile(r"<table>.*?</table>", re.S)
_TAG = re.compile("<[^>]+>")
_STYLE = re.compile(r"<style>.*?</style>|<!--.*?-->", re.S)


def on_startup(**_: Any) -> None:
    """Lay the packages out as they are installed, before mkdocstrings looks for them."""
    lay_out(ROOT / "build/docs/source")


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = notebook(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = _CHART.sub(lambda found: charts.draw(found["file"], found["settings"]), markdown)
    return _FIGURE.sub(lambda found: figure(found["path"], found["text"]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Tell each cell of a wide table its column: on a phone the cells stand below each other."""
    return _TABLE.sub(lambda table: labelled(table[0]), html)


def labelled(table: str) -> str:
    """A table whose cells know the text of their column's head."""
    heads = [_TAG.sub("", head) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.S)]

    def row(found: re.Match[str]) -> str:
        names = iter(heads)
        return re.sub("<td", lambda _: f'<td data-column="{next(names)}"', found[0])

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.S)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Refuse pages that load anything from elsewhere."""
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        found = _LOADED.search(path.read_text(encoding="utf-8"))
        if found:
            raise ValueError(f"{path} loads from the network: {found[0]}")


def notebook(path: Path) -> str:
    """A notebook as a page: its text, its code, and what that printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        magic = re.match(r"%%(bash)\n|%%(writefile) (\S+)\n", source)
        language = magic[1] or "python" if magic else "python"
        title = f' title="{magic[3]}"' if magic and magic[2] else ""
        parts.append(fence(language + title, source[magic.end() :] if magic else source))
        printed = "".join(_printed(output) for output in cell["outputs"])
        if printed and not title:
            parts.append(fence('text title="Output"', printed))
    where = f"The notebook: `notebooks/{path.name}`. `make test-docs` runs it."
    return "\n\n".join([*parts, where]) + "\n"


def fence(info: str, text: str) -> str:
    return f"```{info}\n{text.rstrip()}\n```"


def _printed(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "".join(output["text"])
    return "".join(output.get("data", {}).get("text/plain", [])) + "\n"


def figure(path: str, text: str) -> str:
    """The drawing itself, without the style that it needs only where it stands alone."""
    drawing = _STYLE.sub("", (ROOT / "docs" / path).read_text(encoding="utf-8"))
    # One block of HTML: an empty line would end it.
    drawing = "\n".join(line for line in drawing.splitlines() if line.strip())
    return f'<figure class="drawing" role="img" aria-label="{text}">\n{drawing}\n</figure>'


def lay_out(folder: Path) -> None:
    """Copies of the sources below `folder`, where an installed package has them."""
    shutil.rmtree(folder, ignore_errors=True)
    places = {"deepytorch": "deepytorch", "deepytorch_core": "deepytorch_core"}
    places |= {f"deepytorch/{name}": name for name in ("integrations", "recipes")}
    for place, source in places.items():
        for path in (ROOT / source).rglob("*.py"):
            target = folder / place / path.relative_to(ROOT / source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
