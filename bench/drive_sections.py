"""Sections for those who change the drive's code, beside those of `infinity bench`.

    python bench/drive_sections.py --path /mnt/nvme0 --only extents verify --save drive.json

extents: small extents, adjacent or apart in the file, and in memory. Those that are adjacent in the
  file should reach the bandwidth of large ones: the engine gathers them into blocks, wherever they
  are in memory. Those that are apart are one command each, and the ceiling is the drive's rate for
  such commands from the same list, submitted by fio and by a raw ring.
verify: the cost of `[io] verify`, a volume that keeps checksums beside one that does not: the lost
  share of the bandwidth, and the difference of the CPU seconds per GB. A third contender reads
  every byte once without a check (numpy's maximum), because a check cannot cost less than that.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy

from infinity.sizes import KIB, format_nbytes
from infinity.storage.arena import Arena
from infinity.storage.protocol import Priority, Ticket
from infinity.storage.volume import Extent, Volume, VolumePath
from infinity.tools.bench import pattern
from infinity.tools.bench.measure import (
    QUICK,
    Access,
    Comparison,
    Contender,
    Effort,
    IoSettings,
    Lab,
    short_size,
    timed,
)
from infinity.tools.bench.nvme import EXTENT_NBYTES, DriveSet, has_raw_ring, open_drives
from infinity.tools.bench.report import environment_of
from infinity.tools.bench.scratch import DIRECTORY_NAME, RegionName, remove_directory, reserve
from infinity.tools.bench.transfer import (
    TransferKind,
    TransferMove,
    engine_transfer,
    moves_transfer,
    next_seed,
    raw_ring,
)
from infinity.tools.cli.bench import open_lab, stopping_at_sigterm, tell

SMALL_NBYTES = 64 * KIB
_MAX_DEPTH = 256  # of small blocks in the engine's window


def side_by_side(kind: TransferKind, nbytes: int) -> list[TransferMove]:
    """Extents that are neighbours in the file and shuffled in memory."""
    places = _shuffled(nbytes // SMALL_NBYTES)
    return [_move(kind, block, place) for block, place in enumerate(places)]


def apart(kind: TransferKind, nbytes: int) -> list[TransferMove]:
    """Extents that are neighbours in memory: every other block of the file, in random order."""
    blocks = _shuffled(nbytes // SMALL_NBYTES)
    return [_move(kind, 2 * block, place) for place, block in enumerate(blocks)]


def _move(kind: TransferKind, block: int, place: int) -> TransferMove:
    assert kind != "mixed"
    region: RegionName = "still" if kind == "read" else "busy"
    return TransferMove(kind, region, block * SMALL_NBYTES, SMALL_NBYTES, place * SMALL_NBYTES)


def _shuffled(count: int) -> list[int]:
    """The same order in every run."""
    order = list(range(count))
    random.Random(64).shuffle(order)
    return order


def extents(drives: DriveSet, kind: TransferKind) -> Iterator[Comparison]:
    """Three groups: side by side against large extents, apart in one request, apart one by one."""
    lab = drives.lab
    nbytes = min(lab.effort.sweep_nbytes, lab.effort.nbytes // 2)
    many = format_nbytes(nbytes)
    depth = min(_MAX_DEPTH, lab.start_depth * lab.io.block_size // SMALL_NBYTES)
    with drives.files() as files, contextlib.ExitStack() as stack:

        def ring(name: str, moves: Sequence[TransferMove]) -> list[Contender]:
            """With as much in flight as the engine has."""
            if not has_raw_ring():
                return []
            label = f"ring {IoSettings(SMALL_NBYTES, depth)}{name}"
            return [stack.enter_context(raw_ring(label, files, moves, depth=depth))]

        def fio_of(access: Access) -> list[Contender]:
            if not lab.with_fio:
                return []
            return [drives.fio(kind, IoSettings(SMALL_NBYTES, depth, access), 2 * nbytes)]

        near, far = side_by_side(kind, nbytes), apart(kind, nbytes)
        in_order = sorted(far, key=lambda move: move.offset_nbytes)
        large = engine_transfer(
            f"extents of {short_size(EXTENT_NBYTES)}", files, kind,
            nbytes=nbytes, extent_nbytes=EXTENT_NBYTES,
        )  # fmt: skip
        groups: list[tuple[str, Sequence[Contender], Sequence[Contender]]] = [
            (
                "side by side in the file, scattered in memory",
                [
                    moves_transfer("one request", files, near, in_one_request=True),
                    moves_transfer("a request each", files, near),
                ],
                [large, *ring("", near)],
            ),
            (
                "apart in the file",
                [moves_transfer("one request", files, far, in_one_request=True)],
                [*ring("", in_order), *fio_of("strided")],
            ),
            (
                "apart in the file, in random order",
                [moves_transfer("a request each", files, far)],
                [*ring(", random", far), *fio_of("random")],
            ),
        ]
        for case, subjects, ceilings in groups:
            yield drives.measured(
                f"extents {kind}", f"{many} in 64 KiB, {case}", subjects, ceilings,
                lab.effort.rounds,
                operation=kind, extent_nbytes=SMALL_NBYTES, depth=lab.io.queue_depth,
            )  # fmt: skip


def volume_transfer(
    name: str,
    volume: Volume,
    extents: Sequence[Extent],
    arena: Arena,
    operation: Literal["read", "write"],
    nbytes: int,
    *,
    looks: bool = False,
) -> Contender:
    """`nbytes` in extents of 16 MiB through a volume, waited for in order, as a pass over units
    does: the check of one extent runs while the next ones are on their way. `looks`: every byte of
    an extent is read once, in the place of a check."""
    memory, seed = arena.memory(0, nbytes), next_seed()

    def submit(move: Callable[..., Ticket]) -> list[Ticket]:
        return [
            move(
                extents, offset_nbytes=at, nbytes=min(EXTENT_NBYTES, nbytes - at),
                address=arena.address + at, priority=Priority.STATE,
            )
            for at in range(0, nbytes, EXTENT_NBYTES)
        ]  # fmt: skip

    def write() -> None:
        for ticket in submit(volume.write):
            ticket.wait()

    def read() -> None:
        for number, ticket in enumerate(submit(volume.read)):
            ticket.wait()
            if looks:
                at = number * EXTENT_NBYTES
                numpy.frombuffer(memory[at : at + EXTENT_NBYTES], numpy.uint64).max()

    def prepare() -> None:
        nonlocal seed
        if operation == "read":
            pattern.poison(memory)
            return
        seed = next_seed()
        pattern.fill(memory, offset_nbytes=0, seed=seed)

    def compare() -> bool:
        if operation == "write":
            pattern.poison(memory)
            read()
        return pattern.matches(memory, offset_nbytes=0, seed=seed)

    pattern.fill(memory, offset_nbytes=0, seed=seed)
    write()
    transfer = read if operation == "read" else write
    return timed(name, nbytes, transfer, prepare=prepare, compare=compare)


def verify(lab: Lab, directory: Path) -> Iterator[Comparison]:
    """Reads and writes with and without checksums on one drive, alternately."""
    nbytes = min(lab.effort.nbytes, 4 * lab.effort.sweep_nbytes)
    roots = [directory / f"{DIRECTORY_NAME}-{name}" for name in ("plain", "checked")]
    lab.on_step(f"writing files in {directory}")
    with lab.engine() as engine, contextlib.ExitStack() as stack:
        volumes = []
        for root, has_checksums in zip(roots, (False, True), strict=True):
            stack.callback(remove_directory, root)
            volume = Volume(engine, [VolumePath(str(root))], verify=has_checksums)
            stack.callback(volume.close)
            (extents,) = reserve(volume, [nbytes])
            volumes.append((volume, extents))
        for operation in ("read", "write"):
            plain, checked = (
                volume_transfer(name, volume, extents, lab.arena, operation, nbytes)
                for name, (volume, extents) in zip(
                    ("verify = false", "verify = true"), volumes, strict=True
                )
            )
            checks = [checked]
            if operation == "read":
                looking = volume_transfer(
                    "verify = false, read once", volumes[0][0], volumes[0][1], lab.arena,
                    operation, nbytes, looks=True,
                )  # fmt: skip
                checks.append(looking)
            group = Comparison(
                f"verify {operation}",
                f"{format_nbytes(nbytes)} in {format_nbytes(EXTENT_NBYTES)}, {directory}",
                checks,
                [plain],
                {"operation": operation, "paths": str(directory), "extent_nbytes": EXTENT_NBYTES},
            )
            yield lab.measure(group, lab.effort.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, action="append", required=True)
    parser.add_argument("--only", nargs="+", choices=("extents", "verify"), default=["extents"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path)
    words = parser.parse_args()
    effort = QUICK if words.quick else Effort()
    with stopping_at_sigterm(), open_lab(None, words.path, effort, with_fio=True) as lab:
        found = environment_of(lab.directories, lab.arena)
        results = [result for name in words.only for result in run(lab, name)]
    tell(results, found, save=words.save)


def run(lab: Lab, name: str) -> Iterator[Comparison]:
    """Yields the results of a section, drive by drive."""
    for directory in lab.directories:
        if name == "verify":
            yield from verify(lab, directory)
            continue
        with open_drives(lab, [directory]) as drives:
            for kind in ("read", "write"):
                yield from extents(drives, kind)


if __name__ == "__main__":
    main()
