"""The checksums of a volume's buffers: one table for each path."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.sizes import PAGE_NBYTES
from infinity.storage.checksums import (
    CHECKSUM_NBYTES,
    DigestedWrite,
    PageChecksums,
    PageDigests,
    digest,
)
from infinity.storage.daemon_threads import DaemonThreads
from infinity.storage.generations import GenerationRun
from infinity.storage.protocol import Ticket
from infinity.storage.volume_layout import Extent


class BufferChecksums:
    """CRC32C of each page of every buffer, as last written. Thread-safe as `PageChecksums`.

    With `is_deferred` a thread of this object computes the checksums of a write beside the
    transfer, in the order of the writes; they are needed when something is frozen, not before.
    Else the caller of a write computes them, on up to `num_threads` threads.
    """

    def __init__(self, *, is_deferred: bool, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._tables: list[PageChecksums] = []
        self._digester = DaemonThreads(1, "infinity-checksums") if is_deferred else None

    def close(self) -> None:
        """Ends the thread."""
        if self._digester is not None:
            self._digester.close()

    def add_path(self, *, is_fresh: bool) -> None:
        """Adds the table of the next path; `is_fresh` as for `PageChecksums`."""
        self._tables.append(PageChecksums(is_fresh=is_fresh))

    def grow(self, path_index: int, size_nbytes: int) -> None:
        """Extends the table of a path to the size of its file."""
        self._tables[path_index].grow(size_nbytes)

    def of(self, extents: Sequence[Extent]) -> bytes:
        """Returns the checksums of a buffer, 4 bytes for each page in native order."""
        if self._digester is not None:
            self._digester.submit(_nothing).result()  # After the writes that were queued before.
        return b"".join(
            self._tables[extent.path_index].of(extent.offset_nbytes, extent.nbytes)
            for extent in extents
        )

    def put(self, extents: Sequence[Extent], checksums: bytes) -> None:
        """Sets the checksums of a buffer, as `of` returns them."""
        at = 0
        for extent in extents:
            nbytes = extent.nbytes // PAGE_NBYTES * CHECKSUM_NBYTES
            self._tables[extent.path_index].put(extent.offset_nbytes, checksums[at : at + nbytes])
            at += nbytes

    def forget(self, path_index: int, run: GenerationRun) -> None:
        """Drops the checksums of a range that changed other than by a write."""
        self._tables[path_index].forget(run.offset_nbytes, run.nbytes)

    def known(
        self, path_index: int, runs: Sequence[GenerationRun]
    ) -> list[tuple[GenerationRun, bytes]]:
        """Returns the parts of `runs` that have checksums, with the checksums."""
        table = self._tables[path_index]
        return [
            (GenerationRun(run.generation, *part), table.of(*part))
            for run in runs
            for part in table.known(run.offset_nbytes, run.nbytes)
        ]

    def digests(
        self,
        parts: Sequence[tuple[Extent, int]],
        address: int,
        known: PageDigests | None,
        *,
        is_now: bool = False,
    ) -> list[bytes] | None:
        """Returns the checksums of the parts of a write. None if `record` computes them later;
        never with `is_now`.

        `parts`: the extents, each with its distance from `address` in memory. `known`: checksums of
        all that is written, as far as an update has taken them.
        """
        if self._digester is not None and not is_now:
            return None
        return _digests_of(parts, address, known, self._num_threads)

    def record(
        self,
        ticket: Ticket,
        parts: Sequence[tuple[Extent, int]],
        address: int,
        digests: Sequence[bytes] | None,
        known: PageDigests | None,
    ) -> Ticket:
        """Records the checksums of a write that is queued. Returns the ticket to wait for: the
        memory belongs to the write until that ticket is done."""
        if digests is not None:
            self._put(parts, digests)
            return ticket
        assert self._digester is not None
        return DigestedWrite(ticket, self._digester.submit(self._digest, parts, address, known))

    def _digest(
        self, parts: Sequence[tuple[Extent, int]], address: int, known: PageDigests | None
    ) -> None:
        self._put(parts, _digests_of(parts, address, known))

    def _put(self, parts: Sequence[tuple[Extent, int]], digests: Sequence[bytes]) -> None:
        for (extent, _), checksums in zip(parts, digests, strict=True):
            self._tables[extent.path_index].put(extent.offset_nbytes, checksums)


def _digests_of(
    parts: Sequence[tuple[Extent, int]],
    address: int,
    known: PageDigests | None,
    num_threads: int = 1,
) -> list[bytes]:
    if known is None:
        return [digest(address + at, extent.nbytes, num_threads) for extent, at in parts]
    checksums, found = known.finish(num_threads), []
    for extent, at in parts:
        start = at // PAGE_NBYTES * CHECKSUM_NBYTES
        found.append(checksums[start : start + extent.nbytes // PAGE_NBYTES * CHECKSUM_NBYTES])
    return found


def _nothing() -> None: ...
