"""Cost of `[io] verify`: a volume that keeps checksums beside one that does not.

The cost is the lost share of the bandwidth, and the difference of the CPU seconds per GB. A third
contender reads every byte once without a check (numpy's maximum), because a check cannot cost less
than reading the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy
from typing_extensions import override

from infinity.sizes import format_nbytes
from infinity.storage.arena import Arena
from infinity.storage.protocol import Priority, Ticket
from infinity.storage.volume import Extent, Volume, VolumePath
from infinity.tools.bench import pattern
from infinity.tools.bench.lab import Lab
from infinity.tools.bench.measure import Contender, ContenderGroup, Measurement, Result, clock
from infinity.tools.bench.nvme import EXTENT_NBYTES
from infinity.tools.bench.scratch import DIRECTORY_NAME, check_space, remove_directory
from infinity.tools.bench.transfer import next_seed


class VolumeTransfer(Contender):
    """`nbytes` in extents of 16 MiB through a volume, waited for in order, as a pass over units
    does: the check of one extent runs while the next ones are on their way. `looks`: every byte of
    an extent is read once, in the place of a check."""

    def __init__(
        self,
        name: str,
        volume: Volume,
        extents: Sequence[Extent],
        arena: Arena,
        operation: Literal["read", "write"],
        nbytes: int,
        *,
        looks: bool = False,
    ) -> None:
        self.name = name
        self._volume = volume
        self._extents = extents
        self._arena = arena
        self._operation = operation
        self._nbytes = nbytes
        self._looks = looks
        self._seed = next_seed()
        self._write()

    @override
    def run(self) -> Measurement:
        memory = self._arena.memory(0, self._nbytes)
        if self._operation == "read":
            pattern.poison(memory)
            seconds, cpu_s = clock(self._read)
        else:
            self._seed = next_seed()
            pattern.fill(memory, offset_nbytes=0, seed=self._seed)
            seconds, cpu_s = clock(self._submit_writes)
            pattern.poison(memory)
            self._read()
        ok = pattern.matches(memory, offset_nbytes=0, seed=self._seed)
        return Measurement(self._nbytes, seconds, cpu_s, ok=ok)

    def _write(self) -> None:
        pattern.fill(self._arena.memory(0, self._nbytes), offset_nbytes=0, seed=self._seed)
        self._submit_writes()

    def _submit_writes(self) -> None:
        self._move(self._volume.write)

    def _read(self) -> None:
        self._move(self._volume.read)

    def _move(self, move: Callable[..., Ticket]) -> None:
        tickets = [
            move(
                self._extents, offset_nbytes=at, nbytes=min(EXTENT_NBYTES, self._nbytes - at),
                address=self._arena.address + at, priority=Priority.STATE,
            )
            for at in range(0, self._nbytes, EXTENT_NBYTES)
        ]  # fmt: skip
        for index, ticket in enumerate(tickets):
            ticket.wait()
            if self._looks:
                at = index * EXTENT_NBYTES
                extent = self._arena.memory(at, min(EXTENT_NBYTES, self._nbytes - at))
                numpy.frombuffer(extent, dtype=numpy.uint64).max()


def verify(lab: Lab, directory: Path) -> Iterator[Result]:
    """Reads and writes with and without checksums on one drive, alternately."""
    nbytes = min(lab.effort.nbytes, 4 * lab.effort.sweep_nbytes)
    roots = [directory / f"{DIRECTORY_NAME}-{name}" for name in ("plain", "checked")]
    check_space(roots, [1.0, 1.0], 2 * nbytes)
    lab.on_step(f"writing files in {directory}")
    with lab.engine() as engine, contextlib.ExitStack() as stack:
        volumes = []
        for root, has_checksums in zip(roots, (False, True), strict=True):
            stack.callback(remove_directory, root)
            volume = Volume(engine, [VolumePath(str(root))], verify=has_checksums)
            stack.callback(volume.close)
            (extents,) = volume.reserve([nbytes])
            volumes.append((volume, extents))
        for operation in ("read", "write"):
            plain, checked = (
                VolumeTransfer(name, volume, extents, lab.arena, operation, nbytes)
                for name, (volume, extents) in zip(
                    ("verify = false", "verify = true"), volumes, strict=True
                )
            )
            checks = [checked]
            if operation == "read":
                looking = VolumeTransfer(
                    "verify = false, read once", volumes[0][0], volumes[0][1], lab.arena,
                    operation, nbytes, looks=True,
                )  # fmt: skip
                checks.append(looking)
            group = ContenderGroup(
                f"verify {operation}",
                f"{format_nbytes(nbytes)} in {format_nbytes(EXTENT_NBYTES)}, {directory}",
                checks,
                [plain],
                {"operation": operation, "paths": str(directory), "extent_nbytes": EXTENT_NBYTES},
            )
            yield lab.measure(group, lab.effort.rounds)
