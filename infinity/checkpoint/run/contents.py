"""The content of a checkpoint, and the files of one rank.

The ending of a name gives the kind of the tensor, so that any reader of safetensors can use the
files: `layers.0.weight` in the compute dtype, `layers.0.weight.residual` (or `.master`), the
moments of the optimizer (`.exp_avg`, `.exp_avg_sq`, `.momentum_buffer`), `.gradient`. Every tensor
has the full shape of its parameter. Moments of eight bits have a second tensor, which is flat: the
scales of their blocks, `.exp_avg.scales`.

State on NVMe that can be linked is not copied (`links.py`). If the model is not sharded, all other
state is written as safetensors, unit by unit. The shards of a sharded model are copied page by page
into one file, which is read like a linked file. Memory holds one chunk of a state kind, or one
tensor that is not row-major in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from infinity.checkpoint.durable import PRIVATE_FILE, SequentialFile, write_file
from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsWriter,
    TensorInfo,
    dtype_name,
    tensor_bytes,
)
from infinity.checkpoint.run.format import (
    CHECKSUMS_NAME,
    COPIES_NAME,
    PROGRAM_NAME,
    TABLE_NAME,
    FileEntry,
    LinkedKind,
    LinkedTensor,
    Stored,
    StoredRange,
    table_to_bytes,
)
from infinity.checkpoint.run.references import SHARDS_NAME, reference_to_bytes
from infinity.engine.state_access import Part, StateAccess
from infinity.errors import UnsupportedError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL, num_scales
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.state.moments_8bit import runs_within
from infinity.state.partition import Partition, ShardSlice
from infinity.state.store import NvmeLocation
from infinity.state.tiles import name_of_tiled
from infinity.state.units import MOMENT_KINDS, StateKind, TensorFacts, TensorSpec, Unit
from infinity.storage.checksums import CHECKSUM_NBYTES, digest
from infinity.storage.protocol import FileRange

if TYPE_CHECKING:
    from _hashlib import HASH


# State kinds that are streamed; gradients are few and handled one by one.
STREAMED = (StateKind.PARAMETERS, StateKind.MASTER, *MOMENT_KINDS)
BUFFERS_NAME = "buffers.safetensors"
# The allowance for headers, tables and manifest, for each tensor.
_TENSOR_OVERHEAD_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a checkpoint, and the `spec` of the engine that it belongs to.

    If state is sharded, `spec` is the part of the parameter that lies in a shard, and `share` tells
    which part.
    """

    name: str
    state_kind: StateKind
    spec: TensorSpec
    dtype: torch.dtype
    is_scales: bool = False  # The codes have this name without its ending.
    share: ShardSlice | None = None

    @property
    def full(self) -> TensorSpec:
        """The full parameter."""
        return self.spec if self.share is None else self.share.full

    @property
    def facts(self) -> TensorFacts:
        """Shape, stride and dtype of the full parameter."""
        return self.full.facts

    @property
    def start(self) -> int:
        """The index of the first element of this part in the full tensor, in memory order.

        Scales count blocks of codes. A shard begins at the start of a block.
        """
        start = 0 if self.share is None else self.share.start
        return start // BLOCK_NUMEL if self.is_scales else start

    @property
    def info(self) -> TensorInfo:
        """Name, dtype and shape, as a file has them."""
        shape = (num_scales(self.full.numel),) if self.is_scales else self.facts.shape
        return TensorInfo(name=self.name, dtype=self.dtype, shape=shape)


def state_tensors(
    unit: Unit,
    *,
    has_kind: Callable[[StateKind], bool],
    has_gradient: Callable[[TensorSpec], bool] = lambda _: False,
    shares: Mapping[TensorSpec, ShardSlice] | None = None,
) -> Iterator[StateTensor]:
    """Yields every tensor that a checkpoint holds of a unit; none if the unit rests in the files of
    its base (`references.py`).

    `has_kind` and `has_gradient` tell which state the engine keeps. `shares` maps the specs of a
    shard to the full parameters; None for a model that is not sharded.
    """
    for spec in unit.tensors if unit.stored is None else ():
        share = None if shares is None else shares.get(spec)
        weight = StateTensor(spec.name, StateKind.PARAMETERS, spec, spec.facts.dtype, share=share)
        yield weight
        if spec.state_offset < 0:
            continue
        for state_kind in (StateKind.MASTER, *MOMENT_KINDS):
            dtype = unit.dtype(state_kind)
            is_residual = state_kind is StateKind.MASTER and unit.has_residual
            # A residual beside fp32 weights is zero, always.
            is_zero = is_residual and spec.facts.dtype is not torch.bfloat16
            if dtype is not None and has_kind(state_kind) and not is_zero:
                name = f"{spec.name}.{'residual' if is_residual else state_kind.value}"
                yield StateTensor(name, state_kind, spec, dtype, share=share)
                if unit.is_8bit(state_kind):
                    name = f"{name}.{scales_suffix(weight.full)}"
                    yield StateTensor(name, state_kind, spec, torch.float32, True, share)
        if has_gradient(spec):
            yield StateTensor(f"{spec.name}.gradient", StateKind.GRADIENTS, spec, torch.float32)


KeptTensors = list[tuple[Unit, list[StateTensor]]]


def kept_tensors(state: StateAccess) -> KeptTensors:
    """Returns the tensors that this process keeps now, unit by unit.

    Of a sharded model these are the tensors of its shards, and the weights that every rank has in
    full; units that rest in the files of their base have none.
    """
    local = () if state.partition is None else state.partition.local
    shares = {share.part: share for shard in local for share in (*shard.shares, *shard.frozen)}
    kept = []
    for unit in state.units:
        has_kind = partial(state.has_kind, unit)
        if state.partition is None:
            found = state_tensors(unit, has_kind=has_kind, has_gradient=state.has_gradient)
        else:
            of_shard = state_tensors(unit, has_kind=has_kind, shares=shares)
            found = (tensor for tensor in of_shard if has_kind(tensor.state_kind))
        kept.append((unit, list(found)))
    return kept


def digest_of_state(state: StateAccess) -> str:
    """Returns a SHA-256 of all weights, masters and moments on tiers, wherever they rest, and in
    whatever units and tiles. On one rank."""
    found: dict[tuple[str, str], HASH] = {}
    for unit in (unit for unit in state.units if unit.stored is None):
        for state_kind in STREAMED:
            for part in state.parts(unit, state_kind) if state.has_kind(unit, state_kind) else ():
                key = name_of_tiled(part.spec.name), state_kind.value
                sha256 = found.setdefault(key, hashlib.sha256())
                for values in (part.values, part.scales):
                    if values is not None:
                        sha256.update(tensor_bytes(values))
    # Without the names, of which that of one adapter among several is a part.
    return hashlib.sha256(b"".join(found[key].digest() for key in sorted(found))).hexdigest()


def scales_suffix(spec: TensorSpec) -> str:
    """Returns the ending of the name of the scales of a parameter.

    Scales belong to blocks in memory order, which a file of codes does not show. If memory order is
    not row-major, the ending contains the order, so that a model with another order is refused.
    """
    if is_row_major(spec):
        return "scales"
    strides = spec.facts.stride
    order = sorted(range(len(strides)), key=lambda dimension: -strides[dimension])
    return "scales_" + "_".join(map(str, order))


def is_row_major(spec: TensorSpec) -> bool:
    """Whether memory order is row-major, the order of elements in a file."""
    return spec.facts.stride == row_major_stride(spec.facts.shape)


def in_row_major(parts: Iterable[Part]) -> Iterator[Part]:
    """Yields the same elements in row-major order; holds a full tensor if its strides differ.

    `scales` of a part belong to blocks in memory order, and are left out then.
    """
    full: torch.Tensor | None = None
    for part in parts:
        spec, stop = part.spec, part.start + part.values.numel()
        if is_row_major(spec):
            yield part
            continue
        if full is None:
            full = torch.empty(spec.numel, dtype=part.values.dtype, device="cpu")
        full[part.start : stop] = part.values
        if stop == spec.numel:
            shaped = full.as_strided(spec.facts.shape, spec.facts.stride)
            yield Part(spec, 0, shaped.contiguous().view(-1))
            full = None


def row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the stride of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


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

    def stored(self, runs: Iterable[FileRange]) -> LinkedKind:
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


def state_kind_ranges(tensors: Iterable[tuple[Unit, StateTensor]]) -> list[KindRange]:
    """Returns full state kinds of units, with these tensors in them."""
    of_state_kind: dict[tuple[Unit, StateKind], list[LinkedTensor]] = {}
    for unit, tensor in tensors:
        of_state_kind.setdefault((unit, tensor.state_kind), []).extend(linked_tensors(unit, tensor))
    return [
        KindRange(unit, state_kind, 0, unit.nbytes(state_kind), tuple(rows))
        for (unit, state_kind), rows in of_state_kind.items()
    ]


def own_weights(state: StateAccess, divided: Partition) -> Iterator[KindRange]:
    """Yields the part that this rank owns of the weights that every rank keeps in full."""
    for full_unit, shard in zip(divided.full_units, divided.local, strict=True):
        if not state.is_chosen(full_unit):
            continue
        for shares in (shard.shares, shard.frozen):
            places = [_weight_range(share) for share in shares]
            if not places:
                continue
            low = align_down(min(start for start, _ in places), PAGE_NBYTES)
            high = align_up(max(stop for _, stop in places), PAGE_NBYTES)
            tensors = [
                LinkedTensor(*_form(share.full.facts), start - low, share.start, share.part.numel)
                for share, (start, _) in zip(shares, places, strict=True)
            ]
            yield KindRange(full_unit, StateKind.PARAMETERS, low, high, tuple(tensors))


def _form(facts: TensorFacts) -> tuple[str, str, tuple[int, ...], tuple[int, ...]]:
    return facts.name, dtype_name(facts.dtype), facts.shape, facts.stride


def _weight_range(share: ShardSlice) -> tuple[int, int]:
    """Returns the byte range [start, stop) of a shard in the weights of the full unit."""
    at, size = share.full.weight_offset_nbytes, share.full.facts.dtype.itemsize
    return at + share.start * size, at + share.stop * size


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
        pages = _empty_ranges(state, state.partition)
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
    return ranges if divided.stage == 3 else [*own_weights(state, divided), *ranges]


def _empty_ranges(state: StateAccess, divided: Partition) -> list[KindRange]:
    """Returns the parameters without an element, which have no owner, for the first rank."""
    found = []
    for unit in state.full_units if divided.rank == 0 else ():
        if unit.stored is not None:
            continue
        empty = [spec.facts for spec in unit.tensors if not spec.numel]
        rows = [LinkedTensor(*_form(facts), 0) for facts in empty]
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
        files.append(write_small(directory / TABLE_NAME, "table", table_to_bytes(stored.kinds)))
        files.append(write_small(directory / CHECKSUMS_NAME, "checksums", stored.checksums))
    return files


class _HashedWriter(SafetensorsWriter):
    """Writes a safetensors file and computes the SHA-256 of every tensor on the way. The parts of a
    tensor come in order."""

    def __init__(self, path: Path, infos: list[TensorInfo], kinds: Mapping[str, str]) -> None:
        super().__init__(path, infos, metadata={"format": "pt"}, mode=PRIVATE_FILE)
        self._kinds = kinds
        self._hashes: dict[str, HASH] = {info.name: hashlib.sha256() for info in infos}

    @override
    def write_part(self, name: str, start: int, part: torch.Tensor) -> None:
        super().write_part(name, start, part)
        self._hashes[name].update(tensor_bytes(part))

    def end(self) -> FileEntry:
        """Syncs the complete file and gives it its final name. Raises StorageError."""
        self.finish()
        self.commit()
        digest = hashlib.sha256(self.header).hexdigest()
        extents = [StoredRange("header", "header", 0, len(self.header), digest)]
        for name, info in self.tensors.items():
            sha256, kind = self._hashes[name].hexdigest(), self._kinds[name]
            extents.append(StoredRange(name, kind, info.offset_nbytes, info.nbytes, sha256))
        return FileEntry(self.path.name, self.file_nbytes, tuple(extents))


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
                writer.write_part(tensor.name, 0, state.gradient(unit, tensor.spec).contiguous())
        return writer.end()


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
            empty = torch.empty(tensor.info.shape, dtype=tensor.dtype, device="cpu")
            writer.write_part(tensor.name, 0, empty)

    def without_scales() -> Iterator[Part]:
        for part in state.parts(unit, state_kind):
            if part.spec not in tensors or not part.spec.numel:
                continue
            if part.scales is not None:
                writer.write_part(scales[part.spec].name, part.start // BLOCK_NUMEL, part.scales)
            yield part

    for part in in_row_major(without_scales()):
        writer.write_part(tensors[part.spec].name, part.start, part.values)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every buffer once, also those outside of state_dict(): a forward may change them.
    Raises UnsupportedError for one that is sparse."""
    found = {name: buffer for name, buffer in model.named_buffers() if buffer is not None}
    for name, buffer in found.items():
        if buffer.layout is not torch.strided:
            raise UnsupportedError(
                f"the buffer {name!r} has the layout {buffer.layout}, which checkpoints cannot "
                "hold; register its indices and values, and build it of them in the forward"
            )
    return found


def infos_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Returns name, dtype and shape of each buffer, as a file has them."""
    return {
        name: TensorInfo(name=name, dtype=buffer.dtype, shape=tuple(buffer.shape))
        for name, buffer in buffers.items()
    }


def put_buffer(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a buffer values. One whose elements share memory (`expand`) gets memory for all."""
    if 0 in buffer.stride():
        buffer.data = values.to(buffer)
    else:
        buffer.copy_(values)


def _write_buffers(path: Path, model: nn.Module) -> FileEntry:
    buffers = buffers_of(model)
    infos = infos_of(buffers)
    with _HashedWriter(path, [*infos.values()], dict.fromkeys(buffers, "buffers")) as writer:
        for name, buffer in buffers.items():
            writer.write_part(name, 0, buffer.detach().cpu().contiguous())
        return writer.end()


def write_small(path: Path, kind: str, content: bytes) -> FileEntry:
    """Writes and syncs a new file; returns its entry for the manifest. Raises StorageError."""
    write_file(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return FileEntry(path.name, len(content), (StoredRange("all", kind, 0, len(content), digest),))


def copy_pages(partial: Path, state: StateAccess, ranges: Sequence[KindRange]) -> Stored:
    """Copies state page by page into one new file of `partial`, and syncs the file.

    Makes no file if there is nothing to copy. Raises StorageError.
    """
    empty = Stored(tuple(r.stored([]) for r in ranges if not r.nbytes))
    ranges = [r for r in ranges if r.nbytes]
    if not ranges:
        return empty
    kinds, checksums, end_nbytes = [], [], 0
    with SequentialFile(partial / COPIES_NAME) as file:
        for kind_range in ranges:
            run = FileRange(COPIES_NAME, end_nbytes, kind_range.nbytes)
            kinds.append(kind_range.stored([run]))
            end_nbytes += kind_range.nbytes
            place = kind_range.start_nbytes, kind_range.stop_nbytes
            for pages in state.pages(kind_range.unit, kind_range.state_kind, *place):
                checksums.append(digest(pages.data_ptr(), pages.numel()))
                file.write(tensor_bytes(pages))
    return empty + Stored(tuple(kinds), b"".join(checksums))
