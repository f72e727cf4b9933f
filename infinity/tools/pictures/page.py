"""Pictures of tracks as one HTML file: a timeline to zoom into, and tables. Needs no network.

`infinity trace view` writes a recorded step per view, `infinity plan --html` a simulated one. The
frame is `page.html`: style, script, and places for what this module fills in. The page may load
nothing (its Content-Security-Policy says so), and its tables are there without a script.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.tools.pictures.painter import Bars, TrackPicture

_DIGITS = 7  # Of a time on a page: a bar is drawn to a millionth of the step.


@dataclass(frozen=True, slots=True)
class PageRow:
    """A row of a table. `share`, from 0 to 1, is drawn as a bar behind the first cell."""

    cells: Sequence[str]
    share: float | None = None


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table. Cells after the first one are figures. `note` is a line below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[PageRow]
    note: str = ""


@dataclass(frozen=True, slots=True)
class PageView:
    """A timeline and its tables: one step. `picture.title` says the finding."""

    name: str
    picture: TrackPicture
    tables: Sequence[PageTable]


def write_page(path: Path, title: str, views: Sequence[PageView]) -> None:
    """Writes the page, whole or not at all. Raises ConfigError when it cannot be written."""
    text = page_of(title, views)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the page {str(path)!r}: {error.strerror}") from None


def page_of(title: str, views: Sequence[PageView]) -> str:
    """Returns the page. The last view is shown first: in a recording it is the steadiest step."""
    frame = (
        resources.files("infinity.tools.pictures").joinpath("page.html").read_text(encoding="utf-8")
    )
    # A "<" cannot end the script element that holds the data.
    data = json.dumps([_data_of(view) for view in views], separators=(",", ":"))
    filled = {
        "title": html.escape(title),
        "views": "\n".join(_section(number, view) for number, view in enumerate(views)),
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], frame)  # In one pass.


def _section(number: int, view: PageView) -> str:
    finding = html.escape(view.picture.title).replace("\n", "<br>")
    tables = "\n".join(_table(table) for table in view.tables)
    return (
        f'<section data-view="{number}"><h2>{finding}</h2>\n'
        f'<div class="tables">\n{tables}\n</div></section>'
    )


def _table(table: PageTable) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "\n".join(_row(row) for row in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f"<figure><figcaption>{html.escape(table.title)}</figcaption>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>{note}</figure>"
    )


def _row(row: PageRow) -> str:
    bar = ""
    if row.share is not None:
        width = 100 * min(max(row.share, 0.0), 1.0)
        bar = f' class="share" style="--share:{width:.2f}%"'
    first, *others = row.cells
    cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
    return f"<tr><td{bar}>{html.escape(first)}</td>{cells}</tr>"


def _data_of(view: PageView) -> dict[str, Any]:
    """Returns what the script draws: bars as [start, length, color, name], each by its number."""
    picture = view.picture
    return {
        "name": view.name,
        "axis": picture.time_label,
        "unit": picture.unit_s,
        "start": picture.start,
        "end": picture.end,
        "edges": list(picture.edges),
        "legend": dict(picture.legend),
        "stretches": [
            [_short(interval.start), _short(interval.length), interval.name]
            for interval in picture.intervals
        ],
        "tracks": [_track_data(label, groups) for label, groups in picture.tracks],
    }


def _track_data(label: str, groups: Sequence[Bars]) -> dict[str, Any]:
    names: dict[str, int] = {}
    bars: list[list[float]] = []
    for color, group in enumerate(groups):
        for place, (start, length) in enumerate(group.bars):
            name = group.names[place] if group.names else ""
            number = names.setdefault(name, len(names))
            bars.append([_short(start), _short(length), color, number])
    bars.sort()
    colors = [group.color for group in groups]
    return {"label": label, "colors": colors, "names": list(names), "bars": bars}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
