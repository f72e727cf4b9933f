"""Reads the tensors of a checkpoint and checks every byte that it reads.

A tensor is stored in one of two forms. A safetensors file holds it in row-major order, and the
manifest has one SHA-256 of the tensor. Linked or copied pages hold it in memory order, and every
page has a CRC32C.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infinity.checkpoint.huggingface.safetensors_file import (
    SafetensorsReader,
    TensorInfo,
    dtype_of,
    tensor_bytes,
)
from infinity.checkpoint.run.directory import damaged
from infinity.checkpoint.run.layout import row_major_stride
from infinity.checkpoint.run.linked import StoredTensor
from infinity.checkpoint.run.manifest import StoredRange
from infinity.errors import CorruptionError, UnsupportedError
from infinity.storage.page_reader import PageReader

if TYPE_CHECKING:
    from _hashlib import HASH


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a safetensors file, with the manifest's range and SHA-256 of the tensor."""

    path: Path
    info: TensorInfo
    extent: StoredRange

    @property
    def group(self) -> str:
        """A text that is equal for all tensors of one unit."""
        return str(self.path)

    @property
    def kind(self) -> str:
        """The name of the state kind."""
        return self.extent.kind

    @property
    def stride(self) -> tuple[int, ...]:
        """The order in which the elements are stored."""
        return row_major_stride(self.info.shape)


@dataclass(frozen=True, slots=True)
class PagedTensor:
    """A tensor in pages that have a CRC32C each: linked to the swap files, or copied."""

    stored: StoredTensor

    @property
    def info(self) -> TensorInfo:
        """Name, dtype and shape. Raises UnsupportedError for a dtype that torch does not have."""
        facts = self.stored.facts
        try:
            dtype = dtype_of(facts.dtype)
        except KeyError:
            raise UnsupportedError(
                f"{facts.name!r} of the checkpoint has dtype {facts.dtype}, which is not known "
                "here: upgrade infinity-offload"
            ) from None
        return TensorInfo(name=facts.name, dtype=dtype, shape=facts.shape)

    @property
    def group(self) -> str:
        """A text that is equal for all tensors of one unit."""
        return self.stored.group

    @property
    def kind(self) -> str:
        """The name of the state kind."""
        return self.stored.kind

    @property
    def stride(self) -> tuple[int, ...]:
        """The order in which the elements are stored."""
        return self.stored.facts.stride


@dataclass(slots=True)
class _Digest:
    """The SHA-256 of the elements [0, stop) of one tensor."""

    stop: int = 0
    sha256: HASH = field(default_factory=hashlib.sha256)


class StoredReader:
    """Reads stored tensors and compares them with their SHA-256 or CRC32C.

    The SHA-256 of a tensor is compared when the tensor has been read from its first to its last
    element; a read out of order is not compared. `is_checked`: the caller has compared the files,
    and no SHA-256 is computed. `consequence` ends the text of every error about damaged bytes.

    Keeps one file open. Not thread-safe; close it.
    """

    def __init__(self, *, is_checked: bool = False, consequence: str = "") -> None:
        self._is_checked = is_checked
        self._consequence = consequence
        self._file: SafetensorsReader | None = None
        self._pages = PageReader()
        self._digests: dict[tuple[Path, str], _Digest] = {}

    def __enter__(self) -> StoredReader:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files. Idempotent."""
        self._close_file()
        self._pages.close()

    def read(self, tensor: FileTensor | PagedTensor, start: int, stop: int) -> torch.Tensor:
        """Returns the elements [start, stop): fresh, flat, on the CPU, in the stored order.

        Raises as `read_into`.
        """
        values = torch.empty(stop - start, dtype=tensor.info.dtype)
        self.read_into(tensor, start, values)
        return values

    def read_full(self, tensor: FileTensor | PagedTensor) -> torch.Tensor:
        """Returns a fresh tensor on the CPU, in its shape. Raises as `read_into`."""
        shape = tensor.info.shape
        return self.read(tensor, 0, math.prod(shape)).as_strided(shape, tensor.stride)

    def read_into(self, tensor: FileTensor | PagedTensor, start: int, target: torch.Tensor) -> None:
        """Fills `target` (CPU, contiguous) with the elements from `start` on, in the stored order.

        Raises CorruptionError with file and range for bytes that their checksum does not match,
        StorageError for a file that cannot be read, UnsupportedError for an unknown dtype.
        """
        if isinstance(tensor, PagedTensor):
            self._read_pages(tensor.stored, start, target)
            return
        self._open(tensor.path).read_into(tensor.info.name, start, target)
        if not self._is_checked:
            self._compare(tensor, start, target)

    def _compare(self, tensor: FileTensor, start: int, values: torch.Tensor) -> None:
        key = tensor.path, tensor.info.name
        if start == 0:
            self._digests[key] = _Digest()
        digest = self._digests.get(key)
        if digest is None or start != digest.stop:
            return
        digest.stop += values.numel()
        digest.sha256.update(tensor_bytes(values))
        if digest.stop < math.prod(tensor.info.shape):
            return
        del self._digests[key]
        if digest.sha256.hexdigest() != tensor.extent.sha256:
            detail = self._detail("its SHA-256 is not the manifest's")
            raise damaged(tensor.path, tensor.extent, detail)

    def _read_pages(self, stored: StoredTensor, start: int, target: torch.Tensor) -> None:
        view = tensor_bytes(target)
        stop, item_nbytes = start + target.numel(), target.dtype.itemsize
        try:
            for part in stored.read(self._pages, start, stop, item_nbytes=item_nbytes):
                view[: len(part)] = part
                view = view[len(part) :]
        except CorruptionError as error:
            if not self._consequence:
                raise
            raise CorruptionError(
                error.errno or 0,
                operation="read",
                path=error.path,
                offset_nbytes=error.offset_nbytes,
                nbytes=error.nbytes,
                detail=self._detail(f"{stored.facts.name!r} is damaged: {error.detail}"),
            ) from None

    def _detail(self, fault: str) -> str:
        return f"{fault}; {self._consequence}" if self._consequence else fault

    def _open(self, path: Path) -> SafetensorsReader:
        if self._file is None or self._file.path != str(path):
            self._close_file()
            self._file = SafetensorsReader(path)
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
