"""The results of a run: rows, JSON with every sample and the environment, tables in columns that
readers of fio and nvbandwidth look for, and plots. The title of each panel of these says what its
figures show, computed from them."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from infinity.config.extras import installed
from infinity.config.machine import host_memory, read_field, read_text
from infinity.storage.arena import Arena
from infinity.tools.bench import fio
from infinity.tools.bench.measure import (
    Comparison,
    SampleSummary,
    bandwidth_of,
    cpu_s_per_gb,
    paired_ratios,
    short_size,
    summarize,
    verdict,
)
from infinity.tools.bench.nvme import KINDS
from infinity.tools.doctor.paths import find_block, find_mount
from infinity.tools.pictures.timeline import find_pyplot

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Against:
    """A subject beside one ceiling: `share` is the bandwidth ratio, round by round."""

    name: str
    gb_per_s: SampleSummary
    share: SampleSummary
    cpu_s_per_gb: float | None
    latency_s: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One subject: decimal GB/s, CPU seconds per GB, its ceilings with the fastest first."""

    section: str
    case: str
    subject: str
    nbytes: int
    gb_per_s: SampleSummary
    cpu_s_per_gb: float | None
    ok: bool | None
    latency_s: Mapping[float, float]
    ceilings: tuple[Against, ...]
    labels: Mapping[str, str | int | float]
    note: str


def rows_of(results: Sequence[Comparison]) -> list[Row]:
    """A row per subject, in the order they were measured."""
    rows = []
    pairs = [(result, subject.name) for result in results for subject in result.subjects]
    for result, subject in pairs:
        samples, ceilings = result.samples[subject], []
        for name in (ceiling.name for ceiling in result.ceilings):
            share, figures = paired_ratios(samples, result.samples[name]), _figures(result, name)
            ceilings.append(Against(name=name, share=share, **figures))
        rows.append(
            Row(
                section=result.section, case=result.case, subject=subject,
                nbytes=samples[0].nbytes, **_figures(result, subject), ok=verdict(samples),
                ceilings=tuple(sorted(ceilings, key=lambda against: -against.gb_per_s.median)),
                labels=result.labels, note=result.note,
            )
        )  # fmt: skip
    return rows


def _figures(result: Comparison, name: str) -> dict[str, Any]:
    """Returns what a contender has measured: its latency is the median over rounds of every
    quantile that all rounds took."""
    samples = result.samples[name]
    points = set.intersection(*(set(sample.latency_s) for sample in samples))
    return {
        "gb_per_s": bandwidth_of(samples),
        "cpu_s_per_gb": cpu_s_per_gb(samples),
        "latency_s": {
            point: summarize([sample.latency_s[point] for sample in samples]).median
            for point in sorted(points)
        },
    }


def to_json(results: Sequence[Comparison], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Everything: environment, rows, and each sample, so that other statistics can be taken."""
    return {
        "format": FORMAT,
        "units": "decimal GB/s (10^9 bytes), seconds, bytes",
        "environment": dict(environment),
        "rows": [asdict(row) for row in rows_of(results)],
        "samples": [
            {
                "section": result.section,
                "case": result.case,
                "labels": dict(result.labels),
                "contender": name,
                "rounds": [asdict(sample) for sample in samples],
            }
            for result in results
            for name, samples in result.samples.items()
        ],
    }


# -- Tables ----------------------------------------------------------------------------------------


_SEARCH = "fio search"


def parts(rows: Sequence[Row]) -> list[RenderableType]:
    """The tables of a run from top to bottom, those without a line left out: bandwidth, then sweeps
    as one grid per operation, then latency, then what went wrong."""
    sweeps = list(dict.fromkeys(row.section for row in rows if row.section.startswith("sweep")))
    plain = [row for row in rows if row.section not in (_SEARCH, "latency", *sweeps)]
    waits = [row for row in rows if row.section == "latency"]
    found: list[RenderableType] = [bandwidth_table(plain)] if plain else []
    found += [sweep_table(name, [row for row in rows if row.section == name]) for name in sweeps]
    found += [latency_table(waits)] if waits else []
    notes = sorted({row.note for row in rows if row.note})
    found += [Text(f"note: {note}", style="yellow") for note in notes]
    found += [
        Text(f"WRONG BYTES: {row.section}, {row.case}, {row.subject}", style="bold red")
        for row in rows
        if row.ok is False
    ]
    return found


def bandwidth_table(rows: Sequence[Row]) -> Table:
    """A line per subject and ceiling. The share is the median of the rounds' own ratios."""
    table = _table(
        "Bandwidth in decimal GB/s, median of interleaved rounds; share of the ceiling beside it",
        "GB/s", "low - high", "share", "low - high", "CPU s/GB",
    )  # fmt: skip
    for section, case in dict.fromkeys((row.section, row.case) for row in rows):
        group = [row for row in rows if (row.section, row.case) == (section, case)]
        table.add_section()
        table.add_row(Text(section, style="bold"))
        table.add_row(Text(f" {case}", style="dim"))
        for row in group:
            share = row.ceilings[0].share if row.ceilings else None
            _add(table, f"  {row.subject}", row, share, _verdict(row.ok))
        for index, ceiling in enumerate(group[0].ceilings):
            # The subject's line has the share of the best ceiling.
            title = Text(f"    {'beside' if index else 'ceiling'}: {ceiling.name}", style="dim")
            _add(table, title, ceiling, ceiling.share if index and len(group) == 1 else None)
    return table


def _add(
    table: Table,
    title: str | Text,
    of: Row | Against,
    share: SampleSummary | None,
    ok: Text | str = "",
) -> None:
    shares = ("", "") if share is None else (f"{share.median:.2f}", _spread(share))
    median = f"{of.gb_per_s.median:.2f}"
    cpu = "-" if of.cpu_s_per_gb is None else f"{of.cpu_s_per_gb:.4f}"
    table.add_row(title, median, _spread(of.gb_per_s), *shares, cpu, ok)


def sweep_table(section: str, rows: Sequence[Row]) -> Table:
    """Extent sizes down, depths across; the ceiling is that of the same rounds."""
    depths = dict.fromkeys(row.subject for row in rows)
    title = f"{section}: GB/s by extent and queue depth (share of the ceiling)"
    table = _table(title, *depths, "ceiling", "CPU s/GB", first="extents")
    for case in dict.fromkeys(row.case for row in rows):
        line = [row for row in rows if row.case == case]
        ceilings = line[0].ceilings
        table.add_row(
            short_size(float(line[0].labels["extent_nbytes"])),
            *[
                f"{row.gb_per_s.median:.2f}"
                + "".join(f" ({best.share.median:.2f})" for best in row.ceilings[:1])
                for row in line
            ],
            f"{ceilings[0].gb_per_s.median:.2f} {ceilings[0].name}" if ceilings else "-",
            _range([row.cpu_s_per_gb for row in line if row.cpu_s_per_gb is not None]),
            _verdict(all(row.ok for row in line)),
        )
    return table


def latency_table(rows: Sequence[Row]) -> Table:
    """Milliseconds from request to answer, one request at a time."""
    table = _table("Latency of single reads in milliseconds", "p50", "p90", "p99")
    for case in dict.fromkeys(row.case for row in rows):
        group = [row for row in rows if row.case == case]
        table.add_row(Text(case, style="bold"))
        for row in group:
            table.add_row(f"  {row.subject}", *_latencies(row.latency_s), _verdict(row.ok))
        for ceiling in group[0].ceilings:
            label = Text(f"    ceiling: {ceiling.name}", style="dim")
            table.add_row(label, *_latencies(ceiling.latency_s))
    return table


def _table(title: str, *figures: str, first: str = "") -> Table:
    """Returns a table with columns of figures between what was measured and the verdict."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold", min_width=0 if first else 30)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bytes", no_wrap=True)
    return table


def _latencies(latency_s: Mapping[float, float]) -> list[str]:
    return [
        f"{1e3 * latency_s[point]:.2f}" if point in latency_s else "-" for point in (0.5, 0.9, 0.99)
    ]


def _spread(of: SampleSummary) -> str:
    return f"{of.low:.2f} - {of.high:.2f}"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} - {high}"


def _verdict(ok: bool | None) -> Text:
    if ok is None:
        return Text("-", style="dim")
    return Text("equal", style="green") if ok else Text("WRONG", style="bold red")


# -- The environment, so that two results can be compared ------------------------------------------


_PACKAGES = ("infinity-offload", "numpy", "torch")


def environment_of(
    directories: Sequence[Path], arena: Arena, root: Path = Path("/")
) -> dict[str, Any]:
    """Machine, memory, versions, the file system and drive of each directory, and the command."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in _PACKAGES},
        "fio": fio.version(),
        "cpu": read_field(root / "proc/cpuinfo", "model name") or platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "available_memory_nbytes": host_memory(root).nbytes,
        "transparent_huge_pages": read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        "arena_nbytes": arena.capacity_nbytes,
        "arena_huge_page_nbytes": arena.huge_page_nbytes,
        "paths": [drive(directory, root) for directory in directories],
    }


def drive(directory: Path, root: Path = Path("/")) -> dict[str, Any]:
    """File system and drive behind a directory; None for what the system does not say."""
    found = os.statvfs(directory)
    block = find_block(root, directory.stat().st_dev)
    mounts = read_text(root / "proc/self/mountinfo") or ""
    mount = find_mount(os.path.realpath(directory), mounts)
    return {
        "path": str(directory),
        "mount": mount and mount.point,
        "file_system": mount and mount.kind,
        "options": mount and mount.options,
        "size_nbytes": found.f_blocks * found.f_frsize,
        "free_nbytes": found.f_bavail * found.f_frsize,
        "drive": block and block.name,
        "model": block and read_text(block / "device/model"),
        "scheduler": block and read_text(block / "queue/scheduler"),
        "max_request_kib": block and read_text(block / "queue/max_sectors_kb"),
        "num_requests": block and read_text(block / "queue/nr_requests"),
    }


# -- Plots -----------------------------------------------------------------------------------------

_CEILING = {"color": "black", "linestyle": "--", "linewidth": 1.2}
_BAND_ALPHA = 0.15


def save_plots(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Writes one PNG for each kind of figure that the rows hold: bandwidth over extent size,
    scaling over paths, distribution of latency. Returns them.

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
    kinds = [kind for kind in KINDS if any(row.section == f"sweep {kind}" for row in rows)]
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
    for kind in KINDS:
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
    for kind in KINDS:
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
