"""Bars on tracks over time: painted by matplotlib, or on a page for a browser.

`infinity trace` shows recorded steps, `infinity plan` a simulated one. A page is one HTML file with
a timeline to zoom into and tables. Its frame is `page.html`: style, script, and places for what
this module fills in. It may load nothing (its Content-Security-Policy says so), and its tables are
there without a script.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from infinity.checkpoint.durable import replace_file
from infinity.errors import UnsupportedError, refusing
from infinity.sizes import format_nbytes

# What a colour means in every picture: the passes of compute, what is moved or updated, and waits.
COLORS = {
    "forward": "#1d6fa5",
    "backward": "#7b5ea7",
    "weights": "#2a7f62",
    "state": "#e09f3e",
    "gradients": "#c1121f",
    "layer inputs": "#17a2a8",
    "waiting": "#e58ab0",
    "other": "#8d99ae",
}
_KINDS = {
    "parameters": "weights", "decoded": "weights", "master": "state", "moments": "state",
    "exp_avg": "state", "exp_avg_sq": "state", "momentum_buffer": "state", "norms": "gradients",
    "input": "layer inputs", "inputs": "layer inputs", "activations": "layer inputs",
}  # fmt: skip
_TITLE_LENGTH = 80  # Characters of a line: a phone shows the words of narrow pictures.
_BAR_HEIGHT = 0.8
_LEAST_NAMED_SHARE = 0.06  # Of the width; the name of a shorter interval does not fit.


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one color on one track: (start, length) in the unit of the time axis.

    `color` is "#rrggbb". `names`, if any, has a text for each bar, which a page shows.
    """

    color: str
    bars: Sequence[tuple[float, float]]
    names: Sequence[str] = ()


# The cells of a row of a table, and a share from 0 to 1 that is drawn as a bar behind the first.
PageRow = tuple[Sequence[str], float | None]


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table. Cells after the first one are figures. `note` is a line below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[PageRow]
    note: str = ""


@dataclass(frozen=True, slots=True)
class TrackPicture:
    """A picture of tracks over time, from the top down.

    `tracks` are (label, bars). `intervals`, if any, make a row above the tracks, with their names
    where these fit. `edges` are vertical lines. `legend` gives the meaning of colors. The time axis
    goes from `start` to `end`; without `end` it shows every bar. `unit_s` is the length of its unit
    in seconds. A page shows the picture under its `name`, with its `tables`.
    """

    title: str
    time_label: str
    tracks: Sequence[tuple[str, Sequence[Bars]]]
    intervals: Sequence[Bars] = ()
    edges: Sequence[float] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    start: float = 0.0
    end: float | None = None
    unit_s: float = 1.0
    name: str = "step"
    tables: Sequence[PageTable] = ()


def kind_of_bytes(name: str) -> str:
    """Returns the kind, a key of `COLORS`, of what a transfer or an update is named after: "state"
    of "master of block 3"."""
    word = name.partition(" ")[0]
    kind = _KINDS.get(word, word)
    return kind if kind in COLORS else "other"


def bars_of(named: Iterable[tuple[str, float, float, str]]) -> list[Bars]:
    """Returns the bars of a track, one group a kind, of (kind, start, length, name)."""
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for kind, start, length, name in named:
        groups.setdefault(kind, []).append((start, length, name))
    return [
        Bars(COLORS[kind], [bar[:2] for bar in group], [bar[2] for bar in group])
        for kind, group in groups.items()
    ]


def legend_of(tracks: Sequence[tuple[str, Sequence[Bars]]]) -> dict[str, str]:
    """Returns the kinds whose colours are on the tracks."""
    shown = {bars.color for _, groups in tracks for bars in groups if bars.bars}
    return {kind: color for kind, color in COLORS.items() if color in shown}


def find_pyplot() -> Any:
    """Returns pyplot, set to paint files. Raises UnsupportedError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib, which is not installed: pip install 'infinity-offload[plot]'"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def paint(path: Path, *pictures: TrackPicture) -> None:
    """Writes the pictures, one below the other, in the format of the suffix of `path`. A PNG has
    their titles as its description.

    Raises UnsupportedError without matplotlib, ConfigError when the file cannot be written.
    """
    pyplot = find_pyplot()
    heights = [1.1 + 0.45 * _num_rows(picture) for picture in pictures]
    figure, axes = pyplot.subplots(
        len(pictures), figsize=(8, sum(heights)), squeeze=False, height_ratios=heights
    )
    for picture, axis in zip(pictures, axes[:, 0], strict=True):
        _paint_tracks(axis, picture)
    figure.tight_layout()
    titles = {"Description": "\n".join(picture.title for picture in pictures)}
    metadata = titles if path.suffix == ".png" else None
    try:
        with refusing(f"cannot write the picture {str(path)!r}", OSError, ValueError):
            figure.savefig(path, dpi=130, bbox_inches="tight", metadata=metadata)
    finally:
        pyplot.close(figure)


def _num_rows(picture: TrackPicture) -> int:
    return len(picture.tracks) + (1 if picture.intervals else 0)


def _paint_tracks(axis: Any, picture: TrackPicture) -> None:
    first = 1 if picture.intervals else 0
    num_rows = _num_rows(picture)
    ends = [start + length for group in picture.intervals for start, length in group.bars]
    width = picture.end or max(ends, default=0)
    for group in picture.intervals:
        place = (-_BAR_HEIGHT / 2, _BAR_HEIGHT)
        axis.broken_barh(group.bars, place, color=group.color, linewidth=0)
        for (start, length), name in zip(group.bars, group.names, strict=True):
            if length > _LEAST_NAMED_SHARE * width:
                middle = start + length / 2
                axis.text(middle, 0, name, ha="center", va="center", fontsize=8, clip_on=True)
    for row, (_, groups) in enumerate(picture.tracks, start=first):
        for group in groups:
            place = (row - _BAR_HEIGHT / 2, _BAR_HEIGHT)
            axis.broken_barh(group.bars, place, color=group.color, linewidth=0)
    axis.set_yticks(range(first, num_rows), [label for label, _ in picture.tracks])
    axis.set_ylim(num_rows - 0.5, -0.6)
    if picture.end is not None:
        axis.set_xlim(picture.start, picture.end)
    for edge in picture.edges:
        axis.axvline(edge, color="black", linewidth=0.8)
    axis.set_xlabel(picture.time_label)
    axis.set_title(textwrap.fill(picture.title, _TITLE_LENGTH), loc="left", fontsize=9.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    if picture.legend:
        from matplotlib.patches import Patch

        patches = [Patch(color=color, label=label) for label, color in picture.legend.items()]
        axis.legend(
            handles=patches, loc="upper center", bbox_to_anchor=(0.4, 0), frameon=False,
            ncols=len(patches), columnspacing=1.2, handlelength=1.2, borderaxespad=4,
        )  # fmt: skip


# -- The page --------------------------------------------------------------------------------------


def link_row(title: str, nbytes: int, busy_s: float, share: float, rate: str) -> PageRow:
    """Returns the row of a link in a table with the columns `LINK_COLUMNS`."""
    cells = (title, format_nbytes(nbytes), milliseconds(busy_s), f"{share:.0%}", rate)
    return cells, share


LINK_COLUMNS = ("link", "bytes", "busy", "of the step", "while busy")


def milliseconds(seconds: float) -> str:
    """Returns a time in seconds from one second on, in milliseconds below."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


_DIGITS = 7  # Of a time on a page: a bar is drawn to a millionth of the step.


def write_page(path: Path, title: str, views: Sequence[TrackPicture]) -> None:
    """Writes the page, whole or not at all. Raises ConfigError when it cannot be written."""
    with refusing(f"cannot write the page {str(path)!r}", OSError):
        replace_file(path, page_of(title, views))


def page_of(title: str, views: Sequence[TrackPicture]) -> str:
    """Returns the page. The last view is shown first: in a recording it is the steadiest step."""
    frame = (
        resources.files("infinity.tools.pictures").joinpath("page.html").read_text(encoding="utf-8")
    )
    sections = []
    for number, view in enumerate(views):
        finding = html.escape(view.title).replace("\n", "<br>")
        tables = "\n".join(map(_table, view.tables))
        sections.append(
            f'<section data-view="{number}"><h2>{finding}</h2>\n'
            f'<div class="tables">\n{tables}\n</div></section>'
        )
    # A "<" cannot end the script element that holds the data.
    data = json.dumps([_data_of(view) for view in views], separators=(",", ":"))
    filled = {
        "title": html.escape(title),
        "views": "\n".join(sections),
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], frame)  # In one pass.


def _table(table: PageTable) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "\n".join(_row(row) for row in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f"<figure><figcaption>{html.escape(table.title)}</figcaption>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>{note}</figure>"
    )


def _row(row: PageRow) -> str:
    (first, *others), share = row
    bar = ""
    if share is not None:
        bar = f' class="share" style="--share:{100 * min(max(share, 0.0), 1.0):.2f}%"'
    cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
    return f"<tr><td{bar}>{html.escape(first)}</td>{cells}</tr>"


def _data_of(view: TrackPicture) -> dict[str, Any]:
    """Returns what the script draws: bars as [start, length, color, name], each by its number."""
    return {
        "name": view.name,
        "axis": view.time_label,
        "unit": view.unit_s,
        "start": view.start,
        "end": view.end,
        "edges": list(view.edges),
        "legend": dict(view.legend),
        "stretches": [
            [_short(start), _short(length), name]
            for group in view.intervals
            for (start, length), name in zip(group.bars, group.names, strict=True)
        ],
        "tracks": [_track_data(label, groups) for label, groups in view.tracks],
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
