"""Tensors that are stored as numbers: a copy, or a cast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.codecs.part import (
    STORED_DTYPES,
    Codec,
    Encoding,
    Shape,
    StoredPart,
    check_decode,
    even_rows,
    flat_bytes,
    typed,
)
from infinity.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Plain(Codec):
    """Elements of the dtype that safetensors calls `stored`, in row-major order.

    An output of the same dtype gets the same bits; another one gets torch's cast. The output may
    have any dtype that torch can cast to.
    """

    stored: str = "BF16"

    @property
    @override
    def format(self) -> str:
        return f"plain {self.stored}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements. Raises UnsupportedError if torch does not have it."""
        if self.stored not in STORED_DTYPES:
            known = ", ".join(STORED_DTYPES)
            raise UnsupportedError(f"torch has no dtype for {self.stored}; readable are {known}")
        return STORED_DTYPES[self.stored]

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        return (StoredPart("", self.stored, shape),)

    @override
    def decode(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        check_decode(self, parts, shape, out)
        if out.dtype is not self.dtype or not shape or out.stride(-1) != 1:
            out.copy_(self.values(parts, shape))
        else:  # As bytes, because a source at an odd address would have to be copied first.
            row = (*shape[:-1], shape[-1] * self.dtype.itemsize)
            out.view(torch.uint8).copy_(parts[0].view(row))

    @override
    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        return typed(parts[0], self.dtype).view(shape)

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`; values that are not finite are stored too."""
        return Encoding(self, (flat_bytes(weight.detach().to(self.dtype)),), {})

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        return even_rows(self.parts(shape), shape[0], start, stop)
