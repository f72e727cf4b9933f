"""The parts of a quantised weight, what a codec is, and the checks that all codecs share."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infinity.errors import ConfigError

Shape = tuple[int, ...]

# By the names that safetensors gives to dtypes. F4 packs two elements in a byte, so no part has it:
# the files here store such codes as U8 or I8.
STORED_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One stored tensor of a weight.

    `suffix` is what the name of the tensor adds to the name of the weight, as the usual writer of
    the format does: "" or "_scale_inv" after "...gate_proj.weight". `dtype` is a name of
    safetensors.
    """

    suffix: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, without padding; 0 of a dtype that no codec stores."""
        dtype = STORED_DTYPES.get(self.dtype)
        return 0 if dtype is None else math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """A weight as its file stores it.

    `codec` decodes `parts`, which are uint8 tensors in the order of `codec.parts(shape)`. `aside`
    are further tensors that readers of the format expect, by suffix; `decode` does not need them.
    """

    codec: Codec
    parts: tuple[torch.Tensor, ...]
    aside: Mapping[str, torch.Tensor]


class Decoder(Protocol):
    """The part of a codec that makes elements of bytes."""

    def decode(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        """Fills `out` with the weight.

        parts: per part one flat uint8 tensor of its bytes, at any alignment, on any device; only
            read
        shape: of the weight
        out: bfloat16, float16 or float32 of this shape, of any strides that do not overlap

        CPU tensors are decoded by the native kernel on torch's number of threads, without the GIL;
        other ones by a kernel of their device or by `Codec.values`, with the same bits. A NaN has
        the bits of the positive quiet NaN. Raises ConfigError if the sizes of the parts do not fit
        the shape.
        """

    def rows(self, shape: Shape, start: int, stop: int) -> Sequence[tuple[int, int]] | None:
        """Returns per part the range of bytes that holds elements [start, stop) of dimension 0.

        Those bytes decode with the shape (stop - start, *shape[1:]). None if elements outside the
        range share a byte or a scale with elements inside.
        """


class Codec(Decoder, Protocol):
    """Decodes and encodes the weights of one format. Frozen and hashable; holds no tensor."""

    def __hash__(self) -> int:  # Each codec is a frozen dataclass, which has its own.
        return object.__hash__(self)

    @property
    def format(self) -> str:
        """The name of the format in messages."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logical weight."""

    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        """Returns the parts of a weight of this shape. Raises ConfigError for a shape that cannot
        be stored in the format."""

    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        """Returns the weight before its last rounding, new: the reference of `decode`.

        `decode` rounds it to the dtype of `out`, to nearest, ties to even.
        """

    def encode(self, weight: torch.Tensor) -> Encoding:
        """Encodes a floating-point tensor. Deterministic; `decode` gives what its readers see.

        Raises ConfigError for a shape that the format cannot store, and for values that are not
        finite.
        """


@functools.lru_cache(maxsize=4096)
def parts_of(codec: Codec, shape: Shape) -> tuple[StoredPart, ...]:
    """Returns `codec.parts(shape)`, remembered: a checkpoint has many weights of few shapes."""
    return codec.parts(shape)


@functools.lru_cache(maxsize=4096)
def stored_nbytes(codec: Codec, shape: Shape) -> int:
    """Returns the bytes of the parts of a weight."""
    return sum(part.nbytes for part in codec.parts(shape))


def check_sizes(codec: Codec, sizes_nbytes: Sequence[int], shape: Shape) -> None:
    """Raises ConfigError if parts of these sizes do not make a weight of the shape."""
    expected = parts_of(codec, shape)
    if len(sizes_nbytes) != len(expected):
        raise ConfigError(f"{codec.format} needs {len(expected)} parts, got {len(sizes_nbytes)}")
    for part, nbytes in zip(expected, sizes_nbytes, strict=True):
        if nbytes != part.nbytes:
            raise ConfigError(
                f"{codec.format}: a weight of shape {shape} needs {part.nbytes} bytes of "
                f"'*{part.suffix}' ({part.dtype} {part.shape}), got {nbytes}"
            )


def check_decode(
    codec: Codec, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor
) -> None:
    """Raises ConfigError if the sizes of parts, shape and `out` contradict each other."""
    check_sizes(codec, [tensor.numel() for tensor in parts], shape)
    for tensor in parts:
        assert tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
    if tuple(out.shape) != shape:
        raise ConfigError(f"{codec.format}: expected an output of {shape}, got {tuple(out.shape)}")


def check_encode(codec: Codec, weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight in fp32. Raises ConfigError for what `codec` cannot encode."""
    codec.parts(tuple(weight.shape))
    if not weight.is_floating_point():
        raise ConfigError(f"{codec.format} encodes floating-point weights, got {weight.dtype}")
    wide = weight.detach().float()
    if not torch.isfinite(wide).all():
        raise ConfigError(f"{codec.format} cannot encode values that are not finite")
    return wide


def matrix_of(format_name: str, shape: Shape) -> tuple[int, int, int]:
    """Returns (matrices, rows, columns) of a shape. Raises ConfigError for a vector or a number."""
    if len(shape) < 2:
        raise ConfigError(f"{format_name} stores matrices, got a weight of shape {shape}")
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bytes of a part as elements of `dtype`, copied if they are not aligned."""
    nbytes = dtype.itemsize
    if part.storage_offset() % nbytes or part.data_ptr() % nbytes:
        part = part.clone()
    return part.view(dtype)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as a flat uint8 tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def even_rows(
    parts: Sequence[StoredPart], rows: int, start: int, stop: int
) -> tuple[tuple[int, int], ...]:
    """Returns the byte ranges of elements [start, stop) where every part has `rows` equal ones."""
    ranges = []
    for part in parts:
        nbytes = part.nbytes // rows if rows else 0
        ranges.append((start * nbytes, stop * nbytes))
    return tuple(ranges)
