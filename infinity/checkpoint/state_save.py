"""Writing a checkpoint: all state of a run, durable at one rename.

State on NVMe that can be kept by links is not copied (`state_commit`); the rest is streamed unit by
unit. Nothing is held but the part that is on its way: a chunk of one piece, or one tensor whose
memory order is not that of a file. The order of effects: files, each synced; the manifest, synced;
the directory, synced; the rename; the directory above, synced; only then older checkpoints go.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from infinity import __version__
from infinity.checkpoint import state_directory
from infinity.checkpoint.safetensors_export import check_space
from infinity.checkpoint.safetensors_format import SafetensorsWriter, TensorInfo, tensor_bytes
from infinity.checkpoint.state_commit import (
    Links,
    has_room,
    is_linkable,
    label_of,
    link_state,
    thaw,
    thaw_removed,
)
from infinity.checkpoint.state_layout import STREAMED, StateTensor, is_row_major, state_tensors
from infinity.checkpoint.state_linked import CHECKSUMS_NAME, TABLE_NAME, to_bytes
from infinity.checkpoint.state_manifest import Extent, FileEntry, Manifest
from infinity.checkpoint.state_random import random_state
from infinity.engine.engine import Engine, engine_of
from infinity.engine.optimizer import AdamW
from infinity.engine.state_access import Part, StateAccess
from infinity.errors import ConfigError, StorageError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.state.units import Piece, Unit

if TYPE_CHECKING:
    from _hashlib import HASH

BUFFERS_NAME = "buffers.safetensors"
PROGRAM_NAME = "program.pt"
_log = logging.getLogger("infinity")
# An allowance for headers and manifest, per tensor.
_TENSOR_OVERHEAD_NBYTES = 1024


class Stateful(Protocol):
    """A learning-rate scheduler, or anything that saves itself like one."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AdamW | None = None,
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

    Call between steps, from the training thread. A crash or an error at any moment leaves the
    checkpoints that were there. Raises ConfigError when one of this or a later step is there,
    StorageError naming the operation and the file, InfinityError while parameters are in use.
    """
    engine_of(model).refuse_ranks("infinity.checkpoint.save")
    if keep is not None and keep < 1:
        raise ConfigError(f"keep={keep}: expected at least 1, the checkpoint that is written")
    program = _Program.of(optimizer, scheduler, step, extra)
    engine = engine_of(model)
    commits = engine.config.commit_directory
    own = _own_commits(engine, commits)
    path = _write_checkpoint(
        Path(directory), engine, model, program, keep=keep, linked=linked, leaving=own
    )
    if own and commits is not None and commits != Path(directory):
        _remove(engine, commits, keep=0)  # They are of earlier steps, or of this one.
        with contextlib.suppress(OSError):
            commits.rmdir()
    return path


def commit(
    model: nn.Module,
    optimizer: AdamW | None = None,
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
    checkpoint, directory = engine.config.checkpoint, engine.config.commit_directory
    if checkpoint is None or checkpoint.durability != "step" or directory is None:
        raise ConfigError(
            'infinity.checkpoint.commit needs checkpoint.durability = "step" in the configuration'
        )
    program = _Program.of(optimizer, scheduler, step, extra)
    return _write_checkpoint(directory, engine, model, program, keep=1, linked=True, leaving=())


@dataclass(frozen=True, slots=True)
class _Program:
    """The small state, packed."""

    step: int
    content: bytes

    @classmethod
    def of(
        cls,
        optimizer: AdamW | None,
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


def _own_commits(engine: Engine, commits: Path | None) -> list[str]:
    """Labels of the commits that this run has made and not given up."""
    volume = engine.parts.store.volume
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
    volume = engine.parts.store.volume
    target = directory / state_directory.checkpoint_name(program.step)
    try:
        with (
            state_directory.writing(directory, program.step) as partial,
            engine.at_rest("infinity.checkpoint") as state,
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
            _write_files(partial, target, state, model, program, linked=linked)
    except BaseException:
        if volume is not None:
            thaw_removed(volume)  # Unless the name has come to be there and could not be removed.
        raise
    if keep is not None:
        _remove(engine, directory, keep=keep)
    return target


def _remove(engine: Engine, directory: Path, *, keep: int) -> None:
    """Removes all but the newest checkpoints, and then lets go of what they held."""
    volume = engine.parts.store.volume
    try:
        removed = set(map(label_of, state_directory.prune(directory, keep)))
    except BaseException:
        if volume is not None:
            thaw_removed(volume)
        raise
    if volume is not None:
        thaw(volume, [each for each in volume.frozen if each.label in removed])


def _write_files(
    partial: Path,
    target: Path,
    state: StateAccess,
    model: nn.Module,
    program: _Program,
    *,
    linked: bool,
) -> None:
    """Everything in the directory, each file synced, the manifest last."""
    everything = [(unit, tensor) for unit in state.units for tensor in tensors_of(state, unit)]
    links = None
    if linked:
        there = [row for row in everything if is_linkable(state, row[0], row[1].piece)]
        links = link_state(partial, target, state, there) if there else None
        if there and links is None:
            _log.warning("%s is a full copy: it cannot be linked to the swap files", target)
    copied: dict[Unit, list[StateTensor]] = {unit: [] for unit in state.units}
    for unit, tensor in everything:
        if links is None or not is_linkable(state, unit, tensor.piece):
            copied[unit].append(tensor)
    check_space(partial, _needed_nbytes(copied, links, len(program.content)))
    files = [
        _write_unit(partial / f"unit-{unit.index:05d}.safetensors", state, unit, tuple(tensors))
        for unit, tensors in copied.items()
        if tensors
    ]
    files.append(_write_buffers(partial / BUFFERS_NAME, model))
    files.append(_write_small(partial / PROGRAM_NAME, "program", program.content))
    if links is not None:
        files.append(_write_small(partial / TABLE_NAME, "table", to_bytes(links.pieces)))
        files.append(_write_small(partial / CHECKSUMS_NAME, "checksums", links.checksums))
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(
        program.step,
        created,
        f"infinity {__version__}",
        tuple(files),
        schema=1 if links is None else 2,
    )
    state_directory.write_manifest(partial, manifest)


def tensors_of(state: StateAccess, unit: Unit) -> list[StateTensor]:
    """What a checkpoint holds of a unit, as the engine has it now."""
    return list(
        state_tensors(
            unit,
            has_piece=lambda piece: state.store.home(unit, piece) is not None,
            has_gradient=state.has_gradient,
        )
    )


def _needed_nbytes(
    copied: Mapping[Unit, list[StateTensor]], links: Links | None, rest_nbytes: int
) -> int:
    infos = [tensor.info for tensors in copied.values() for tensor in tensors]
    nbytes = sum(info.nbytes + _TENSOR_OVERHEAD_NBYTES for info in infos) + rest_nbytes
    if links is not None:
        num_tensors = sum(len(piece.tensors) for piece in links.pieces)
        nbytes += len(links.checksums) + num_tensors * _TENSOR_OVERHEAD_NBYTES
    return nbytes


class _HashedWriter:
    """A safetensors file and the SHA-256 of every tensor in it, taken as the bytes pass."""

    def __init__(self, path: Path, infos: list[TensorInfo], kinds: Mapping[str, str]) -> None:
        self._path = path
        self._kinds = kinds
        self._writer = SafetensorsWriter(path, infos, metadata={"format": "pt"})
        self._hashes: dict[str, HASH] = {info.name: hashlib.sha256() for info in infos}

    def put(self, name: str, start: int, part: torch.Tensor) -> None:
        """The next elements of a tensor: parts come in order."""
        self._writer.write_part(name, start, part)
        self._hashes[name].update(tensor_bytes(part))

    def finish(self) -> FileEntry:
        """The file is whole, synced and has its name."""
        self._writer.finish()
        try:
            self._writer.commit()
        except OSError as error:
            raise StorageError(error.errno or 0, operation="rename", path=str(self._path)) from None
        header = self._writer.header
        digest = hashlib.sha256(header).hexdigest()
        extents = [Extent("header", "header", 0, len(header), digest)]
        for name, info in self._writer.tensors.items():
            sha256 = self._hashes[name].hexdigest()
            kind = self._kinds[name]
            extents.append(Extent(name, kind, info.offset_nbytes, info.nbytes, sha256))
        return FileEntry(self._path.name, self._writer.file_nbytes, tuple(extents))

    def close(self) -> None:
        self._writer.close()


def _write_unit(
    path: Path, state: StateAccess, unit: Unit, tensors: tuple[StateTensor, ...]
) -> FileEntry:
    kinds = {tensor.name: tensor.piece.kind for tensor in tensors}
    writer = _HashedWriter(path, [tensor.info for tensor in tensors], kinds)
    try:
        for piece in STREAMED:
            of_piece = [tensor for tensor in tensors if tensor.piece is piece]
            if of_piece:
                _write_piece(writer, state, unit, piece, of_piece)
        for tensor in tensors:
            if tensor.piece is Piece.GRADIENTS:
                gradient = state.gradient(unit, tensor.spec)
                writer.put(tensor.name, 0, gradient.contiguous())
        return writer.finish()
    finally:
        writer.close()


def _write_piece(
    writer: _HashedWriter,
    state: StateAccess,
    unit: Unit,
    piece: Piece,
    of_piece: Sequence[StateTensor],
) -> None:
    tensors = {tensor.spec: tensor for tensor in of_piece if not tensor.is_scales}
    scales = {tensor.spec: tensor for tensor in of_piece if tensor.is_scales}
    whole: torch.Tensor | None = None  # Of a tensor that lies otherwise in memory than in a file.
    for tensor in of_piece:
        if not tensor.spec.numel:  # No part comes of it.
            writer.put(tensor.name, 0, torch.empty(tensor.info.shape, dtype=tensor.dtype))
    for part in state.parts(unit, piece):
        spec = part.spec
        if spec not in tensors or not spec.numel:
            continue
        if part.scales is not None:
            writer.put(scales[spec].name, part.start // BLOCK_NUMEL, part.scales)
        name = tensors[spec].name
        if is_row_major(spec):
            writer.put(name, part.start, part.values)
            continue
        whole = _collect(whole, part)
        if part.start + part.values.numel() == spec.numel:
            shaped = whole.as_strided(spec.facts.shape, spec.facts.stride)
            writer.put(name, 0, shaped.contiguous())
            whole = None


def _collect(whole: torch.Tensor | None, part: Part) -> torch.Tensor:
    if whole is None:
        whole = torch.empty(part.spec.numel, dtype=part.values.dtype)
    whole[part.start : part.start + part.values.numel()] = part.values
    return whole


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer once, those that state_dict() leaves out too: a forward may change them."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer is not None}


def _write_buffers(path: Path, model: nn.Module) -> FileEntry:
    buffers = buffers_of(model)
    infos = [
        TensorInfo(name=name, dtype=buffer.dtype, shape=tuple(buffer.shape))
        for name, buffer in buffers.items()
    ]
    writer = _HashedWriter(path, infos, dict.fromkeys(buffers, "buffers"))
    try:
        for name, buffer in buffers.items():
            writer.put(name, 0, buffer.detach().cpu().contiguous())
        return writer.finish()
    finally:
        writer.close()


def _write_small(path: Path, kind: str, content: bytes) -> FileEntry:
    state_directory.write_file(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return FileEntry(path.name, len(content), (Extent("all", kind, 0, len(content), digest),))


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
