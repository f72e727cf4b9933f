"""Keeps state on NVMe without a copy: flush, freeze, link. Releases it when its checkpoint is gone.

Note [Order of a commit]
  1. All writes are done, and every swap file is synced. The state is durable, but has no name.
  2. The volume is frozen: from now on no write reaches the ranges that hold this state.
  3. The swap files are linked into the partial checkpoint. The other files of the checkpoint are
     written and synced after that, and the rename makes the commit (`directory.writing`).
  The release has the reverse order: first the checkpoint loses its name durably, then its ranges
  may be written again (`thaw_removed`). So after a crash every name refers to unchanged bytes.
  docs/design/0004-commits.md has the full argument.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.huggingface.safetensors_file import dtype_name, tensor_bytes
from infinity.checkpoint.run.directory import (
    SequentialFile,
    list_checkpoints,
    partial_of,
    sync_directory,
)
from infinity.checkpoint.run.layout import StateTensor
from infinity.checkpoint.run.linked import COPIES_NAME, LinkedKind, LinkedRun, LinkedTensor
from infinity.engine.state_access import StateAccess
from infinity.errors import StorageError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL, num_scales
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.state.moments_8bit import runs_within
from infinity.state.partition import Partition, ShardSlice
from infinity.state.store import NvmeLocation
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import digest
from infinity.storage.frozen_content import FileRange, FrozenContent, files_of
from infinity.storage.volume import Volume
from infinity.storage.volume_layout import slice_extents

# link(2) fails so on another file system, on one without links, and for too many links.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_log = logging.getLogger("infinity")
_warned_of_links: set[str] = set()
# Open directories of checkpoints, whose path the kernel tells, also after they were renamed.
_followed: weakref.WeakKeyDictionary[FrozenContent, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Stored:
    """State that was linked or copied page by page, and the checksums of all pages in order."""

    kinds: tuple[LinkedKind, ...] = ()
    checksums: bytes = b""

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.kinds + other.kinds, self.checksums + other.checksums)


@dataclass(frozen=True, slots=True)
class KindRange:
    """Full pages of a state kind, and the tensors in them. Offsets count from `start_nbytes`."""

    unit: Unit
    state_kind: StateKind
    start_nbytes: int
    stop_nbytes: int
    tensors: tuple[LinkedTensor, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the range."""
        return self.stop_nbytes - self.start_nbytes

    def stored(self, runs: Iterable[LinkedRun]) -> LinkedKind:
        """Returns the row of the table for these pages in `runs`."""
        unit, state_kind = self.unit, self.state_kind
        return LinkedKind(unit.name, state_kind.value, state_kind.kind, tuple(runs), self.tensors)


def is_linkable(state: StateAccess, unit: Unit, state_kind: StateKind) -> bool:
    """Whether the state kind rests in swap files that a checkpoint may link to.

    Gradients are written in place even while the volume is frozen, and moments of eight bits have
    no spare generation; both must be copied.
    """
    if state_kind is StateKind.GRADIENTS or unit.is_8bit(state_kind):
        return False
    return isinstance(state.store.location(unit, state_kind), NvmeLocation)


def has_space(
    volume: Volume, target: Path, *, num_spares: int, keep: int | None, leaving: Collection[str]
) -> bool:
    """Whether a spare generation is left for the writes after a commit of `target`.

    `num_spares`: those for commits; the volume has one more for early updates. `keep` is the number
    of checkpoints that stay in the directory of `target`, with `target`; `leaving` has the labels
    of commits that are removed right after this one.
    """
    checkpoints = [*list_checkpoints(target.parent), target]
    kept = checkpoints if keep is None else checkpoints[-keep:]
    departing = set(leaving) | (set(map(label_of, checkpoints)) - set(map(label_of, kept)))
    remaining = [
        frozen.label
        for frozen in volume.frozen
        if frozen.label  # Else it is of early updates, which a commit takes back.
        and frozen.label != label_of(target)
        and (frozen.label not in departing or _is_linked_elsewhere(volume, frozen))
    ]
    return len(remaining) + 1 <= num_spares


def state_kind_ranges(tensors: Iterable[tuple[Unit, StateTensor]]) -> list[KindRange]:
    """Returns full state kinds of units, with these tensors in them."""
    of_state_kind: dict[tuple[Unit, StateKind], list[LinkedTensor]] = {}
    for unit, tensor in tensors:
        of_state_kind.setdefault((unit, tensor.state_kind), []).extend(linked_tensors(unit, tensor))
    return [
        KindRange(unit, state_kind, 0, unit.nbytes(state_kind), tuple(rows))
        for (unit, state_kind), rows in of_state_kind.items()
    ]


def own_weights(divided: Partition) -> Iterator[KindRange]:
    """Yields the part that this rank owns of the weights that every rank keeps in full."""
    for full_unit, shard in zip(divided.full_units, divided.local, strict=True):
        for shares in (shard.shares, shard.frozen):
            places = [_weight_range(share) for share in shares]
            if not places:
                continue
            low = align_down(min(start for start, _ in places), PAGE_NBYTES)
            high = align_up(max(stop for _, stop in places), PAGE_NBYTES)
            tensors = tuple(
                LinkedTensor(
                    share.full.name,
                    dtype_name(share.full.facts.dtype),
                    share.full.facts.shape,
                    share.full.facts.stride,
                    start - low,
                    share.start,
                    share.part.numel,
                )
                for share, (start, _) in zip(shares, places, strict=True)
            )
            yield KindRange(full_unit, StateKind.PARAMETERS, low, high, tensors)


def _weight_range(share: ShardSlice) -> tuple[int, int]:
    """Returns the byte range [start, stop) of a shard in the weights of the full unit."""
    at, size = share.full.weight_offset_nbytes, share.full.facts.dtype.itemsize
    return at + share.start * size, at + share.stop * size


def link_state(
    partial: Path, target: Path, state: StateAccess, ranges: Iterable[KindRange]
) -> Stored | None:
    """Flushes and freezes the state on NVMe, and links its swap files into `partial`.

    Returns None, and changes nothing, if the file system has no links. `target` is the final path
    of the checkpoint. Raises StorageError.
    """
    volume = state.store.volume
    assert volume is not None and volume.num_spares
    volume.sync()
    frozen = volume.freeze(label_of(target))
    try:
        stored, paths = located(state, ranges)
        is_linked = _link(paths, partial)
    except BaseException:
        volume.thaw(frozen)  # The checkpoint has no name yet.
        raise
    if not is_linked:
        volume.thaw(frozen)
        return None
    return stored


def located(state: StateAccess, ranges: Iterable[KindRange]) -> tuple[Stored, list[str]]:
    """Returns the ranges of swap files that hold state now, with their checksums, and the files.

    All writes are done (`Volume.sync`).
    """
    volume = state.store.volume
    assert volume is not None
    kinds, paths, checksums = [], dict[str, None](), []
    for kind_range in ranges:
        location = state.store.location(kind_range.unit, kind_range.state_kind)
        assert isinstance(location, NvmeLocation)
        place = {"offset_nbytes": kind_range.start_nbytes, "nbytes": kind_range.nbytes}
        extents = [extent for extent, _ in slice_extents(location.extents, **place)]
        runs = volume.locate(extents)
        paths.update((run.path, None) for run in runs)
        kinds.append(kind_range.stored(linked_runs(runs)))
        checksums.append(volume.checksums(extents))
    return Stored(tuple(kinds), b"".join(checksums)), list(paths)


def copy_pages(partial: Path, state: StateAccess, ranges: Iterable[KindRange]) -> Stored:
    """Copies state page by page into one new file of `partial`, and syncs the file.

    Makes no file if there is nothing to copy. Raises StorageError.
    """
    kinds, checksums, end_nbytes = [], [], 0
    with ExitStack() as stack:
        file: SequentialFile | None = None
        for kind_range in ranges:
            if not kind_range.nbytes:
                kinds.append(kind_range.stored([]))
                continue
            if file is None:
                file = stack.enter_context(SequentialFile(partial / COPIES_NAME))
            run = LinkedRun(COPIES_NAME, end_nbytes, kind_range.nbytes)
            kinds.append(kind_range.stored([run]))
            end_nbytes += kind_range.nbytes
            place = kind_range.start_nbytes, kind_range.stop_nbytes
            for pages in state.pages(kind_range.unit, kind_range.state_kind, *place):
                checksums.append(digest(pages.data_ptr(), pages.numel()))
                file.write(tensor_bytes(pages))
    return Stored(tuple(kinds), b"".join(checksums))


def linked_tensors(unit: Unit, tensor: StateTensor) -> Iterator[LinkedTensor]:
    """Yields the rows of the table for a tensor: its place in the state kind.

    A tensor has one row. Codes of eight bits alternate with their scales, so both have one row for
    every granule.
    """
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
    """Yields (first element, number of elements, byte offset in the state kind) for every row."""
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
    """Returns ranges of swap files as the table has them; a link has the name of its file."""
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
    """Returns the label of the frozen content of the checkpoint `path`."""
    return os.path.realpath(path)


# INV-16: a commit loses its name for good before its ranges may be written.
def thaw_removed(volume: Volume) -> None:
    """Releases the content of checkpoints that have no name any more, after syncing the removal.

    If the sync fails, the content stays frozen: its space is lost, its bytes are not. So does one
    that was renamed, and one that may have a copy by hard links.
    """
    follow(volume)
    commits = [frozen for frozen in volume.frozen if frozen.label]
    gone = [frozen for frozen in commits if _is_gone(str(_place_of(frozen)))]
    for renamed in [frozen for frozen in commits if _is_gone(frozen.label) and frozen not in gone]:
        _warn(renamed, f"it is {_place_of(renamed)} now")
    for parent in {os.path.dirname(frozen.label) for frozen in gone}:
        directory = Path(parent)
        while not directory.is_dir():
            directory = directory.parent
        with contextlib.suppress(OSError):
            sync_directory(directory)
            thaw(volume, [frozen for frozen in gone if os.path.dirname(frozen.label) == parent])


def relabel(volume: Volume, before: str, after: Path) -> None:
    """The directory with the label `before` was renamed to `after`, by the program itself."""
    for frozen in volume.frozen:
        if frozen.label.startswith(f"{before}/"):
            frozen.label = label_of(after) + frozen.label.removeprefix(before)


def follow(volume: Volume) -> None:
    """Keeps the directories of checkpoints open whose content is frozen, to know where they are
    after a rename. They are closed with the content."""
    for frozen in volume.frozen:
        if frozen.label and frozen not in _followed:
            with contextlib.suppress(OSError):
                fd = os.open(frozen.label, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                weakref.finalize(frozen, os.close, fd).atexit = False
                _followed[frozen] = f"/proc/self/fd/{fd}"


def _place_of(content: FrozenContent) -> Path:
    """Returns the present path of the checkpoint, or one that is gone."""
    with contextlib.suppress(OSError):
        if content in _followed:
            return Path(os.readlink(_followed[content]))
    return Path(content.label)


def _warn(content: FrozenContent, why: str) -> None:
    """Warns, once for each checkpoint."""
    if content.label not in _warned_of_links:
        _warned_of_links.add(content.label)
        _log.warning(
            "%s has lost its name: %s. Its generation stays in use, so that the state there stays "
            "whole, and later checkpoints may be full copies; a checkpoint that is copied and then "
            "removed frees it",
            content.label, why,
        )  # fmt: skip


def _is_gone(label: str) -> bool:
    """Whether nothing has the path of a checkpoint. A path that cannot be examined may be there."""
    try:
        os.lstat(label)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _is_linked_elsewhere(volume: Volume, content: FrozenContent) -> bool:
    """Whether a swap file of the content has a link that no checkpoint of this run accounts for: it
    may be one of a copy of this checkpoint (`cp -al`)."""
    contents = [frozen for frozen in volume.frozen if frozen.label]
    places = {Path(frozen.label) for frozen in contents} | set(map(_place_of, contents))
    if all(_has_known_links(path, places) for path in files_of(content, volume.swap_paths)):
        return False
    _warn(content, "its swap files have links elsewhere, as a copy by hard links has")
    return True


def _has_known_links(swap_path: str, places: Iterable[Path]) -> bool:
    """Whether all links to a swap file are its own name and those of checkpoints, as in `adopt`.

    The links are counted first: one that goes meanwhile hides no other.
    """
    try:
        found = os.stat(swap_path)
    except OSError:
        return False  # Its own name is gone, and its links cannot be counted.
    name = os.path.basename(swap_path)
    known = 1
    for place in {place for path in places for place in (path, partial_of(path))}:
        for link in (place / name, *place.glob(f"rank-*/{name}")):
            with contextlib.suppress(OSError):
                known += os.path.samestat(os.lstat(link), found)
    return found.st_nlink <= known


def thaw(volume: Volume, contents: Iterable[FrozenContent]) -> None:
    """Releases the contents of checkpoints that are removed, but for those whose files have links
    that are not known. The ranges may then be written again."""
    for frozen in [kept for kept in contents if not _is_linked_elsewhere(volume, kept)]:
        volume.thaw(frozen)
