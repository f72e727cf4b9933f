"""The files that one rank writes into a checkpoint, each of them synced.

State on NVMe that can be kept by links is not copied (`state_commit`). The rest of a model that is
not divided goes into safetensors, unit by unit; of one that is divided, shards are copied page by
page into a file that is read like those that are linked. Nothing is held but the part that is on
its way: a chunk of one piece, or one tensor whose memory order is not that of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsWriter,
    TensorInfo,
    dtype_name,
    tensor_bytes,
)
from infinity.checkpoint.run import directory as state_directory
from infinity.checkpoint.run.commit import (
    PieceRange,
    Stored,
    copy_pages,
    is_linkable,
    own_weights,
    state_kind_ranges,
)
from infinity.checkpoint.run.directory import PRIVATE_FILE
from infinity.checkpoint.run.layout import (
    STREAMED,
    StateTensor,
    is_row_major,
    state_tensors,
    tensors_of_rank,
)
from infinity.checkpoint.run.linked import CHECKSUMS_NAME, TABLE_NAME, LinkedTensor, to_bytes
from infinity.checkpoint.run.manifest import PROGRAM_NAME, FileEntry, StoredRange
from infinity.engine.state_access import Part, StateAccess
from infinity.errors import StorageError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.sizes import PAGE_NBYTES
from infinity.state.partition import Partition
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import CHECKSUM_NBYTES

if TYPE_CHECKING:
    from _hashlib import HASH

BUFFERS_NAME = "buffers.safetensors"
# An allowance for headers, tables and manifest, per tensor.
_TENSOR_OVERHEAD_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank has to keep: by links, as safetensors, or page by page."""

    linked: tuple[PieceRange, ...]
    units: Mapping[Unit, tuple[StateTensor, ...]]
    pages: tuple[PieceRange, ...]

    @property
    def needed_nbytes(self) -> int:
        """Space for it, but for the small state."""
        infos = [tensor.info for tensors in self.units.values() for tensor in tensors]
        ranges = self.linked + self.pages
        num_tensors = len(infos) + sum(len(each.tensors) for each in ranges)
        return (
            sum(info.nbytes for info in infos)
            + sum(each.nbytes for each in self.pages)
            + sum(each.nbytes for each in ranges) // PAGE_NBYTES * CHECKSUM_NBYTES
            + num_tensors * _TENSOR_OVERHEAD_NBYTES
        )


def contents_of(state: StateAccess, *, may_link: bool) -> Contents:
    """What this rank has to keep."""
    if state.partition is not None:
        linked: list[PieceRange] = []
        pages = _empty_ranges(state.partition)
        for each in _ranges_of_rank(state, state.partition):
            is_linked = may_link and is_linkable(state, each.unit, each.state_kind)
            (linked if is_linked else pages).append(each)
        return Contents(tuple(linked), {}, tuple(pages))
    everything = [(unit, each) for unit, tensors in kept_tensors(state) for each in tensors]
    units: dict[Unit, list[StateTensor]] = {}
    rows = []
    for unit, tensor in everything:
        if may_link and is_linkable(state, unit, tensor.state_kind):
            rows.append((unit, tensor))
        else:
            units.setdefault(unit, []).append(tensor)
    of_unit = {unit: tuple(tensors) for unit, tensors in units.items()}
    return Contents(tuple(state_kind_ranges(rows)), of_unit, ())


KeptTensors = list[tuple[Unit, list[StateTensor]]]


def kept_tensors(state: StateAccess) -> KeptTensors:
    """What this process keeps of the model, unit by unit."""
    if state.partition is None:
        return [(unit, tensors_of(state, unit)) for unit in state.units]
    return list(tensors_of_rank(state.partition, has_kind=state.has_kind))


def tensors_of(state: StateAccess, unit: Unit) -> list[StateTensor]:
    """What a checkpoint holds of a unit, as the engine has it now."""
    return list(
        state_tensors(
            unit,
            has_kind=lambda state_kind: state.has_kind(unit, state_kind),
            has_gradient=state.has_gradient,
        )
    )


def _ranges_of_rank(state: StateAccess, divided: Partition) -> list[PieceRange]:
    """The pieces of this rank's shards, and its part of weights that every rank has whole."""
    kept = kept_tensors(state)
    rows = [(unit, each) for unit, tensors in kept for each in tensors if each.share is not None]
    ranges = state_kind_ranges(rows)
    return ranges if divided.stage == 3 else [*own_weights(divided), *ranges]


def _empty_ranges(divided: Partition) -> list[PieceRange]:
    """Parameters without an element have no owner; the first rank names them."""
    found = []
    for unit in divided.full_units if divided.rank == 0 else ():
        facts = [spec.facts for spec in unit.tensors if not spec.numel]
        rows = [LinkedTensor(f.name, dtype_name(f.dtype), f.shape, f.stride, 0) for f in facts]
        if rows:
            found.append(PieceRange(unit, StateKind.PARAMETERS, 0, 0, tuple(rows)))
    return found


def write_contents(
    directory: Path,
    state: StateAccess,
    model: nn.Module,
    program: bytes,
    contents: Contents,
    linked: Stored,
) -> list[FileEntry]:
    """Writes what is not linked already, and the tables of what is. Returns the files that are
    vouched for by SHA-256."""
    files = [
        _write_unit(directory / f"unit-{unit.index:05d}.safetensors", state, unit, tensors)
        for unit, tensors in contents.units.items()
    ]
    files.append(_write_buffers(directory / BUFFERS_NAME, model))
    files.append(write_small(directory / PROGRAM_NAME, "program", program))
    stored = linked + copy_pages(directory, state, contents.pages)
    if stored.kinds or state.partition is not None:
        files.append(write_small(directory / TABLE_NAME, "table", to_bytes(stored.kinds)))
        files.append(write_small(directory / CHECKSUMS_NAME, "checksums", stored.checksums))
    return files


class _HashedWriter:
    """A safetensors file and the SHA-256 of every tensor in it, taken as the bytes pass."""

    def __init__(self, path: Path, infos: list[TensorInfo], kinds: Mapping[str, str]) -> None:
        self._path = path
        self._kinds = kinds
        self._writer = SafetensorsWriter(path, infos, metadata={"format": "pt"}, mode=PRIVATE_FILE)
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
        extents = [StoredRange("header", "header", 0, len(header), digest)]
        for name, info in self._writer.tensors.items():
            sha256 = self._hashes[name].hexdigest()
            kind = self._kinds[name]
            extents.append(StoredRange(name, kind, info.offset_nbytes, info.nbytes, sha256))
        return FileEntry(self._path.name, self._writer.file_nbytes, tuple(extents))

    def close(self) -> None:
        self._writer.close()


def _write_unit(
    path: Path, state: StateAccess, unit: Unit, tensors: tuple[StateTensor, ...]
) -> FileEntry:
    kinds = {tensor.name: tensor.state_kind.kind for tensor in tensors}
    writer = _HashedWriter(path, [tensor.info for tensor in tensors], kinds)
    try:
        for state_kind in STREAMED:
            of_state_kind = [tensor for tensor in tensors if tensor.state_kind is state_kind]
            if of_state_kind:
                _write_state_kind(writer, state, unit, state_kind, of_state_kind)
        for tensor in tensors:
            if tensor.state_kind is StateKind.GRADIENTS:
                gradient = state.gradient(unit, tensor.spec)
                writer.put(tensor.name, 0, gradient.contiguous())
        return writer.finish()
    finally:
        writer.close()


def _write_state_kind(
    writer: _HashedWriter,
    state: StateAccess,
    unit: Unit,
    state_kind: StateKind,
    of_state_kind: Sequence[StateTensor],
) -> None:
    tensors = {tensor.spec: tensor for tensor in of_state_kind if not tensor.is_scales}
    scales = {tensor.spec: tensor for tensor in of_state_kind if tensor.is_scales}
    whole: torch.Tensor | None = None  # Of a tensor that lies otherwise in memory than in a file.
    for tensor in of_state_kind:
        if not tensor.spec.numel:  # No part comes of it.
            writer.put(tensor.name, 0, torch.empty(tensor.info.shape, dtype=tensor.dtype))
    for part in state.parts(unit, state_kind):
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


def write_small(path: Path, kind: str, content: bytes) -> FileEntry:
    """A new file that is held whole, synced, and what the manifest says of it."""
    state_directory.write_file(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return FileEntry(path.name, len(content), (StoredRange("all", kind, 0, len(content), digest),))
