"""Small extents: the effect of batching, adjacent or apart in the file, and in memory.

Extents that are adjacent in the file should reach the bandwidth of large ones: the engine gathers
them into blocks, wherever they are in memory. Extents that are apart are one command each, and the
ceiling is the drive's rate for such commands from the same list, submitted by fio and by a raw
ring.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

from infinity.sizes import KIB, format_nbytes
from infinity.tools.bench import fio
from infinity.tools.bench.measure import Contender, ContenderGroup, Result
from infinity.tools.bench.nvme import EXTENT_NBYTES, DriveSet, has_raw_ring
from infinity.tools.bench.raw_ring import RawRing
from infinity.tools.bench.scratch import RegionName
from infinity.tools.bench.transfer import (
    EngineTransfer,
    FileSet,
    MovesTransfer,
    TransferKind,
    TransferMove,
)

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


def extents(drives: DriveSet, kind: TransferKind) -> Iterator[Result]:
    """Three groups: side by side against large extents, apart in one request, apart one by one."""
    lab = drives.lab
    nbytes = min(lab.effort.sweep_nbytes, lab.effort.nbytes // 2)
    many = format_nbytes(nbytes)
    depth = min(_MAX_DEPTH, lab.start_depth * lab.io.block_size // SMALL_NBYTES)
    with lab.engine() as engine, contextlib.ExitStack() as stack:
        files = FileSet(engine, drives.scratch, lab.arena)

        def ring(name: str, moves: Sequence[TransferMove]) -> list[Contender]:
            """With as much in flight as the engine has."""
            if not has_raw_ring():
                return []
            label = f"ring {fio.FioSettings(SMALL_NBYTES, depth)}{name}"
            return [stack.enter_context(RawRing(label, files, moves, depth=depth))]

        def fio_of(access: fio.Access) -> list[Contender]:
            if not lab.with_fio:
                return []
            return [drives.fio(kind, fio.FioSettings(SMALL_NBYTES, depth, access), 2 * nbytes)]

        def group(
            case: str, subjects: Sequence[Contender], ceilings: Sequence[Contender]
        ) -> ContenderGroup:
            labels = drives.labels(kind, extent_nbytes=SMALL_NBYTES, depth=lab.io.queue_depth)
            case = f"{many} in 64 KiB, {case}"
            return ContenderGroup(f"extents {kind}", case, subjects, ceilings, labels, drives.note)

        near, far = side_by_side(kind, nbytes), apart(kind, nbytes)
        in_order = sorted(far, key=lambda move: move.offset_nbytes)
        large = EngineTransfer(
            f"extents of {format_nbytes(EXTENT_NBYTES).replace('.0 ', ' ')}", files, kind,
            nbytes=nbytes, extent_nbytes=EXTENT_NBYTES,
        )  # fmt: skip
        groups = [
            group(
                "side by side in the file, scattered in memory",
                [
                    MovesTransfer("one request", files, near, in_one_request=True),
                    MovesTransfer("a request each", files, near),
                ],
                [large, *ring("", near)],
            ),
            group(
                "apart in the file",
                [MovesTransfer("one request", files, far, in_one_request=True)],
                [*ring("", in_order), *fio_of("strided")],
            ),
            group(
                "apart in the file, in random order",
                [MovesTransfer("a request each", files, far)],
                [*ring(", random", far), *fio_of("random")],
            ),
        ]
        for compared in groups:
            yield lab.measure(compared, lab.effort.rounds)
