"""The checkpoints of compressed-tensors: groups of modules, each with a scheme for its weights.

Source: compressed-tensors `quantization/quant_args.py`, `quantization/quant_config.py` and
`compressors/quantized_compressors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from infinity.codecs.affine import AffineGroups
from infinity.codecs.floating import MXFP8, PER_ROW, PER_TENSOR, add_fp4, add_fp8
from infinity.codecs.found import FoundTensors, Scheme, no_codec
from infinity.codecs.grouped import check_order, numbers_in
from infinity.codecs.packing import WORD_BITS, packed_shape
from infinity.errors import ConfigError

KNOWN_FORMATS = (
    "pack-quantized (2 to 8 bits), int-quantized (8 bits), float-quantized and naive-quantized, "
    "mxfp8-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized"
)
_FP8_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")
Codes = Literal["ROWS", "BYTES"]  # See `AffineGroups.layout`.

_BYTE = 8
_PACKED = ".weight_packed"
_LEFTOVERS = (
    _PACKED,
    ".weight_scale",
    ".weight_zero_point",
    ".weight_g_idx",
    ".weight_shape",
    ".weight_global_scale",
)


@dataclass(frozen=True, slots=True)
class _Group:
    """How the weights of some modules are stored. `size`: of groups of integers, 0 for rows."""

    kind: str  # "int", "bytes", "fp8", "mxfp4" or "nvfp4"
    size: int = 0
    block: tuple[int, int] = (0, 0)
    bits: int = 4
    is_symmetric: bool = True
    order: str = ""

    @property
    def told(self) -> str:
        """The facts of integers, for messages."""
        zeros = "" if self.is_symmetric else " with zero points"
        return f"{self.bits} bits in groups of {self.size or 'full rows'}{zeros}"

    @property
    def format(self) -> str:
        """As `Scheme.formats` has it."""
        if self.kind == "fp8":
            rows, columns = self.block
            return f"fp8-{rows}x{columns}-{'u8' if self.block == MXFP8 else 'bf16'}"
        if self.kind in ("mxfp4", "nvfp4"):
            return self.kind
        zeros = "" if self.is_symmetric else "-zeros"
        return f"int{self.bits}-g{self.size or -1}{zeros}{self.order}"


def compressed_scheme(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns the scheme of compressed-tensors. Raises ConfigError."""
    groups = quantization.get("config_groups")
    if not groups:
        raise ConfigError(f"{where}: expected config_groups of compressed-tensors, got none")
    for key in ("sparsity_config", "transform_config"):
        table = quantization.get(key)
        if table and table.get("format") != "dense":
            raise ConfigError(f"{where}: no codec knows {key} of compressed-tensors: {table}")
    found: list[_Group] = []
    formats: list[tuple[str, str]] = []
    for name, group in groups.items():
        table, form = group or {}, ""
        if table.get("weights") is not None:
            found.append(_parse_group(name, table, quantization.get("format"), where))
            form = found[-1].format
        formats += [(target, form) for target in table.get("targets") or ["Linear"]]
    classes = [("*", form) for target, form in formats if target == "Linear"]
    return Scheme(CompressedScheme(found), [*formats, *classes], is_exact=True)


class CompressedScheme:
    """`weight_packed` or F8_E4M3 `weight`, `weight_scale`, and for packed codes `weight_shape`."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self._groups = groups

    def __call__(self, found: FoundTensors) -> None:
        """Finds the weights; see `Scheme`."""
        for name in found.unused(_PACKED):
            stem = name.removesuffix("_packed")
            if found.headers[name][0] == "U8":
                self._add_fp4(found, stem)
            else:
                self._add_int(found, stem, name, "ROWS")
        has_bytes = any(group.kind == "bytes" for group in self._groups)
        for name, (dtype, _) in found.headers.items():
            if dtype == "F8_E4M3" and not found.is_used(name):
                self._add_fp8(found, name)
            elif dtype == "I8" and has_bytes and name.endswith(".weight"):
                self._add_int(found, name, name, "BYTES")
        found.refuse_leftovers(_LEFTOVERS, "compressed-tensors")

    def _add_int(self, found: FoundTensors, name: str, codes: str, layout: Codes) -> None:
        scale, zeros, order = f"{name}_scale", f"{name}_zero_point", f"{name}_g_idx"
        dtype, stored = found.scales(scale)
        shape, kind = found.matrix(codes), "bytes" if layout == "BYTES" else "int"
        groups = [group for group in self._groups if group.kind == kind]
        has_zeros = zeros in found.headers
        for group in groups:
            columns = group.size * stored[-1] if group.size and stored else 0
            if not columns or len(groups) > 1:
                said = _columns_of(found, name, shape[-1], group.bits, layout)
                if columns and columns != said:  # Codes of another group fill as many words.
                    continue
                columns = said
            size = group.size or max(columns, 1)
            logical = (*shape[:-1], columns)
            codec = AffineGroups(size, dtype, group.bits, layout, has_zeros)
            _, words = packed_shape(layout, group.bits, *logical[-2:])
            if words != shape[-1] or not columns or has_zeros == group.is_symmetric:
                continue
            names = [codes, scale, *([zeros] if has_zeros else ())]
            count = -(-columns // size)
            if order in found.headers and check_order(found, order, columns, count, size):
                codec, names = replace(codec, has_order=True), [*names, order]
            aside = [f"{name}_shape", *({order} - {*names})]
            found.add(name, codec, logical, names, aside=aside)
            return
        expected = " or ".join(group.told for group in groups) or "no group of such codes"
        raise found.error(
            f"{scale!r} has shape {stored} for codes {codes!r} of {shape}"
            f"{f' with {zeros!r}' if has_zeros else ''}; config.json says {expected}. Do "
            "config.json and the files belong together?"
        )

    def _add_fp4(self, found: FoundTensors, name: str) -> None:
        packed, scale = f"{name}_packed", f"{name}_scale"
        kinds = {"nvfp4": ("F8_E4M3",), "mxfp4": ("U8", "F8_E8M0")}
        known = [kind for kind in kinds if any(group.kind == kind for group in self._groups)]
        if not known:
            raise found.error(f"{packed!r} is U8, and config.json has no group of FP4")
        found.scales(scale, tuple(dtype for kind in known for dtype in kinds[kind]))
        add_fp4(found, packed, scale, f"{name}_global_scale", name=name, is_divided=True)

    def _add_fp8(self, found: FoundTensors, name: str) -> None:
        blocks = [group.block for group in self._groups if group.kind == "fp8"]
        blocks = [*dict.fromkeys(blocks), *blocks[:1]]
        add_fp8(found, name, f"{name}_scale", blocks, is_rounded=True)


def _columns_of(found: FoundTensors, name: str, packed: int, bits: int, layout: Codes) -> int:
    """Returns the columns of a weight whose last word may be short: as `weight_shape` says."""
    said = () if layout == "BYTES" else numbers_in(found, f"{name}_shape")
    words = packed if layout == "BYTES" else packed * WORD_BITS // bits
    return max(0, said[-1]) if said else words


def _parse_group(name: str, group: Mapping[str, Any], default: Any, where: str) -> _Group:
    """Returns a group of config_groups. Raises ConfigError for one that no codec knows."""
    weights, form = group["weights"], group.get("format") or default
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    told = f"format={form!r}, {bits} bits, type={kind!r}, strategy={strategy!r}, group_size={size}"
    is_symmetric = bool(weights.get("symmetric", True))
    is_grouped = strategy in ("group", None) and (size or 0) > 0
    if kind == "int" and (is_grouped or strategy == "channel"):
        own = int(size or 0) if is_grouped else 0
        if form == "pack-quantized" and bits in range(2, 9):
            order = "-order" if weights.get("actorder") in ("group", True) else ""  # Else unstored.
            return _Group("int", own, bits=bits, is_symmetric=is_symmetric, order=order)
        if form in ("int-quantized", "naive-quantized") and bits == _BYTE:
            return _Group("bytes", own, bits=bits, is_symmetric=is_symmetric)
    if not is_symmetric:
        raise _unknown(where, name, f"{told}, asymmetric (with zero points)")
    if form in _FP8_FORMATS and (kind, bits) == ("float", 8):
        block = _fp8_block(strategy, weights.get("block_structure"), size)
        if block is not None:
            return _Group("fp8", block=block)
    if (form, kind, bits, size) == ("mxfp4-pack-quantized", "float", 4, 32):
        return _Group("mxfp4")
    if (form, kind, bits, size) == ("nvfp4-pack-quantized", "float", 4, 16):
        return _Group("nvfp4")
    raise _unknown(where, name, told)


def _fp8_block(strategy: Any, structure: Any, size: Any) -> tuple[int, int] | None:
    """Returns the block of an FP8 strategy, None for one without a codec."""
    if strategy in ("tensor", None):
        return PER_TENSOR
    if strategy == "channel":
        return PER_ROW
    if strategy == "group" and isinstance(size, int) and size > 0:
        return 1, size
    if isinstance(structure, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", structure):
        structure = [int(size) for size in structure.split("x")]
    is_pair = isinstance(structure, list) and len(structure) == 2
    if strategy == "block" and is_pair and all(isinstance(n, int) and n > 0 for n in structure):
        return structure[0], structure[1]
    return None


def _unknown(where: str, name: str, told: str) -> ConfigError:
    return no_codec(where, f"{name} of compressed-tensors with {told}", KNOWN_FORMATS)
