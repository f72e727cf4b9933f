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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from infinity.checkpoint.durable import partial_of, sync_directory
from infinity.checkpoint.run.contents import (
    STREAMED,
    KeptTensors,
    KindRange,
    is_linkable,
    linked_tensors,
)
from infinity.checkpoint.run.directory import (
    find_checkpoint,
    list_checkpoints,
    prune,
    read_linked,
    read_manifest,
    sweep,
)
from infinity.checkpoint.run.format import COPIES_NAME, LinkedKind, LinkedState, Stored
from infinity.checkpoint.run.opened import OpenCheckpoint
from infinity.config import SwapConfig
from infinity.config.schema.tiers import NvmeTier
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import config_of_rank
from infinity.engine.state_access import StateAccess
from infinity.errors import InfinityError, StorageError
from infinity.state.spare_generations import count_spares
from infinity.state.store import NvmeLocation
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import PageReader
from infinity.storage.generations import Adopted, FrozenContent, files_of
from infinity.storage.lock_file import job_of, swap_names
from infinity.storage.protocol import FileRange
from infinity.storage.swap_directory import examine
from infinity.storage.volume import Volume
from infinity.storage.volume_layout import slice_extents

# link(2) fails so on another file system, on one without links, and for too many links.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_log = logging.getLogger("infinity")
_warned_of_links: set[str] = set()
# Open directories of checkpoints, whose path the kernel tells, also after they were renamed.
_followed: weakref.WeakKeyDictionary[FrozenContent, str] = weakref.WeakKeyDictionary()


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
        if frozen.label != label_of(target)
        and (frozen.label not in departing or _is_linked_elsewhere(volume, frozen))
    ]
    return len(remaining) + 1 <= num_spares


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
        stored, paths = _located(state, ranges)
        is_linked = _link(paths, partial)
    except BaseException:
        volume.thaw(frozen)  # The checkpoint has no name yet.
        raise
    if not is_linked:
        volume.thaw(frozen)
        return None
    return stored


def _located(state: StateAccess, ranges: Iterable[KindRange]) -> tuple[Stored, list[str]]:
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


def linked_runs(ranges: Iterable[FileRange]) -> tuple[FileRange, ...]:
    """Returns ranges of swap files as the table has them; a link has the name of its file."""
    return tuple(FileRange(os.path.basename(r.path), r.offset_nbytes, r.nbytes) for r in ranges)


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
    commits = volume.frozen
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
        if frozen not in _followed:
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
    contents = volume.frozen
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


# -- A run that resumes ----------------------------------------------------------------------------


Inode = tuple[int, int]


def plan_adoption(
    config: SwapConfig, path: str | os.PathLike[str], ranks: RankTopology | None = None
) -> Adopted | None:
    """Finds the swap files that a run adopts, which will load the checkpoint `path`; None for none.

    Removes partial checkpoints that a crash has left, and commits older than the last one. A file
    is adopted only if every link to it is known, because a write must never reach a link that
    somebody has made elsewhere. With several `ranks` this is a collective call, and every rank
    adopts the files of its own directories. Raises ConfigError if
    there is no checkpoint, StorageError.
    """
    checkpoint = find_checkpoint(Path(path))
    own = config if ranks is None else config_of_rank(config, ranks)
    num_spares = count_spares(own, num_ranks=1 if ranks is None else ranks.count)
    found = _stale_files(own.tiers.nvme, num_spares)
    saved, committed = config.checkpoint_directory, config.commit_directories
    if found is not None and (ranks is None or ranks.rank == 0):
        _tidy(saved, committed, checkpoint)
    if ranks is not None:  # Links must not go while a rank counts them.
        ranks.links.all_gather("adopting swap files", b"")
    if found is None:
        return None
    jobs, swap_files, num_found = found
    contents: dict[str, list[FileRange]] = {}
    num_links = dict.fromkeys(swap_files, 1)
    places = {place.resolve(): None for place in (checkpoint.parent, saved, *committed)}
    for neighbour in (path for place in places for path in list_checkpoints(place)):
        for place, linked in _linked_states(neighbour).items():
            names = [name for name in linked.files() if name != COPIES_NAME]
            inodes = {name: _inode(neighbour / place / name) for name in names}
            if not set(inodes.values()) & set(swap_files):
                continue
            if not set(inodes.values()) <= set(swap_files):
                return None
            for inode in inodes.values():
                num_links[inode] += 1
            contents[label_of(neighbour)] = [
                replace(run, path=swap_files[inodes[run.path]])
                for entry in linked.kinds
                for run in entry.runs
                if run.path != COPIES_NAME
            ]
    is_known = all(os.stat(swap_files[inode]).st_nlink == n for inode, n in num_links.items())
    if label_of(checkpoint) not in contents or len(contents) > num_spares or not is_known:
        return None
    return Adopted(jobs, contents, num_found)


def _stale_files(
    tiers: Sequence[NvmeTier], num_spares: int
) -> tuple[dict[str, str], dict[Inode, str], int] | None:
    """Returns (ended job by swap directory, path of every swap file that the jobs left, the most
    spare generations of a job). Early updates may have had one more than commits need."""
    if not num_spares:
        return None
    jobs: dict[str, str] = {}
    swap_files: dict[Inode, str] = {}
    num_found = 0
    for tier in tiers:
        job = _stale_job(tier.path)
        if job is None:
            return None
        jobs[str(tier.path)] = job
        for generation, name in enumerate(swap_names(job, num_spares + 1)):
            swap_path = tier.path / name
            if swap_path.exists():
                swap_files[_inode(swap_path)] = str(swap_path)
                num_found = max(num_found, generation)
    return jobs, swap_files, num_found


def _stale_job(directory: Path) -> str | None:
    """Returns the ended job that left swap files in a directory; None unless it is exactly one."""
    if not directory.is_dir():
        return None
    swap = examine(str(directory))
    if swap is None or swap.is_held or swap.is_newer:
        return None
    jobs = {job_of(file.name) for file in swap.files}
    return jobs.pop() if len(jobs) == 1 else None


def _tidy(saved: Path, committed: Iterable[Path], checkpoint: Path) -> None:
    """Removes partial checkpoints and superseded commits. Checkpoints belong to the user."""
    if saved.is_dir():
        sweep(saved)
    for commits in committed:
        if not commits.is_dir():
            continue
        sweep(commits)
        if checkpoint.resolve() not in [path.resolve() for path in list_checkpoints(commits)[:-1]]:
            prune(commits, 1)


def _linked_states(path: Path) -> dict[str, LinkedState]:
    """Returns the linked state of a checkpoint; nothing if the checkpoint is damaged.

    The links of a damaged checkpoint stay unknown, so its files are not adopted.
    """
    try:
        return read_linked(path, read_manifest(path))
    except InfinityError:
        return {}


def _inode(path: Path) -> Inode:
    found = os.stat(path)
    return found.st_dev, found.st_ino


# State kinds that the swap files hold as the checkpoint has them: where, and their rows.
_Matches = dict[tuple[Unit, StateKind], tuple[NvmeLocation, LinkedKind]]


def restore_linked(
    checkpoint: OpenCheckpoint, state: StateAccess, kept: KeptTensors, rank: int
) -> set[tuple[Unit, StateKind]]:
    """Restores the linked state of this rank in its swap files; returns what is restored.

    Either all linked state of the rank is restored, or nothing. Weights that every rank keeps in
    full are not restored, because each rank has linked only a part of them; nor are those that
    another node has linked. Every page is compared
    with its CRC32C before anything changes. Raises CorruptionError, StorageError.
    """
    volume, place = state.store.volume, checkpoint.place_of(rank)
    linked, label = checkpoint.linked_states.get(place), label_of(checkpoint.path)
    frozen = next((f for f in volume.frozen if f.label == label), None) if volume else None
    if volume is None or linked is None or frozen is None:
        return set()
    found = _find_matches(linked, state, kept, volume, frozen)
    if found is None:
        return set()
    matches, swap_paths = found
    for swap_path in swap_paths:
        link = checkpoint.path / place / os.path.basename(swap_path)
        if not os.path.samefile(swap_path, link):
            return set()
    with PageReader() as pages:
        for _, entry in matches.values():
            for _ in linked.read(pages, entry, 0, entry.nbytes):
                pass  # Reading compares; a wrong page raises.
    state.weight_cache.forget()
    volume.restore(frozen)
    for location, entry in matches.values():
        volume.put_checksums(location.extents, linked.checksums_of(entry))
    return set(matches)


def _find_matches(
    linked: LinkedState,
    state: StateAccess,
    kept: KeptTensors,
    volume: Volume,
    frozen: FrozenContent,
) -> tuple[_Matches, set[str]] | None:
    """Pairs linked state with the frozen ranges of the volume; returns the pairs and the swap files
    of the ranges, None if any of it has no pair."""
    entries = {
        (entry.unit, entry.state_kind): entry
        for entry in linked.kinds
        if any(run.path != COPIES_NAME for run in entry.runs)
    }
    matches: _Matches = {}
    swap_paths, divided = set[str](), state.partition
    for unit, kept_tensors in kept:
        if divided is not None and not divided.is_saver(unit):
            continue
        for state_kind in STREAMED:
            tensors = [tensor for tensor in kept_tensors if tensor.state_kind is state_kind]
            if not tensors or not is_linkable(state, unit, state_kind):
                continue
            entry = entries.pop((unit.name, state_kind.value), None)
            if divided is not None and tensors[0].share is None:
                continue
            rows = tuple(row for tensor in tensors for row in linked_tensors(unit, tensor))
            if entry is None or entry.tensors != rows:
                return None
            location = state.store.location(unit, state_kind)
            assert isinstance(location, NvmeLocation)
            ranges = volume.locate(location.extents, frozen)
            if entry.runs != linked_runs(ranges):
                return None
            swap_paths.update(swap_range.path for swap_range in ranges)
            matches[unit, state_kind] = location, entry
    return None if entries else (matches, swap_paths)
