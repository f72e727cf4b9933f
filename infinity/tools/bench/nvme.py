"""The drives: sequential read, write and mixed, over sizes and depths, striped, and latency.

Each section is a generator: it sets up, yields results one by one, and cleans up behind itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from infinity.sizes import MIB, format_nbytes
from infinity.storage.probe import explain_missing_uring
from infinity.storage.protocol import StorageEngine
from infinity.tools.bench import fio
from infinity.tools.bench.measure import (
    Comparison,
    Contender,
    IoSettings,
    Lab,
    bandwidth_of,
    short_size,
)
from infinity.tools.bench.scratch import BenchDirectory, bench_directory
from infinity.tools.bench.transfer import (
    FileSet,
    TransferKind,
    engine_latency,
    engine_transfer,
    plan_moves,
    raw_ring,
)
from infinity.uring import is_built

EXTENT_NBYTES = 16 * MIB
KINDS: tuple[TransferKind, ...] = ("read", "write", "mixed")
_LATENCY_EXTENTS_NBYTES = (64 << 10, 1 * MIB, 8 * MIB)
_NUM_BEHIND = 4  # write-backs of 16 MiB
# Settings of fio that take part in every round of the headline: a search of a few rounds does not
# tell the best from the second best, and the fastest of them is the ceiling.
_NUM_FIO = 3


class DriveSet:
    """A set of directories under test: its scratch files, and fio's best settings for them."""

    def __init__(self, lab: Lab, scratch: BenchDirectory) -> None:
        self.lab = lab
        self.scratch = scratch
        self._best_fio: dict[TransferKind, Sequence[IoSettings]] = {}
        self._fio_note = ""

    @property
    def name(self) -> str:
        """The paths, as reports name the drives."""
        return " + ".join(str(directory) for directory in self.scratch.directories)

    @property
    def note(self) -> str:
        """A remark without which a figure misleads; empty if the figure needs none."""
        if not all(self.scratch.is_direct):
            return "buffered: this is the page cache"
        return self._fio_note

    @contextlib.contextmanager
    def files(self, **changes: Any) -> Iterator[FileSet]:
        """Opens the scratch files in an engine of the lab, with other options of it if any."""
        with self.lab.engine(**changes) as engine:
            yield FileSet(engine, self.scratch, self.lab.arena)

    def measured(
        self,
        section: str,
        case: str,
        subjects: Sequence[Contender],
        ceilings: Sequence[Contender],
        rounds: int,
        *,
        warm_ups: int = 1,
        **labels: str | int | float,
    ) -> Comparison:
        """Runs contenders over these drives. `labels`: `operation`, and what else programs need."""
        own = labels | {"paths": self.name, "num_paths": len(self.scratch.directories)}
        case = f"{case}, {self.name}"
        compared = Comparison(section, case, subjects, ceilings, own, self.note)
        return self.lab.measure(compared, rounds, warm_ups=warm_ups)

    def fio(self, kind: TransferKind, settings: IoSettings, nbytes: int | None = None) -> Contender:
        """Returns fio as a contender, over the scratch files' region of this kind."""
        words, huge_pages = self._fio_command(kind, settings, nbytes), self.lab.huge_pages
        return Contender(f"fio {settings}", lambda: fio.run(words, huge_pages=huge_pages))

    def _fio_command(
        self, kind: TransferKind, settings: IoSettings, nbytes: int | None = None
    ) -> list[str]:
        shares = self.scratch.shares("still" if kind == "read" else "busy")
        direct = all(self.scratch.is_direct)
        return fio.command(shares, kind, settings, direct=direct, nbytes=nbytes)

    def best_fio(self, kind: TransferKind) -> Iterator[Comparison]:
        """Runs the search once per kind and yields its results; `ceilings` uses the best
        settings."""
        if not self.lab.with_fio or kind in self._best_fio:
            return
        candidates = self.lab.effort.fio_candidates
        tried = [self.fio(kind, settings) for settings in candidates]
        rounds = self.lab.effort.search_rounds
        result = self.measured("fio search", kind, tried, [], rounds, warm_ups=0, operation=kind)
        rates = {
            settings: bandwidth_of(result.samples[f"fio {settings}"]).median
            for settings in candidates
        }
        best = sorted(candidates, key=lambda settings: -rates[settings])
        if self.lab.arena.huge_page_nbytes and not self._best_fio:
            words = self._fio_command(kind, best[0])
            if not fio.huge_page_nbytes(words, huge_pages=self.lab.huge_pages):
                self._fio_note = "fio had 4 KiB pages, the arena huge ones: its ceiling is too low"
        self._best_fio[kind] = best[:_NUM_FIO]
        yield result

    def ceilings(
        self,
        kind: TransferKind,
        files: FileSet,
        stack: contextlib.ExitStack,
        *,
        nbytes: int,
        is_headline: bool = True,
    ) -> list[Contender]:
        """Returns fio at its best, and the raw ring with the same blocks, if both exist.

        `is_headline`: with the ring, and with fio's next best settings.
        """
        found: list[Contender] = []
        if self.lab.with_fio:
            share_nbytes = nbytes // len(self.scratch.directories)
            best = self._best_fio[kind][: _NUM_FIO if is_headline else 1]
            found += [self.fio(kind, settings, share_nbytes) for settings in best]
        if is_headline and has_raw_ring():
            block_nbytes, depth = self.lab.io.block_size, self.lab.start_depth
            moves = plan_moves(kind, nbytes=nbytes, extent_nbytes=block_nbytes)
            name = f"ring {IoSettings(block_nbytes, depth)}"
            found.append(stack.enter_context(raw_ring(name, files, moves, depth=depth)))
        return found


def has_raw_ring() -> bool:
    """Returns True if the ceiling of the raw ring can be measured on this machine."""
    return is_built() and explain_missing_uring() is None


@contextlib.contextmanager
def open_drives(lab: Lab, directories: Sequence[Path]) -> Iterator[DriveSet]:
    """Makes scratch files on the directories for the time of a `with` block."""
    lab.on_step(f"writing files in {', '.join(map(str, directories))}")
    weights = [
        weight
        for directory, weight in zip(
            lab.directories, lab.weights or [1.0] * len(lab.directories), strict=True
        )
        if directory in directories
    ]
    with bench_directory(lab.arena, directories, lab.effort.nbytes, weights=weights) as scratch:
        yield DriveSet(lab, scratch)


def bandwidth(drives: DriveSet, kind: TransferKind) -> Iterator[Comparison]:
    """The headline: `nbytes` in extents of 16 MiB through the engine as configured."""
    lab, nbytes = drives.lab, drives.lab.effort.nbytes
    yield from drives.best_fio(kind)
    with drives.files() as files, contextlib.ExitStack() as stack:
        label = engine_label(lab, files.engine)
        subject = engine_transfer(label, files, kind, nbytes=nbytes, extent_nbytes=EXTENT_NBYTES)
        yield drives.measured(
            f"nvme {kind}", f"{format_nbytes(nbytes)} in {format_nbytes(EXTENT_NBYTES)}",
            [subject], drives.ceilings(kind, files, stack, nbytes=nbytes), lab.effort.rounds,
            operation=kind, extent_nbytes=EXTENT_NBYTES, depth=lab.io.queue_depth,
        )  # fmt: skip


def sweep(drives: DriveSet, kind: TransferKind) -> Iterator[Comparison]:
    """Measures every extent size at every depth. One group per size: the depths alternate with
    fio."""
    lab = drives.lab
    yield from drives.best_fio(kind)
    with contextlib.ExitStack() as engines:
        by_depth = {
            depth: engines.enter_context(drives.files(queue_depth=depth))
            for depth in lab.effort.depths
        }
        for extent_nbytes in lab.effort.extents_nbytes:
            num_sides = 2 if kind == "mixed" else 1
            nbytes = max(lab.effort.sweep_nbytes, num_sides * extent_nbytes)
            if nbytes > lab.effort.nbytes:
                continue
            with contextlib.ExitStack() as stack:
                subjects = [
                    engine_transfer(
                        f"depth {depth}", files, kind, nbytes=nbytes, extent_nbytes=extent_nbytes
                    )
                    for depth, files in by_depth.items()
                ]
                files = next(iter(by_depth.values()))
                ceilings = drives.ceilings(kind, files, stack, nbytes=nbytes, is_headline=False)
                yield drives.measured(
                    f"sweep {kind}", f"extents of {format_nbytes(extent_nbytes)}", subjects,
                    ceilings, lab.effort.sweep_rounds, warm_ups=0,
                    operation=kind, extent_nbytes=extent_nbytes,
                )  # fmt: skip


def stripes(lab: Lab) -> Iterator[Comparison]:
    """1, 2, ... of the paths at once, each count against fio on the same files."""
    devices = {directory.stat().st_dev for directory in lab.directories}
    shared = "" if len(devices) == len(lab.directories) else "paths share a drive"
    for count in range(1, len(lab.directories) + 1):
        with open_drives(lab, lab.directories[:count]) as drives:
            for kind in KINDS:
                for result in bandwidth(drives, kind):
                    if result.section != "fio search":
                        note = "; ".join(filter(None, (result.note, shared)))
                        case = f"{count} paths"
                        result = replace(result, section=f"stripes {kind}", case=case, note=note)
                    yield result


def latency(drives: DriveSet) -> Iterator[Comparison]:
    """One demand read at a time: on an idle drive, and behind write-backs that never run dry."""
    lab = drives.lab
    with drives.files() as files:
        for extent_nbytes in _LATENCY_EXTENTS_NBYTES:
            count = min(lab.effort.num_latencies, lab.effort.nbytes // 2 // extent_nbytes)
            subjects = [
                engine_latency(name, files, extent_nbytes=extent_nbytes, count=count, behind=behind)
                for name, behind in (("idle drive", 0), ("behind write-backs", _NUM_BEHIND))
            ]
            ceilings = []
            if lab.with_fio:
                settings = IoSettings(extent_nbytes, 1)
                ceilings.append(drives.fio("read", settings, extent_nbytes * count))
            yield drives.measured(
                "latency", f"reads of {format_nbytes(extent_nbytes)}", subjects, ceilings,
                lab.effort.sweep_rounds, warm_ups=0, operation="read", extent_nbytes=extent_nbytes,
            )  # fmt: skip


def engine_label(lab: Lab, engine: StorageEngine) -> str:
    """Returns the name of the engine and its settings: "io_uring 4 MiB x auto"."""
    return f"{engine.name} {short_size(lab.io.block_size)} x {lab.io.queue_depth}"
