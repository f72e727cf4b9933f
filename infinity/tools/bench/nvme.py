"""The drives: sequential read, write and mixed, over sizes and depths, striped, and latency.

Each section is a generator: it sets up, yields results one by one, and cleans up behind itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from infinity.sizes import MIB, format_nbytes
from infinity.storage.probe import explain_missing_uring
from infinity.storage.protocol import StorageEngine
from infinity.tools.bench import fio
from infinity.tools.bench.lab import Lab
from infinity.tools.bench.measure import Contender, ContenderGroup, Result, summarize
from infinity.tools.bench.scratch import BenchDirectory, RegionName
from infinity.tools.bench.transfer import (
    EngineLatency,
    EngineTransfer,
    FileSet,
    RawRing,
    TransferKind,
    plan_moves,
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
        self._best_fio: dict[TransferKind, list[fio.FioSettings]] = {}
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

    def labels(self, kind: str, **more: int | float | str) -> dict[str, str | int | float]:
        """Returns the labels of a group over these drives, for programs."""
        labels: dict[str, str | int | float] = {
            "operation": kind,
            "paths": self.name,
            "num_paths": len(self.scratch.directories),
        }
        return labels | more

    def fio(
        self, kind: TransferKind, settings: fio.FioSettings, nbytes: int | None = None
    ) -> fio.Fio:
        """Returns fio as a contender, over the scratch files' region of this kind."""
        region: RegionName = "still" if kind == "read" else "busy"
        return fio.Fio(
            self.scratch.shares(region),
            kind,
            settings,
            direct=all(self.scratch.is_direct),
            huge_pages=self.lab.huge_pages,
            nbytes=nbytes,
        )

    def best_fio(self, kind: TransferKind) -> Iterator[Result]:
        """Runs the search once per kind and yields its results; `ceilings` uses the best
        settings."""
        if not self.lab.with_fio or kind in self._best_fio:
            return
        contenders = [self.fio(kind, settings) for settings in self.lab.effort.fio_candidates]
        group = ContenderGroup(
            "fio search", f"{kind}, {self.name}", contenders, labels=self.labels(kind)
        )
        result = self.lab.measure(group, self.lab.effort.search_rounds, warm_ups=0)
        contenders.sort(key=lambda contender: -_gb_per_s(result, contender))
        best = contenders[0]
        if self.lab.arena.huge_page_nbytes and not self._best_fio and not best.huge_page_nbytes():
            self._fio_note = "fio had 4 KiB pages, the arena huge ones: its ceiling is too low"
        self._best_fio[kind] = [contender.settings for contender in contenders[:_NUM_FIO]]
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
            name = f"ring {fio.FioSettings(block_nbytes, depth)}"
            ring = RawRing(name, files, moves, depth=depth)
            found.append(stack.enter_context(ring))
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
    with BenchDirectory(lab.arena, directories, lab.effort.nbytes, weights=weights) as scratch:
        yield DriveSet(lab, scratch)


def bandwidth(drives: DriveSet, kind: TransferKind) -> Iterator[Result]:
    """The headline: `nbytes` in extents of 16 MiB through the engine as configured."""
    lab, nbytes = drives.lab, drives.lab.effort.nbytes
    yield from drives.best_fio(kind)
    with lab.engine() as engine, contextlib.ExitStack() as stack:
        files = FileSet(engine, drives.scratch, lab.arena)
        subject = EngineTransfer(
            engine_label(lab, engine), files, kind,
            nbytes=nbytes, extent_nbytes=EXTENT_NBYTES,
        )  # fmt: skip
        group = ContenderGroup(
            f"nvme {kind}",
            f"{format_nbytes(nbytes)} in {format_nbytes(EXTENT_NBYTES)}, {drives.name}",
            [subject],
            drives.ceilings(kind, files, stack, nbytes=nbytes),
            drives.labels(kind, extent_nbytes=EXTENT_NBYTES, depth=lab.io.queue_depth),
            drives.note,
        )
        yield lab.measure(group, lab.effort.rounds)


def sweep(drives: DriveSet, kind: TransferKind) -> Iterator[Result]:
    """Measures every extent size at every depth. One group per size: the depths alternate with
    fio."""
    lab = drives.lab
    yield from drives.best_fio(kind)
    with contextlib.ExitStack() as engines:
        by_depth = {
            depth: FileSet(
                engines.enter_context(lab.engine(depth=depth)), drives.scratch, lab.arena
            )
            for depth in lab.effort.depths
        }
        for extent_nbytes in lab.effort.extents_nbytes:
            num_sides = 2 if kind == "mixed" else 1
            nbytes = max(lab.effort.sweep_nbytes, num_sides * extent_nbytes)
            if nbytes > lab.effort.nbytes:
                continue
            with contextlib.ExitStack() as stack:
                subjects = [
                    EngineTransfer(
                        f"depth {depth}", files, kind, nbytes=nbytes, extent_nbytes=extent_nbytes
                    )
                    for depth, files in by_depth.items()
                ]
                files = next(iter(by_depth.values()))
                group = ContenderGroup(
                    f"sweep {kind}",
                    f"extents of {format_nbytes(extent_nbytes)}, {drives.name}",
                    subjects,
                    drives.ceilings(kind, files, stack, nbytes=nbytes, is_headline=False),
                    drives.labels(kind, extent_nbytes=extent_nbytes),
                    drives.note,
                )
                yield lab.measure(group, lab.effort.sweep_rounds, warm_ups=0)


def stripes(lab: Lab) -> Iterator[Result]:
    """1, 2, ... of the paths at once, each count against fio on the same files."""
    devices = {directory.stat().st_dev for directory in lab.directories}
    shared = "" if len(devices) == len(lab.directories) else "paths share a drive"
    for count in range(1, len(lab.directories) + 1):
        with open_drives(lab, lab.directories[:count]) as drives:
            for kind in KINDS:
                for result in bandwidth(drives, kind):
                    if result.group.section == "fio search":
                        yield result
                        continue
                    group = result.group
                    renamed = ContenderGroup(
                        f"stripes {kind}", f"{count} paths", group.subjects, group.ceilings,
                        group.labels, "; ".join(filter(None, (group.note, shared))),
                    )  # fmt: skip
                    yield Result(renamed, result.samples)


def latency(drives: DriveSet) -> Iterator[Result]:
    """One demand read at a time: on an idle drive, and behind write-backs that never run dry."""
    lab = drives.lab
    with lab.engine() as engine:
        files = FileSet(engine, drives.scratch, lab.arena)
        for extent_nbytes in _LATENCY_EXTENTS_NBYTES:
            count = min(lab.effort.num_latencies, lab.effort.nbytes // 2 // extent_nbytes)
            subjects = [
                EngineLatency(name, files, extent_nbytes=extent_nbytes, count=count, behind=behind)
                for name, behind in (("idle drive", 0), ("behind write-backs", _NUM_BEHIND))
            ]
            ceilings = []
            if lab.with_fio:
                settings = fio.FioSettings(extent_nbytes, 1)
                ceilings.append(drives.fio("read", settings, extent_nbytes * count))
            group = ContenderGroup(
                "latency", f"reads of {format_nbytes(extent_nbytes)}, {drives.name}",
                subjects, ceilings, drives.labels("read", extent_nbytes=extent_nbytes), drives.note,
            )  # fmt: skip
            yield lab.measure(group, lab.effort.sweep_rounds, warm_ups=0)


def _gb_per_s(result: Result, contender: Contender) -> float:
    return summarize([sample.gb_per_s for sample in result.samples[contender.name]]).median


def engine_label(lab: Lab, engine: StorageEngine) -> str:
    """Returns the name of the engine and its settings: "io_uring 4 MiB x auto"."""
    block = format_nbytes(lab.io.block_size).replace(".0 ", " ")
    return f"{engine.name} {block} x {lab.io.queue_depth}"
