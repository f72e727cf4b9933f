"""The weights among the stored bytes of a block, and how they are decoded on a device: worked out
once, carried out often, a batch of equal weights by one launch.

A codec has a reference, and may have a Triton kernel for CUDA devices, which is tried first.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.codecs import native
from infinity.codecs.codes import decode_natively, values_of
from infinity.codecs.part import Codec, Decoder, Shape, check_decode, check_sizes
from infinity.codecs.rounding import decode_by_values
from infinity.errors import ConfigError
from infinity.fused.choice import Trials
from infinity.fused.decode import (
    ALIGNMENT,
    MOST_WEIGHTS,
    CodeLayout,
    DecodeLaunch,
    launch_of,
    place_of,
)
from infinity.fused.launches import made_current
from infinity.sizes import align_up

trials = Trials()
_TRIAL_WEIGHTS = 3
_TRIAL_COLUMNS = 1100  # More than a tile has.
_WORD = 8  # Codes that a thread may read as one.


class FusedCodec(Codec):
    """A codec of codes and scales."""

    @abstractmethod
    def code_layout(self, shape: Shape) -> CodeLayout:
        """Returns how a weight of this shape is stored."""

    @property
    def offset(self) -> float:
        """An fp32 number of each weight that is added to scales that are nested: that of NF4."""
        return 0.0

    @property
    @abstractmethod
    def trial_shapes(self) -> tuple[Shape, ...]:
        """Shapes of weights that show the borders of groups, blocks and tiles: one for each kernel
        that decodes the codec's weights. The last one is like those of most checkpoints."""

    @property
    def trial_codecs(self) -> tuple[FusedCodec, ...]:
        """Codecs that differ in `offset` only. Equal for all codecs that one kernel decodes."""
        return (self,)

    @override
    def decode(self, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor) -> None:
        check_decode(self, parts, shape, out)
        if native.runs(parts, out):
            decode_natively(self.code_layout(shape), parts, out, self.offset)
        else:
            decode(self, parts, shape, out)

    @override
    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        return values_of(self.code_layout(shape), parts, self.offset).view(shape)


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
    form = first.codec.code_layout(first.shape)
    return launch_of(form, first.shape, first.stride, first.dtype, is_aligned=is_aligned)


def places_on(device: torch.device, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Returns rows of a table as one tensor on the device."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)


def decode(
    codec: FusedCodec, parts: Sequence[torch.Tensor], shape: Shape, out: torch.Tensor
) -> None:
    """`Codec.decode` where no native kernel does: one weight alone. A batch is faster."""
    device = out.device
    is_there = device.type == "cuda" and all(part.device == device for part in parts)
    is_aligned = out.data_ptr() % ALIGNMENT == 0
    launch = (
        launch_of(codec.code_layout(shape), shape, out.stride(), out.dtype, is_aligned=is_aligned)
        if is_there
        else None
    )
    if launch is None or explain_refusal(codec, out.dtype, device, launch.variant):
        decode_by_values(codec, parts, shape, out)
        return
    row = place_of(0, codec.offset, [0] * len(parts))
    with made_current(device):
        launch.run(parts, places_on(device, [row]), out)


def runs(batch: DecodeBatch, device: torch.device) -> bool:
    """Whether a launch decodes the batch on the device. The first call per device and kernel
    compiles the kernel and compares its bits with those of the reference, which takes seconds."""
    if batch.launch is None or device.type != "cuda":
        return False
    codec, dtype = batch.first.codec, batch.first.dtype
    assert isinstance(codec, FusedCodec)
    return not explain_refusal(codec, dtype, device, batch.launch.variant)


def explain_refusal(
    codec: FusedCodec, dtype: torch.dtype, device: torch.device, variant: str = ""
) -> str:
    """Returns why the reference decodes on the device, "" if the Triton kernel does. `variant`: see
    `DecodeLaunch.variant`; "" is that of most checkpoints."""
    return trials.explain_refusal(
        f"decoding of {codec.format} to {dtype}",
        (codec.trial_codecs, dtype, variant),
        device,
        lambda: has_reference_bits(codec, dtype, device, variant),
    )


def has_reference_bits(
    codec: FusedCodec, dtype: torch.dtype, device: torch.device, variant: str
) -> bool:
    """Decodes weights of random bytes by one launch, and each by the reference."""
    source = torch.Generator().manual_seed(0)  # Not the program's own generator.
    stored, weights, numel = _trial_weights(codec, dtype, variant)
    codes = torch.randint(256, (stored,), generator=source, dtype=torch.uint8, device="cpu")
    block = codes.to(device)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    found = torch.full((numel,), 21845, dtype=bits, device=device)
    expected = found.clone()
    (batch,) = batches_of(weights)
    with made_current(device):
        batch.decode_at_once(block, found.view(torch.uint8), places_on(device, batch.rows()))
    for weight in weights:
        assert isinstance(weight.codec, FusedCodec)
        out = weight.elements_in(expected.view(dtype))
        decode_by_values(weight.codec, weight.stored_in(block), weight.shape, out)
    return torch.equal(found, expected)


def _trial_weights(
    codec: FusedCodec, dtype: torch.dtype, variant: str
) -> tuple[int, list[WeightPlace], int]:
    """Returns the bytes of a block, weights of which it has parts at odd addresses, and the number
    of elements of the memory for them: some begin at even places, some at odd ones, or all at
    aligned ones."""
    shape, stride, is_aligned = next(
        (shape, stride, is_aligned)
        for shape in _trial_shapes(codec)
        for stride in _trial_strides(shape)
        for is_aligned in (True, False)
        if (
            launch := launch_of(
                codec.code_layout(shape), shape, stride, dtype, is_aligned=is_aligned
            )
        )
        and variant in ("", launch.variant)
    )
    span = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    stored_nbytes, numel, weights = 1, ALIGNMENT if is_aligned else 3, []
    for number in range(_TRIAL_WEIGHTS):
        member = codec.trial_codecs[number % len(codec.trial_codecs)]
        parts = []
        for part in member.parts(shape):
            parts.append((stored_nbytes, part.nbytes))
            stored_nbytes += part.nbytes + 3
        weights.append(WeightPlace(member, shape, tuple(parts), dtype, numel, stride))
        numel += span + 5 + (span % 2)
        if is_aligned:
            numel = align_up(numel, ALIGNMENT)
    return stored_nbytes, weights[::-1], numel


def _trial_shapes(codec: FusedCodec) -> Iterator[Shape]:
    """Yields shapes of the codec, those of several tiles and of whole words of codes first."""
    shapes = codec.trial_shapes[::-1]
    words = [align_up(shape[-1], _WORD) for shape in shapes]
    wide = [columns * -(-_TRIAL_COLUMNS // columns) for columns in words]
    all_columns = dict.fromkeys([*wide, *words, *(shape[-1] for shape in shapes), _WORD])
    all_rows = dict.fromkeys([*(shape[-2] for shape in shapes), _WORD])
    for rows, columns in itertools.product(all_rows, all_columns):
        shape = (*shapes[0][:-2], rows, columns)
        with contextlib.suppress(ConfigError):
            codec.parts(shape)
            yield shape


def _trial_strides(shape: Shape) -> Iterator[tuple[int, ...]]:
    """Yields strides without gaps, and with gaps: columns side by side at aligned rows and at
    others, rows side by side, neither."""
    *_, rows, columns = shape
    wide = align_up(columns + 1, ALIGNMENT)
    kinds = [(columns, 1, 0), (wide, 1, ALIGNMENT), (columns + 3, 1, 5)]
    if columns < _TRIAL_COLUMNS:  # Other tiles are narrow.
        kinds += [(1, rows + 3, 5), (2 * columns + 1, 2, 5)]
    for row_stride, column_stride, gap in kinds:
        matrix_stride = max(rows * row_stride, columns * column_stride) + gap
        yield (matrix_stride, row_stride, column_stride)[-len(shape) :]


class DecodePlan:
    """Decodes the weights of a block. Owns the tables of its launches, on the devices for them."""

    def __init__(self, weights: Iterable[WeightPlace]) -> None:
        """Raises ConfigError if a codec needs other numbers of bytes than its weight has."""
        self._batches = batches_of(weights)
        # A tensor for each batch, which is empty if no launch decodes the batch.
        self._places: dict[torch.device, Sequence[torch.Tensor]] = {}

    def prepare(self, device: torch.device) -> None:
        """Chooses kernels, which takes seconds where one is compiled and tried for the first time,
        and brings the tables of their launches to the device, 56 bytes for each weight."""
        rows = [batch.rows() if runs(batch, device) else [] for batch in self._batches]
        places = places_on(device, list(itertools.chain.from_iterable(rows)))
        self._places[device] = places.split(list(map(len, rows)))

    def decode(self, block: torch.Tensor, memory: torch.Tensor) -> None:
        """Fills the weights in `memory` from the stored bytes in `block`: both uint8, on a device,
        in the order of its current stream."""
        device = block.device
        if device not in self._places:
            self.prepare(device)
        with torch.no_grad(), made_current(device):
            for batch, places in zip(self._batches, self._places[device], strict=True):
                if len(places):
                    batch.decode_at_once(block, memory, places)
                else:
                    batch.decode_one_by_one(block, memory)
