"""Writes a Hugging Face directory from another one, one logical tensor at a time.

The headers of the source give every name, shape and dtype of the result, so files are written in
any order with the memory of one tensor. A shard of the source becomes a shard of the result. All
of it is written to a hidden directory beside the result, and renamed when it is whole and synced:
a process that is killed leaves no directory that looks complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.durable import check_space, new_directory, sync_file
from infinity.checkpoint.huggingface.import_weights import WeightSource
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsWriter, TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import INDEX_NAME, SINGLE_NAME
from infinity.codecs import AffineGroups, TableBlocks
from infinity.codecs.detect import DECLARING_FILES
from infinity.codecs.part import STORED_DTYPES, Codec, Shape
from infinity.codecs.tables import STATE_SUFFIX
from infinity.config.paths import RUN_NAMES
from infinity.errors import ConfigError, reporting

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
# Spaces that a reader of JSON skips: the length of a number is not known before it is.
_STATE_MARGIN = 32

Make = Callable[[], torch.Tensor]
Values = Mapping[str, torch.Tensor]  # Stored tensors by name.
Progress = Callable[..., None]  # Of `description`, the logical tensor, and `advance`, its bytes.


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """The stored tensors of one logical tensor of the result, and the function that makes them."""

    infos: tuple[TensorInfo, ...]
    make: Callable[[], Values]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that it is written as."""
        return sum(info.nbytes for info in self.infos)


@dataclass(slots=True)
class DirectoryPlan:
    """A result: outcomes by shard, and the content of config.json. Nothing is read yet.

    source, source_nbytes: the directory, or file, that it is made of, and the bytes of its tensors
    close: closes the files of the source
    """

    source: Path
    source_nbytes: int
    config: dict[str, Any]
    close: Callable[[], None] = lambda: None
    shards: dict[str, list[tuple[str, PlannedTensor]]] = field(default_factory=dict)
    others: tuple[Path, ...] = ()  # Files that replace those of the source's directory.

    @classmethod
    def of(cls, source: WeightSource, config: dict[str, Any]) -> DirectoryPlan:
        """Returns a result without tensors, of the weights of a directory."""
        return cls(source.path, source.nbytes, config, source.close)

    def add(self, shard: str, name: str, outcome: PlannedTensor) -> None:
        """Plans a tensor into a file of the result."""
        self.shards.setdefault(shard, []).append((name, outcome))

    @property
    def nbytes(self) -> int:
        """The bytes of all planned tensors, without headers."""
        return sum(outcome.nbytes for rows in self.shards.values() for _, outcome in rows)


def copied(
    where: Path, infos: Sequence[TensorInfo], read: Callable[[str], torch.Tensor]
) -> PlannedTensor:
    """Returns tensors as they are stored; `read` returns them by name. Raises ConfigError, which
    begins with `where`, for a dtype that torch does not have."""
    for info in infos:
        if info.unreadable is not None:
            raise ConfigError(
                f"{where}: {info.name!r} is {info.unreadable[0]}, which cannot be copied"
            )
    return PlannedTensor(tuple(infos), lambda: {info.name: read(info.name) for info in infos})


def unchanged(source: WeightSource, name: str) -> PlannedTensor:
    """Returns a logical tensor as the source stores it."""
    encoded = source.encoded(name)
    infos = [source.stored_info(stored) for stored in (*encoded.names, *encoded.aside)]
    return copied(source.path, infos, source.read_stored)


def as_numbers(name: str, shape: Shape, dtype: torch.dtype, make: Make) -> PlannedTensor:
    """Returns a tensor that is stored as numbers."""
    info = TensorInfo(name=name, dtype=dtype, shape=shape)
    return PlannedTensor((info,), lambda: {name: make()})


def as_codes(name: str, shape: Shape, codec: Codec, make: Make) -> PlannedTensor:
    """Returns a tensor that `codec` encodes, under the names of the usual writer of the format.

    Raises ConfigError for a shape that the format cannot store.
    """
    infos = [
        TensorInfo(name=name + part.suffix, dtype=STORED_DTYPES[part.dtype], shape=part.shape)
        for part in codec.parts(shape)
    ]
    aside = _aside_infos(name, shape, codec)
    return PlannedTensor((*infos, *aside), lambda: _encoded(name, codec, make(), infos, aside))


def as_stored(source: WeightSource, name: str, make: Make) -> PlannedTensor:
    """Returns a changed tensor, in the codec, dtypes and names that the source has for it."""
    encoded = source.encoded(name)
    infos = [source.stored_info(stored) for stored in encoded.names]
    # JSON whose numbers change is written anew, with space for longer ones.
    states = _aside_infos(name, encoded.shape, encoded.codec)
    made = {info.name: info for info in states if info.name.startswith(name + STATE_SUFFIX)}
    others = [made.get(stored) or source.stored_info(stored) for stored in encoded.aside]

    def encode() -> Values:
        aside = [info for info in others if info.name in made]
        values = _encoded(name, encoded.codec, make(), infos, aside)
        return values | {
            info.name: source.read_stored(info.name) for info in others if info.name not in made
        }

    return PlannedTensor((*infos, *others), encode)


def _encoded(
    name: str,
    codec: Codec,
    weight: torch.Tensor,
    infos: Sequence[TensorInfo],
    aside: Sequence[TensorInfo],
) -> dict[str, torch.Tensor]:
    """Returns the stored tensors of a weight. `infos`: those of its parts; `aside`: the others."""
    try:
        encoding = codec.encode(weight)
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from None
    values = {
        info.name: part.view(info.dtype).view(info.shape)
        for info, part in zip(infos, encoding.parts, strict=True)
    }
    for info in aside:
        tensor = encoding.aside[info.name.removeprefix(name)]
        num_spaces = info.shape[0] - tensor.shape[0]
        assert num_spaces >= 0, info.name
        spaces = torch.full((num_spaces,), ord(" "), dtype=tensor.dtype)
        values[info.name] = torch.cat([tensor, spaces])
    return values


def _aside_infos(name: str, shape: Shape, codec: Codec) -> list[TensorInfo]:
    """Returns the further tensors of an encoding: a shape, or the JSON of bitsandbytes."""
    if isinstance(codec, AffineGroups) and codec.layout == "ROWS":
        return [TensorInfo(name=f"{name}_shape", dtype=torch.int32, shape=(len(shape),))]
    if isinstance(codec, TableBlocks):
        length = len(codec.state_json(shape)) + _STATE_MARGIN
        state = f"{name}{STATE_SUFFIX}{codec.kind}"
        return [TensorInfo(name=state, dtype=torch.uint8, shape=(length,))]
    return []


# -- Writing ---------------------------------------------------------------------------------------


def check_target(out: Path, nbytes: int) -> None:
    """Raises ConfigError if `out` already exists, StorageError if its file system is too full."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ConfigError(f"{out} already exists; expected the name of a new directory")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{parent} does not exist; make it first")
    check_space(parent, nbytes, path=out, operation="write", needs="the result needs")


def write_directory(plan: DirectoryPlan, out: Path, progress: Progress = lambda **_: None) -> None:
    """Writes the result, with the other files of the source's directory. Raises as `check_target`,
    and StorageError."""
    check_target(out, plan.nbytes)
    out = out.absolute()
    try:
        with reporting("write", out), new_directory(out) as partial:
            for shard, rows in plan.shards.items():
                _write_shard(partial / shard, rows, progress)
            for file in (*_other_files(plan.source), *plan.others):
                shutil.copyfile(file, partial / file.name)
                sync_file(partial / file.name)
            _write_json(partial / "config.json", plan.config)
            if set(plan.shards) != {SINGLE_NAME}:
                pairs = [(shard, of) for shard in plan.shards for _, of in plan.shards[shard]]
                weight_map = {info.name: shard for shard, of in pairs for info in of.infos}
                metadata = {"total_size": plan.nbytes}
                index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
                _write_json(partial / INDEX_NAME, index)
    finally:
        plan.close()


def _write_shard(path: Path, rows: Sequence[tuple[str, PlannedTensor]], progress: Progress) -> None:
    infos = [info for _, outcome in rows for info in outcome.infos]
    with SafetensorsWriter(path, infos, metadata={"format": "pt"}) as writer:
        for name, outcome in rows:
            values = outcome.make()
            for info in outcome.infos:
                writer.write(info.name, values[info.name])
            del values  # Frees the memory before the next tensor is read.
            progress(description=name, advance=outcome.nbytes)
        writer.finish()
        writer.commit()


def _other_files(source: Path) -> Iterator[Path]:
    """Yields tokenizer, generation settings, code and licence of a directory: every file that has
    no weights and declares no quantisation, which config.json does, but for those about the run
    that the source is of."""
    is_of_run = (source / RUN_NAMES[0]).is_file()
    of_others = {*DECLARING_FILES, *(RUN_NAMES if is_of_run else ())}
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        is_weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        is_left_out = is_weights or path.name in of_others or path.name.startswith(".")
        if path.is_file() and not is_left_out:
            yield path


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync_file(path)
