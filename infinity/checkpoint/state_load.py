"""Reading a checkpoint back: checked first, then streamed to wherever state rests now.

What is linked to the swap files of this very run, or of one whose files it has taken over
(`state_adopt`), is read and checked, and then restored where it is. All other is streamed.

Nothing that is read depends on placement, budgets, chunk sizes or units, so all of these may be
other ones than when it was written. Names, shapes, dtypes, lengths and the small state are checked
before anything is changed. A tensor's SHA-256 is known when its last byte has passed, the CRC32C of
linked state page by page; if one is wrong the model may be a mixture by then, and the error says
so.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.checkpoint.safetensors_format import (
    SafetensorsReader,
    TensorInfo,
    dtype_of,
    tensor_bytes,
)
from infinity.checkpoint.state_commit import is_linkable, label_of, linked_runs, linked_tensor
from infinity.checkpoint.state_directory import (
    check_extent,
    damaged,
    find_checkpoint,
    read_linked,
    read_manifest,
)
from infinity.checkpoint.state_layout import STREAMED, StateTensor, is_row_major
from infinity.checkpoint.state_linked import LinkedPiece, LinkedState, LinkedTensor
from infinity.checkpoint.state_manifest import Extent, FileEntry, Manifest, corrupt
from infinity.checkpoint.state_random import restore_random_state
from infinity.checkpoint.state_save import (
    BUFFERS_NAME,
    PROGRAM_NAME,
    Stateful,
    buffers_of,
    tensors_of,
)
from infinity.engine.engine import Engine, engine_of
from infinity.engine.gradients import in_memory_order
from infinity.engine.optimizer import AdamW
from infinity.engine.state_access import Part, StateAccess
from infinity.errors import ConfigError, CorruptionError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.state.store import NvmeHome
from infinity.state.units import Piece, TensorSpec, Unit
from infinity.storage.page_reader import PageReader

if TYPE_CHECKING:
    from _hashlib import HASH

_MIXTURE = "the model is a mixture of two states now: do not train on, load another checkpoint"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was read: the checkpoint, its number of steps, and the caller's own additions."""

    path: Path
    step: int
    extra: dict[str, Any]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AdamW | None = None,
    *,
    scheduler: Stateful | None = None,
) -> Loaded:
    """Brings back what `save` wrote: what follows is the continuation of that run, bit by bit.

    path: a checkpoint, or a directory of them, of which the newest is taken
    model: offloaded, of the same architecture and dtypes, wherever its state rests now
    optimizer, scheduler: made as they were; None leaves out theirs, and then it is no continuation

    Call between steps, from the training thread. Raises ConfigError for a checkpoint of another
    model or optimizer, UnsupportedError for a newer one and CorruptionError for a damaged one,
    before anything was changed; but for bytes that turn out wrong while they are streamed, which is
    a CorruptionError that says so.
    """
    engine_of(model).refuse_ranks("infinity.checkpoint.load")
    found = Checkpoint(find_checkpoint(Path(path)))
    program = found.program()
    _check_program(program, optimizer, scheduler, found.path)
    engine = engine_of(model)
    with engine.at_rest("infinity.checkpoint.load") as state:
        found.check_model(state, model)
        _load_tensors(found, state, engine)
    _load_buffers(found, model)
    if optimizer is not None:
        optimizer.restore_named_state(program["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(program["scheduler"])
    restore_random_state(program["random"])
    return Loaded(found.path, found.manifest.step, program["extra"])


def read_program(path: str | os.PathLike[str]) -> Loaded:
    """Only the step and `extra` of a checkpoint: what there is to check before a model is made."""
    found = Checkpoint(find_checkpoint(Path(path)))
    return Loaded(found.path, found.manifest.step, found.program()["extra"])


@dataclass(frozen=True, slots=True)
class _Linked:
    """A tensor whose bytes are in linked files."""

    state: LinkedState
    piece: LinkedPiece
    tensor: LinkedTensor

    @property
    def info(self) -> TensorInfo:
        tensor = self.tensor
        return TensorInfo(name=tensor.name, dtype=dtype_of(tensor.dtype), shape=tensor.shape)


class Checkpoint:
    """The facts of one checkpoint: its manifest, and where every tensor is. Holds no tensor.

    Raises as `read_manifest`, and CorruptionError for a header that its SHA-256 does not vouch for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._places: dict[str, tuple[FileEntry, TensorInfo, Extent]] = {}
        self._linked: dict[str, _Linked] = {}
        self.buffers: FileEntry | None = None
        for file in self.manifest.files:
            if file.name == BUFFERS_NAME:
                self.buffers = file
            elif file.name.endswith(".safetensors"):
                for name, place in _places(path, file).items():
                    self._places[name] = (file, *place)
        self.linked_state = linked = read_linked(path, self.manifest)
        for piece in linked.pieces if linked is not None else ():
            for tensor in piece.tensors:
                self._linked[tensor.name] = _Linked(linked, piece, tensor)

    def program(self) -> dict[str, Any]:
        """The small state, checked. Runs no code of the file's."""
        path = str(self.path / PROGRAM_NAME)
        entry = next((file for file in self.manifest.files if file.name == PROGRAM_NAME), None)
        if entry is None or len(entry.extents) != 1:
            raise corrupt(path, "the manifest does not name it")
        content = (self.path / PROGRAM_NAME).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry.extents[0].sha256:
            raise corrupt(path, "its SHA-256 is not the manifest's", nbytes=len(content))
        state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        return state

    def check_model(self, state: StateAccess, model: nn.Module) -> None:
        """Raises ConfigError unless this is a checkpoint of the model, name by name."""
        expected: dict[str, TensorInfo] = {}
        for unit in state.units:
            for tensor in tensors_of(state, unit):
                if tensor.piece is not Piece.GRADIENTS:
                    expected[tensor.name] = tensor.info
        self._check_moments(expected)
        gradients = {f"{s.name}.gradient" for unit in state.units for s in unit.trainable()}
        names = {*self._places, *self._linked}
        _compare_names(set(expected), names - gradients, self.path)
        for name, info in expected.items():
            there = self._info_of(name)
            if (there.shape, there.dtype) != (info.shape, info.dtype):
                raise ConfigError(
                    f"{self.path}: {name!r} has shape {there.shape} and {there.dtype}, "
                    f"the model has {info.shape} and {info.dtype}; expected a checkpoint of this "
                    "model in this precision"
                )
        if self.buffers is not None:
            buffers = buffers_of(model)
            with SafetensorsReader(self.path / BUFFERS_NAME) as reader:
                _compare_names(set(buffers), set(reader.tensors), self.path / BUFFERS_NAME)
                for name, buffer in buffers.items():
                    if tuple(buffer.shape) != reader.tensors[name].shape:
                        raise ConfigError(
                            f"{self.path / BUFFERS_NAME}: buffer {name!r} has shape "
                            f"{reader.tensors[name].shape}, the model has {tuple(buffer.shape)}"
                        )

    def _check_moments(self, expected: Mapping[str, TensorInfo]) -> None:
        """Raises ConfigError where moments are kept in another format than the model's."""
        for name, info in expected.items():
            if name.endswith((".exp_avg", ".exp_avg_sq")) and self.has(name):
                there = self._info_of(name).dtype
                if (there is torch.uint8) != (info.dtype is torch.uint8):
                    word = "8bit" if there is torch.uint8 else "float32"
                    raise ConfigError(
                        f"{self.path}: its moments are {word} and the model's are not; set "
                        f"precision.moments to {word!r} to go on with it. A conversion would not "
                        "be the continuation of that run"
                    )

    def _info_of(self, name: str) -> TensorInfo:
        linked = self._linked.get(name)
        return linked.info if linked is not None else self._places[name][1]

    def has(self, name: str) -> bool:
        return name in self._places or name in self._linked

    def linked(self, name: str) -> _Linked | None:
        return self._linked.get(name)

    def file_of(self, name: str) -> str:
        return self._places[name][0].name

    def extent_of(self, name: str) -> Extent:
        return self._places[name][2]


def _places(path: Path, file: FileEntry) -> dict[str, tuple[TensorInfo, Extent]]:
    """Tensors of one file, as its header and the manifest agree on them."""
    check_extent(path / file.name, file.extents[0])
    extents = {extent.name: extent for extent in file.extents[1:]}
    with SafetensorsReader(path / file.name) as reader:
        infos = dict(reader.tensors)
    if {(n, i.offset_nbytes, i.nbytes) for n, i in infos.items()} != {
        (n, e.offset_nbytes, e.nbytes) for n, e in extents.items()
    }:
        raise corrupt(str(path / file.name), "its header and the manifest name different tensors")
    return {name: (info, extents[name]) for name, info in infos.items()}


def _compare_names(expected: set[str], there: set[str], path: Path) -> None:
    missing, surplus = sorted(expected - there), sorted(there - expected)
    if missing or surplus:
        what = [f"it lacks {missing[0]!r} and {len(missing) - 1} more"] if missing else []
        what += [f"it has {surplus[0]!r} and {len(surplus) - 1} more"] if surplus else []
        if any(".tiles." in name for name in missing + surplus):
            what += ["large layers were cut otherwise: set schedule.tile as it was for that run"]
        raise ConfigError(
            f"{path} is a checkpoint of another model, precision or set of trainable parameters: "
            + "; ".join(what)
        )


def _check_program(
    program: Mapping[str, Any],
    optimizer: AdamW | None,
    scheduler: Stateful | None,
    path: Path,
) -> None:
    for what, given in (("an optimizer", optimizer), ("a scheduler", scheduler)):
        if given is not None and program[what.split()[1]] is None:
            raise ConfigError(f"{path} was saved without {what}, so there is none to bring back")
    if optimizer is not None:
        optimizer.check_named_state(program["optimizer"])


class _CheckedReader:
    """Reads tensors in order: compares each one's SHA-256 at its end, or of linked state the CRC32C
    of every page."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reader: SafetensorsReader | None = None
        self._pages = PageReader()
        self._file = ""
        self._hashes: dict[str, HASH] = {}

    def is_in_memory_order(self, name: str, spec: TensorSpec) -> bool:
        """Whether the elements come in the order in which they lie in memory."""
        linked = self._checkpoint.linked(name)
        return is_row_major(spec) if linked is None else linked.tensor.stride == spec.facts.stride

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fills `target` (CPU, contiguous) with elements from `start` on, as they come."""
        linked = self._checkpoint.linked(name)
        if linked is not None:
            self._read_linked(linked, start, target)
            return
        self._open(self._checkpoint.file_of(name))
        assert self._reader is not None
        self._reader.read_into(name, start, target)
        digest = self._hashes.setdefault(name, hashlib.sha256())
        digest.update(tensor_bytes(target))
        if start + target.numel() == self._numel(name):
            del self._hashes[name]
            extent = self._checkpoint.extent_of(name)
            if digest.hexdigest() != extent.sha256:
                path = self._checkpoint.path / self._file
                raise damaged(path, extent, f"its SHA-256 is not the manifest's; {_MIXTURE}")

    def _read_linked(self, linked: _Linked, start: int, target: torch.Tensor) -> None:
        view = tensor_bytes(target)
        begin_nbytes = linked.tensor.offset_nbytes + start * target.dtype.itemsize
        try:
            for part in linked.state.read(self._pages, linked.piece, begin_nbytes, len(view)):
                view[: len(part)] = part
                view = view[len(part) :]
        except CorruptionError as error:
            raise CorruptionError(
                error.errno or 0,
                operation="read",
                path=error.path,
                offset_nbytes=error.offset_nbytes,
                nbytes=error.nbytes,
                detail=f"{linked.tensor.name!r} is damaged: {error.detail}; {_MIXTURE}",
            ) from None

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in its shape."""
        linked = self._checkpoint.linked(name)
        if linked is not None:
            info = linked.info
            flat = torch.empty(math.prod(info.shape), dtype=info.dtype)
            self.read_into(name, 0, flat)
            return flat.as_strided(info.shape, linked.tensor.stride)
        self._open(self._checkpoint.file_of(name))
        assert self._reader is not None
        info = self._reader.tensors[name]
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, 0, tensor)
        return tensor

    def close(self) -> None:
        self._close_file()
        self._pages.close()

    def _close_file(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _numel(self, name: str) -> int:
        assert self._reader is not None
        info = self._reader.tensors[name]
        return info.nbytes // info.dtype.itemsize

    def _open(self, file: str) -> None:
        if self._reader is None or self._file != file:
            self._close_file()
            self._reader = SafetensorsReader(self._checkpoint.path / file)
            self._file = file


def _load_tensors(checkpoint: Checkpoint, state: StateAccess, engine: Engine) -> None:
    in_place = _restore(checkpoint, state)
    state.forget_gradients()
    with ExitStack() as stack:
        reader = _CheckedReader(checkpoint)
        stack.callback(reader.close)
        for unit in state.units:
            tensors = tensors_of(state, unit)
            for piece in STREAMED:
                if not (in_place and is_linkable(state, unit, piece)):
                    _load_piece(reader, state, unit, piece, tensors)
            for spec in unit.trainable():
                if checkpoint.has(f"{spec.name}.gradient"):
                    gradient = reader.read(f"{spec.name}.gradient")
                    state.put_gradient(unit, spec, gradient, engine.parts.device.torch_device)


def _restore(checkpoint: Checkpoint, state: StateAccess) -> bool:
    """Where the swap files of this run hold the linked state as the checkpoint has it, piece by
    piece, makes it the current one; nothing is changed before every page was checked."""
    volume, linked = state.store.volume, checkpoint.linked_state
    label = label_of(checkpoint.path)
    frozen = next((f for f in volume.frozen if f.label == label), None) if volume else None
    if volume is None or linked is None or frozen is None:
        return False
    pieces = {(piece.unit, piece.piece): piece for piece in linked.pieces}
    found: list[tuple[NvmeHome, LinkedPiece]] = []
    swap_paths: set[str] = set()
    for unit in state.units:
        for name in STREAMED:
            tensors = [tensor for tensor in tensors_of(state, unit) if tensor.piece is name]
            if not tensors or not is_linkable(state, unit, name):
                continue
            home, piece = state.store.home(unit, name), pieces.get((unit.name, name.value))
            assert isinstance(home, NvmeHome)
            here = tuple(linked_tensor(unit, tensor) for tensor in tensors)
            if piece is None or piece.tensors != here:
                return False
            ranges = volume.locate(home.extents, frozen)
            if piece.runs != linked_runs(ranges):
                return False
            swap_paths.update(each.path for each in ranges)
            found.append((home, piece))
    if len(found) != len(pieces) or not all(
        os.path.samefile(each, checkpoint.path / os.path.basename(each)) for each in swap_paths
    ):
        return False
    with PageReader() as pages:
        for piece in linked.pieces:
            for _ in linked.read(pages, piece, 0, piece.nbytes):
                pass  # It is the right one, or an error.
    state.executor.forget()
    volume.restore(frozen)
    for home, piece in found:
        volume.put_checksums(home.extents, linked.checksums_of(piece))
    return True


def _load_piece(
    reader: _CheckedReader,
    state: StateAccess,
    unit: Unit,
    piece: Piece,
    tensors: Sequence[StateTensor],
) -> None:
    if state.store.home(unit, piece) is None:
        return
    of_piece = [tensor for tensor in tensors if tensor.piece is piece]
    names = {tensor.spec: tensor.name for tensor in of_piece if not tensor.is_scales}
    scales = {tensor.spec: tensor.name for tensor in of_piece if tensor.is_scales}
    whole: tuple[TensorSpec, torch.Tensor] | None = None
    for part in state.parts(unit, piece, keep=True):
        spec = part.spec
        if part.scales is not None:
            reader.read_into(scales[spec], part.start // BLOCK_NUMEL, part.scales)
        if spec not in names:
            part.values.zero_()
        elif reader.is_in_memory_order(names[spec], spec):
            reader.read_into(names[spec], part.start, part.values)
        else:
            if whole is None or whole[0] is not spec:
                whole = spec, in_memory_order(reader.read(names[spec]), spec)
            _fill(part, whole[1])


def _fill(part: Part, whole: torch.Tensor) -> None:
    part.values.copy_(whole[part.start : part.start + part.values.numel()])


def _load_buffers(checkpoint: Checkpoint, model: nn.Module) -> None:
    if checkpoint.buffers is None:
        return
    path = checkpoint.path / BUFFERS_NAME
    extents = {extent.name: extent for extent in checkpoint.buffers.extents[1:]}
    with SafetensorsReader(path) as reader, torch.no_grad():
        for name, buffer in buffers_of(model).items():
            value = reader.read(name)
            if hashlib.sha256(tensor_bytes(value)).hexdigest() != extents[name].sha256:
                raise damaged(path, extents[name], f"its SHA-256 is not the manifest's; {_MIXTURE}")
            buffer.copy_(value)
