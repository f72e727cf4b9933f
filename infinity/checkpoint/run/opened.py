"""Opens a checkpoint and verifies that it is one of this model. Changes nothing.

Names, shapes, dtypes, lengths and headers are verified here, before a load changes anything. Bytes
of tensors are verified when they are read.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

import torch
from torch import nn

from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsReader,
    TensorInfo,
    tensor_bytes,
)
from infinity.checkpoint.run.contents import (
    BUFFERS_NAME,
    StateTensor,
    buffers_of,
    infos_of,
    row_major_stride,
    state_tensors,
)
from infinity.checkpoint.run.directory import (
    check_extent,
    comparing,
    read_content,
    read_linked,
    read_manifest,
)
from infinity.checkpoint.run.format import (
    PROGRAM_NAME,
    FileEntry,
    Manifest,
    Part,
    StoredRange,
    joined_parts,
    overlaps,
)
from infinity.checkpoint.run.references import check_reference, check_reference_files
from infinity.codecs.part import STORED_DTYPES
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError, StorageError, UnsupportedError, corrupt, listed
from infinity.state.tiles import name_of_tiled, number_of_tile
from infinity.state.units import MOMENT_KINDS
from infinity.storage.checksums import PageReader
from infinity.storage.closing import Closing


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, in one of two places. `extent`: a safetensors file, with the
    manifest's range and SHA-256. `parts`: pages that have a CRC32C each, linked to the swap files
    or copied, in one part or in consecutive parts of several ranks.

    `stride` is the order in which the elements are stored, `kind` names the state kind, and `group`
    is equal for all tensors of one unit.
    """

    info: TensorInfo
    stride: tuple[int, ...]
    kind: str
    group: str
    extent: tuple[Path, StoredRange] | None = None
    parts: tuple[Part, ...] = ()


class StoredReader(Closing):
    """Reads stored tensors and compares them with their SHA-256 or CRC32C.

    The SHA-256 of a tensor is compared when the tensor has been read from its first to its last
    element; a read out of order is not compared. `is_checked`: the caller has compared the files,
    and no SHA-256 is computed. `consequence` ends the text of every error.

    Keeps one file open. Not thread-safe; close it.
    """

    def __init__(self, *, is_checked: bool = False, consequence: str = "") -> None:
        self._is_checked = is_checked
        self._consequence = consequence
        self._file: SafetensorsReader | None = None
        self._pages = PageReader()
        # Elements read, from the first one on, and what compares them.
        self._begun: dict[tuple[Path, str], tuple[int, Callable[[memoryview], None]]] = {}

    def close(self) -> None:
        """Closes all files. Idempotent."""
        self._close_file()
        self._pages.close()

    def read(self, tensor: SavedTensor, start: int, stop: int) -> torch.Tensor:
        """Returns the elements [start, stop): fresh, flat, on the CPU, in the stored order.

        Raises as `read_into`.
        """
        values = torch.empty(stop - start, dtype=tensor.info.dtype, device="cpu")
        self.read_into(tensor, start, values)
        return values

    def read_full(self, tensor: SavedTensor) -> torch.Tensor:
        """Returns a fresh tensor on the CPU, in its shape. Raises as `read_into`."""
        shape = tensor.info.shape
        return self.read(tensor, 0, math.prod(shape)).as_strided(shape, tensor.stride)

    def read_into(self, tensor: SavedTensor, start: int, target: torch.Tensor) -> None:
        """Fills `target` (CPU, contiguous) with the elements from `start` on, in the stored order.

        Raises CorruptionError with file and range for bytes that their checksum does not match,
        StorageError for a file that cannot be read, UnsupportedError for an unknown dtype.
        """
        try:
            if tensor.extent is None:
                self._read_pages(tensor, start, target)
                return
            path, extent = tensor.extent
            self._open(path).read_into(tensor.info.name, start, target)
            if not self._is_checked:
                self._compare(path, extent, tensor.info, start, target)
        except StorageError as error:
            if not self._consequence:
                raise
            reason = error.detail or os.strerror(error.errno or 0)
            detail = f"{tensor.info.name!r}: {reason}; {self._consequence}"
            raise error.with_detail(detail) from None

    def _compare(
        self, path: Path, extent: StoredRange, info: TensorInfo, start: int, values: torch.Tensor
    ) -> None:
        key = path, info.name
        if start == 0:
            self._begun[key] = 0, comparing(path, extent)
        done, compare = self._begun.get(key, (-1, None))
        if compare is None or start != done:
            return
        compare(tensor_bytes(values))
        self._begun[key] = done + values.numel(), compare
        if done + values.numel() == math.prod(info.shape):
            del self._begun[key]

    def _read_pages(self, tensor: SavedTensor, start: int, target: torch.Tensor) -> None:
        view, size = tensor_bytes(target), target.dtype.itemsize
        for (state, entry, part), low, high in overlaps(
            tensor.parts, start, start + target.numel()
        ):
            place = part.offset_nbytes + (low - part.start) * size, (high - low) * size
            for content in state.read(self._pages, entry, *place):
                view[: len(content)] = content
                view = view[len(content) :]

    def _open(self, path: Path) -> SafetensorsReader:
        if self._file is None or self._file.path != str(path):
            self._close_file()
            self._file = SafetensorsReader(path)
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# -- Large layers in other tiles ------------------------------------------------------------------


Source = tuple[str, int, int]  # (tensor of the checkpoint, first element, number of elements)


@dataclass(frozen=True, slots=True)
class Recut:
    """A tensor of the model, and the ranges that it is joined from, in order."""

    info: TensorInfo
    sources: tuple[Source, ...]

    def within(self, start: int, count: int) -> Iterator[Source]:
        """Yields the ranges that hold `count` elements from `start` on."""
        first = 0
        for name, begin, numel in self.sources:
            low, high = max(start, first), min(start + count, first + numel)
            if low < high:
                yield name, begin + low - first, high - low
            first += numel


def recut(expected: Mapping[str, TensorInfo], saved: Mapping[str, TensorInfo]) -> dict[str, Recut]:
    """Maps expected tensors, by name, to saved tensors of another cut. Leaves out tensors that
    cannot be joined; the comparison of names then reports them."""
    saved_tiles = _by_parameter(saved)
    found: dict[str, Recut] = {}
    for name, tiles in _by_parameter(expected).items():
        sources = saved_tiles.get(name, [])
        cuts = [[(info.name, info.shape) for info in side] for side in (tiles, sources)]
        if cuts[0] == cuts[1] or not _can_join(tiles, sources):
            continue
        ranges = tuple((info.name, 0, math.prod(info.shape)) for info in sources)
        joined, first = Recut(sources[0], ranges), 0
        for info in tiles:
            count = math.prod(info.shape)
            found[info.name] = Recut(info, tuple(joined.within(first, count)))
            first += count
    return found


def _by_parameter(infos: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Groups tiles by the name of the tiled parameter, in order; a plain tensor is one tile."""
    groups: dict[str, list[TensorInfo]] = {}
    for info in infos.values():
        groups.setdefault(name_of_tiled(info.name), []).append(info)
    for tiles in groups.values():
        tiles.sort(key=lambda info: number_of_tile(info.name))
    return groups


def _can_join(tiles: list[TensorInfo], sources: list[TensorInfo]) -> bool:
    """Whether both sides are cuts of the same rows."""
    if not sources or any(not info.shape for info in tiles + sources):
        return False
    kinds = {(info.dtype, tuple(info.shape[1:])) for info in tiles + sources}
    rows = [sum(info.shape[0] for info in side) for side in (tiles, sources)]
    return len(kinds) == 1 and tiles[0].dtype is not torch.uint8 and rows[0] == rows[1]


# -- The checkpoint --------------------------------------------------------------------------------


_log = logging.getLogger("infinity")

_MOMENT_ENDS = tuple(f".{state_kind.value}" for state_kind in MOMENT_KINDS)


class OpenCheckpoint:
    """The manifest of one checkpoint and the place of every tensor in it. Holds no tensor.

    Raises as `read_manifest` and `read_linked`, CorruptionError for a header, or a reference to the
    files of a base, that does not have the SHA-256 of the manifest, and UnsupportedError for a
    dtype that torch does not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        check_reference_files(path, self.manifest)
        self._files = {file.name: file for file in self.manifest.files}
        self.tensors: dict[str, SavedTensor] = {}
        for file in self.manifest.files:
            if file.name.endswith(".safetensors") and PurePath(file.name).name != BUFFERS_NAME:
                self.tensors |= _tensors_of_file(path, file)
        self.linked_states = read_linked(path, self.manifest)
        for name, parts in joined_parts(self.linked_states.values(), path).items():
            self.tensors[name] = _in_pages(parts)
        self._recut: dict[str, Recut] = {}  # Tensors of the model that are cut into other tiles.

    def place_of(self, rank: int) -> str:
        """Returns the prefix of the names of the files of this rank.

        A rank that the checkpoint does not have gets the files of the first rank.
        """
        places = self.manifest.places
        return places[rank if rank < len(places) else 0]

    def packed_program(self, rank: int = 0) -> tuple[bytes, Path]:
        """Returns the small state of a rank as it is packed, and its file.

        Raises CorruptionError, StorageError.
        """
        name = self.place_of(rank) + PROGRAM_NAME
        path, entry = self.path / name, self._files.get(name)
        if entry is None or len(entry.extents) != 1:
            raise corrupt(str(path), "the manifest does not name it")
        content = read_content(path)
        if hashlib.sha256(content).hexdigest() != entry.extents[0].sha256:
            raise corrupt(str(path), "its SHA-256 is not the manifest's", nbytes=len(content))
        return content, path

    def buffers(self, rank: int) -> dict[str, SavedTensor]:
        """Returns the buffers that this rank saved, by name; none if there is no file of them.

        Raises CorruptionError for a damaged header, StorageError.
        """
        entry = self._files.get(self.place_of(rank) + BUFFERS_NAME)
        return {} if entry is None else _tensors_of_file(self.path, entry)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has the tensor, in one piece or in tiles of another cut."""
        return name in self.tensors or name in self._recut

    def sources(self, name: str, start: int, count: int) -> Iterator[tuple[SavedTensor, int, int]]:
        """Yields (tensor, first element, number of elements) of the ranges that hold `count`
        elements of a tensor of the model from `start` on. `check_model` finds other cuts."""
        recut = self._recut.get(name)
        ranges = [(name, start, count)] if recut is None else recut.within(start, count)
        for source, first, numel in ranges:
            yield self.tensors[source], first, numel

    def form_of(self, name: str) -> tuple[TensorInfo, tuple[int, ...]]:
        """Returns a tensor of the model as the checkpoint has it, and the order of its elements."""
        recut = self._recut.get(name)
        if recut is not None:  # Tiles are always row-major.
            return recut.info, row_major_stride(recut.info.shape)
        return self.tensors[name].info, self.tensors[name].stride

    def check_model(self, state: StateAccess, model: nn.Module, rank: int = 0) -> None:
        """Compares names, shapes and dtypes with those of the model, in any cut of large layers.

        Raises ConfigError for a checkpoint of another model, CorruptionError for damaged buffers.
        """
        check_reference(self.path, state.store.shards)
        tensors = _expected(state)
        expected = {tensor.name: tensor.info for tensor in tensors}
        self._check_moments(expected)
        gradients = _gradient_infos(state)
        names = set(self.tensors)
        if state.partition is not None and names & set(gradients):
            raise ConfigError(
                f"{self.path} has gradients that were summed so far, which cannot be divided over "
                "ranks; load it on one rank, make the step, and save again"
            )
        infos = {name: tensor.info for name, tensor in self.tensors.items()}
        self._recut = recut(expected | gradients, infos)
        used = {name for tensor in self._recut.values() for name, _, _ in tensor.sources}
        if self.manifest.ranks or state.partition is not None:
            # State without an element is not kept by any rank.
            names |= {name for name, info in expected.items() if not math.prod(info.shape)}
        _compare_names(set(expected) - set(self._recut), names - set(gradients) - used, self.path)
        wanted = {name: info for name, info in expected.items() if name not in self._recut}
        _compare_forms(wanted, infos, self.path)
        self._check_buffers(model, rank)
        self._check_orders(tensors)

    def check_part(self, rank: int, count: int) -> None:
        """Compares this rank's part of the files with their SHA-256, if there are several ranks.

        A rank reads only the elements that it keeps, and the manifest has one SHA-256 of all
        elements. So `count` ranks compare every tensor once before they read. Raises
        CorruptionError.
        """
        if count > 1:
            extents = [tensor.extent for tensor in self.tensors.values() if tensor.extent]
            for path, extent in extents[rank::count]:
                check_extent(path, extent)

    def _check_orders(self, tensors: Iterable[StateTensor]) -> None:
        """Compares the order of elements in pages with the model's: no checksum covers it.

        A memory format of images, as channels_last, may differ: it is converted, with a warning.
        Raises ConfigError for another order.
        """
        others = []
        for tensor in tensors:
            stored, facts = self.tensors.get(tensor.name), tensor.facts
            if stored and stored.parts and not tensor.is_scales and 0 not in facts.shape:
                pairs = zip(facts.shape, stored.stride, facts.stride, strict=True)
                if all(length == 1 or one == other for length, one, other in pairs):
                    continue
                if len(facts.shape) not in (4, 5):
                    raise ConfigError(
                        f"{self.path}: {tensor.name!r} has strides {stored.stride}, the model has "
                        f"{facts.stride}; build the model as it was built for that run"
                    )
                others.append(tensor.name)
        if others:
            _log.warning(
                "%s has another order of elements than the model of %s; they are converted",
                self.path, listed(others),
            )  # fmt: skip

    def _check_buffers(self, model: nn.Module, rank: int) -> None:
        name = self.place_of(rank) + BUFFERS_NAME
        if name not in self._files:
            return
        path, saved, own = self.path / name, self.buffers(rank), infos_of(buffers_of(model))
        _compare_names(set(own), set(saved), path)
        _compare_forms(own, {name: tensor.info for name, tensor in saved.items()}, path)

    def _check_moments(self, expected: Mapping[str, TensorInfo]) -> None:
        """Raises ConfigError for moments of another optimizer or of another format."""
        wanted, saved = _moments_in(expected), _moments_in(self.tensors)
        if wanted and saved and wanted != saved:
            raise ConfigError(
                f"{self.path} is of another optimizer: of a parameter it has {saved or 'nothing'}, "
                f"and the model has space for {wanted or 'nothing'}; set optimizer.name, and "
                "optimizer.momentum for sgd, as they were for that run"
            )
        for name, info in expected.items():
            if name.endswith(_MOMENT_ENDS) and name in self.tensors:
                saved_dtype = self.tensors[name].info.dtype
                if (saved_dtype is torch.uint8) != (info.dtype is torch.uint8):
                    value = "8bit" if saved_dtype is torch.uint8 else "float32"
                    raise ConfigError(
                        f"{self.path}: its moments are {value} and the model's are not; set "
                        f"precision.moments to {value!r} to continue from it. A conversion would "
                        "not be the continuation of that run"
                    )


def _moments_in(names: Iterable[str]) -> str:
    """Lists the kinds of moments that the names of tensors end with."""
    endings = {name.rpartition(".")[2] for name in names}
    return " and ".join(kind.value for kind in MOMENT_KINDS if kind.value in endings)


def _expected(state: StateAccess) -> list[StateTensor]:
    """Returns every tensor of the model that a checkpoint must have, whichever rank keeps it."""
    return [
        tensor
        for unit in state.full_units
        for tensor in state_tensors(unit, has_kind=partial(state.is_kept, unit))
    ]


def _gradient_infos(state: StateAccess) -> dict[str, TensorInfo]:
    """Returns every gradient that a checkpoint may have, by name."""
    specs = {f"{spec.name}.gradient": spec for unit in state.units for spec in unit.trainable()}
    return {
        name: TensorInfo(name=name, dtype=torch.float32, shape=spec.facts.shape)
        for name, spec in specs.items()
    }


def _in_pages(parts: tuple[Part, ...]) -> SavedTensor:
    """Returns the tensor that these are all parts of. Raises UnsupportedError."""
    _, entry, facts = parts[0]
    try:
        info = TensorInfo(name=facts.name, dtype=STORED_DTYPES[facts.dtype], shape=facts.shape)
    except KeyError:
        raise UnsupportedError(
            f"{facts.name!r} of the checkpoint has dtype {facts.dtype}, which is not known here: "
            "upgrade infinity-offload"
        ) from None
    return SavedTensor(info, facts.stride, entry.kind, entry.unit, parts=parts)


def _tensors_of_file(path: Path, file: FileEntry) -> dict[str, SavedTensor]:
    """Returns the tensors of one file, by name, after its header was compared with the manifest.

    Raises CorruptionError for a damaged header and for one that contradicts the manifest.
    """
    check_extent(path / file.name, file.extents[0])
    extents = {extent.name: extent for extent in file.extents[1:]}
    with SafetensorsReader(path / file.name) as reader:
        infos = dict(reader.tensors)
    if {(n, i.offset_nbytes, i.nbytes) for n, i in infos.items()} != {
        (n, e.offset_nbytes, e.nbytes) for n, e in extents.items()
    }:
        raise corrupt(str(path / file.name), "its header and the manifest name different tensors")
    found = {}
    for name, extent in extents.items():
        info, place = infos[name], (path / file.name, extent)
        found[name] = SavedTensor(info, row_major_stride(info.shape), extent.kind, file.name, place)
    return found


def _compare_forms(
    expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo], path: Path
) -> None:
    for name, info in expected.items():
        own = found.get(name, info)
        if (own.shape, own.dtype) != (info.shape, info.dtype):
            raise ConfigError(
                f"{path}: {name!r} has shape {own.shape} and {own.dtype}, the model has "
                f"{info.shape} and {info.dtype}; expected a checkpoint of this model in this "
                "precision"
            )


def _compare_names(expected: set[str], found: set[str], path: Path) -> None:
    missing, surplus = sorted(expected - found), sorted(found - expected)
    if missing or surplus:
        what = [f"it lacks {listed(missing)}"] if missing else []
        what += [f"it has {listed(surplus)}"] if surplus else []
        if any(".tiles." in name for name in missing + surplus):
            what += ["moments of eight bits need schedule.tile as it was for that run"]
        raise ConfigError(
            f"{path} is a checkpoint of another model, optimizer, precision or set of trainable "
            "parameters: " + "; ".join(what)
        )
