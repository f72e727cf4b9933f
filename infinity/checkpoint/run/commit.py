"""Keeping what is on NVMe without copying it: flush, freeze, link; and letting go of it again.

Note [Order of a commit]
  1. All writes are done; every swap file is synced. The state is durable, but nothing says so.
  2. The volume is frozen: from here on no write reaches the ranges that hold this state.
  3. The swap files are linked into the checkpoint that is being written, whose own files are
     written and synced after that, and its rename makes the commit (`state_directory.writing`).
  Letting go is the other way round: first the checkpoint has lost its name for good, then its
  ranges may be written again (`thaw_removed`). So whatever name is there after a crash, what it
  points to is as it was written. docs/design/0004-commits.md has the argument in full.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.huggingface.safetensors_file import dtype_name, tensor_bytes
from infinity.checkpoint.run.directory import SequentialFile, list_checkpoints, sync_directory
from infinity.checkpoint.run.layout import StateTensor
from infinity.checkpoint.run.linked import COPIES_NAME, LinkedPiece, LinkedRun, LinkedTensor
from infinity.engine.state_access import StateAccess
from infinity.errors import StorageError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL, num_scales
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.state.moments_8bit import runs_within
from infinity.state.partition import Partition, ShardSlice
from infinity.state.store import NvmeLocation
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import digest
from infinity.storage.volume import FileRange, Frozen, Volume
from infinity.storage.volume_layout import slice_extents

# Of link(2): another file system, one without links, or too many.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Stored:
    """What was linked, or copied page by page, and the checksums of all pages in their order."""

    kinds: tuple[LinkedPiece, ...] = ()
    checksums: bytes = b""

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.kinds + other.kinds, self.checksums + other.checksums)


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Whole pages of a piece, and the tensors in them; their offsets count from `start_nbytes`."""

    unit: Unit
    state_kind: StateKind
    start_nbytes: int
    stop_nbytes: int
    tensors: tuple[LinkedTensor, ...]

    @property
    def nbytes(self) -> int:
        return self.stop_nbytes - self.start_nbytes

    def stored(self, runs: Iterable[LinkedRun]) -> LinkedPiece:
        unit, state_kind = self.unit, self.state_kind
        return LinkedPiece(unit.name, state_kind.value, state_kind.kind, tuple(runs), self.tensors)


def is_linkable(state: StateAccess, unit: Unit, state_kind: StateKind) -> bool:
    """Gradients are not: they are written in place, while something is frozen, too. Nor are moments
    of eight bits, for which no spare generation is kept."""
    if state_kind is StateKind.GRADIENTS or unit.is_8bit(state_kind):
        return False
    return isinstance(state.store.location(unit, state_kind), NvmeLocation)


def has_room(volume: Volume, target: Path, *, keep: int | None, leaving: Collection[str]) -> bool:
    """Whether a spare generation is left for the writes after a commit of `target`.

    `keep`: how many checkpoints of its directory stay, this one counted; `leaving`: labels of
    commits that will be given up right after it.
    """
    there = [*list_checkpoints(target.parent), target]
    staying = set(map(label_of, there if keep is None else there[-keep:])) | {label_of(target)}
    in_directory = set(map(label_of, there))
    remaining = [
        each.label
        for each in volume.frozen
        if each.label not in (*leaving, label_of(target))
        and (each.label in staying or each.label not in in_directory)
    ]
    return len(remaining) + 1 <= volume.num_spares


def state_kind_ranges(tensors: Iterable[tuple[Unit, StateTensor]]) -> list[PieceRange]:
    """Whole pieces, with these tensors in them."""
    of_state_kind: dict[tuple[Unit, StateKind], list[LinkedTensor]] = {}
    for unit, tensor in tensors:
        of_state_kind.setdefault((unit, tensor.state_kind), []).extend(linked_tensors(unit, tensor))
    return [
        PieceRange(unit, state_kind, 0, unit.nbytes(state_kind), tuple(rows))
        for (unit, state_kind), rows in of_state_kind.items()
    ]


def own_weights(divided: Partition) -> Iterator[PieceRange]:
    """Of weights that every rank keeps whole, the part that this rank owns."""
    for whole, shard in zip(divided.full_units, divided.mine, strict=True):
        for shares in (shard.shares, shard.frozen):
            places = [_weight_range(share) for share in shares]
            if not places:
                continue
            low = align_down(min(start for start, _ in places), PAGE_NBYTES)
            high = align_up(max(stop for _, stop in places), PAGE_NBYTES)
            tensors = tuple(
                LinkedTensor(
                    share.whole.name,
                    dtype_name(share.whole.facts.dtype),
                    share.whole.facts.shape,
                    share.whole.facts.stride,
                    start - low,
                    share.start,
                    share.part.numel,
                )
                for share, (start, _) in zip(shares, places, strict=True)
            )
            yield PieceRange(whole, StateKind.PARAMETERS, low, high, tensors)


def _weight_range(share: ShardSlice) -> tuple[int, int]:
    """Where its bytes are among the weights of the whole unit."""
    at, size = share.whole.weight_offset_nbytes, share.whole.facts.dtype.itemsize
    return at + share.start * size, at + share.stop * size


def link_state(
    partial: Path, target: Path, state: StateAccess, ranges: Iterable[PieceRange]
) -> Stored | None:
    """Flushes the state on NVMe, freezes it and links the files it is in into `partial`.

    None, and nothing is changed, where the file system has no links. `target` is the name that the
    checkpoint will have.
    """
    volume = state.store.volume
    assert volume is not None and volume.num_spares
    volume.sync()
    frozen = volume.freeze(label_of(target))
    try:
        kinds, paths, checksums = [], dict[str, None](), []
        for each in ranges:
            location = state.store.location(each.unit, each.state_kind)
            assert isinstance(location, NvmeLocation)
            place = {"offset_nbytes": each.start_nbytes, "nbytes": each.nbytes}
            extents = [extent for extent, _ in slice_extents(location.extents, **place)]
            runs = volume.locate(extents)
            paths.update((run.path, None) for run in runs)
            kinds.append(each.stored(linked_runs(runs)))
            checksums.append(volume.checksums(extents))
        is_linked = _link(paths, partial)
    except BaseException:
        volume.thaw(frozen)  # Its name was never given.
        raise
    if not is_linked:
        volume.thaw(frozen)
        return None
    return Stored(tuple(kinds), b"".join(checksums))


def copy_pages(partial: Path, state: StateAccess, ranges: Iterable[PieceRange]) -> Stored:
    """Copies pieces page by page into one file of `partial`, synced; none where there is nothing
    to copy. Raises StorageError."""
    kinds, checksums, end_nbytes = [], [], 0
    with ExitStack() as stack:
        file: SequentialFile | None = None
        for each in ranges:
            if not each.nbytes:
                kinds.append(each.stored([]))
                continue
            if file is None:
                file = stack.enter_context(SequentialFile(partial / COPIES_NAME))
            kinds.append(each.stored([LinkedRun(COPIES_NAME, end_nbytes, each.nbytes)]))
            end_nbytes += each.nbytes
            place = each.start_nbytes, each.stop_nbytes
            for pages in state.pages(each.unit, each.state_kind, *place):
                checksums.append(digest(pages.data_ptr(), pages.numel()))
                file.write(tensor_bytes(pages))
    return Stored(tuple(kinds), b"".join(checksums))


def linked_tensors(unit: Unit, tensor: StateTensor) -> Iterator[LinkedTensor]:
    """A tensor and its place in its piece, as the table has it: in one row, but codes of eight bits
    and their scales, which take turns in a piece, in one for every granule."""
    for first, numel, offset_nbytes in _ranges_of(unit, tensor):
        yield LinkedTensor(
            tensor.name,
            dtype_name(tensor.dtype),
            tensor.info.shape,
            (1,) if tensor.is_scales else tensor.facts.stride,
            offset_nbytes,
            tensor.start + first,
            numel,
        )


def _ranges_of(unit: Unit, tensor: StateTensor) -> Iterator[tuple[int, int, int]]:
    """(first element, how many, offset in the piece in bytes) of what lies in one row."""
    spec, state_kind = tensor.spec, tensor.state_kind
    if state_kind is StateKind.PARAMETERS:
        yield 0, spec.numel, spec.weight_offset_nbytes
    elif not unit.is_8bit(state_kind):
        yield 0, spec.numel, unit.nbytes(state_kind, spec.state_offset)
    else:
        stop = spec.state_offset + spec.numel
        for run in runs_within(unit.state_numel, spec.state_offset, stop):
            first = run.start - spec.state_offset
            if tensor.is_scales:
                yield first // BLOCK_NUMEL, num_scales(run.numel), run.scales_offset_nbytes
            else:
                yield first, run.numel, run.codes_offset_nbytes


def linked_runs(ranges: Iterable[FileRange]) -> tuple[LinkedRun, ...]:
    """Ranges of swap files as the table has them: a link has the name of its file."""
    return tuple(LinkedRun(os.path.basename(r.path), r.offset_nbytes, r.nbytes) for r in ranges)


def _link(paths: Iterable[str], partial: Path) -> bool:
    for path in paths:
        try:
            os.link(path, partial / os.path.basename(path))
        except OSError as error:
            if error.errno in _NO_LINKS:
                for linked in partial.iterdir():
                    linked.unlink()
                return False
            detail = "the swap file is gone; who removed it?" if error.errno == errno.ENOENT else ""
            raise StorageError(
                error.errno or errno.EIO, operation="link", path=path, detail=detail
            ) from None
    return True


def label_of(path: Path) -> str:
    """The label under which the content of the checkpoint `path` is frozen."""
    return os.path.realpath(path)


# INV-16: a commit loses its name for good before its ranges may be written.
def thaw_removed(volume: Volume) -> None:
    """Lets go of what belongs to checkpoints that have no name any more, once that is durable.

    Where that cannot be assured the content stays frozen: its space is lost, its bytes are not.
    """
    gone = [each for each in volume.frozen if not os.path.lexists(each.label)]
    for parent in {os.path.dirname(each.label) for each in gone}:
        there = Path(parent)
        while not there.is_dir():
            there = there.parent
        with contextlib.suppress(OSError):
            sync_directory(there)
            thaw(volume, (each for each in gone if os.path.dirname(each.label) == parent))


def thaw(volume: Volume, frozen: Iterable[Frozen]) -> None:
    for each in frozen:
        volume.thaw(each)
