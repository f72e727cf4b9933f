"""NF4 and FP4 codes as bitsandbytes stores them: docs/formats/quantized.md."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from infinity.codecs.on_device import FusedCodec
from infinity.codecs.part import Encoding, Shape, StoredPart, check_encode, flat_bytes
from infinity.codecs.rounding import FLOAT_DTYPES
from infinity.errors import ConfigError
from infinity.fused.decode import CodeLayout

STATE_SUFFIX = ".quant_state.bitsandbytes__"  # And the kind.
NUM_CODES = 16
NUM_NESTED_CODES = 256
_TRIAL_OFFSETS = (0.04, -0.3)  # Every weight has its own.

# Quantiles of a normal distribution, symmetric about an exact zero: Dettmers et al., "QLoRA", 2023,
# appendix E.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


# Floats of two bits of exponent and one of mantissa, by code; 12 is 1.
_FP4_MAGNITUDES = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_FP4_VALUES = (*_FP4_MAGNITUDES, *(-magnitude for magnitude in _FP4_MAGNITUDES))
# What `encode` writes; `decode` takes the table that is stored.
_TABLES = {"nf4": NF4_VALUES, "fp4": tuple(value / 12 for value in _FP4_VALUES)}


_MARGIN = 1.01  # More than the rounding of nested scales adds.


@dataclass(frozen=True, slots=True)
class TableBlocks(FusedCodec):
    """Two codes per byte, highest bits first, in blocks of the flattened weight.

    block: codes that share a scale; the last block may be short
    nested_block: scales that share a scale of their own ("double quantisation"); 0 if scales are
        stored as F32
    offset: is added to every scale that was nested, as fp32
    stored: the dtype that the writer quantised, a name of safetensors: BF16, F16 or F32
    kind: nf4 or fp4

    scale = fp32(nested_quant_map[code] * nested_absmax) + offset, rounded to fp32 twice. The value
    is quant_map[code] * scale, rounded to fp32, then to `stored`, then to the dtype of the output.
    """

    block: int = 64
    nested_block: int = 256
    offset: float = 0.0
    stored: str = "BF16"
    kind: str = "nf4"

    @property
    @override
    def format(self) -> str:
        return f"{self.kind.upper()} of bitsandbytes"

    @property
    @override
    def dtype(self) -> torch.dtype:
        return FLOAT_DTYPES[self.stored]

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        numel = math.prod(shape)
        blocks = -(-numel // self.block)
        codes = StoredPart("", "U8", (-(-numel // 2), 1))
        table = StoredPart(".quant_map", "F32", (NUM_CODES,))
        if not self.nested_block:
            return codes, StoredPart(".absmax", "F32", (blocks,)), table
        return (
            codes,
            StoredPart(".absmax", "U8", (blocks,)),
            table,
            StoredPart(".nested_absmax", "F32", (-(-blocks // self.nested_block),)),
            StoredPart(".nested_quant_map", "F32", (NUM_NESTED_CODES,)),
        )

    @override
    def code_layout(self, shape: Shape) -> CodeLayout:
        return CodeLayout(
            shape, "TABLE", "F32", (1, self.block), product=self.stored, packing="PAIRS",
            nested_block=self.nested_block,
        )  # fmt: skip

    @property
    @override
    def trial_shapes(self) -> tuple[Shape, ...]:
        return (37, 2 * self.block + 1), (37, 3 * self.block)

    @property
    @override
    def trial_codecs(self) -> tuple[FusedCodec, ...]:
        return tuple(replace(self, offset=offset) for offset in _TRIAL_OFFSETS)

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`: scales are the largest magnitudes, offset by their mean if nested.

        The codec of the result has that offset. `aside` has the JSON of bitsandbytes.
        """
        wide, shape = check_encode(self, weight), tuple(weight.shape)
        flat, numel = wide.reshape(-1), weight.numel()
        largest, scaled = _normalised(flat, self.block)
        if (largest * (_MARGIN if self.nested_block else 1) > torch.finfo(self.dtype).max).any():
            raise ConfigError(
                f"{self.format} of {self.stored} cannot encode values up to "
                f"{float(largest.max()):.3g}; give another format, or keep this weight as it is"
            )
        table = torch.tensor(_TABLES[self.kind], device="cpu")
        ascending, order = table.sort(stable=True)
        codes = order.to(torch.uint8)[_nearest(scaled, ascending).int()][:numel]
        codes = torch.cat([codes, codes.new_zeros(numel % 2)])
        packed = (codes[0::2] << 4) | codes[1::2]
        if not self.nested_block:
            return self._encoding(self, shape, (packed, largest, table))
        offset = float(largest.double().mean()) if largest.numel() else 0.0
        offset = float(torch.tensor(offset, device="cpu"))  # As fp32.
        nested_table = _dynamic_map()
        nested_largest, nested_scaled = _normalised(largest - offset, self.nested_block)
        nested = _nearest(nested_scaled, nested_table)[: largest.numel()]
        codec = replace(self, offset=offset)
        tensors = (packed, nested, table, nested_largest, nested_table)
        return self._encoding(codec, shape, tensors)

    @staticmethod
    def _encoding(codec: TableBlocks, shape: Shape, tensors: tuple[torch.Tensor, ...]) -> Encoding:
        state = torch.tensor(list(codec.state_json(shape)), dtype=torch.uint8, device="cpu")
        return Encoding(codec, tuple(map(flat_bytes, tensors)), {STATE_SUFFIX + codec.kind: state})

    def state_json(self, shape: Shape) -> bytes:
        """Returns what bitsandbytes stores about a weight as JSON."""
        state: dict[str, object] = {
            "quant_type": self.kind,
            "blocksize": self.block,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(shape),
        }
        if self.nested_block:
            state["nested_blocksize"] = self.nested_block
            state["nested_dtype"] = "float32"
            state["nested_offset"] = self.offset
        return json.dumps(state).encode()

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        numel = math.prod(shape[1:])
        first, last, end = start * numel, stop * numel, shape[0] * numel
        step = self.block * (self.nested_block or 1)
        if first % step or (last % step and last != end) or (last % 2 and last != end):
            return None
        blocks = (first // self.block, -(-last // self.block))
        table = (0, 4 * NUM_CODES)
        codes = (first // 2, -(-last // 2))
        if not self.nested_block:
            return codes, (4 * blocks[0], 4 * blocks[1]), table
        nested = (4 * (blocks[0] // self.nested_block), 4 * -(-blocks[1] // self.nested_block))
        return codes, blocks, table, nested, (0, 4 * NUM_NESTED_CODES)


def _normalised(flat: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (largest magnitude of every block, numbers divided by it, padded to full blocks)."""
    blocks = -(-flat.numel() // block)
    padded = flat.new_zeros(blocks * block)
    padded[: flat.numel()] = flat
    padded = padded.view(blocks, block)
    largest = padded.abs().amax(dim=1) if blocks else flat.new_zeros(0)
    divisor = torch.where(largest == 0, 1.0, largest)
    return largest, (padded / divisor[:, None]).view(-1)


def _nearest(numbers: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Returns uint8 codes of the nearest numbers of an ascending table; of two, the lower one."""
    middles = (table[:-1] + table[1:]) / 2
    return torch.bucketize(numbers, middles).to(torch.uint8)


def _dynamic_map() -> torch.Tensor:
    """Returns 256 ascending numbers in (-1, 1]: seven decades, each with twice as many as the last.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization", 2022, section 2.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        middles = [0.1 + 0.9 * (2 * i + 1) / (2 * count) for i in range(count)]
        scaled = [10.0 ** (decade - 6) * middle for middle in middles]
        numbers += [*scaled, *(-number for number in scaled)]
    return torch.tensor(sorted(numbers), device="cpu")
