"""Opens a checkpoint and verifies that it is one of this model. Changes nothing.

Names, shapes, dtypes, lengths, headers and the small state are verified here, before a load changes
anything. Bytes of tensors are verified when they are read (`stored.py`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader, TensorInfo
from infinity.checkpoint.run.directory import check_extent, read_content, read_linked, read_manifest
from infinity.checkpoint.run.files import BUFFERS_NAME, buffers_of, tensors_of
from infinity.checkpoint.run.layout import StateTensor, state_tensors
from infinity.checkpoint.run.linked import stored_tensors
from infinity.checkpoint.run.manifest import PROGRAM_NAME, FileEntry, Manifest
from infinity.checkpoint.run.program import parse_program
from infinity.checkpoint.run.recut import Recut, recut
from infinity.checkpoint.run.references import check_reference, check_reference_files
from infinity.checkpoint.run.stored import FileTensor, PagedTensor
from infinity.engine.state_access import StateAccess
from infinity.errors import ConfigError, corrupt, listed
from infinity.state.units import MOMENT_KINDS, StateKind

_log = logging.getLogger("infinity")

_MOMENT_ENDS = tuple(f".{state_kind.value}" for state_kind in MOMENT_KINDS)


class OpenCheckpoint:
    """The manifest of one checkpoint and the place of every tensor in it. Holds no tensor.

    Raises as `read_manifest` and `read_linked`, and CorruptionError for a header, or a reference to
    the files of a base, that does not have the SHA-256 of the manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        check_reference_files(path, self.manifest)
        self._files = {file.name: file for file in self.manifest.files}
        self._in_files: dict[str, FileTensor] = {}
        for file in self.manifest.files:
            if file.name.endswith(".safetensors") and PurePath(file.name).name != BUFFERS_NAME:
                self._in_files |= _tensors_of_file(path, file)
        self.linked_states = read_linked(path, self.manifest)
        linked = stored_tensors(self.linked_states.values(), path)
        in_pages = {name: PagedTensor(stored) for name, stored in linked.items()}
        self.tensors: Mapping[str, FileTensor | PagedTensor] = {**self._in_files, **in_pages}
        self._recut: dict[str, Recut] = {}  # Tensors of the model that are cut into other tiles.

    def place_of(self, rank: int) -> str:
        """Returns the prefix of the names of the files of this rank.

        A rank that the checkpoint does not have gets the files of the first rank.
        """
        places = self.manifest.places
        return places[rank if rank < len(places) else 0]

    def program(self, rank: int = 0) -> dict[str, Any]:
        """Returns the small state of a rank; `random` is None for a rank that did not save.

        Runs no code that the file holds. Raises CorruptionError, StorageError.
        """
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

    def buffers(self, rank: int) -> dict[str, FileTensor]:
        """Returns the buffers that this rank saved, by name; none if there is no file of them.

        Raises CorruptionError for a damaged header, StorageError.
        """
        entry = self._files.get(self.place_of(rank) + BUFFERS_NAME)
        return {} if entry is None else _tensors_of_file(self.path, entry)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has the tensor, in one piece or in tiles of another cut."""
        return name in self.tensors or name in self._recut

    def recut(self, name: str) -> Recut | None:
        """Returns the sources of a tensor that the checkpoint has in other tiles.

        `check_model` finds them.
        """
        return self._recut.get(name)

    def check_model(self, state: StateAccess, model: nn.Module, rank: int = 0) -> None:
        """Compares names, shapes and dtypes with those of the model, in any cut of large layers.

        Raises ConfigError for a checkpoint of another model, CorruptionError for damaged buffers.
        """
        check_reference(self.path, state.store.shards)
        tensors = [t for t in _expected(state) if t.state_kind is not StateKind.GRADIENTS]
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
        self._recut, used = recut(expected | gradients, infos)
        if self.manifest.ranks or state.partition is not None:
            # State without an element is not kept by any rank.
            names |= {name for name, info in expected.items() if not math.prod(info.shape)}
        _compare_names(set(expected) - set(self._recut), names - set(gradients) - used, self.path)
        self._check_tensors(expected, infos)
        self._check_buffers(model, rank)
        self._check_orders(tensors)

    def check_part(self, rank: int, count: int) -> None:
        """Compares this rank's part of the files with their SHA-256, if there are several ranks.

        A rank reads only the elements that it keeps, and the manifest has one SHA-256 of all
        elements. So `count` ranks compare every tensor once before they read. Raises
        CorruptionError.
        """
        if count > 1:
            for tensor in list(self._in_files.values())[rank::count]:
                check_extent(tensor.path, tensor.extent)

    def _check_tensors(
        self, expected: Mapping[str, TensorInfo], infos: Mapping[str, TensorInfo]
    ) -> None:
        for name, info in expected.items():
            found = infos.get(name)
            if name in self._recut or found is None:
                continue
            if (found.shape, found.dtype) != (info.shape, info.dtype):
                raise ConfigError(
                    f"{self.path}: {name!r} has shape {found.shape} and {found.dtype}, "
                    f"the model has {info.shape} and {info.dtype}; expected a checkpoint of this "
                    "model in this precision"
                )

    def _check_orders(self, tensors: Iterable[StateTensor]) -> None:
        """Compares the order of elements in pages with the model's: no checksum covers it.

        A memory format of images, as channels_last, may differ: it is converted, with a warning.
        Raises ConfigError for another order.
        """
        others = []
        for tensor in tensors:
            stored, facts = self.tensors.get(tensor.name), tensor.facts
            if isinstance(stored, PagedTensor) and not tensor.is_scales and 0 not in facts.shape:
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
        path, saved, buffers = self.path / name, self.buffers(rank), buffers_of(model)
        _compare_names(set(buffers), set(saved), path)
        for name, buffer in buffers.items():
            if tuple(buffer.shape) != saved[name].info.shape:
                raise ConfigError(
                    f"{path}: buffer {name!r} has shape "
                    f"{saved[name].info.shape}, the model has {tuple(buffer.shape)}"
                )

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


def _expected(state: StateAccess) -> Iterator[StateTensor]:
    """Yields every tensor of the model that a checkpoint must have, whichever rank keeps it."""
    if state.partition is None:
        for unit in state.units:
            yield from tensors_of(state, unit)
        return
    for unit in (unit for unit in state.full_units if unit.stored is None):
        is_kept = partial(state.is_kept, unit)
        yield from state_tensors(unit, has_kind=is_kept, has_gradient=lambda _: False)


def _gradient_infos(state: StateAccess) -> dict[str, TensorInfo]:
    """Returns every gradient that a checkpoint may have, by name."""
    names = {
        f"{spec.name}.gradient": spec.facts.shape
        for unit in state.units
        for spec in unit.trainable()
    }
    return {
        name: TensorInfo(name=name, dtype=torch.float32, shape=shape)
        for name, shape in names.items()
    }


def _tensors_of_file(path: Path, file: FileEntry) -> dict[str, FileTensor]:
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
    return {
        name: FileTensor(path / file.name, infos[name], extent) for name, extent in extents.items()
    }


def _compare_names(expected: set[str], found: set[str], path: Path) -> None:
    missing, surplus = sorted(expected - found), sorted(found - expected)
    if missing or surplus:
        what = [f"it lacks {missing[0]!r} and {len(missing) - 1} more"] if missing else []
        what += [f"it has {surplus[0]!r} and {len(surplus) - 1} more"] if surplus else []
        if any(".tiles." in name for name in missing + surplus):
            what += ["moments of eight bits need schedule.tile as it was for that run"]
        raise ConfigError(
            f"{path} is a checkpoint of another model, optimizer, precision or set of trainable "
            "parameters: " + "; ".join(what)
        )
