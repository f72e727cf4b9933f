"""The results of a run: rows, JSON with every sample and the environment, and tables in the columns
that readers of fio and nvbandwidth look for."""

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
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from infinity.config.extras import installed
from infinity.config.machine import host_memory, read_field, read_text
from infinity.storage.arena import Arena
from infinity.tools.bench import fio
from infinity.tools.bench.measure import (
    Comparison,
    Measurement,
    SampleSummary,
    bandwidth_of,
    cpu_s_per_gb,
    paired_ratios,
    short_size,
    summarize,
    verdict,
)
from infinity.tools.doctor.paths import find_block, find_mount

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
    return [_row_of(result, subject.name) for result in results for subject in result.subjects]


def _row_of(result: Comparison, subject: str) -> Row:
    samples, ceilings = result.samples[subject], []
    for ceiling in result.ceilings:
        other = result.samples[ceiling.name]
        share, latency_s = paired_ratios(samples, other), _median_latency(other)
        cpu = cpu_s_per_gb(other)
        ceilings.append(Against(ceiling.name, bandwidth_of(other), share, cpu, latency_s))
    return Row(
        section=result.section,
        case=result.case,
        subject=subject,
        nbytes=samples[0].nbytes,
        gb_per_s=bandwidth_of(samples),
        cpu_s_per_gb=cpu_s_per_gb(samples),
        ok=verdict(samples),
        latency_s=_median_latency(samples),
        ceilings=tuple(sorted(ceilings, key=lambda against: -against.gb_per_s.median)),
        labels=result.labels,
        note=result.note,
    )


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


def _median_latency(samples: Sequence[Measurement]) -> dict[float, float]:
    """The median over rounds of every quantile that all rounds took."""
    points = set.intersection(*(set(sample.latency_s) for sample in samples))
    return {
        point: summarize([sample.latency_s[point] for sample in samples]).median
        for point in sorted(points)
    }


# -- Tables ----------------------------------------------------------------------------------------


_SEARCH = "fio search"


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Bandwidth, then sweeps as one grid per operation, then latency, then what went wrong."""
    for part in parts(rows):
        console.print(part)


def parts(rows: Sequence[Row]) -> list[RenderableType]:
    """The tables of a run from top to bottom; those without a line are left out."""
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
