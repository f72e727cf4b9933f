"""Writing a checkpoint: all state of a run, durable at one rename.

The order of effects: files, each synced (`state_files`); with several ranks, until all of them have
come so far; the manifest, synced; the directory, synced; the rename; the directory above, synced;
only then older checkpoints go.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch import nn

from infinity import __version__
from infinity.checkpoint.huggingface.export_weights import check_space
from infinity.checkpoint.run import directory as state_directory
from infinity.checkpoint.run.commit import (
    Stored,
    has_room,
    label_of,
    link_state,
    thaw,
    thaw_removed,
)
from infinity.checkpoint.run.copy import Orders, Saving, copy_checkpoint
from infinity.checkpoint.run.files import Contents, contents_of, write_contents
from infinity.checkpoint.run.linked import TABLE_NAME
from infinity.checkpoint.run.manifest import (
    SCHEMA,
    FileEntry,
    Manifest,
    files_of_bytes,
    files_to_bytes,
    places_of,
    rank_directories,
)
from infinity.checkpoint.run.rng_state import random_state
from infinity.distributed.sync import CollectiveSection
from infinity.engine.durability import is_elsewhere
from infinity.engine.engine import Engine
from infinity.engine.optimizer import OffloadedOptimizer
from infinity.engine.registry import engine_of
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError, RankError, UnsupportedError

_log = logging.getLogger("infinity")


class Stateful(Protocol):
    """A learning-rate scheduler, or anything that saves itself like one."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


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
) -> Path:
    """Writes `directory/step-NNNNNNNN` and returns it, once it is durable.

    It holds everything an exact continuation needs: weights, residuals or masters, moments,
    gradients summed so far, the model's buffers, settings and step counts of the optimizer, the
    scheduler, the generators of Python, NumPy and torch, and `extra`: numbers, text, tensors, and
    lists and dicts of these. `step` is the number of steps taken; by default the optimizer's.
    `keep` removes all but the newest so many checkpoints of the directory, this one counted.

    State on NVMe is linked to instead of copied where the configuration's `[checkpoint]` keeps
    spare generations, one is left, and the directory is on the file system of the swap paths.
    `linked` false makes a copy in any case: safetensors that can be moved elsewhere.

    With several ranks all of them call it, with a directory that they share, when no parameter has
    a gradient; each writes what it owns, and `extra` may be another on each.

    Call between steps, from the training thread. A crash or an error at any moment leaves the
    checkpoints that were there. Raises ConfigError when one of this or a later step is there,
    StorageError naming the operation and the file, InfinityError while parameters are in use.
    """
    saving = async_save(
        directory, model, optimizer,
        scheduler=scheduler, step=step, extra=extra, keep=keep, linked=linked,
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
) -> Saving:
    """The same without waiting for a copy: training may go on at once.

    Where `directory` is on another file system than the swap paths, the step is committed in the
    first of these, and copied behind training, by what it leaves of the drive. A spare generation
    is taken until then. `Saving.wait()` gives the path once the copy is durable, or raises what
    went wrong; the checkpoints that were there stay then, and so does the commit.

    One copy at a time: waits for the one before, and raises what went wrong with it. In every other
    case, several ranks among them, the checkpoint is there when this returns.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"keep={keep}: expected at least 1, the checkpoint that is written")
    engine = engine_of(model)
    target, commits = Path(directory), engine.commit_directory
    with engine.collective_section("infinity.checkpoint.save") as asked:
        program = _Program.of(optimizer, scheduler, step, extra)
        last = _await_last(engine)
        copying = _copying_directory(engine, target, program.step) if linked else None
        own = _own_commits(engine, commits)
        _check_ranks(engine)
        asked.mine = repr((program.step, keep, linked)).encode()
    _refuse_different("save", asked)
    place = copying or target
    path = place / state_directory.checkpoint_name(program.step)
    if last is None or last.source != path:  # Else it is there: its copy has failed.
        _write_checkpoint(
            place, engine, model, program,
            keep=1 if copying else keep, linked=linked, leaving=own,
        )  # fmt: skip
    if commits is not None and label_of(commits) != label_of(place):
        _remove_commits(engine, commits, own)  # They are of earlier steps, or of this one.
    return copy_behind(engine, path, target, keep=keep) if copying else Saving(path)


def copy_behind(engine: Engine, commit: Path, directory: Path, *, keep: int | None) -> Saving:
    """Begins to copy a commit of the swap directory to where checkpoints are; then the commit goes.

    With one rank; `_await_last` comes before.
    """
    volume = engine.store.volume
    assert volume is not None and engine.background is None and engine.num_ranks == 1

    def copy(orders: Orders) -> None:
        copy_checkpoint(commit, directory, volume.engine, orders=orders)
        if keep is not None:
            _remove(engine, directory, keep=keep)
        _remove_all(engine, commit.parent)

    engine.background = saving = Saving(directory / commit.name, commit, copy)
    return saving


def _await_last(engine: Engine) -> Saving | None:
    """The copy before, which has ended. Its failure is raised, unless somebody knows of it."""
    last, engine.background = engine.background, None
    if not isinstance(last, Saving):
        return None
    last.close()
    if not last.is_told and not last.is_abandoned:
        last.wait()
    return last


def _copying_directory(engine: Engine, directory: Path, step: int) -> Path | None:
    """Where a checkpoint waits until it is copied to `directory`; None where it is not first
    committed: links to it are possible, there is no spare generation for it, or several ranks."""
    volume, copying = engine.store.volume, engine.config.copying_directory
    if volume is None or copying is None or not volume.num_spares or engine.num_ranks > 1:
        return None
    if not is_elsewhere(engine.config, directory):
        return None
    state_directory.refuse_later(directory, step)
    thaw_removed(volume)
    own = _own_commits(engine, engine.commit_directory)
    target = copying / state_directory.checkpoint_name(step)
    return copying if has_room(volume, target, keep=1, leaving=own) else None


def commit(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    *,
    scheduler: Stateful | None = None,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Makes this step the one that `load(path)` goes on from after a crash; returns the path.

    What `save` keeps, in the first swap directory, in place of the last commit: state on NVMe stays
    where it is, the rest is written. `checkpoint.durability = "step"` makes the room for it. A
    later `save` of this model takes the commit's place.

    Call between steps, after the scheduler's. Raises ConfigError where nothing is set up for it,
    and otherwise as `save`; whatever happens, the last commit is there.
    """
    engine = engine_of(model)
    checkpoint, directory = engine.config.checkpoint, engine.commit_directory
    if checkpoint is None or checkpoint.durability != "step" or directory is None:
        raise ConfigError(
            'infinity.checkpoint.commit needs checkpoint.durability = "step" in the configuration'
        )
    with engine.collective_section("infinity.checkpoint.commit") as asked:
        program = _Program.of(optimizer, scheduler, step, extra)
        _check_ranks(engine)
        asked.mine = repr(program.step).encode()
    _refuse_different("commit", asked)
    return _write_checkpoint(directory, engine, model, program, keep=1, linked=True, leaving=())


@dataclass(frozen=True, slots=True)
class _Program:
    """The small state, packed."""

    step: int
    content: bytes

    @classmethod
    def of(
        cls,
        optimizer: OffloadedOptimizer | None,
        scheduler: Stateful | None,
        step: int | None,
        extra: Mapping[str, Any] | None,
    ) -> _Program:
        named = optimizer.named_state() if optimizer is not None else None
        if step is None:
            if named is None:
                raise ConfigError("save without an optimizer needs the number of steps: step=...")
            step = max(named["steps"].values(), default=0)
        content = pack_program(
            {
                "optimizer": named,
                "scheduler": scheduler.state_dict() if scheduler is not None else None,
                "random": random_state(),
                "extra": dict(extra or {}),
            }
        )
        return cls(step, content)


def _refuse_different(call: str, asked: CollectiveSection) -> None:
    if len(set(asked.of_all)) > 1:
        texts = " and ".join(sorted({each.decode() for each in asked.of_all})[:2])
        raise ConfigError(
            f"infinity.checkpoint.{call}: step and options are {texts} on different ranks; all of "
            "them make the same call"
        )


def _check_ranks(engine: Engine) -> None:
    """With several ranks: raises what one of them may have to raise before any has begun.

    A gradient is on its way between ranks until the step has used it.
    """
    if engine.num_ranks == 1:
        return
    with engine.at_rest("infinity.checkpoint"):
        pass
    for param in engine.params:
        if engine.has_gradient(param):
            raise UnsupportedError(
                f"{param.name!r} has a gradient, which checkpoints of several ranks cannot hold; "
                "call optimizer.step() and optimizer.zero_grad() before"
            )


def _own_commits(engine: Engine, commits: Path | None) -> list[str]:
    """Labels of the commits that this run has made and not given up."""
    volume = engine.store.volume
    if volume is None or commits is None:
        return []
    parent = label_of(commits)
    return [each.label for each in volume.frozen if os.path.dirname(each.label) == parent]


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
    """One transaction over all ranks: each makes its own files durable, then one rename by the
    first commits them all. An error on any of them leaves nothing."""
    volume = engine.store.volume
    target = directory / state_directory.checkpoint_name(program.step)
    try:
        with (
            engine.at_rest("infinity.checkpoint") as state,
            ExitStack() as naming,
        ):
            if volume is not None and volume.num_spares:
                thaw_removed(volume)  # Those that the user has removed.
                if linked and not has_room(volume, target, keep=keep, leaving=leaving):
                    linked = False
                    _log.warning(
                        "%s is a full copy: its links would need more than the %d spare "
                        "generations of checkpoint.keep",
                        target,
                        volume.num_spares,
                    )
            else:
                linked = False
            _write_on_all(naming, target, engine, state, model, program, linked=linked)
    except BaseException as error:
        # Unless the name has come to be there and could not be removed, or may still come: a rank
        # that is gone does not say how far it was.
        if volume is not None and not isinstance(error, RankError):
            thaw_removed(volume)
        raise
    if keep is not None:
        _remove(engine, directory, keep=keep)
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
    """`naming` gets what gives the directory its name, or removes it."""
    ranks = rank_directories(engine.num_ranks)
    partial = state_directory.partial_of(target)
    with engine.collective_section(f"{target.name}: its directory"):
        if engine.rank == 0:
            naming.enter_context(state_directory.writing(target.parent, program.step))
            state_directory.make_in(partial, ranks)
    own = partial / ranks[engine.rank] if ranks else partial
    with engine.collective_section(f"{target.name}: links") as needed:
        if not own.is_dir():
            raise ConfigError(
                f"{own} was made by rank 0 and is not there for rank {engine.rank}: expected a "
                "directory that all ranks share, and the same on all of them"
            )
        contents, transport = _link(own, target, state, linked=linked)
        needed.mine = str(contents.needed_nbytes + len(program.content)).encode()
    with engine.collective_section(f"{target.name}: files") as written:
        if engine.rank == 0:
            check_space(partial, sum(map(int, needed.of_all)))
        files = write_contents(own, state, model, program.content, contents, transport)
        if ranks:
            state_directory.sync_names(own)
        written.mine = files_to_bytes(files)
    with engine.collective_section(f"{target.name}: its name"):
        if engine.rank == 0:
            content = map(files_of_bytes, written.of_all)
            # INV-21: the parts of all ranks are durable here.
            _write_manifest(partial, program.step, ranks, list(content))
            naming.close()


def _link(own: Path, target: Path, state: StateAccess, *, linked: bool) -> tuple[Contents, Stored]:
    """What is kept, and how; links are made."""
    contents = contents_of(state, may_link=linked)
    if not contents.linked:
        return contents, Stored()
    transport = link_state(own, target, state, contents.linked)
    if transport is not None:
        return contents, transport
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
    state_directory.write_manifest(partial, manifest)


def _remove(engine: Engine, directory: Path, *, keep: int) -> None:
    """Removes all but the newest checkpoints, and then lets go of what they held."""
    volume = engine.store.volume
    try:
        with engine.collective_section("infinity.checkpoint: what is older goes") as removed:
            if engine.rank == 0:
                names = [path.name for path in state_directory.prune(directory, keep)]
                removed.mine = "\n".join(names).encode()
    except BaseException as error:
        if volume is not None and not isinstance(error, RankError):
            thaw_removed(volume)
        raise
    gone = {label_of(directory / name) for name in removed.of_all[0].decode().split()}
    if volume is not None:
        thaw(volume, [each for each in volume.frozen if each.label in gone])


def _remove_commits(engine: Engine, commits: Path, own: Collection[str]) -> None:
    """After a checkpoint, those of this run are not needed any more."""
    with engine.collective_section("infinity.checkpoint: commits of this run") as asked:
        asked.mine = b"mine" if own else b""
    if any(asked.of_all):
        _remove_all(engine, commits)


def _remove_all(engine: Engine, directory: Path) -> None:
    """Removes a directory of commits, with these."""
    _remove(engine, directory, keep=0)
    if engine.rank == 0:
        with contextlib.suppress(OSError):
            directory.rmdir()


def pack_program(state: dict[str, Any]) -> bytes:
    """Small state as torch.save writes it, tried at once whether it can be read without running
    code. Raises ConfigError."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # Whatever an object makes pickle raise.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            "expected numbers, text, tensors, lists and dicts in `extra`, in param_groups and in "
            f"the scheduler's state_dict(), and nothing that needs code to be read: {reason}"
        ) from None
    return buffer.getvalue()
