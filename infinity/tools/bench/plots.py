"""Pictures of a run: bandwidth over extent size, scaling over paths, distribution of latency.

The title of each panel says what its figures show, computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.tools.bench.measure import short_size
from infinity.tools.bench.report import Against, Row
from infinity.tools.pictures.timeline import find_pyplot

_OPERATIONS = ("read", "write", "mixed")
_CEILING = {"color": "black", "linestyle": "--", "linewidth": 1.2}
_BAND_ALPHA = 0.15


def save(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Writes one PNG per kind of figure that the rows hold; returns them.

    Raises UnsupportedError without matplotlib.
    """
    pyplot = find_pyplot()
    directory.mkdir(parents=True, exist_ok=True)
    saved = []
    for name, draw in (("sizes", _sizes), ("stripes", _stripes), ("latency", _latency)):
        figure = draw(pyplot, rows)
        if figure is None:
            continue
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=130, bbox_inches="tight")
        pyplot.close(figure)
        saved.append(path)
    return saved


def _sizes(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Bandwidth over extent size: a line per depth with its spread, the ceiling dashed."""
    kinds = [kind for kind in _OPERATIONS if any(row.section == f"sweep {kind}" for row in rows)]
    if not kinds:
        return None
    figure, axes = _panels(pyplot, len(kinds), 4.6, 3.8)
    for kind, axis in zip(kinds, axes, strict=True):
        own = [row for row in rows if row.section == f"sweep {kind}"]
        for depth in dict.fromkeys(row.subject for row in own):
            line = [row for row in own if row.subject == depth]
            axis.plot(_extents(line), _medians(line), marker="o", ms=4, label=depth)
            low, high = ([getattr(row.gb_per_s, end) for row in line] for end in ("low", "high"))
            axis.fill_between(_extents(line), low, high, alpha=_BAND_ALPHA)
        first = [row for row in own if row.subject == own[0].subject and row.ceilings]
        if first:
            name = f"compared with {first[0].ceilings[0].name}"
            axis.plot(_extents(first), _ceilings(first), label=name, **_CEILING)
        sizes = sorted(set(_extents(own)))
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [short_size(size) for size in sizes], rotation=45)
        axis.minorticks_off()
        _finish(axis, _best_of(kind, own), "extent")
        axis.legend(fontsize="small", loc="lower right")
    figure.suptitle("Bandwidth by size of extent and requests in flight", y=1.06)
    axes[0].set_ylabel("GB/s, median and spread")
    axes[0].set_ylim(bottom=0)  # Shared, and fixed from here on: after everything is drawn.
    return figure


def _stripes(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Bandwidth over the number of paths; ideal is the first path times their number."""
    own = [row for row in rows if row.section.startswith("stripes ")]
    if len({row.labels["num_paths"] for row in own}) < 2:
        return None
    figure, (axis,) = _panels(pyplot, 1, 5, 3.8)
    for kind in _OPERATIONS:
        line = [row for row in own if row.section == f"stripes {kind}"]
        if not line:
            continue
        counts = [int(row.labels["num_paths"]) for row in line]
        low = [row.gb_per_s.median - row.gb_per_s.low for row in line]
        high = [row.gb_per_s.high - row.gb_per_s.median for row in line]
        drawn = axis.errorbar(
            counts, _medians(line), [low, high], marker="o", capsize=3, label=kind
        )
        if all(row.ceilings for row in line):
            color, name = drawn.lines[0].get_color(), f"{kind}, {line[0].ceilings[0].name}"
            axis.plot(counts, _ceilings(line), linestyle="--", color=color, label=name)
    axis.set_xticks(sorted({int(row.labels["num_paths"]) for row in own}))
    _finish(axis, _gain_of(own), "paths")
    axis.set_ylabel("GB/s, median and spread")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="small")
    return figure


def _latency(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Share of requests answered within a time; one panel per extent size."""
    from matplotlib import ticker

    own = [row for row in rows if row.section == "latency" and row.latency_s]
    cases = list(dict.fromkeys(_extents(own)))
    if not cases:
        return None
    figure, axes = _panels(pyplot, len(cases), 4.2, 3.6)
    for size, axis in zip(cases, axes, strict=True):
        group = [row for row in own if _extents([row]) == [size]]
        for row in group:
            axis.plot(*_answered(row), marker="o", ms=3, label=row.subject)
        for ceiling in group[0].ceilings:
            axis.plot(*_answered(ceiling), label=f"compared with {ceiling.name}", **_CEILING)
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        is_wide = high > 50 * low  # More labels than that run into each other.
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if is_wide else (1, 2, 3, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        _finish(axis, _median_of(size, group), "milliseconds", grid="both")
        axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.suptitle("Share of requests answered within a time; titles: the median", y=1.06)
    axes[0].set_ylabel("share of requests answered")
    return figure


def _panels(pyplot: Any, count: int, width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure and its panels, side by side with one vertical axis."""
    size = (width * count, height)
    figure, axes = pyplot.subplots(1, count, figsize=size, sharey=True, squeeze=False)
    return figure, axes[0]


def _finish(axis: Any, title: str, label: str, grid: str = "major") -> None:
    axis.set_title(title, fontsize="medium")
    axis.set_xlabel(label)
    axis.grid(alpha=0.3, which=grid)


def _extents(rows: Sequence[Row]) -> list[float]:
    return [float(row.labels["extent_nbytes"]) for row in rows]


def _medians(rows: Sequence[Row]) -> list[float]:
    return [row.gb_per_s.median for row in rows]


def _ceilings(rows: Sequence[Row]) -> list[float]:
    return [row.ceilings[0].gb_per_s.median for row in rows]


def _answered(of: Row | Against) -> tuple[list[float], list[float]]:
    """Returns milliseconds, and the share of requests that were answered by then."""
    points = sorted(of.latency_s)
    return [1e3 * of.latency_s[point] for point in points], points


def _best_of(kind: str, rows: Sequence[Row]) -> str:
    """Returns the highest median bandwidth, and its share of what it was compared with."""
    best = max(rows, key=lambda row: row.gb_per_s.median)
    text = f"{kind}: at most {best.gb_per_s.median:.2f} GB/s"
    if not best.ceilings:
        return text
    ceiling = best.ceilings[0]
    return f"{text},\n{best.gb_per_s.median / ceiling.gb_per_s.median:.0%} of {ceiling.name}"


def _gain_of(rows: Sequence[Row]) -> str:
    """Returns how many times the bandwidth of the fewest paths the most paths have."""
    gains = []
    for kind in _OPERATIONS:
        line = [row for row in rows if row.section == f"stripes {kind}"]
        if len(line) > 1:
            gains.append(f"{kind} {line[-1].gb_per_s.median / line[0].gb_per_s.median:.2f}")
    counts = sorted({int(row.labels["num_paths"]) for row in rows})
    return f"{counts[-1]} paths for {counts[0]}, times the bandwidth:\n{', '.join(gains)}"


def _median_of(size: float, rows: Sequence[Row]) -> str:
    """Returns the lowest median time of an answer, beside that of what it was compared with."""
    times_ms = [1e3 * row.latency_s[0.5] for row in rows if 0.5 in row.latency_s]
    text = f"reads of {short_size(size)}"
    if not times_ms:
        return text
    text += f": {min(times_ms):.2g} ms"
    others = [
        1e3 * ceiling.latency_s[0.5] for ceiling in rows[0].ceilings if 0.5 in ceiling.latency_s
    ]
    return f"{text}\n({rows[0].ceilings[0].name}: {others[0]:.2g} ms)" if others else text
