"""Weights among stored bytes, and batches of them that one launch decodes.

Pure, but for `decode_one_by_one` and `places_on`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity.codecs.part import Decoder, FusedCodec, Shape, check_sizes
from infinity.fused.decode import ALIGNMENT, MOST_WEIGHTS, DecodeLaunch, launch_of, place_of


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """One weight: the bytes that make it in a block, and its elements in other memory.

    parts: (offset, length) in bytes of each part in the block
    start: the offset in elements of the first one in that memory; stride: of the others
    """

    codec: Decoder
    shape: Shape
    parts: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    start: int
    stride: tuple[int, ...]

    @property
    def is_aligned(self) -> bool:
        """Whether the first element lies at a multiple of what a thread stores at once."""
        return self.start * self.dtype.itemsize % ALIGNMENT == 0

    def stored_in(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Returns the bytes of each part in a block: uint8."""
        return [block[start : start + nbytes] for start, nbytes in self.parts]

    def elements_in(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the weight in memory of its dtype."""
        return memory[self.start :].as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Weights of one shape, dtype and strides, and of one codec but for its `offset`.

    launch: decodes all of them; None if no Triton kernel can
    """

    weights: tuple[WeightPlace, ...]
    launch: DecodeLaunch | None

    @property
    def first(self) -> WeightPlace:
        """A weight like the others."""
        return self.weights[0]

    def rows(self) -> list[tuple[int, ...]]:
        """Returns the row of each weight in the table of the launch."""
        rows = []
        for weight in self.weights:
            assert isinstance(weight.codec, FusedCodec)
            starts = [offset_nbytes for offset_nbytes, _ in weight.parts]
            rows.append(place_of(weight.start, weight.codec.offset, starts))
        return rows

    def decode_one_by_one(self, block: torch.Tensor, memory: torch.Tensor) -> None:
        """Decodes the weights by their codecs, from bytes of `block` to `memory` (both uint8)."""
        elements = memory.view(self.first.dtype)
        for weight in self.weights:
            stored, target = weight.stored_in(block), weight.elements_in(elements)
            weight.codec.decode(stored, weight.shape, target)

    def decode_at_once(
        self, block: torch.Tensor, memory: torch.Tensor, places: torch.Tensor
    ) -> None:
        """Decodes the weights by one launch. `places`: `rows` on the device of the other two."""
        assert self.launch is not None
        parts = [block] * len(self.first.parts)
        self.launch.run(parts, places, memory.view(self.first.dtype))


def batches_of(weights: Iterable[WeightPlace]) -> tuple[DecodeBatch, ...]:
    """Returns batches with each of the weights in one of them.

    Raises ConfigError if a codec needs other numbers of bytes.
    """
    alike: defaultdict[Hashable, list[WeightPlace]] = defaultdict(list)
    for weight in weights:
        codec = weight.codec
        if isinstance(codec, FusedCodec):
            check_sizes(codec, [nbytes for _, nbytes in weight.parts], weight.shape)
        kind = codec.trial_codecs if isinstance(codec, FusedCodec) else codec
        alike[kind, weight.shape, weight.dtype, weight.stride].append(weight)
    return tuple(
        DecodeBatch(tuple(group[start : start + MOST_WEIGHTS]), _launch(group))
        for group in alike.values()
        for start in range(0, len(group), MOST_WEIGHTS)
    )


def _launch(weights: Sequence[WeightPlace]) -> DecodeLaunch | None:
    first = weights[0]
    if not isinstance(first.codec, FusedCodec):
        return None
    is_aligned = all(weight.is_aligned for weight in weights)
    form = first.codec.form(first.shape)
    return launch_of(form, first.shape, first.stride, first.dtype, is_aligned=is_aligned)


def places_on(device: torch.device, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Returns rows of a table as one tensor on the device."""
    return torch.tensor(rows, dtype=torch.int64).to(device)
