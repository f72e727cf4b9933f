"""Eight bits per element of an optimizer's state: docs/formats/moments_8bit.md. Approximate.

Blocks of 256 elements share an fp32 scale, the largest magnitude among them; an element is one
byte, which names one of 256 values between -scale and scale (between 0 and scale for squares).
Which 256 is the dynamic map: seven decades of equally spaced values, each decade with twice as many
as the one below it. The arithmetic is written down here, and is that of the native kernels, bit for
bit.

Source: Dettmers et al., "8-bit optimizers via block-wise quantization", 2022, sections 2 and 3; the
layout of torchao's OptimState8bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from infinity.ops.exact import fma, to_fp32

BLOCK_NUMEL = 256  # Elements that share a scale; a tensor may be cut at multiples of it.
NUM_DECADES = 7
SMALLEST_SCALE = 2.0**-126  # A block with nothing as large as this is stored as zeros.


@dataclass(frozen=True, slots=True)
class State8Bit:
    """One array of state: uint8 codes (numel,) and fp32 scales (blocks,), borrowed.

    Blocks are counted from the first element; the last one may be short.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def numel(self) -> int:
        """Returns the number of elements, as `torch.Tensor.numel`."""
        return self.codes.numel()

    def zero_(self, name: str) -> None:
        """Makes every element zero; `name` says which array it is."""
        self.codes.fill_(map_of(name).zero_code)
        self.scales.zero_()


def num_scales(numel: int) -> int:
    """Returns the number of blocks, and thus of scales, of `numel` values."""
    return -(-numel // BLOCK_NUMEL)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DynamicMap:
    """The 256 values, and the piecewise linear function that finds the nearest one.

    Segment 0 is zero, the next seven are the decades from the smallest, the last one is 1.
    """

    is_signed: bool
    values: torch.Tensor  # fp32 (256,), by code, ascending.
    thresholds: torch.Tensor  # fp32 (8,): where each segment after the first starts.
    slopes: torch.Tensor  # fp32 (9,), by segment, as are these two:
    offsets: torch.Tensor
    lasts: torch.Tensor

    @property
    def zero_code(self) -> int:
        """The code that stands for 0."""
        return 127 if self.is_signed else 0

    def encode(self, numbers: torch.Tensor) -> torch.Tensor:
        """uint8 codes of fp32 numbers whose magnitude is at most about 1."""
        magnitude = numbers.abs()
        segment = torch.bucketize(magnitude, self.thresholds, right=True)
        place = fma(magnitude, self.slopes[segment], self.offsets[segment])
        place = torch.minimum(place, self.lasts[segment]).to(torch.int32)
        if self.is_signed:  # There is no -1: the lowest value is the one before it.
            place = torch.clamp(self.zero_code + torch.where(numbers < 0, -place, place), min=0)
        return place.to(torch.uint8)


@functools.cache
def dynamic_map(is_signed: bool) -> DynamicMap:
    """With a sign, or for squares, which have none."""
    lowest, highest = [0.0], [0.0]
    slopes, offsets, lasts = [0.0], [0.0], [0.0]
    for decade in range(NUM_DECADES):
        count = 2.0 ** (decade if is_signed else decade + 1)
        denominator = 20 * count * 10.0 ** (NUM_DECADES - 1 - decade)
        lowest.append((2 * count + 9) / denominator)
        highest.append((20 * count - 9) / denominator)
        slopes.append(count * 10.0 ** (NUM_DECADES - decade) / 9)
        offsets.append((8 * count - (0 if is_signed else 9)) / 9)
        lasts.append(2 * count - (1 if is_signed else 2))
    top = 128.0 if is_signed else 255.0
    lowest.append(1.0)
    thresholds = [(low + high) / 2 for low, high in zip(highest, lowest[1:], strict=True)]
    if not is_signed:
        # No square becomes zero, because a step divides by its root: the lowest value is that of
        # all below the middle of it and its neighbour.
        thresholds[0], slopes[1], offsets[1] = SMALLEST_SCALE, 1e8 / 55, 1.0
    return DynamicMap(
        is_signed,
        torch.tensor([_value(code, is_signed) for code in range(256)], device="cpu"),
        torch.tensor(thresholds, device="cpu"),
        torch.tensor([*slopes, 0.0], device="cpu"),
        torch.tensor([*offsets, top], device="cpu"),
        torch.tensor([*lasts, top], device="cpu"),
    )


def _value(code: int, is_signed: bool) -> float:
    """A small float with a decimal exponent: q = m 2^e stands for 10^(e - 9) (9 m - 8)."""
    place = code - 127 if is_signed else code
    q = 4 * abs(place) + 2 if is_signed else 2 * place + 3
    e = q.bit_length() - 1
    if e == 1:
        return 0.0
    value = min(to_fp32((9 * q / 2**e - 8) * to_fp32(1 / 10.0 ** (9 - e))), 1.0)
    return -value if place < 0 else value


def map_of(name: str) -> DynamicMap:
    """The map of one of an optimizer's arrays, by its name in `state_names`."""
    return dynamic_map(name != "exp_avg_sq")


def decode(state: State8Bit, name: str) -> torch.Tensor:
    """The elements as fp32 (numel,), new."""
    values = map_of(name).values[state.codes.to(torch.int64)]
    return values * state.scales.repeat_interleave(BLOCK_NUMEL)[: values.numel()]


def encode_(state: State8Bit, numbers: torch.Tensor, name: str) -> None:
    """Stores fp32 `numbers` (numel,) in the nearest codes.

    A block with an element that is not finite is NaN as a whole, for codes could not tell which it
    was; one whose elements are all below SMALLEST_SCALE is zero.
    """
    if not numbers.numel():
        return
    used = map_of(name)
    blocks = numbers.new_zeros(num_scales(numbers.numel()) * BLOCK_NUMEL)
    blocks[: numbers.numel()] = numbers
    blocks = blocks.view(-1, BLOCK_NUMEL)
    largest = blocks.abs().amax(dim=1)  # NaN where one is.
    is_finite = torch.isfinite(largest)
    is_stored = is_finite & (largest >= SMALLEST_SCALE)
    scales = torch.where(is_finite, torch.where(is_stored, largest, 0.0), float("nan"))
    reciprocals = torch.where(is_stored, torch.ones_like(largest) / largest, 0.0)
    scaled = torch.where(is_stored[:, None], blocks * reciprocals[:, None], 0.0)
    state.codes.copy_(used.encode(scaled.flatten())[: numbers.numel()])
    state.scales.copy_(scales)
