"""Reading a checkpoint back: checked first, then streamed to wherever state rests now.

What is linked to the swap files of this very run, or of one whose files it has taken over
(`state_adopt`), is read and checked, and then restored where it is. All other is streamed: of a
checkpoint that several ranks wrote, those ranges of their shards that this rank keeps.

Nothing that is read depends on placement, budgets, chunk sizes, units, stage, number of ranks or
how large layers are cut (`state_recut`): all of these may be others than when it was written.
Names, shapes, dtypes, lengths and the small state are checked before anything is changed. A
tensor's SHA-256 is known when its last byte has passed, the CRC32C of linked state page by page; if
one is wrong the model may be a mixture by then, and the error says so.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsReader,
    TensorInfo,
    dtype_of,
    tensor_bytes,
)
from infinity.checkpoint.run.commit import is_linkable, label_of, linked_runs, linked_tensors
from infinity.checkpoint.run.directory import (
    check_extent,
    damaged,
    find_checkpoint,
    read_content,
    read_linked,
    read_manifest,
)
from infinity.checkpoint.run.files import (
    BUFFERS_NAME,
    KeptTensors,
    buffers_of,
    kept_tensors,
    tensors_of,
)
from infinity.checkpoint.run.layout import (
    STREAMED,
    StateTensor,
    row_major_stride,
    state_tensors,
)
from infinity.checkpoint.run.linked import (
    COPIES_NAME,
    LinkedPiece,
    StoredTensor,
    stored_tensors,
)
from infinity.checkpoint.run.manifest import PROGRAM_NAME, FileEntry, Manifest, StoredRange
from infinity.checkpoint.run.program import believing, parse_program
from infinity.checkpoint.run.recut import Recut, RecutSource, recut
from infinity.checkpoint.run.rng_state import restore_random_state
from infinity.checkpoint.run.save import Stateful
from infinity.engine.engine import Engine
from infinity.engine.optimizer import OffloadedOptimizer
from infinity.engine.registry import engine_of
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError, CorruptionError, UnsupportedError, corrupt
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.state.store import NvmeLocation
from infinity.state.units import MOMENT_PIECES, StateKind, TensorSpec, Unit
from infinity.storage.page_reader import PageReader
from infinity.streaming.gradients import in_memory_order

if TYPE_CHECKING:
    from _hashlib import HASH

_MOMENT_ENDS = tuple(f".{state_kind.value}" for state_kind in MOMENT_PIECES)
_MIXTURE = "the model is a mixture of two states now: do not train on, load another checkpoint"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was read: the checkpoint, its number of steps, the caller's own additions, and how many
    ranks wrote it."""

    path: Path
    step: int
    extra: dict[str, Any]
    num_ranks: int = 1


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OffloadedOptimizer | None = None,
    *,
    scheduler: Stateful | None = None,
) -> Loaded:
    """Brings back what `save` wrote: what follows is the continuation of that run, bit by bit.

    path: a checkpoint, or a directory of them, of which the newest is taken
    model: offloaded, of the same architecture and dtypes, wherever its state rests now
    optimizer, scheduler: made as they were; None leaves out theirs, and then it is no continuation

    Several ranks all call it with one path. Where it was written by another number of them, a rank
    that was not there takes `extra` and buffers of the first, and its generators stay as they are.

    Call between steps, from the training thread. Raises ConfigError for a checkpoint of another
    model or optimizer, UnsupportedError for a newer one and CorruptionError for a damaged one,
    before anything was changed; but for bytes that turn out wrong while they are streamed, which is
    a CorruptionError that says so.
    """
    engine = engine_of(model)
    with engine.collective_section("infinity.checkpoint.load: what is there") as asked:
        found = OpenCheckpoint(find_checkpoint(Path(path)))
        program = found.program(engine.rank)
        _check_program(program, optimizer, scheduler, found.path)
        with engine.at_rest("infinity.checkpoint.load") as state:
            found.check_model(state, model, engine.rank)
        found.check_part(engine.rank, engine.num_ranks)
        asked.mine = found.path.name.encode()
    if len(set(asked.of_all)) > 1:
        there = sorted({name.decode() for name in asked.of_all})
        raise ConfigError(f"{path}: expected one checkpoint for all ranks, they found {there}")
    with (
        engine.collective_section("infinity.checkpoint.load"),
        engine.at_rest("infinity.checkpoint.load") as state,
    ):
        _load_tensors(found, state, engine)
        _load_buffers(found, model, engine.rank)
        state.weight_cache.finish_writes()
    engine.ranks.forget_gathered()
    if optimizer is not None:
        with believing(found.path, "the optimizer's state"):
            optimizer.restore_named_state(program["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(program["scheduler"])
    if program["random"] is not None:
        with believing(found.path, "the state of the generators"):
            restore_random_state(program["random"])
    return Loaded(found.path, found.manifest.step, program["extra"], len(found.manifest.places))


def read_program(path: str | os.PathLike[str], rank: int = 0) -> Loaded:
    """Only the step and `extra` of a checkpoint, those of one rank: what there is to check before a
    model is made."""
    found = OpenCheckpoint(find_checkpoint(Path(path)))
    extra = found.program(rank)["extra"]
    return Loaded(found.path, found.manifest.step, extra, len(found.manifest.places))


def _info(stored: StoredTensor) -> TensorInfo:
    facts = stored.facts
    try:
        dtype = dtype_of(facts.dtype)
    except KeyError:
        raise UnsupportedError(
            f"{facts.name!r} of the checkpoint has dtype {facts.dtype}, which is not known here: "
            "upgrade infinity-offload"
        ) from None
    return TensorInfo(name=facts.name, dtype=dtype, shape=facts.shape)


class OpenCheckpoint:
    """The facts of one checkpoint: its manifest, and where every tensor is. Holds no tensor.

    Raises as `read_manifest`, and CorruptionError for a header that its SHA-256 does not vouch for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._places: dict[str, tuple[FileEntry, TensorInfo, StoredRange]] = {}
        self._files = {file.name: file for file in self.manifest.files}
        self._recut: dict[str, Recut] = {}  # What is put together from tiles of another cut.
        for file in self.manifest.files:
            if file.name.endswith(".safetensors") and PurePath(file.name).name != BUFFERS_NAME:
                for name, place in _places(path, file).items():
                    self._places[name] = (file, *place)
        self.linked_states = read_linked(path, self.manifest)
        self._linked = stored_tensors(self.linked_states.values(), path)

    def place_of(self, rank: int) -> str:
        """What the names of files that are for this rank begin with."""
        places = self.manifest.places
        return places[rank if rank < len(places) else 0]

    def program(self, rank: int = 0) -> dict[str, Any]:
        """The small state of a rank, checked; `random` is None where it was not there. Runs no code
        of the file's."""
        name = self.place_of(rank) + PROGRAM_NAME
        path, entry = self.path / name, self._files.get(name)
        if entry is None or len(entry.extents) != 1:
            raise corrupt(str(path), "the manifest does not name it")
        content = read_content(path)
        if hashlib.sha256(content).hexdigest() != entry.extents[0].sha256:
            raise corrupt(str(path), "its SHA-256 is not the manifest's", nbytes=len(content))
        state = parse_program(content, path)
        if rank >= len(self.manifest.places):
            state["random"] = None
        return state

    def check_model(self, state: StateAccess, model: nn.Module, rank: int = 0) -> None:
        """Raises ConfigError unless this is a checkpoint of the model, name by name, however its
        large layers were cut."""
        expected: dict[str, TensorInfo] = {}
        for tensor in _expected(state):
            if tensor.state_kind is not StateKind.GRADIENTS:
                expected[tensor.name] = tensor.info
        self._check_moments(expected)
        summed = [
            TensorInfo(name=f"{spec.name}.gradient", dtype=torch.float32, shape=spec.facts.shape)
            for unit in state.units
            for spec in unit.trainable()
        ]
        gradients = {info.name: info for info in summed}
        names = {*self._places, *self._linked}
        if state.partition is not None and names & set(gradients):
            raise ConfigError(
                f"{self.path} has gradients that were summed so far, which cannot be divided over "
                "ranks; load it on one rank, make the step, and save again"
            )
        self._recut, used = recut(
            expected | gradients, {name: self._info_of(name) for name in names}
        )
        if self.manifest.ranks or state.partition is not None:
            # State without an element is not kept by any rank.
            names |= {name for name, info in expected.items() if not math.prod(info.shape)}
        _compare_names(set(expected) - set(self._recut), names - set(gradients) - used, self.path)
        for name, info in expected.items():
            if name in self._recut or not self.has(name):
                continue
            there = self._info_of(name)
            if (there.shape, there.dtype) != (info.shape, info.dtype):
                raise ConfigError(
                    f"{self.path}: {name!r} has shape {there.shape} and {there.dtype}, "
                    f"the model has {info.shape} and {info.dtype}; expected a checkpoint of this "
                    "model in this precision"
                )
        entry = self.buffers(rank)
        if entry is not None:
            buffers, path = buffers_of(model), self.path / entry.name
            with SafetensorsReader(path) as reader:
                _compare_names(set(buffers), set(reader.tensors), path)
                for name, buffer in buffers.items():
                    if tuple(buffer.shape) != reader.tensors[name].shape:
                        raise ConfigError(
                            f"{path}: buffer {name!r} has shape "
                            f"{reader.tensors[name].shape}, the model has {tuple(buffer.shape)}"
                        )

    def check_part(self, rank: int, count: int) -> None:
        """Checks a part of the tensors that only a SHA-256 over all of them vouches for: several
        ranks each read what they keep, which is not all of one. Raises CorruptionError."""
        if count > 1:
            for file, _, extent in list(self._places.values())[rank::count]:
                check_extent(self.path / file.name, extent)

    def _check_moments(self, expected: Mapping[str, TensorInfo]) -> None:
        """Raises ConfigError where moments are others than the model's, or in another format."""
        mine, saved = _moments_in(expected), _moments_in([*self._places, *self._linked])
        if mine and saved and mine != saved:
            raise ConfigError(
                f"{self.path} is of another optimizer: of a parameter it has {saved or 'nothing'}, "
                f"and the model has room for {mine or 'nothing'}; set optimizer.name, and "
                "optimizer.momentum for sgd, as they were for that run"
            )
        for name, info in expected.items():
            if name.endswith(_MOMENT_ENDS) and self.has(name):
                there = self._info_of(name).dtype
                if (there is torch.uint8) != (info.dtype is torch.uint8):
                    word = "8bit" if there is torch.uint8 else "float32"
                    raise ConfigError(
                        f"{self.path}: its moments are {word} and the model's are not; set "
                        f"precision.moments to {word!r} to go on with it. A conversion would not "
                        "be the continuation of that run"
                    )

    def buffers(self, rank: int) -> FileEntry | None:
        return self._files.get(self.place_of(rank) + BUFFERS_NAME)

    def _info_of(self, name: str) -> TensorInfo:
        linked = self._linked.get(name)
        return _info(linked) if linked is not None else self._places[name][1]

    def has(self, name: str) -> bool:
        return name in self._places or name in self._linked or name in self._recut

    def recut(self, name: str) -> Recut | None:
        return self._recut.get(name)

    def linked(self, name: str) -> StoredTensor | None:
        return self._linked.get(name)

    def file_of(self, name: str) -> str:
        return self._places[name][0].name

    def extent_of(self, name: str) -> StoredRange:
        return self._places[name][2]


def _moments_in(names: Iterable[str]) -> str:
    """Which moments there are among names of tensors."""
    there = {name.rpartition(".")[2] for name in names}
    return " and ".join(
        state_kind.value for state_kind in MOMENT_PIECES if state_kind.value in there
    )


def _expected(state: StateAccess) -> Iterator[StateTensor]:
    """Every tensor of the model that a checkpoint has to have, whoever keeps it."""
    if state.partition is None:
        for unit in state.units:
            yield from tensors_of(state, unit)
        return
    for unit in state.full_units:
        is_kept = partial(state.is_kept, unit)
        yield from state_tensors(unit, has_kind=is_kept, has_gradient=lambda spec: False)


def _places(path: Path, file: FileEntry) -> dict[str, tuple[TensorInfo, StoredRange]]:
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
            what += ["moments of eight bits need schedule.tile as it was for that run"]
        raise ConfigError(
            f"{path} is a checkpoint of another model, optimizer, precision or set of trainable "
            "parameters: " + "; ".join(what)
        )


def _check_program(
    program: Mapping[str, Any],
    optimizer: OffloadedOptimizer | None,
    scheduler: Stateful | None,
    path: Path,
) -> None:
    for what, given in (("an optimizer", optimizer), ("a scheduler", scheduler)):
        if given is not None and program[what.split()[1]] is None:
            raise ConfigError(f"{path} was saved without {what}, so there is none to bring back")
    if optimizer is not None:
        with believing(path, "the optimizer's state"):
            optimizer.check_named_state(program["optimizer"])


class _CheckedReader:
    """Reads tensors in order: compares each one's SHA-256 at its end, unless it `is_checked`
    already, or of linked state the CRC32C of every page."""

    def __init__(self, checkpoint: OpenCheckpoint, *, is_checked: bool) -> None:
        self._checkpoint = checkpoint
        self._is_checked = is_checked
        self._reader: SafetensorsReader | None = None
        self._pages = PageReader()
        self._file = ""
        self._hashes: dict[str, HASH] = {}

    def is_in_memory_order(self, tensor: StateTensor) -> bool:
        """Whether the elements come in the order in which they lie in memory."""
        if self._checkpoint.recut(tensor.name) is not None:  # As every tensor that is ever cut.
            return row_major_stride(tensor.facts.shape) == tensor.facts.stride
        linked, facts = self._checkpoint.linked(tensor.name), tensor.facts
        stride = row_major_stride(facts.shape) if linked is None else linked.facts.stride
        return stride == facts.stride

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fills `target` (CPU, contiguous) with elements from `start` on, as they come."""
        parts: Iterable[RecutSource] = (RecutSource(name, start, target.numel()),)
        cut_otherwise = self._checkpoint.recut(name)
        if cut_otherwise is not None:
            parts = cut_otherwise.within(start, target.numel())
        for part in parts:
            self._read_from(part.name, part.start, target[: part.count])
            target = target[part.count :]

    def _read_from(self, name: str, start: int, target: torch.Tensor) -> None:
        linked = self._checkpoint.linked(name)
        if linked is not None:
            self._read_linked(linked, start, target)
            return
        self._open(self._checkpoint.file_of(name))
        assert self._reader is not None
        self._reader.read_into(name, start, target)
        if self._is_checked:
            return
        digest = self._hashes.setdefault(name, hashlib.sha256())
        digest.update(tensor_bytes(target))
        if start + target.numel() == self._numel(name):
            del self._hashes[name]
            extent = self._checkpoint.extent_of(name)
            if digest.hexdigest() != extent.sha256:
                path = self._checkpoint.path / self._file
                raise damaged(path, extent, f"its SHA-256 is not the manifest's; {_MIXTURE}")

    def _read_linked(self, linked: StoredTensor, start: int, target: torch.Tensor) -> None:
        view = tensor_bytes(target)
        size = target.dtype.itemsize
        stop = start + target.numel()
        try:
            for part in linked.read(self._pages, start, stop, item_nbytes=size):
                view[: len(part)] = part
                view = view[len(part) :]
        except CorruptionError as error:
            raise CorruptionError(
                error.errno or 0,
                operation="read",
                path=error.path,
                offset_nbytes=error.offset_nbytes,
                nbytes=error.nbytes,
                detail=f"{linked.facts.name!r} is damaged: {error.detail}; {_MIXTURE}",
            ) from None

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in its shape."""
        cut_otherwise = self._checkpoint.recut(name)
        if cut_otherwise is not None:
            info = cut_otherwise.info
            flat = torch.empty(math.prod(info.shape), dtype=info.dtype)
            self.read_into(name, 0, flat)
            return flat.view(info.shape)
        linked = self._checkpoint.linked(name)
        if linked is not None:
            info = _info(linked)
            flat = torch.empty(math.prod(info.shape), dtype=info.dtype)
            self.read_into(name, 0, flat)
            return flat.as_strided(info.shape, linked.facts.stride)
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


def _load_tensors(checkpoint: OpenCheckpoint, state: StateAccess, engine: Engine) -> None:
    kept = kept_tensors(state)
    in_place = _restore(checkpoint, state, kept, engine.rank)
    state.forget_gradients()
    with ExitStack() as stack:
        reader = _CheckedReader(checkpoint, is_checked=engine.num_ranks > 1)
        stack.callback(reader.close)
        for unit, tensors in kept:
            for state_kind in STREAMED:
                if (unit, state_kind) not in in_place:
                    _load_state_kind(reader, state, unit, state_kind, tensors)
            for spec in unit.trainable():
                if checkpoint.has(f"{spec.name}.gradient"):
                    gradient = reader.read(f"{spec.name}.gradient")
                    state.put_gradient(unit, spec, gradient, engine.device.torch_device)


def _restore(
    checkpoint: OpenCheckpoint, state: StateAccess, kept: KeptTensors, rank: int
) -> set[tuple[Unit, StateKind]]:
    """Where the swap files of this run hold the linked state as the checkpoint has it, piece by
    piece, makes it the current one; nothing is changed before every page was checked.

    Weights that every rank has whole are not among these pieces: a checkpoint has a part of them.
    """
    volume, place = state.store.volume, checkpoint.place_of(rank)
    linked, label = checkpoint.linked_states.get(place), label_of(checkpoint.path)
    frozen = next((f for f in volume.frozen if f.label == label), None) if volume else None
    if volume is None or linked is None or frozen is None:
        return set()
    kinds = {
        (state_kind.unit, state_kind.state_kind): state_kind
        for state_kind in linked.kinds
        if any(run.file != COPIES_NAME for run in state_kind.runs)
    }
    found: dict[tuple[Unit, StateKind], tuple[NvmeLocation, LinkedPiece]] = {}
    swap_paths: set[str] = set()
    for unit, of_unit in kept:
        for name in STREAMED:
            tensors = [tensor for tensor in of_unit if tensor.state_kind is name]
            if not tensors or not is_linkable(state, unit, name):
                continue
            location, state_kind = (
                state.store.location(unit, name),
                kinds.pop((unit.name, name.value), None),
            )
            if state.partition is not None and tensors[0].share is None:
                continue
            assert isinstance(location, NvmeLocation)
            here = tuple(row for tensor in tensors for row in linked_tensors(unit, tensor))
            if state_kind is None or state_kind.tensors != here:
                return set()
            ranges = volume.locate(location.extents, frozen)
            if state_kind.runs != linked_runs(ranges):
                return set()
            swap_paths.update(each.path for each in ranges)
            found[unit, name] = location, state_kind
    transport = {each: checkpoint.path / place / os.path.basename(each) for each in swap_paths}
    if kinds or not all(os.path.samefile(*each) for each in transport.items()):
        return set()
    with PageReader() as pages:
        for _, state_kind in found.values():
            for _ in linked.read(pages, state_kind, 0, state_kind.nbytes):
                pass  # It is the right one, or an error.
    state.weight_cache.forget()
    volume.restore(frozen)
    for location, state_kind in found.values():
        volume.put_checksums(location.extents, linked.checksums_of(state_kind))
    return set(found)


def _load_state_kind(
    reader: _CheckedReader,
    state: StateAccess,
    unit: Unit,
    state_kind: StateKind,
    tensors: Sequence[StateTensor],
) -> None:
    if state.store.location(unit, state_kind) is None:
        return
    of_state_kind = [tensor for tensor in tensors if tensor.state_kind is state_kind]
    by_spec = {tensor.spec: tensor for tensor in of_state_kind if not tensor.is_scales}
    scales = {tensor.spec: tensor for tensor in of_state_kind if tensor.is_scales}
    whole: tuple[TensorSpec, torch.Tensor] | None = None
    for part in state.parts(unit, state_kind, keep=True):
        spec, tensor = part.spec, by_spec.get(part.spec)
        if part.scales is not None:
            of_blocks, block = scales[spec], part.start // BLOCK_NUMEL
            reader.read_into(of_blocks.name, of_blocks.start + block, part.scales)
        if tensor is None:
            part.values.zero_()
        elif reader.is_in_memory_order(tensor):
            reader.read_into(tensor.name, tensor.start + part.start, part.values)
        else:
            if whole is None or whole[0] is not spec:
                whole = spec, in_memory_order(reader.read(tensor.name), tensor.whole)
            start = tensor.start + part.start
            part.values.copy_(whole[1][start : start + part.values.numel()])


def _load_buffers(checkpoint: OpenCheckpoint, model: nn.Module, rank: int) -> None:
    entry = checkpoint.buffers(rank)
    if entry is None:
        return
    path = checkpoint.path / entry.name
    extents = {extent.name: extent for extent in entry.extents[1:]}
    with SafetensorsReader(path) as reader, torch.no_grad():
        for name, buffer in buffers_of(model).items():
            value = reader.read(name)
            if hashlib.sha256(tensor_bytes(value)).hexdigest() != extents[name].sha256:
                raise damaged(path, extents[name], f"its SHA-256 is not the manifest's; {_MIXTURE}")
            buffer.copy_(value)
