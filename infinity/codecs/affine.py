"""Numbers of 1 to 8 bits with a scale and a zero per group: docs/formats/quantized.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from infinity.codecs.codes import as_int32
from infinity.codecs.on_device import FusedCodec
from infinity.codecs.packing import WORD_BITS, Packing, packed, packed_shape
from infinity.codecs.part import (
    Encoding,
    Shape,
    StoredPart,
    check_encode,
    even_rows,
    flat_bytes,
    matrix_of,
)
from infinity.codecs.records import RECORDS
from infinity.codecs.rounding import FLOAT_DTYPES
from infinity.errors import ConfigError
from infinity.fused.decode import CodeLayout

_DTYPES = {"BYTES": "I8", "PLANES": "U8"}  # Other packings are in words.
_ONE_OF_127 = 7.874015718698502e-3  # As bitsandbytes writes it.


@dataclass(frozen=True, slots=True)
class _Parts:
    """Names and packings of a layout.

    is_transposed: stored matrices are in x out, with groups of rows; else out x in, with groups of
        columns
    axis: of HQQ, which cuts the whole weight into rows that are groups (1) or columns that are (0)
    words: the dtype of words
    product: the dtype that products are rounded to; "" is that of the scales
    """

    codes: tuple[str, Packing]
    scales: str = ""
    zeros: tuple[str, Packing] = ("", "ROWS")
    order: str = ""
    is_transposed: bool = False
    minima: str = ""
    axis: int | None = None
    words: str = "I32"
    product: str = ""
    times: float = 1.0

    @property
    def is_down(self) -> bool:
        """Whether groups are in columns of the stored matrix."""
        return self.is_transposed or self.axis == 0


_LAYOUTS = {
    "ROWS": _Parts(("_packed", "ROWS"), "_scale", ("_zero_point", "COLUMNS"), "_g_idx"),
    "BYTES": _Parts(("", "BYTES"), "_scale", ("_zero_point", "BYTES"), "_g_idx"),
    "GPTQ": _Parts(("/qweight", "COLUMNS"), "/scales", ("/qzeros", "ROWS"), "/g_idx", True),
    "AWQ": _Parts(("/qweight", "AWQ"), "/scales", ("/qzeros", "AWQ"), "/g_idx", True),
    "MLX": _Parts(("", "ROWS"), "/scales", minima="/biases", words="U32"),
    "METAL": _Parts(("", "ROWS"), "/scales", minima="/qbiases", words="U32", product="F32"),
    "HQQ": _Parts(("/W_q", "PLANES"), "/scale", ("/zero", "FLOATS"), axis=1),
    "HQQ_DOWN": _Parts(("/W_q", "PLANES"), "/scale", ("/zero", "FLOATS"), axis=0),
    "LLM.int8": _Parts(("", "BYTES"), "/SCB", times=_ONE_OF_127),
    "QUARK": _Parts(
        ("", "AWQ"), "_scale", ("_zero_point", "AWQ"), is_transposed=True, product="F32"
    ),
    "QUARK_SIGNED": _Parts(
        ("", "SIGNED_AWQ"), "_scale", ("_zero_point", "SIGNED_AWQ"), "", True, product="F32"
    ),
    **{kind: _Parts((f".{kind}", "FIELDS")) for kind in RECORDS},
}


@dataclass(frozen=True, slots=True)
class AffineGroups(FusedCodec):
    """Codes in 32-bit words or bytes, and a scale and perhaps a zero per group of input columns.

    group: columns that share a scale; the last group of GPTQ and AWQ may be short
    scale: the dtype of the scales, BF16, F16 or F32
    bits: of a code
    layout: ROWS and BYTES of compressed-tensors, MLX, METAL and LLM.int8 are out x in; GPTQ, AWQ
        and QUARK are in x out; HQQ; types of ggml, whose records hold codes and scales, are made by
        `ggml`
    has_zeros: a zero per group is stored; else it is 2^(bits - 1), and of MLX 0
    is_raised: stored zeros are less by one, in words (the first convention of GPTQ)
    has_order: an I32 per column names its group, instead of its place ("act-order")

    The value is (code - zero) * scale, to which MLX and ggml add the minimum of the group. Each
    operation is rounded to the dtype of the scales (of ggml, METAL and quark to fp32); the result,
    to that of the output.
    """

    group: int = 32
    scale: str = "BF16"
    bits: int = 4
    layout: str = "ROWS"
    has_zeros: bool = False
    is_raised: bool = False
    has_order: bool = False

    @property
    @override
    def format(self) -> str:
        if self.layout in RECORDS:
            return f"{self.layout} of GGUF"
        writer = {"ROWS": "", "BYTES": ""}.get(self.layout, f" of {self.layout}")
        return f"INT{self.bits}{writer} in groups of {self.group}"

    @property
    @override
    def dtype(self) -> torch.dtype:
        is_half = self.scale == "F16" and self.layout not in RECORDS
        return torch.float16 if is_half else torch.bfloat16

    @override
    def parts(self, shape: Shape) -> tuple[StoredPart, ...]:
        _, rows, columns = matrix_of(self.format, shape)
        names, lead = _LAYOUTS[self.layout], shape[:-2]
        if self.layout in RECORDS:
            record = RECORDS[self.layout].record
            assert record is not None
            blocks, rest = divmod(columns, record.numel)
            if rest:
                raise ConfigError(
                    f"{self.format}: the columns of {shape} are not full blocks of {record.numel}"
                )
            return (StoredPart(names.codes[0], "U8", (*shape[:-1], blocks * record.nbytes)),)
        layout, (codes, packing) = self.code_layout(shape), names.codes
        stored, cut = layout.shape, names.is_transposed or names.axis is not None
        if lead and (self.has_zeros or self.has_order or cut):
            raise ConfigError(f"{self.format} stores single matrices, got a weight of {shape}")
        if columns % self.group and not (cut or self.has_order):
            raise ConfigError(f"{self.format}: the columns of {shape} are not full groups")
        if names.axis is not None and (rows * columns % self.group or stored[0] * self.bits % 8):
            raise ConfigError(f"{self.format}: {shape} does not fill groups and bytes")
        words = rows if packing.endswith("AWQ") else math.gcd(rows, columns)
        if names.is_transposed and words * self.bits % WORD_BITS:
            raise ConfigError(f"{self.format}: {shape} does not fill words of 32 bits")
        of_rows = shape[:-1] if self.layout == "LLM.int8" else None
        grid, dtype = layout.grid, _DTYPES.get(packing, names.words)
        parts = [
            StoredPart(codes, dtype, (*lead, *packed_shape(packing, self.bits, *stored[-2:]))),
            StoredPart(names.scales, self.scale, of_rows or (*lead, *grid)),
        ]
        if self.has_zeros and names.zeros[1] == "FLOATS":
            parts.append(StoredPart(names.zeros[0], self.scale, grid))
        elif self.has_zeros:
            of_zeros = packed_shape(names.zeros[1], self.bits, *grid)
            parts.append(StoredPart(names.zeros[0], dtype, of_zeros))
        if self.has_order:
            parts.append(StoredPart(names.order, "I32", (columns,)))
        if names.minima:
            parts.append(StoredPart(names.minima, self.scale, (*lead, *grid)))
        return tuple(parts)

    def _stored(self, shape: Shape) -> Shape:
        names = _LAYOUTS[self.layout]
        if names.axis is not None:
            groups = math.prod(shape) // self.group
            return (groups, self.group) if names.axis else (self.group, groups)
        return (*shape[:-2], shape[-1], shape[-2]) if names.is_transposed else shape

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _raise(self) -> int:
        """The number that is added to words of zeros: one in each of their fields."""
        return sum(1 << shift for shift in range(0, WORD_BITS, self.bits)) * self.is_raised

    @override
    def code_layout(self, shape: Shape) -> CodeLayout:
        if self.layout in RECORDS:
            return replace(RECORDS[self.layout], shape=shape)
        names = _LAYOUTS[self.layout]
        zeros = 0 if names.minima else self._middle
        return CodeLayout(
            self._stored(shape), "INT", self.scale,
            (self.group, 1) if names.is_down else (1, self.group),
            product=names.product or self.scale, packing=names.codes[1], bits=self.bits,
            is_transposed=names.is_transposed, zeros=names.zeros[1] if self.has_zeros else zeros,
            raised=self._raise, has_order=self.has_order, minima="PLUS" if names.minima else "",
            times=names.times,
        )  # fmt: skip

    @property
    @override
    def trial_shapes(self) -> tuple[Shape, ...]:
        names = _LAYOUTS[self.layout]
        if self.layout in RECORDS:
            return ((2, 35, 512),)
        if names.is_transposed or names.axis is not None:  # Both dimensions fill words.
            return ((96, 3 * math.lcm(self.group, WORD_BITS)),)
        groups = 1 if self.layout == "LLM.int8" else 3 * math.lcm(self.group, 8) // self.group
        lead = () if self.has_zeros or self.has_order else (2,)
        return ((*lead, 35, groups * self.group),)

    def encode(self, weight: torch.Tensor) -> Encoding:
        """As `Codec.encode`: the scale of a group is its largest magnitude / (2^(bits - 1) - 0.5),
        or 1; with zeros it is the range of the group and 0 / (2^bits - 1). With an order the first
        group has the columns of the largest magnitudes.

        `aside` has `_shape` of ROWS, the weight's shape. Raises ConfigError for types of ggml too.
        """
        if self.layout in RECORDS:
            raise ConfigError(
                f"{self.format} is read and not written here; write numbers (`infinity merge --to "
                "bf16`), of which llama.cpp makes a GGUF file"
            )
        wide, shape = check_encode(self, weight), tuple(weight.shape)
        names = _LAYOUTS[self.layout]
        if names.axis is not None:
            wide = wide.reshape(self._stored(shape))
            wide = wide.t() if names.is_down else wide
        columns = wide.shape[-1]
        order = (
            wide.abs().amax(dim=0).argsort(descending=True, stable=True) if self.has_order else None
        )
        ordered = wide if order is None else wide[:, order]
        count = -(-columns // self.group)
        padded = torch.nn.functional.pad(ordered, (0, count * self.group - columns))
        groups = padded.reshape(math.prod(wide.shape[:-1]), count, self.group)
        scales, zeros, minima = self._scales_of(groups)
        exact = scales.float()[..., None] * names.times
        numbers = (groups - minima[..., None] if names.minima else groups) / exact
        has_floats = self.has_zeros and names.zeros[1] == "FLOATS"
        numbers = numbers if has_floats else numbers.round_()
        numbers = numbers.add_(zeros.float()[..., None]).round_()  # Integers stay as they are.
        codes = numbers.clamp_(0, (1 << self.bits) - 1).to(torch.uint8)
        del numbers
        ends = torch.stack([codes.amin(dim=-1), codes.amax(dim=-1)])
        product = FLOAT_DTYPES[names.product or self.scale]
        values = ((ends - zeros.float()) * exact[..., 0]).to(product).float() + minima.float()
        if not torch.isfinite(values.to(scales.dtype)).all():
            raise ConfigError(
                f"{self.format} cannot encode values up to {float(wide.abs().amax()):.3g} with "
                f"scales of {self.scale}; give another format, or keep this weight as it is"
            )
        codes = codes.flatten(1)[:, :columns]
        if order is not None:
            codes = codes[:, order.argsort()]
        if names.is_down:
            codes, scales, zeros = codes.t(), scales.t(), zeros.t()
        parts = [packed(codes.contiguous(), names.codes[1], self.bits), flat_bytes(scales)]
        if has_floats:
            parts.append(flat_bytes(zeros))
        elif self.has_zeros:
            stored = packed(zeros.to(torch.uint8).contiguous(), names.zeros[1], self.bits)
            if self.is_raised:
                stored = flat_bytes(stored.view(torch.int32) - as_int32(self._raise))
            parts.append(stored)
        if order is not None:
            parts.append(flat_bytes((order.argsort() // self.group).int()))
        if names.minima:
            parts.append(flat_bytes(minima))
        aside = {"_shape": torch.tensor(shape, dtype=torch.int32, device="cpu")}
        return Encoding(self, tuple(parts), aside if self.layout == "ROWS" else {})

    def _scales_of(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (scales and zeros and minima, as stored) of groups in the last dimension; zeros
        that are no floats are fp32."""
        names, dtype = _LAYOUTS[self.layout], FLOAT_DTYPES[self.scale]
        most, tiny = (1 << self.bits) - 1, torch.finfo(dtype).tiny
        if dtype is torch.float16:
            tiny *= torch.finfo(dtype).eps  # Subnormals: they keep small weights.
        if not (self.has_zeros or names.minima):
            largest = groups.abs().amax(dim=-1)
            exact = torch.where(largest == 0, 1.0, largest / (most / 2)) / names.times
            zeros = torch.full_like(largest, float(self._middle))
            return exact.to(dtype).clamp(min=tiny), zeros, torch.zeros_like(largest)
        low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
        exact = torch.where(high == low, 1.0, (high - low) / most)
        scales = exact.to(dtype).clamp(min=tiny)
        if names.minima:
            return scales, torch.zeros_like(low), low.to(dtype)
        zeros = -low / scales.float()
        if names.zeros[1] == "FLOATS":
            return scales, zeros.to(dtype), torch.zeros_like(low)
        return scales, zeros.round().clamp(self.is_raised, most), torch.zeros_like(low)

    @override
    def rows(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...] | None:
        names = _LAYOUTS[self.layout]
        if names.is_transposed or names.axis is not None:
            return None  # A row of the weight is no row of the stored matrix.
        codes, *others = self.parts(shape)
        if not others:
            return even_rows((codes,), shape[0], start, stop)
        scales, *others = others
        ranges = list(even_rows((codes, scales), shape[0], start, stop))
        if self.has_zeros and self.layout == "BYTES":
            ranges += even_rows(others[:1], shape[0], start, stop)
        elif self.has_zeros:
            step = WORD_BITS // math.gcd(WORD_BITS, self.bits)  # Rows that fill words of zeros.
            if start % step or (stop % step and stop != shape[0]):
                return None
            words = (start * self.bits // WORD_BITS, -(-stop * self.bits // WORD_BITS))
            ranges += even_rows(others[:1], others[0].shape[0], *words)
        if self.has_order:
            ranges.append((0, others[-1].nbytes))
        if names.minima:
            ranges += even_rows(others, shape[0], start, stop)
        return tuple(ranges)


def ggml(kind: str) -> AffineGroups:
    """Returns the codec of a type of ggml, by its name."""
    layout = RECORDS[kind]
    return AffineGroups(layout.block[1], layout.scale, layout.bits, kind)
