"""What several benchmarks share: the kernel's own counts, where they ran, rows that are kept.

Nothing but the standard library: it is also imported in the environments of other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any


def process_io() -> dict[str, int]:
    """Bytes that this process has caused to be fetched from and sent to drives (proc(5))."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read_nbytes": int(lines["read_bytes"]), "written_nbytes": int(lines["write_bytes"])}


def high_water_nbytes() -> int:
    """The most memory this process had at once (proc(5), VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise KeyError("VmHWM")


def moved_since(before: dict[str, int]) -> dict[str, int]:
    """What `process_io` has counted since it gave `before`."""
    return {name: count - before[name] for name, count in process_io().items()}


def environment() -> dict[str, Any]:
    """Where and how figures came about."""
    return {
        "command": " ".join(sys.argv),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": version("torch"),
        "load_average": os.getloadavg(),
    }


class Results:
    """Rows by name, written after each, so that a run that is cut keeps what it has.

    Rows that `path` has already stay if they were made with the same settings, so the rest can be
    asked for by themselves. Without a path nothing is written.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = json.loads(json.dumps(settings, default=str))
        self._rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            there = json.loads(path.read_text())
            if there.get("settings") == self._settings:
                self._rows = {row["name"]: row for row in there["results"]}

    def keep(self, row: dict[str, Any]) -> None:
        """`row["name"]` takes the place of a row of that name."""
        self._rows[row["name"]] = row
        if self._path is not None:
            written = {
                "settings": self._settings,
                "environment": environment(),
                "results": self.rows,
            }
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(written, indent=1) + "\n")
            part.replace(self._path)

    def show(self, title: str, columns: Columns, rows: Iterable[Mapping[str, Any]]) -> None:
        """Prints a table, and writes it beside the rows, as text."""
        header, lines = list(columns), [cells_of(columns, row) for row in rows]
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        text = [title] + [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in (header, *lines)
        ]
        print("\n".join(text), flush=True)
        if self._path is not None:
            self._path.with_suffix(".txt").write_text("\n".join(text) + "\n")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())


@contextmanager
def progress(what: str, done: Callable[[], str], every_s: float = 30.0) -> Iterator[None]:
    """Says `what`, the seconds so far and `done()` every `every_s` seconds of a `with` block."""
    over, begun = threading.Event(), time.perf_counter()

    def run() -> None:
        while not over.wait(every_s):
            say(f"  {what}: {time.perf_counter() - begun:.0f} s, {done()}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# By title: a format of the fields of a row, or a function of the row.
Columns = Mapping[str, str | Callable[[Any], str]]


def cells_of(columns: Columns, row: Mapping[str, Any]) -> list[str]:
    return [c.format(**row) if isinstance(c, str) else c(row) for c in columns.values()]


def arguments(
    doc: str, *, path: bool = True, plot: bool = False, quick: str = ""
) -> argparse.ArgumentParser:
    """Returns a parser with the first line of a docstring, and with the options of most programs.
    `quick`: what --quick does."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if path:
        parser.add_argument("--path", type=Path, default=Path.cwd(), help="on the drive")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--save", type=Path)
    if plot:
        parser.add_argument("--plot", type=Path)
    return parser


def print_table(
    title: str, columns: Columns, rows: Iterable[Mapping[str, Any]], console: Any = None
) -> None:
    """Prints a line for each row."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*cells_of(columns, row))
    (console or Console()).print(table)


def take_turns(
    sides: Mapping[str, Callable[[], Any]], rounds: int, *, warm_ups: int = 1
) -> dict[str, list[Any]]:
    """Returns what each side gives in each round, after `warm_ups` that are not counted. A round is
    begun by the next side, so that none is always the one behind another."""
    names = list(sides)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(-warm_ups, rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            given = sides[name]()
            if number >= 0:
                found[name].append(given)
    return found


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Returns a function that gives the seconds of a run."""

    def measured() -> float:
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s

    return measured


def spread(values: Sequence[float], name: str = "ratio") -> dict[str, float]:
    """The median, the lowest and the highest."""
    median = statistics.median(values)
    return {name: median, f"{name}_low": min(values), f"{name}_high": max(values)}


def move(submits: Iterable[Callable[[], Any]], depth: int) -> None:
    """Submits transfers in order, `depth` of them in flight, and waits until all are over."""
    in_flight: deque[Any] = deque()
    for submit in submits:
        if len(in_flight) == depth:
            in_flight.popleft().wait()
        in_flight.append(submit())
    for ticket in in_flight:
        ticket.wait()


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def save(path: Path | None, words: Any, **found: Any) -> None:
    """Writes what was found with the settings and the environment, if there is a path."""
    if path is not None:
        settings = {k: str(v) for k, v in vars(words).items() if k not in ("save", "plot")}
        document = {"settings": settings, "environment": environment(), **found}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
