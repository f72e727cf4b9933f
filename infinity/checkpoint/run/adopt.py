"""Adopts the swap files that a checkpoint links to, instead of copying them into new files.

A run that was killed leaves its swap files, and its commits and checkpoints link to them. The run
that resumes adopts the files: linked ranges stay frozen, and the load of the checkpoint restores
the map of the volume. No byte moves, and no second set of files is needed. If any condition fails,
the checkpoint is streamed into new files like any other checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from infinity.checkpoint.run.commit import label_of
from infinity.checkpoint.run.directory import (
    find_checkpoint,
    list_checkpoints,
    prune,
    read_linked,
    read_manifest,
    sweep,
)
from infinity.checkpoint.run.linked import COPIES_NAME, LinkedState
from infinity.config import SwapConfig
from infinity.distributed.group import RankTopology
from infinity.distributed.setup import config_of_rank
from infinity.errors import InfinityError
from infinity.state.spare_generations import count_spares
from infinity.storage.frozen_content import Adopted, FileRange
from infinity.storage.swap_directory import job_of, swap_names
from infinity.storage.swap_inspect import examine

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
    found = _stale_files(own, num_spares)
    if found is not None and (ranks is None or ranks.rank == 0):
        _tidy(config, checkpoint)
    if ranks is not None:  # Links must not go while a rank counts them.
        ranks.links.all_gather("adopting swap files", b"")
    if found is None:
        return None
    jobs, swap_files, num_found = found
    contents: dict[str, list[FileRange]] = {}
    num_links = dict.fromkeys(swap_files, 1)
    for neighbour in _neighbours(config, checkpoint):
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
                FileRange(swap_files[inodes[run.file]], run.offset_nbytes, run.nbytes)
                for entry in linked.kinds
                for run in entry.runs
                if run.file != COPIES_NAME
            ]
    is_known = all(os.stat(swap_files[inode]).st_nlink == n for inode, n in num_links.items())
    if label_of(checkpoint) not in contents or len(contents) > num_spares or not is_known:
        return None
    return Adopted(jobs, contents, num_found)


def _stale_files(
    config: SwapConfig, num_spares: int
) -> tuple[dict[str, str], dict[Inode, str], int] | None:
    """Returns (ended job by swap directory, path of every swap file that the jobs left, the most
    spare generations of a job). Early updates may have had one more than commits need."""
    is_measured = len(config.tiers.nvme) > 1 and any(t.weight == "auto" for t in config.tiers.nvme)
    if not num_spares or is_measured:  # A measurement of a path writes to its file.
        return None
    jobs: dict[str, str] = {}
    swap_files: dict[Inode, str] = {}
    num_found = 0
    for tier in config.tiers.nvme:
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


def _tidy(config: SwapConfig, checkpoint: Path) -> None:
    """Removes partial checkpoints and superseded commits. Checkpoints belong to the user."""
    if config.checkpoint_directory.is_dir():
        sweep(config.checkpoint_directory)
    for commits in config.commit_directories:
        if not commits.is_dir():
            continue
        sweep(commits)
        if checkpoint.resolve() not in [path.resolve() for path in list_checkpoints(commits)[:-1]]:
            prune(commits, 1)


def _neighbours(config: SwapConfig, checkpoint: Path) -> Iterator[Path]:
    """Yields every checkpoint that may link to the same files, once."""
    places = [checkpoint.parent, config.checkpoint_directory, *config.commit_directories]
    for place in {place.resolve(): None for place in places}:
        yield from list_checkpoints(place)


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
