"""Writes a checkpoint: all state of a run, durable at one rename.

The order of effects: all ranks write and sync their files (`contents.py`); the first rank writes
and syncs the manifest, syncs the directory, renames it and syncs its parent; then it removes older
checkpoints.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from torch import nn

from infinity import __version__
from infinity.checkpoint.durable import check_space, partial_of, sync_directory
from infinity.checkpoint.run.contents import Contents, buffers_of, contents_of, write_contents
from infinity.checkpoint.run.copy import Saving, copy_checkpoint
from infinity.checkpoint.run.directory import (
    checkpoint_name,
    make_in,
    prune,
    refuse_later,
    write_manifest,
    writing,
)
from infinity.checkpoint.run.format import (
    SCHEMA,
    TABLE_NAME,
    FileEntry,
    Manifest,
    Stored,
    files_of_bytes,
    files_to_bytes,
    places_of,
    rank_directories,
)
from infinity.checkpoint.run.links import (
    follow,
    has_space,
    label_of,
    link_state,
    thaw,
    thaw_removed,
)
from infinity.checkpoint.run.load import chosen_units, extra_states, pack_program, random_state
from infinity.checkpoint.run.references import read_reference
from infinity.distributed.sync import CollectiveSection
from infinity.engine.engine import Engine
from infinity.engine.registry import engine_of
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError, RankError, UnsupportedError
from infinity.optimizers.offloaded import OffloadedOptimizer
from infinity.state.spare_generations import count_spares, is_elsewhere

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_log = logging.getLogger("infinity")


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    linked: bool = True,
    all_state: bool = True,
) -> Path:
    """Writes the checkpoint `directory/step-NNNNNNNN` and returns its path when it is durable.

    The checkpoint holds everything that an exact continuation needs: weights, residuals or masters,
    moments, gradients summed so far, the buffers of the model, settings and step counts of the
    optimizer, the scheduler, the generators of Python, NumPy and torch, and `extra`.

    step: the number of steps taken; by default the optimizer's count
    extra: numbers, text, tensors, and lists and dicts of these; ranks may give different ones
    keep: the number of newest checkpoints that stay in the directory, with this one; None keeps all
    linked: False copies all state to safetensors files, which can be moved to another file system
    all_state: False keeps the state of the optimizer's parameters alone, without links: that of one
        adapter of `infinity.together`. `load(..., all_state=False)` leaves those of others as they
        are. Buffers, extra state of modules and generators are kept whole, because a run of this
        adapter alone goes on with them

    State on NVMe is linked instead of copied if `[checkpoint]` of the configuration keeps spare
    generations, one is left, and the directory is on the file system of the swap directories.

    All ranks call `save` with a directory that they share, while no parameter has a gradient. Each
    rank writes what it owns.

    Call between steps, from the training thread. A crash or an error at any moment leaves the older
    checkpoints intact. Raises ConfigError if the directory has a checkpoint of this or a later
    step, StorageError with the operation and the file, UnsupportedError for a gradient on several
    ranks, InfinityError while parameters are in use.
    """
    saving = async_save(
        directory, model, optimizer,
        scheduler=scheduler, step=step, extra=extra, keep=keep, linked=linked, all_state=all_state,
    )  # fmt: skip
    return saving.wait()


def async_save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    linked: bool = True,
    all_state: bool = True,
) -> Saving:
    """Writes a checkpoint as `save`, but returns before a copy to another file system ends.

    If `directory` is on another file system than the swap directories, the step is committed in the
    first swap directory, and a thread copies it with the bandwidth that training leaves. The commit
    occupies a spare generation until the copy ends. `Saving.wait()` returns the path when the copy
    is durable, or raises the error of the copy; older checkpoints and the commit stay then.

    Waits for the previous copy, and raises its error. The next call for that step writes the
    checkpoint directly, and removes the commit. In that case, and in every other one, for example
    with several ranks, the checkpoint is complete when the call returns. Raises as `save`, and
    ConfigError for `keep` below 1.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"keep={keep}: expected at least 1, the checkpoint that is written")
    engine, linked = engine_of(model), linked and all_state
    target, commits = Path(directory), engine.commit_directory
    with engine.ranks.collective_section("infinity.checkpoint.save") as asked:
        program = _Program.of(model, optimizer, scheduler, step, extra, all_state=all_state)
        last = _await_last(engine)
        copying = _copying_directory(engine, target, program.step) if linked else None
        own = _own_commits(engine, commits)
        _check_ranks(engine, program.chosen)
        asked.local = repr((program.step, keep, linked)).encode()
    _refuse_different("save", asked)
    place, leaving = copying or target, own
    left = place / checkpoint_name(program.step)
    is_left = last is not None and last.has_failed and last.source == left and os.path.lexists(left)
    if is_left:
        # The run may have other state now. The commit stays until this checkpoint is durable.
        leaving, copying, place = [*own, label_of(left)], None, target
    path = _write_checkpoint(
        place, engine, model, program,
        keep=1 if copying else keep, linked=linked, leaving=leaving,
    )  # fmt: skip
    if is_left:
        _remove_all(engine, left.parent)
    if commits is not None and label_of(commits) != label_of(place):
        # The checkpoint supersedes the commits of this run.
        with engine.ranks.collective_section("infinity.checkpoint: commits of this run") as mine:
            mine.local = b"mine" if own else b""
        if any(mine.of_all):
            _remove_all(engine, commits)
    return copy_behind(engine, path, target, keep=keep) if copying else Saving(path)


def copy_behind(engine: Engine, commit: Path, directory: Path, *, keep: int | None) -> Saving:
    """Starts the copy of a commit to the directory of checkpoints; the copy removes the commit.

    For one rank. The caller has waited for the previous copy (`_await_last`).
    """
    volume = engine.store.volume
    assert volume is not None and engine.background is None and engine.num_ranks == 1

    def copy(saving: Saving) -> None:
        copy_checkpoint(commit, directory, volume.engine, saving=saving)
        if keep is not None:
            _remove(engine, directory, keep=keep)
        _remove_all(engine, commit.parent)

    engine.background = saving = Saving(directory / commit.name, commit, copy)
    return saving


def _await_last(engine: Engine) -> Saving | None:
    """Waits for the previous copy and returns it. Raises its error, unless it was raised before."""
    last, engine.background = engine.background, None
    if not isinstance(last, Saving):
        return None
    last.close()
    if not last.is_told and not last.is_abandoned:
        last.wait()
    return last


def _copying_directory(engine: Engine, directory: Path, step: int) -> Path | None:
    """Returns the swap directory in which a step is committed before it is copied to `directory`.

    Returns None if `directory` can have links to the swap files, if no spare generation is left,
    or with several ranks. Raises ConfigError for a checkpoint of this or a later step.
    """
    volume, copying = engine.store.volume, engine.config.copying_directory
    num_spares = count_spares(engine.config, num_ranks=engine.num_ranks)
    if volume is None or copying is None or not num_spares or engine.num_ranks > 1:
        return None
    if not is_elsewhere(engine.config.tiers.nvme, directory):
        return None
    refuse_later(directory, step)
    thaw_removed(volume)
    own = _own_commits(engine, engine.commit_directory)
    target = copying / checkpoint_name(step)
    has_one = has_space(volume, target, num_spares=num_spares, keep=1, leaving=own)
    return copying if has_one else None


def commit(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Makes this step durable in the first swap directory; returns the path for `load`.

    The commit holds what `save` keeps, and replaces the last commit: state on NVMe is linked, all
    other state is written. `checkpoint.durability = "step"` reserves the space. A later `save` of
    this model removes the commit.

    Call between steps, after the step of the scheduler. A crash or an error leaves the last commit
    intact. Raises ConfigError without `checkpoint.durability = "step"`, otherwise as `save`.
    """
    engine = engine_of(model)
    checkpoint, directory = engine.config.checkpoint, engine.commit_directory
    if checkpoint is None or checkpoint.durability != "step" or directory is None:
        raise ConfigError(
            'infinity.checkpoint.commit needs checkpoint.durability = "step" in the configuration'
        )
    with engine.ranks.collective_section("infinity.checkpoint.commit") as asked:
        program = _Program.of(model, optimizer, scheduler, step, extra)
        _check_ranks(engine, program.chosen)
        asked.local = repr(program.step).encode()
    _refuse_different("commit", asked)
    return _write_checkpoint(directory, engine, model, program, keep=1, linked=True, leaving=())


@dataclass(frozen=True, slots=True)
class _Program:
    """The small state, packed, and its number of steps."""

    step: int
    content: bytes
    chosen: Collection[int] | None  # The units that the checkpoint holds; None: all.

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: OffloadedOptimizer | None,
        scheduler: Stateful | None,
        step: int | None,
        extra: Mapping[str, Any] | None,
        *,
        all_state: bool = True,
    ) -> _Program:
        chosen = chosen_units(optimizer, all_state=all_state)
        buffers_of(model)  # Refuses what no checkpoint can hold.
        named = optimizer.named_state() if optimizer is not None else None
        if step is None:
            if named is None:
                raise ConfigError("save without an optimizer needs the number of steps: step=...")
            step = max(named["steps"].values(), default=0)
        content = pack_program(
            {
                "optimizer": named,
                "scheduler": scheduler.state_dict() if scheduler is not None else None,
                "modules": extra_states(model),
                "random": random_state(),
                "extra": dict(extra or {}),
            }
        )
        return cls(step, content, chosen)


def _refuse_different(call: str, asked: CollectiveSection) -> None:
    if len(set(asked.of_all)) > 1:
        texts = " and ".join(sorted({text.decode() for text in asked.of_all})[:2])
        raise ConfigError(
            f"infinity.checkpoint.{call}: step and options are {texts} on different ranks; all of "
            "them make the same call"
        )


def _check_ranks(engine: Engine, chosen: Collection[int] | None) -> None:
    """Checks, for several ranks, that parameters are at rest, and those of `chosen` units without
    gradients.

    A gradient may be in transit between ranks until the step has used it. Raises UnsupportedError,
    InfinityError.
    """
    if engine.num_ranks == 1:
        return
    with engine.at_rest("infinity.checkpoint"):
        pass
    for param in engine.params:
        is_kept = chosen is None or param.unit.index in chosen
        if is_kept and engine.gradients.has(param.spec):
            raise UnsupportedError(
                f"{param.name!r} has a gradient, which checkpoints of several ranks cannot hold; "
                "call optimizer.step() and optimizer.zero_grad() before"
            )


def _own_commits(engine: Engine, commits: Path | None) -> list[str]:
    """Returns the labels of the commits that this run has made and not removed. The content of one
    that was removed stays frozen if somebody has a copy by hard links."""
    volume = engine.store.volume
    if volume is None or commits is None:
        return []
    parent = label_of(commits)
    labels = [f.label for f in volume.frozen if os.path.dirname(f.label) == parent]
    return list(filter(os.path.lexists, labels))


def _write_checkpoint(
    directory: Path,
    engine: Engine,
    model: nn.Module,
    program: _Program,
    *,
    keep: int | None,
    linked: bool,
    leaving: Collection[str],
) -> Path:
    """Runs one transaction over all ranks, and returns the path of the checkpoint.

    Every rank makes its own files durable, then one rename by the first rank commits all of them.
    An error on any rank leaves no checkpoint.
    """
    volume = engine.store.volume
    target = directory / checkpoint_name(program.step)
    num_spares = count_spares(engine.config, num_ranks=engine.num_ranks)
    try:
        with engine.at_rest("infinity.checkpoint", program.chosen) as state, ExitStack() as naming:
            if volume is not None and volume.num_spares:
                thaw_removed(volume)  # The user may have removed checkpoints.
            if volume is None or not num_spares:
                linked = False
            elif linked and not has_space(
                volume, target, num_spares=num_spares, keep=keep, leaving=leaving
            ):
                linked = False
                _log.warning(
                    "%s is a full copy: its links would need more than the %d spare "
                    "generations of checkpoint.keep",
                    target,
                    num_spares,
                )
            _write_on_all(naming, target, engine, state, model, program, linked=linked)
    except BaseException as error:
        # The content stays frozen if the name exists and could not be removed, or may still come:
        # the progress of a lost rank is unknown.
        if volume is not None and not isinstance(error, RankError):
            thaw_removed(volume)
        raise
    if keep is not None:
        _remove(engine, directory, keep=keep)
    if volume is not None:
        follow(volume)
    return target


def _write_on_all(
    naming: ExitStack,
    target: Path,
    engine: Engine,
    state: StateAccess,
    model: nn.Module,
    program: _Program,
    *,
    linked: bool,
) -> None:
    """Writes the files of all ranks. `naming` renames the directory, or removes it after errors."""
    ranks = rank_directories(engine.num_ranks)
    partial = partial_of(target)
    with engine.ranks.collective_section(f"{target.name}: its directory"):
        if engine.rank == 0:
            naming.enter_context(writing(target.parent, program.step))
            make_in(partial, ranks)
    own = partial / ranks[engine.rank] if ranks else partial
    with engine.ranks.collective_section(f"{target.name}: links") as needed:
        if not own.is_dir():
            raise ConfigError(
                f"{own} was made by rank 0 and is not there for rank {engine.rank}: expected a "
                "directory that all ranks share, and the same on all of them"
            )
        contents, stored = _link(own, target, state, linked=linked)
        needed.local = str(contents.needed_nbytes + len(program.content)).encode()
    with engine.ranks.collective_section(f"{target.name}: files") as written:
        if engine.rank == 0:
            check_space(partial, sum(map(int, needed.of_all)))
        files = write_contents(own, state, model, program.content, contents, stored)
        if ranks:
            sync_directory(own)
        written.local = files_to_bytes(files)
    with engine.ranks.collective_section(f"{target.name}: its name"):
        if engine.rank == 0:
            if ranks:
                read_reference(partial)  # Refuses a base of which ranks read different bytes.
            content = map(files_of_bytes, written.of_all)
            # INV-21: the parts of all ranks are durable here.
            _write_manifest(partial, program.step, ranks, list(content))
            naming.close()


def _link(own: Path, target: Path, state: StateAccess, *, linked: bool) -> tuple[Contents, Stored]:
    """Divides the state by the way of keeping it, and makes the links. Raises StorageError."""
    contents = contents_of(state, may_link=linked)
    if not contents.linked:
        return contents, Stored()
    stored = link_state(own, target, state, contents.linked)
    if stored is not None:
        return contents, stored
    _log.warning("%s is a full copy: it cannot be linked to the swap files", target)
    return contents_of(state, may_link=False), Stored()


def _write_manifest(
    partial: Path, step: int, ranks: tuple[str, ...], of_ranks: Sequence[Sequence[FileEntry]]
) -> None:
    files = tuple(
        replace(file, name=f"{place}{file.name}")
        for place, found in zip(places_of(ranks), of_ranks, strict=True)
        for file in found
    )
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    is_linked = any(PurePath(file.name).name == TABLE_NAME for file in files)
    schema = SCHEMA if ranks else 2 if is_linked else 1
    manifest = Manifest(step, created, f"infinity {__version__}", files, schema, ranks)
    write_manifest(partial, manifest)


def _remove(engine: Engine, directory: Path, *, keep: int) -> None:
    """Removes all but the newest checkpoints, and then releases their frozen content."""
    volume = engine.store.volume
    try:
        with engine.ranks.collective_section("infinity.checkpoint: what is older goes") as removed:
            if engine.rank == 0:
                names = [path.name for path in prune(directory, keep)]
                removed.local = "\n".join(names).encode()
    except BaseException as error:
        if volume is not None and not isinstance(error, RankError):
            thaw_removed(volume)
        raise
    gone = {label_of(directory / name) for name in removed.of_all[0].decode().split()}
    if volume is not None:
        # One that was renamed may have had the same name before.
        newest = {frozen.label: frozen for frozen in volume.frozen}
        thaw(volume, [frozen for label, frozen in newest.items() if label in gone])


def _remove_all(engine: Engine, directory: Path) -> None:
    """Removes all commits of a directory, and the directory if it is empty then."""
    _remove(engine, directory, keep=0)
    if engine.rank == 0:
        with contextlib.suppress(OSError):
            directory.rmdir()
