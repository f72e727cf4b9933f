"""Writes and syncs the files of one rank of a checkpoint.

State on NVMe that can be linked is not copied (`links.py`). If the model is not sharded, all other
state is written as safetensors, unit by unit. The shards of a sharded model are copied page by page
into one file, which is read like a linked file. Memory holds one chunk of a state kind, or one
tensor that is not row-major in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from infinity.checkpoint.durable import SequentialFile, write_file
from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsWriter,
    TensorInfo,
    dtype_name,
    tensor_bytes,
)
from infinity.checkpoint.run.directory import PRIVATE_FILE
from infinity.checkpoint.run.layout import (
    STREAMED,
    KindRange,
    StateTensor,
    in_row_major,
    is_linkable,
    kept_tensors,
    own_weights,
    state_kind_ranges,
)
from infinity.checkpoint.run.linked import (
    CHECKSUMS_NAME,
    COPIES_NAME,
    TABLE_NAME,
    LinkedRun,
    LinkedTensor,
    Stored,
    to_bytes,
)
from infinity.checkpoint.run.manifest import PROGRAM_NAME, FileEntry, StoredRange
from infinity.checkpoint.run.references import SHARDS_NAME, reference_to_bytes
from infinity.engine.state_access import Part, StateAccess
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.sizes import PAGE_NBYTES
from infinity.state.partition import Partition
from infinity.state.units import StateKind, Unit
from infinity.storage.checksums import CHECKSUM_NBYTES, digest

if TYPE_CHECKING:
    from _hashlib import HASH


BUFFERS_NAME = "buffers.safetensors"
# The allowance for headers, tables and manifest, for each tensor.
_TENSOR_OVERHEAD_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class Contents:
    """The state that one rank keeps: by links, as safetensors, or page by page."""

    linked: tuple[KindRange, ...]
    units: Mapping[Unit, tuple[StateTensor, ...]]
    pages: tuple[KindRange, ...]

    @property
    def needed_nbytes(self) -> int:
        """The space that must be free, without that of the small state."""
        infos = [tensor.info for tensors in self.units.values() for tensor in tensors]
        ranges = self.linked + self.pages
        num_tensors = len(infos) + sum(len(kind_range.tensors) for kind_range in ranges)
        return (
            sum(info.nbytes for info in infos)
            + sum(kind_range.nbytes for kind_range in self.pages)
            + sum(kind_range.nbytes for kind_range in ranges) // PAGE_NBYTES * CHECKSUM_NBYTES
            + num_tensors * _TENSOR_OVERHEAD_NBYTES
        )


def contents_of(state: StateAccess, *, may_link: bool) -> Contents:
    """Divides the state that this rank keeps by the way of keeping it. Moves no byte."""
    if state.partition is not None:
        linked: list[KindRange] = []
        pages = _empty_ranges(state.partition)
        for kind_range in _ranges_of_rank(state, state.partition):
            is_linked = may_link and is_linkable(state, kind_range.unit, kind_range.state_kind)
            (linked if is_linked else pages).append(kind_range)
        return Contents(tuple(linked), {}, tuple(pages))
    units: dict[Unit, list[StateTensor]] = {}
    rows = []
    for unit, tensor in ((unit, t) for unit, tensors in kept_tensors(state) for t in tensors):
        if may_link and is_linkable(state, unit, tensor.state_kind):
            rows.append((unit, tensor))
        else:
            units.setdefault(unit, []).append(tensor)
    of_unit = {unit: tuple(tensors) for unit, tensors in units.items()}
    return Contents(tuple(state_kind_ranges(rows)), of_unit, ())


def _ranges_of_rank(state: StateAccess, divided: Partition) -> list[KindRange]:
    """Returns the state of this rank's shards, and its part of weights that all ranks keep. Of
    shards that other nodes have, too, one node writes each."""
    kept = kept_tensors(state)
    rows = [
        (unit, tensor)
        for unit, tensors in kept
        for tensor in tensors
        if tensor.share is not None and divided.is_saver(unit)
    ]
    ranges = state_kind_ranges(rows)
    return ranges if divided.stage == 3 else [*own_weights(divided), *ranges]


def _empty_ranges(divided: Partition) -> list[KindRange]:
    """Returns the parameters without an element, which have no owner, for the first rank."""
    found = []
    for unit in divided.full_units if divided.rank == 0 else ():
        if unit.stored is not None:
            continue
        facts = [spec.facts for spec in unit.tensors if not spec.numel]
        rows = [LinkedTensor(f.name, dtype_name(f.dtype), f.shape, f.stride, 0) for f in facts]
        if rows:
            found.append(KindRange(unit, StateKind.PARAMETERS, 0, 0, tuple(rows)))
    return found


def write_contents(
    directory: Path,
    state: StateAccess,
    model: nn.Module,
    program: bytes,
    contents: Contents,
    linked: Stored,
) -> list[FileEntry]:
    """Writes the state that is not linked, and the tables of the linked state.

    Returns the files for the manifest, with a SHA-256 of every extent. Raises StorageError.
    """
    files = [
        _write_unit(directory / f"unit-{unit.index:05d}.safetensors", state, unit, tensors)
        for unit, tensors in contents.units.items()
    ]
    files.append(_write_buffers(directory / BUFFERS_NAME, model))
    if state.store.shards is not None:
        is_first = state.partition is None or state.partition.rank == 0
        reference = reference_to_bytes(state.store.shards, is_first_rank=is_first)
        files.append(write_small(directory / SHARDS_NAME, "reference", reference))
    files.append(write_small(directory / PROGRAM_NAME, "program", program))
    stored = linked + copy_pages(directory, state, contents.pages)
    if stored.kinds or state.partition is not None:
        files.append(write_small(directory / TABLE_NAME, "table", to_bytes(stored.kinds)))
        files.append(write_small(directory / CHECKSUMS_NAME, "checksums", stored.checksums))
    return files


class _HashedWriter:
    """Writes a safetensors file and computes the SHA-256 of every tensor on the way."""

    def __init__(self, path: Path, infos: list[TensorInfo], kinds: Mapping[str, str]) -> None:
        self._path = path
        self._kinds = kinds
        self._writer = SafetensorsWriter(path, infos, metadata={"format": "pt"}, mode=PRIVATE_FILE)
        self._hashes: dict[str, HASH] = {info.name: hashlib.sha256() for info in infos}

    def put(self, name: str, start: int, part: torch.Tensor) -> None:
        """Writes the next elements of a tensor; the parts of a tensor must come in order."""
        self._writer.write_part(name, start, part)
        self._hashes[name].update(tensor_bytes(part))

    def finish(self) -> FileEntry:
        """Syncs the complete file and gives it its final name. Raises StorageError."""
        self._writer.finish()
        self._writer.commit()
        header = self._writer.header
        digest = hashlib.sha256(header).hexdigest()
        extents = [StoredRange("header", "header", 0, len(header), digest)]
        for name, info in self._writer.tensors.items():
            sha256 = self._hashes[name].hexdigest()
            kind = self._kinds[name]
            extents.append(StoredRange(name, kind, info.offset_nbytes, info.nbytes, sha256))
        return FileEntry(self._path.name, self._writer.file_nbytes, tuple(extents))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self._writer.close()


def _write_unit(
    path: Path, state: StateAccess, unit: Unit, tensors: tuple[StateTensor, ...]
) -> FileEntry:
    kinds = {tensor.name: tensor.state_kind.kind for tensor in tensors}
    with _HashedWriter(path, [tensor.info for tensor in tensors], kinds) as writer:
        for state_kind in STREAMED:
            of_state_kind = [tensor for tensor in tensors if tensor.state_kind is state_kind]
            if of_state_kind:
                _write_state_kind(writer, state, unit, state_kind, of_state_kind)
        for tensor in tensors:
            if tensor.state_kind is StateKind.GRADIENTS:
                gradient = state.gradient(unit, tensor.spec)
                writer.put(tensor.name, 0, gradient.contiguous())
        return writer.finish()


def _write_state_kind(
    writer: _HashedWriter,
    state: StateAccess,
    unit: Unit,
    state_kind: StateKind,
    of_state_kind: Sequence[StateTensor],
) -> None:
    tensors = {tensor.spec: tensor for tensor in of_state_kind if not tensor.is_scales}
    scales = {tensor.spec: tensor for tensor in of_state_kind if tensor.is_scales}
    for tensor in of_state_kind:
        if not tensor.spec.numel:  # `parts` yields no part of it.
            writer.put(tensor.name, 0, torch.empty(tensor.info.shape, dtype=tensor.dtype))

    def without_scales() -> Iterator[Part]:
        for part in state.parts(unit, state_kind):
            if part.spec not in tensors or not part.spec.numel:
                continue
            if part.scales is not None:
                writer.put(scales[part.spec].name, part.start // BLOCK_NUMEL, part.scales)
            yield part

    for part in in_row_major(without_scales()):
        writer.put(tensors[part.spec].name, part.start, part.values)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every buffer once, also those outside of state_dict(): a forward may change them."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer is not None}


def _write_buffers(path: Path, model: nn.Module) -> FileEntry:
    buffers = buffers_of(model)
    infos = [
        TensorInfo(name=name, dtype=buffer.dtype, shape=tuple(buffer.shape))
        for name, buffer in buffers.items()
    ]
    with _HashedWriter(path, infos, dict.fromkeys(buffers, "buffers")) as writer:
        for name, buffer in buffers.items():
            writer.put(name, 0, buffer.detach().cpu().contiguous())
        return writer.finish()


def write_small(path: Path, kind: str, content: bytes) -> FileEntry:
    """Writes and syncs a new file; returns its entry for the manifest. Raises StorageError."""
    write_file(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return FileEntry(path.name, len(content), (StoredRange("all", kind, 0, len(content), digest),))


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
