"""Reads and writes safetensors files, one tensor at a time.

Layout: the length of the header (8 bytes, little-endian), the header (JSON, padded with spaces),
then the bytes of the tensors, back to back. `data_offsets` count from the end of the header.

The safetensors library is not used, for two reasons. Its reader maps the file, so every page that
is read counts as resident memory until the kernel reclaims it. Its writer needs all tensors of a
file at once. Both would let the memory grow to the size of the model. The library is the oracle of
the tests: it loads files that are written here, and its files are read here.

Source: README of the safetensors repository, section "Format".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from infinity.bounded import (
    MAX_INT,
    MalformedError,
    field,
    integer,
    list_of,
    open_regular,
    parse_json,
    table_of,
    text_of,
)
from infinity.checkpoint.durable import TRANSFER_NBYTES, partial_of, reserve_space
from infinity.codecs.part import STORED_DTYPES
from infinity.errors import UnsupportedError, corrupt, reporting
from infinity.sizes import MIB
from infinity.storage.checksums import read_into
from infinity.storage.closing import Closing
from infinity.storage.shards import ShardIdentity

_LENGTH_NBYTES = 8
_MAX_HEADER_NBYTES = 100 * MIB  # The bound of the library.
_MAX_DIMENSIONS = 64  # The bound of torch.

_FORMAT_DTYPES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in a header."""
    return _FORMAT_DTYPES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The facts of one tensor in a header. `offset_nbytes` counts from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_nbytes: int = 0
    unreadable: tuple[str, int] | None = None  # (dtype, bytes) if torch does not have the dtype.

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes in the file."""
        if self.unreadable is not None:
            return self.unreadable[1]
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype | str:
        """The dtype in the file; its name if torch does not have the dtype."""
        return self.dtype if self.unreadable is None else self.unreadable[0]

    @property
    def header_dtype(self) -> str:
        """The dtype as the header has it."""
        return dtype_name(self.dtype) if self.unreadable is None else self.unreadable[0]


@dataclass(frozen=True, slots=True)
class KnownHeader:
    """A header that was parsed before, and the file that it is of."""

    identity: ShardIdentity
    tensors: Mapping[str, TensorInfo]
    metadata: dict[str, str]


class SafetensorsReader(Closing):
    """Reads tensors of one file on demand, after checking its header on opening.

    Raises CorruptionError if the file is shorter or longer than its header says, if offsets
    overlap, leave holes or pass the end, and if the bytes of a tensor do not fit its shape and
    dtype; StorageError if the file cannot be opened or read. Not thread-safe; close it.
    """

    def __init__(self, path: str | os.PathLike[str], *, known: KnownHeader | None = None) -> None:
        """Opens the file. A header that is the `known` one is not parsed again."""
        self.path = str(path)
        try:
            with reporting("open", self.path):
                self._fd: int | None = open_regular(self.path)
        except ValueError as error:  # Not a regular file, or not a path.
            raise corrupt(self.path, str(error)) from None
        try:
            self.tensors: Mapping[str, TensorInfo]
            if known is not None and self.identity() == known.identity:
                self.tensors, self.metadata = known.tensors, known.metadata
            else:
                with reporting("read", self.path):
                    self.tensors, self.metadata = _read_header(self._fd, self.path)
        except BaseException:
            self.close()
            raise

    def identity(self) -> ShardIdentity:
        """Returns what tells this file from another one. Raises StorageError."""
        assert self._fd is not None, f"{self.path} is closed"
        with reporting("read", self.path):
            status = os.fstat(self._fd)
            length = int.from_bytes(os.pread(self._fd, _LENGTH_NBYTES, 0), "little")
            header = os.pread(self._fd, _LENGTH_NBYTES + min(length, _MAX_HEADER_NBYTES), 0)
        return ShardIdentity(
            path=os.path.abspath(self.path),
            nbytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            header_sha256=hashlib.sha256(header).hexdigest(),
        )

    def header(self) -> KnownHeader:
        """Returns what a later reader of the same file can be given as `known`."""
        return KnownHeader(self.identity(), self.tensors, self.metadata)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self, name: str) -> torch.Tensor:
        """Returns a fresh CPU tensor, which the caller owns. Raises as `read_into`."""
        info = self._readable(name)
        tensor = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self.read_into(name, 0, tensor)
        return tensor

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fills `target` (CPU, contiguous, dtype of `name`) with elements from `start` on.

        Elements are in row-major order. Raises CorruptionError if the file ends too early,
        StorageError, and UnsupportedError for a dtype that torch does not have.
        """
        assert self._fd is not None, f"{self.path} is closed"
        info = self._readable(name)
        assert target.dtype is info.dtype, (name, target.dtype, info.dtype)
        begin_nbytes = info.offset_nbytes + start * info.dtype.itemsize
        view = tensor_bytes(target)
        assert begin_nbytes + len(view) <= info.offset_nbytes + info.nbytes, (name, start)
        done = read_into(self._fd, view, begin_nbytes, path=self.path)
        if done < len(view):
            raise corrupt(
                self.path,
                f"the file ends inside tensor {name!r}",
                begin_nbytes + done,
                len(view) - done,
            )

    def head(self, name: str, nbytes: int) -> bytes:
        """Returns the first bytes of a tensor of any dtype, at most `nbytes`. Raises as
        `read_into`."""
        assert self._fd is not None, f"{self.path} is closed"
        info = self.tensors[name]
        content = bytearray(min(nbytes, info.nbytes))
        done = read_into(self._fd, memoryview(content), info.offset_nbytes, path=self.path)
        if done < len(content):
            raise corrupt(self.path, f"the file ends inside tensor {name!r}")
        return bytes(content)

    def _readable(self, name: str) -> TensorInfo:
        info = self.tensors[name]
        if info.unreadable is not None:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} has dtype {info.unreadable[0]}; readable are "
                + ", ".join(STORED_DTYPES)
            )
        return info


class SafetensorsWriter(Closing):
    """Writes the tensors of one planned file in any order, each to its final place.

    The file is `.<name>.partial` until `commit()` renames it to `path`; by then it is complete and
    synced. `close()` without a commit removes the partial file. Raises StorageError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Sequence[TensorInfo],
        *,
        metadata: Mapping[str, str],
        mode: int = 0o666,
    ) -> None:
        """Creates the partial file and allocates its space. The umask applies to `mode`."""
        self.path = Path(path)
        self.partial_path = partial_of(self.path)
        # `tensors`: every planned tensor with its place, in the order of the file.
        self.header, self.tensors, self.file_nbytes = _plan_header(tensors, metadata)
        # The number of missing elements. An empty tensor is in the table until it is written.
        self._left = {info.name: math.prod(info.shape) for info in tensors}
        self._finished = False
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with reporting("create", self.partial_path):
            self._fd: int | None = os.open(self.partial_path, flags, mode)
        try:
            with reporting("allocate", self.partial_path, 0, self.file_nbytes):
                reserve_space(self._fd, self.file_nbytes)
            self._write(memoryview(self.header), 0)
        except BaseException:
            self.close()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether every tensor has been written."""
        return not self._left

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes `tensor` (CPU, planned dtype and shape) as `name`, once for each name."""
        info = self.tensors[name]
        assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), (
            f"{name}: planned {info.shape} {info.dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
        )
        self.write_part(name, 0, tensor.detach().contiguous())

    def write_part(self, name: str, start: int, part: torch.Tensor) -> None:
        """Writes `part` (CPU, contiguous, row-major) as elements of `name` from `start` on.

        Every element must be written exactly once.
        """
        info = self.tensors[name]
        assert part.device.type == "cpu", f"{name} is on {part.device}"
        assert part.dtype is info.dtype, (name, part.dtype, info.dtype)
        assert part.numel() <= self._left.get(name, -1), f"{name} was written before"
        self._write(tensor_bytes(part), info.offset_nbytes + start * info.dtype.itemsize)
        self._left[name] -= part.numel()
        if not self._left[name]:
            del self._left[name]

    def finish(self) -> None:
        """Syncs and closes the partial file, which must be complete."""
        assert self._fd is not None and self.is_complete, (
            f"{self.path}: {list(self._left)} not written"
        )
        with reporting("fsync", self.partial_path):
            os.fsync(self._fd)
        # The file is not read soon; the page cache has better uses.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._fd)
        self._fd = None
        self._finished = True

    def commit(self) -> None:
        """Renames the finished file to `path`, and replaces an older file."""
        assert self._finished, f"{self.path} is not finished"
        with reporting("rename", self.path):
            os.replace(self.partial_path, self.path)
        self._finished = False

    def close(self) -> None:
        """Removes a file that was not committed. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if not self.partial_path.is_symlink():
            with contextlib.suppress(OSError):  # The first error is on its way.
                self.partial_path.unlink()

    def _write(self, view: memoryview, offset_nbytes: int) -> None:
        assert self._fd is not None, f"{self.path} is closed"
        done = 0
        while done < len(view):
            place = offset_nbytes + done
            with reporting("write", self.partial_path, place, len(view) - done):
                done += os.pwrite(self._fd, view[done : done + TRANSFER_NBYTES], place)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns a view of the bytes of a contiguous CPU tensor."""
    assert tensor.is_contiguous()
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.resolve_conj().reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)


def _plan_header(
    tensors: Iterable[TensorInfo], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo], int]:
    """Returns (header with its length, every tensor with its place, bytes of the full file)."""
    # Wide items first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda info: -info.dtype.itemsize)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for info in ordered:
        if info.dtype not in _FORMAT_DTYPES:
            raise UnsupportedError(
                f"{info.name} has dtype {info.dtype}, which safetensors cannot store; convert it"
            )
        entries[info.name] = {
            "dtype": _FORMAT_DTYPES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, begin + info.nbytes],
        }
        begin += info.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    data_start = _LENGTH_NBYTES + len(header)
    placed = {
        info.name: replace(info, offset_nbytes=data_start + entries[info.name]["data_offsets"][0])
        for info in ordered
    }
    return struct.pack("<Q", len(header)) + header, placed, data_start + begin


def _read_header(fd: int, path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    file_nbytes = os.fstat(fd).st_size
    prefix = os.pread(fd, _LENGTH_NBYTES, 0)
    if len(prefix) < _LENGTH_NBYTES:
        raise corrupt(path, f"{file_nbytes} bytes are too few for a safetensors file", 0, 8)
    header_nbytes: int = struct.unpack("<Q", prefix)[0]
    data_start = _LENGTH_NBYTES + header_nbytes
    if header_nbytes > min(_MAX_HEADER_NBYTES, file_nbytes - _LENGTH_NBYTES):
        raise corrupt(
            path,
            f"the header should have {header_nbytes} bytes, the file has {file_nbytes}; it is "
            "truncated or no safetensors file (a Git LFS pointer?)",
            _LENGTH_NBYTES,
            header_nbytes,
        )
    try:
        entries = table_of(parse_json(os.pread(fd, header_nbytes, _LENGTH_NBYTES)), "it")
        metadata = table_of(entries.pop("__metadata__", None) or {}, "__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise MalformedError("__metadata__ has a value that is no text")
    except MalformedError as error:
        detail = f"the header is damaged: {error}"
        raise corrupt(path, detail, _LENGTH_NBYTES, header_nbytes) from None
    tensors: dict[str, TensorInfo] = {}
    places: list[tuple[int, int, TensorInfo]] = []
    for name, entry in entries.items():
        tensors[name], nbytes = _parse_entry(path, name, entry, data_start)
        places.append((tensors[name].offset_nbytes, nbytes, tensors[name]))
    end = data_start
    for offset_nbytes, nbytes, info in sorted(places, key=itemgetter(0, 1)):
        if offset_nbytes != end:
            raise corrupt(
                path,
                f"tensor {info.name!r} starts at byte {offset_nbytes - data_start} of the data, "
                f"expected {end - data_start}: tensors overlap or leave a hole; copy "
                "the file again",
                end,
                nbytes,
            )
        end += nbytes
        if end > file_nbytes:
            raise corrupt(
                path,
                f"tensor {info.name!r} ends at byte {end}, the file has only {file_nbytes}: it is "
                "truncated, copy it again",
                offset_nbytes,
                nbytes,
            )
    if end != file_nbytes:
        raise corrupt(path, f"the header accounts for {end} bytes, the file has {file_nbytes}")
    return tensors, metadata


def _parse_entry(path: str, name: str, entry: Any, data_start: int) -> tuple[TensorInfo, int]:
    """Parses an entry, whose offsets count from the end of the header; returns it with its
    bytes."""
    try:
        dtype_name, shape, (begin, end) = _facts(table_of(entry, "it"))
    except MalformedError as error:
        raise corrupt(
            path, f"the header's entry of tensor {name!r} is malformed: {error}"
        ) from None
    offset_nbytes, nbytes = data_start + begin, end - begin
    dtype = STORED_DTYPES.get(dtype_name)
    if dtype is None:
        if nbytes < 0:
            raise corrupt(path, f"tensor {name!r} has shape {shape}, offsets {[begin, end]}")
        info = TensorInfo(  # The other tensors of the file stay readable.
            name=name, dtype=torch.uint8, shape=shape, offset_nbytes=offset_nbytes,
            unreadable=(dtype_name, nbytes),
        )  # fmt: skip
        return info, nbytes
    info = TensorInfo(name=name, dtype=dtype, shape=shape, offset_nbytes=offset_nbytes)
    if nbytes != info.nbytes:
        raise corrupt(
            path,
            f"tensor {name!r} of shape {shape} and dtype {dtype_name} needs {info.nbytes} bytes, "
            f"the header gives it {nbytes}",
        )
    return info, nbytes


def _facts(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], list[int]]:
    """Returns (dtype, shape, offsets) of an entry, within the bounds of torch and of files."""
    dtype = text_of(field(entry, "dtype"), "its dtype", max_length=32)
    lengths = list_of(field(entry, "shape"), "its shape")
    if len(lengths) > _MAX_DIMENSIONS:
        raise MalformedError(f"its shape has {len(lengths)} dimensions")
    shape = tuple(integer(length, "a length of its shape") for length in lengths)
    if math.prod(length or 1 for length in shape) > MAX_INT:  # torch multiplies these.
        raise MalformedError("its shape has more elements than can be counted")
    offsets = list_of(field(entry, "data_offsets"), "its offsets")
    if len(offsets) != 2:
        raise MalformedError(f"it has {len(offsets)} offsets; expected 2")
    return dtype, shape, [integer(offset, "an offset") for offset in offsets]
