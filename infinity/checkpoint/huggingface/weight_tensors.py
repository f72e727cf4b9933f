"""The tensors of a Hugging Face directory or safetensors file, by their names.

Source of the layout: the index of sharded safetensors checkpoints (transformers,
`save_pretrained`), a JSON object whose `weight_map` gives the file of every tensor.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from infinity.bounded import MalformedError, field, plain_name, read_json, table_of
from infinity.checkpoint.huggingface.safetensors_file import (
    KnownHeader,
    SafetensorsReader,
    TensorInfo,
    tensor_bytes,
)
from infinity.codecs import Plain
from infinity.codecs.detect import DECLARING_FILES, logical_tensors, quantization_of
from infinity.codecs.found import LogicalTensor
from infinity.codecs.part import Decoder
from infinity.errors import ConfigError, CorruptionError, corrupt, listed, refusing, reporting
from infinity.storage.protocol import FileRange
from infinity.storage.shards import ShardIdentity, refuse_changed

_log = logging.getLogger("infinity")

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
OF_DIFFUSERS = "diffusion_pytorch_"  # Before both names, in a directory of diffusers.


class WeightTensors:
    """The logical tensors of a checkpoint, by their names. Holds headers, no tensor.

    A tensor that is stored as numbers has its name in the files. A quantised weight is one tensor
    with the name and the shape of the weight; its codes and scales are stored tensors
    (`infinity.codecs`). Not thread-safe; close it.

    Raises ConfigError for a path without weights and for a quantised checkpoint that no codec can
    decode, CorruptionError for a damaged header or index, StorageError for a read that fails.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._files: dict[str, Path] = {}  # tensor name -> the file that has it
        self._infos: dict[str, TensorInfo] = {}
        self._reader: SafetensorsReader | None = None
        self._headers: dict[Path, KnownHeader] = {}
        for file, listed_names in find_files(self.path).items():
            with SafetensorsReader(file) as reader:
                for name in listed_names:
                    if name not in reader.tensors:
                        raise corrupt(
                            str(file),
                            f"{INDEX_NAME} says that tensor {name!r} is in this file, "
                            "but its header does not have it",
                        )
                self._headers[file] = reader.header()
                listed_here = set(listed_names)
                for name, info in reader.tensors.items():
                    if name in listed_here or name not in self._files:
                        self._files[name], self._infos[name] = file, info
        directory = self.path if self.path.is_dir() else self.path.parent
        self._encoded = logical_tensors(
            read_config(directory), self.stored_facts(), read=self._read_bytes, where=str(directory)
        )

    def _read_bytes(self, name: str) -> bytes:
        return bytes(tensor_bytes(self.read_stored(name)))

    @property
    def identities(self) -> list[ShardIdentity]:
        """The files, as they were when their headers were read."""
        return [header.identity for header in self._headers.values()]

    @property
    def nbytes(self) -> int:
        """The size of all tensors in the files."""
        return sum(info.nbytes for info in self._infos.values())

    def names(self) -> list[str]:
        """Returns the names of all logical tensors."""
        return list(self._encoded)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._encoded[name].shape

    def stored_dtype(self, name: str) -> torch.dtype | str:
        """Returns the dtype of a tensor; its name in the file if torch does not have the dtype."""
        encoded = self._encoded[name]
        if isinstance(encoded.codec, Plain):
            return self._infos[name].stored_dtype
        return encoded.dtype

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor. Raises UnsupportedError if torch does not have it."""
        encoded = self._encoded[name]
        is_plain = isinstance(encoded.codec, Plain)
        return self._infos[name].dtype if is_plain else encoded.dtype

    def file_of(self, name: str) -> Path:
        """Returns the file with the tensor, or with its codes."""
        return self._files[self._encoded[name].names[0]]

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a fresh CPU tensor, in the dtype of the file or decoded, to `dtype` if one is
        given.

        The file stays open until `close`. Raises CorruptionError, StorageError, UnsupportedError
        for a dtype that torch does not have.
        """
        encoded = self._encoded[name]
        if isinstance(encoded.codec, Plain):
            return self.read_stored(name)
        parts = [self.read_stored(part).reshape(-1).view(torch.uint8) for part in encoded.names]
        tensor = torch.empty(encoded.shape, dtype=dtype or encoded.dtype, device="cpu")
        encoded.codec.decode(parts, encoded.shape, tensor)
        return tensor

    def encoded(self, name: str) -> LogicalTensor:
        """Returns the codec of a tensor and the names of its stored tensors."""
        return self._encoded[name]

    def stored_info(self, stored_name: str) -> TensorInfo:
        """Returns the facts of a stored tensor, by its name in the files."""
        return self._infos[stored_name]

    def read_stored(self, stored_name: str) -> torch.Tensor:
        """Returns a stored tensor, by its name in the files, in the dtype of the file."""
        with self._opened(stored_name) as reader:
            return reader.read(stored_name)

    def stored_facts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and shape of all stored tensors, as the headers have them, by name."""
        return {name: (info.header_dtype, info.shape) for name, info in self._infos.items()}

    def heads(self, stored_names: Iterable[str], nbytes: int) -> dict[str, bytes]:
        """Returns the first bytes of stored tensors, at most `nbytes` of each. Raises as `read`."""
        by_file = sorted(set(stored_names), key=lambda name: (str(self._files[name]), name))
        heads = {}
        for name in by_file:
            with self._opened(name) as reader:
                heads[name] = reader.head(name, nbytes)
        self.close()
        return heads

    def stored(self, name: str) -> tuple[Decoder, tuple[FileRange, ...]]:
        """Returns the codec of a tensor, and the ranges of files that it decodes."""
        encoded = self._encoded[name]
        ranges = []
        for part in encoded.names:
            info, path = self._infos[part], self._headers[self._files[part]].identity.path
            ranges.append(FileRange(path, info.offset_nbytes, info.nbytes))
        return encoded.codec, tuple(ranges)

    def read_rows(
        self, name: str, start: int, stop: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Returns rows [start, stop) of a tensor, as `read` returns and raises."""
        if not isinstance(self._encoded[name].codec, Plain):
            return self.read(name, dtype)[start:stop].clone()
        info = self._infos[name]
        rows = torch.empty((stop - start, *info.shape[1:]), dtype=info.dtype, device="cpu")
        with self._opened(name) as reader:
            reader.read_into(name, start * math.prod(info.shape[1:]), rows)
        return rows

    @contextmanager
    def _opened(self, name: str) -> Iterator[SafetensorsReader]:
        """Reads the file with a stored tensor in a `with` block. Raises CorruptionError behind it
        for a file that has changed by then."""
        header = self._headers[self._files[name]]
        if self._reader is None or self._reader.path != header.identity.path:
            self.close()
            self._reader = SafetensorsReader(header.identity.path, known=header)
        yield self._reader
        refuse_changed(header.identity)

    def close(self) -> None:
        """Closes the file. Idempotent; a later `read` opens it again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def find_files(path: Path) -> dict[Path, list[str]]:
    """Returns the files of a checkpoint, each with the tensors that the index expects in it.

    Reads the index, and no other file. Says once which other weights of the directory are not read.
    Raises ConfigError for a path without weights in this layout, CorruptionError for a damaged
    index or shards that are not there, StorageError for a read that fails.
    """
    if path.is_file():
        return {path: []}
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; expected a local Hugging Face checkpoint")
    prefix = OF_DIFFUSERS if any(path.glob(f"{OF_DIFFUSERS}{SINGLE_NAME}*")) else ""
    single, index = path / f"{prefix}{SINGLE_NAME}", path / f"{prefix}{INDEX_NAME}"
    if single.is_file():
        files: dict[Path, list[str]] = {single: []}
    elif index.is_file():
        files = {}
        for name, file_name in read_index(index)[0].items():
            files.setdefault(path / file_name, []).append(name)
    else:
        raise _no_weights(path)
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise CorruptionError(
            errno.ENOENT,
            operation="open",
            path=str(path / missing[0]),
            detail=f"{index.name} names {len(files)} shards, and {len(missing)} of them are not "
            f"there: {listed(missing)}{_interrupted(path)}; complete the directory by the same "
            "command that began it, or copy these again",
        )
    _say_unread(path, frozenset(file.name for file in files))
    return files


# Weights in another layout, and what makes a directory of safetensors of them.
_BY_TRANSFORMERS = "{0} of transformers' repository writes a directory that can be read"
_LAYOUTS = {
    "consolidated*.pth": _BY_TRANSFORMERS.format("convert_llama_weights_to_hf.py"),
    "consolidated*": _BY_TRANSFORMERS.format("convert_mistral_weights_to_hf.py"),
    "original/*": _BY_TRANSFORMERS.format("convert_llama_weights_to_hf.py"),
    "pytorch_model*.bin": "`infinity convert {0} -o DIR` makes safetensors of them",
    "*.gguf": "`infinity convert {0}/{1} -o DIR` makes safetensors of it",
    "*.safetensors": f"download {INDEX_NAME}, a small file that says which tensor is where",
}
_A_PART = re.compile("-of-|adapter")  # The name of a shard, or of an adapter.


def has_weights(path: Path) -> bool:
    """Whether a directory has files of weights, in this layout or another one."""
    return any(file.exists() for pattern in _LAYOUTS for file in path.glob(pattern))


def _no_weights(path: Path) -> ConfigError:
    said = f"{path} has neither {SINGLE_NAME} nor {INDEX_NAME}"
    for pattern, remedy in _LAYOUTS.items():
        names = sorted(str(file.relative_to(path)) for file in path.glob(pattern))
        if names:
            hint = "" if pattern[0] == "*" else "; or download model*.safetensors, if there are any"
            if pattern == "*.safetensors" and len(names) == 1 and not _A_PART.search(names[0]):
                remedy = f"rename it to {SINGLE_NAME}, which is read"
            return ConfigError(
                f"{said}, but {listed(names)}; {remedy.format(path, names[0])}{hint}"
            )
    there = listed(sorted(entry.name for entry in path.iterdir())) or "no file"
    return ConfigError(f"{said}; it has {there}{_interrupted(path)}")


def _interrupted(path: Path) -> str:
    """Describes downloads that were begun into a directory, or into the cache that links to it."""
    places = [path / ".cache/huggingface/download"]
    if path.parent.name == "snapshots":
        places.append(path.parent.parent / "blobs")
    count = sum(len(list(place.glob("*.incomplete"))) for place in places)
    return f"; {count} downloads were interrupted (*.incomplete)" if count else ""


@cache
def _say_unread(path: Path, used: frozenset[str]) -> None:
    names = {str(f.relative_to(path)) for pattern in _LAYOUTS for f in path.glob(pattern)} - used
    if names:
        _log.warning(
            "%s: %s are not read; the weights are those of %s", path, listed(sorted(names)),
            INDEX_NAME if len(used) > 1 else listed(sorted(used)),
        )  # fmt: skip


def read_index(index: Path) -> tuple[dict[str, str], int]:
    """Returns the file of every tensor, and the bytes of all (0: it does not say), from the index
    of a sharded checkpoint. Raises CorruptionError for one without such a table, StorageError."""
    try:
        with reporting("read", index):
            table = table_of(read_json(index), "it")
        weight_map = table_of(field(table, "weight_map"), "weight_map")
        for name, file_name in weight_map.items():
            plain_name(file_name, f"the file of tensor {name!r}")
        size = table_of(table.get("metadata") or {}, "metadata").get("total_size")
    except MalformedError as error:
        raise corrupt(str(index), f"no weight_map can be read: {error}") from None
    return weight_map, int(size) if isinstance(size, int | float) else 0


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the table in config.json, empty if there is no such file, with the quantisation that
    another file declares. Raises ConfigError."""
    file = directory / "config.json"
    return with_declared(directory, _table_in(file) if file.is_file() else {})


def with_declared(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns config.json with a `quantization_config`, if only another file of the directory says
    how weights are quantised. Raises ConfigError for a file that cannot be read."""
    if quantization_of(config, str(directory)) is not None:
        return config
    for name, as_config in DECLARING_FILES.items():
        if (directory / name).is_file():
            declared = as_config(_table_in(directory / name))
            return {**config, "quantization_config": declared} if declared else config
    return config


def _table_in(file: Path) -> dict[str, Any]:
    with refusing(f"{file} cannot be read", MalformedError, OSError):
        # Configurations of some models have numbers that are not finite.
        return table_of(read_json(file, is_strict=False), "it")
