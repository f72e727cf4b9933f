"""Going on in the swap files that a checkpoint links to, instead of copying it into new ones.

A run that was killed has left its swap files, and its commits and checkpoints link to them. The run
that resumes takes the files over: what is linked stays frozen, and loading the checkpoint restores
its map. No byte of it moves, and no second set of files is needed. Where anything is not as
expected the checkpoint is streamed into new files, as any other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

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
from infinity.distributed.group import find_group
from infinity.distributed.setup import config_of_rank
from infinity.engine.durability import count_spares
from infinity.errors import InfinityError
from infinity.storage.swap_directory import job_of, swap_names
from infinity.storage.swap_inspect import examine
from infinity.storage.volume import Adopted, FileRange

Inode = tuple[int, int]


def plan_adoption(
    config: SwapConfig, path: str | os.PathLike[str], group: Any = None
) -> Adopted | None:
    """What to take over for a run that will load the checkpoint `path`; None: nothing.

    Removes what a crash has left half-made, and a commit before the last one. A file is taken over
    only when every link to it is known; one that somebody has made elsewhere must never see a
    write. With several ranks (see `infinity.offload` of `group`) a collective call: each takes over
    the files of its own directories.
    """
    checkpoint = find_checkpoint(Path(path))
    ranks = find_group(group)
    own = config if ranks is None else config_of_rank(config, ranks)
    num_spares = count_spares(own, num_ranks=1 if ranks is None else ranks.count)
    found = _stale_files(own, num_spares)
    if found is not None and (ranks is None or ranks.rank == 0):
        _tidy(config, checkpoint)
    if ranks is not None:
        dist.barrier(ranks.process_group)  # Nobody counts links while they go.
    if found is None:
        return None
    jobs, swap_files = found
    contents: dict[str, list[FileRange]] = {}
    num_transport = dict.fromkeys(swap_files, 1)
    for each in _neighbours(config, checkpoint):
        for place, linked in _linked_states(each).items():
            inodes = {n: _inode(each / place / n) for n in linked.files() if n != COPIES_NAME}
            if not set(inodes.values()) & set(swap_files):
                continue
            if not set(inodes.values()) <= set(swap_files):
                return None
            for inode in inodes.values():
                num_transport[inode] += 1
            contents[label_of(each)] = [
                FileRange(swap_files[inodes[run.file]], run.offset_nbytes, run.nbytes)
                for state_kind in linked.kinds
                for run in state_kind.runs
                if run.file != COPIES_NAME
            ]
    is_known = all(os.stat(swap_files[inode]).st_nlink == n for inode, n in num_transport.items())
    if label_of(checkpoint) not in contents or len(contents) > num_spares or not is_known:
        return None
    return Adopted(jobs, contents)


def _stale_files(
    config: SwapConfig, num_spares: int
) -> tuple[dict[str, str], dict[Inode, str]] | None:
    """Jobs that are gone by swap directory, and the files that they have left there."""
    is_measured = len(config.tiers.nvme) > 1 and any(t.weight == "auto" for t in config.tiers.nvme)
    if not num_spares or is_measured:  # To measure a path is to write to its file.
        return None
    jobs: dict[str, str] = {}
    swap_files: dict[Inode, str] = {}
    for tier in config.tiers.nvme:
        job = _stale_job(tier.path)
        if job is None:
            return None
        jobs[str(tier.path)] = job
        for name in swap_names(job, num_spares):
            swap_path = tier.path / name
            if swap_path.exists():
                swap_files[_inode(swap_path)] = str(swap_path)
    return jobs, swap_files


def _stale_job(directory: Path) -> str | None:
    """The one job that is gone and has left swap files."""
    if not directory.is_dir():
        return None
    swap = examine(str(directory))
    if swap is None or swap.is_held or swap.is_newer:
        return None
    jobs = {job_of(file.name) for file in swap.files}
    return jobs.pop() if len(jobs) == 1 else None


def _tidy(config: SwapConfig, checkpoint: Path) -> None:
    """Only what is ours to remove: checkpoints are the user's."""
    if config.checkpoint_directory.is_dir():
        sweep(config.checkpoint_directory)
    for commits in config.commit_directories:
        if not commits.is_dir():
            continue
        sweep(commits)
        if checkpoint.resolve() not in [path.resolve() for path in list_checkpoints(commits)[:-1]]:
            prune(commits, 1)


def _neighbours(config: SwapConfig, checkpoint: Path) -> Iterator[Path]:
    """Every checkpoint that may link to the same files, once."""
    places = [checkpoint.parent, config.checkpoint_directory, *config.commit_directories]
    for place in {place.resolve(): None for place in places}:
        yield from list_checkpoints(place)


def _linked_states(path: Path) -> dict[str, LinkedState]:
    """Nothing of a damaged one either: its links stay unknown then, and nothing is taken over."""
    try:
        return read_linked(path, read_manifest(path))
    except InfinityError:
        return {}


def _inode(path: Path) -> Inode:
    found = os.stat(path)
    return found.st_dev, found.st_ino
