"""The checkpoints that have floats of 8 or 4 bits, and scales beside them under names of their own.

    DeepSeek, Kimi, Qwen, Mistral (`quant_method` fp8)    fbgemm    modelopt    quark    gpt-oss

The dtypes of codes and scales say what is stored, and the shape of FP8 scales which block they are
of. Sources: transformers `integrations/finegrained_fp8.py`, `fbgemm_fp8.py`, `mxfp4.py`; modelopt
`torch/export/quant_utils.py`; vLLM `quantization/modelopt.py`, `quark/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infinity.bounded import MalformedError, integer, list_of
from infinity.codecs.affine import AffineGroups
from infinity.codecs.floats import MX_BLOCK, NVFP4_BLOCK, FloatBlocks, mxfp4, nvfp4
from infinity.codecs.found import FoundTensors, Scheme, no_codec
from infinity.codecs.part import Shape, StoredPart
from infinity.codecs.rounding import FLOAT_DTYPES
from infinity.errors import ConfigError

Block = tuple[int, int]  # See `FloatBlocks.block`.

ROUTED = r"re:.*\bexperts\."  # A pattern of modules.

PER_TENSOR, PER_ROW, PER_COLUMN, MXFP8 = (0, 0), (1, 0), (0, 1), (1, MX_BLOCK)
_MODELOPT_BLOCKS = (PER_TENSOR, PER_ROW, (128, 128), MXFP8)
_MODELOPT_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "MXFP4", "NVFP4", "NVFP4_AWQ",
    "W4A16_NVFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8", "MIXED_PRECISION",
)  # fmt: skip
# By a word of an algorithm of modelopt, or of a table of quark.
_FORMATS = {
    "w4a8_nvfp4": "nvfp4-g32", "nvfp4": "nvfp4", "mxfp8": "fp8-1x32-u8", "pb_wo": "fp8-128x128",
    "per_channel": "fp8-1x0", "fp4": "mxfp4",
}  # fmt: skip
_FP8_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_POWERS = ("F8_E8M0", "U8")
_INT4_OF_QUARK = {"int4": "QUARK_SIGNED", "uint4": "QUARK"}  # The layouts of its dtypes.
_LEFTOVERS = ("_scale_inv", ".weight_scale", ".weight_scale_2", ".qscale_weight")
_OF_NO_CODEC = {
    "_weight_scale": "is of experts that modelopt has packed into one tensor, which no codec "
    "reads; infinity convert DIR -o OUT writes a matrix for each expert of Llama 4",
    ".pre_quant_scale": "multiplies the inputs of a layer, which transformers' class does not do; "
    "infinity convert DIR -o OUT multiplies the weights, which become bfloat16. Or use a "
    "checkpoint that modelopt has quantized without AWQ and SVDQuant (NVFP4)",
}


class FloatScheme:
    """Codes F8_E4M3, or U8 or I8 of two codes E2M1 each, and their scales.

    | codes | scales, after the name of the codes | format |
    | --- | --- | --- |
    | F8_E4M3 | `_scale_inv`, `_scale` | FP8 in one of `blocks`, MXFP8 |
    | U8, I8 | `_scale` F8_E8M0 or U8 | MXFP4 |
    | U8 | `_scale` F8_E4M3 and `_scale_2` F32 | NVFP4 |
    | I32 | `_scale`, `_zero_point` I32 | INT4 of quark |

    `.scale` and `.qscale_weight` in place of `.weight` are other names of scales.
    """

    def __init__(self, blocks: Sequence[Block], groups: Mapping[str, int] = {}) -> None:
        """blocks: those that FP8 codes may have; groups: of INT4 in a layout of quark."""
        self._blocks, self._groups = tuple(blocks), groups

    def __call__(self, found: FoundTensors) -> None:
        """Finds the weights; see `Scheme`."""
        for end, told in _OF_NO_CODEC.items():
            for name in found.unused(end):
                raise found.error(f"{name!r} {told}, or the bfloat16 one")
        for layout, group in self._groups.items():
            for name in found.unused(".weight"):
                dtype, scales = found.headers[name][0], found.headers.get(f"{name}_scale", ("",))
                if dtype == "I32" and scales[0] in FLOAT_DTYPES:
                    *leading, columns, words = found.matrix(name)
                    codec = AffineGroups(group, scales[0], 4, layout, True)
                    names = (name, f"{name}_scale", f"{name}_zero_point")
                    found.add(name, codec, (*leading, 8 * words, columns), names)
        for name, (dtype, _) in found.headers.items():
            if dtype in ("U8", "I8"):
                scale = _scale_of(found, name)
                if scale is not None:
                    add_fp4(found, name, scale, f"{name}_scale_2")
        for name, (dtype, _) in found.headers.items():
            if dtype != "F8_E4M3" or found.is_used(name):
                continue
            scale = _scale_of(found, name)
            if scale is None:
                raise found.error(
                    f"{name!r} is F8_E4M3, and its scales {name + '_scale_inv'!r} are missing; "
                    "copy the checkpoint again, or use one that is complete"
                )
            add_fp8(found, name, scale, self._blocks)
        found.refuse_leftovers(_LEFTOVERS, "FP8 or FP4")


def _scale_of(found: FoundTensors, name: str) -> str | None:
    stem = name.removesuffix(".weight")
    names = (f"{name}_scale_inv", f"{stem}.scale", f"{stem}.qscale_weight", f"{name}_scale")
    return next((scale for scale in names if scale in found.headers), None)


def add_fp8(
    found: FoundTensors, name: str, scale: str, blocks: Sequence[Block], *, is_rounded: bool = False
) -> None:
    """Adds FP8 codes with the first of the blocks that has as many scales. `is_rounded`: products
    have the dtype of the scales.

    Dimensions of length 1 may be stored or left out. Raises ConfigError if no block fits.
    """
    shape, (dtype, stored) = found.matrix(name), found.scales(scale, _FP8_SCALES)
    product = dtype if is_rounded and dtype in FLOAT_DTYPES else "F32"
    codecs = [FloatBlocks(block, dtype, product=product) for block in blocks]
    grids = [found.parts(name, codec, shape)[1].shape for codec in codecs]
    fits = [stored == grid for grid in grids]
    if not any(fits):
        fits = [_without_ones(stored) == _without_ones(grid) for grid in grids]
    if not any(fits) and len(blocks) != 1:
        raise found.error(
            f"{scale!r} has shape {stored} for FP8 codes of {shape}, which fits no group of "
            "config.json"
        )
    codec = codecs[fits.index(True) if any(fits) else 0]
    codes, scales = found.parts(name, codec, shape)
    if any(fits):
        scales = StoredPart(scales.suffix, dtype, stored)
    found.add(name, codec, shape, (name, scale), parts=(codes, scales))


def add_fp4(
    found: FoundTensors, codes: str, scale: str, global_scale: str, *, name: str = "",
    is_divided: bool = False,
) -> None:  # fmt: skip
    """Adds codes E2M1, two of which are in a byte, with the dtype of their scales: NVFP4 if it is
    F8_E4M3, which then have a global one, else MXFP4. `name`: of the weight, if not `codes`."""
    (stored, _), (dtype, _) = found.headers[codes], found.headers.get(scale, ("", ()))
    shape = found.matrix(codes)
    if dtype == "F8_E4M3":
        is_wide = not is_divided and NVFP4_BLOCK * found.matrix(scale)[-1] == shape[-1]
        block = MX_BLOCK if is_wide else NVFP4_BLOCK
        codec = nvfp4("OVER" if is_divided else "TIMES", block)
        names = [codes, scale, global_scale]
    else:
        codec, names = mxfp4(), [codes, scale]
    logical = (*shape[:-1], 2 * shape[-1])
    of_codes, scales, *of_matrices = found.parts(name or codes, codec, logical)
    parts = [StoredPart(of_codes.suffix, stored, of_codes.shape), scales]
    if dtype in _POWERS:
        parts[1] = StoredPart(scales.suffix, dtype, scales.shape)
    for part in of_matrices:
        _, length = found.headers.get(global_scale, ("", ()))
        is_same = _without_ones(length) == _without_ones(part.shape)
        parts.append(StoredPart(part.suffix, "F32", length if is_same else part.shape))
    found.add(name or codes, codec, logical, names, parts=parts)


def _without_ones(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)


def find_mxfp4(found: FoundTensors) -> None:
    """Finds the weights of gpt-oss: `..._blocks` and `..._scales` U8 of the transposed weight."""
    for blocks in found.unused("_blocks"):
        name, shape = blocks.removesuffix("_blocks"), found.headers[blocks][1]
        if len(shape) < 3 or shape[-1] != MX_BLOCK // 2:
            raise found.error(
                f"{blocks!r} has shape {shape}; MXFP4 needs (..., rows, blocks, {MX_BLOCK // 2})"
            )
        logical = (*shape[:-3], MX_BLOCK * shape[-2], shape[-3])
        found.add(name, mxfp4(True), logical, (blocks, f"{name}_scales"))
    found.refuse_leftovers(("_scales",), "MXFP4")


# -- What the configurations of writers say --------------------------------------------------------


def fp8_scheme(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns the scheme of `quant_method` fp8. Raises ConfigError."""
    if quantization.get("fmt") not in (None, "e4m3"):
        raise ConfigError(f"{where}: expected FP8 of fmt='e4m3', got {quantization['fmt']!r}")
    block = quantization.get("weight_block_size")
    blocks = [PER_TENSOR, PER_ROW] if block is None else [_two_sizes(block, where)]
    formats = [("*", "fp8-{}x{}".format(*blocks[0]))]
    if quantization.get("expert_dtype") == "fp4":
        formats.insert(0, (ROUTED, "mxfp4"))
    return Scheme(FloatScheme(blocks), formats)


def modelopt_scheme(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns the scheme of modelopt. Raises ConfigError for an algorithm that no codec knows."""
    formats = []
    for name, own in {"*": quantization, **(quantization.get("quantized_layers") or {})}.items():
        algorithm = own if isinstance(own, str) else (own or {}).get("quant_algo")
        if algorithm is not None and algorithm.upper() not in _MODELOPT_ALGORITHMS:
            raise no_codec(where, f"modelopt as {algorithm!r}", ", ".join(_MODELOPT_ALGORITHMS))
        formats.append((name, _format_of(algorithm) if algorithm else ""))
    size = quantization.get("group_size")
    sizes = NVFP4_BLOCK, MX_BLOCK
    if "NVFP4" in str(quantization.get("quant_algo")) and size not in (None, *sizes):
        raise ConfigError(f"{where}: expected NVFP4 in groups of 16 or 32, got {size!r}")
    # Where modules are named, others are numbers.
    return Scheme(FloatScheme(_MODELOPT_BLOCKS), formats[1:] or formats)


def quark_scheme(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns the scheme of quark. Raises ConfigError for a dtype that no codec knows."""
    tables = dict(quantization.get("layer_quant_config") or {})
    tables["*"] = quantization.get("global_quant_config")  # The last one.
    groups: dict[str, int] = {}
    formats = []
    for pattern, table in tables.items():
        weight = (table or {}).get("weight") or ()
        form = _format_of(weight) if weight else ""
        for told in [weight] if isinstance(weight, Mapping) else weight:
            dtype, scheme, size = (told.get(key) for key in ("dtype", "qscheme", "group_size"))
            if told.get("scale_format") == "e5m3":  # Bytes, as powers of two are.
                dtype = f"{dtype} with scales in e5m3"
            if dtype in _INT4_OF_QUARK and scheme == "per_group" and size is not None:
                groups[_INT4_OF_QUARK[dtype]], form = size, f"quark-int4-g{size}"
            elif dtype not in (None, "fp8_e4m3", "fp4", "mxfp4"):
                known = "fp8_e4m3, fp4 (MXFP4), and int4 and uint4 per_group"
                raise no_codec(where, f"quark as {dtype!r} ({scheme})", known)
        formats.append((pattern, form))
    algorithms = quantization.get("algo_config") or ()
    for algorithm in [algorithms] if isinstance(algorithms, Mapping) else algorithms:
        for key in ("r4", "online_r1_rotation"):
            if algorithm.get(key):
                raise ConfigError(
                    f"{where}: quark has rotated its weights ({key}), which a model undoes as it "
                    "computes, and transformers' does not; use a checkpoint without"
                )
    order = (quantization.get("export") or {}).get("pack_method", "reorder")
    if groups and (order != "reorder" or len(groups) > 1 or min(groups.values()) < 1):
        packed = f"quark with pack_method={order!r}, {groups}"
        raise no_codec(where, packed, "one kind of INT4 with pack_method='reorder'")
    return Scheme(FloatScheme((PER_TENSOR, PER_ROW), groups), formats)


def _format_of(told: object) -> str:
    """Returns the format of an algorithm of modelopt, or of what quark says of weights."""
    text = str(told).lower()
    return next((name for word, name in _FORMATS.items() if word in text), "fp8-0x0")


def _two_sizes(block: Any, where: str) -> tuple[int, int]:
    try:
        sizes = [integer(size, "a size") for size in list_of(block, "it")]
    except MalformedError:
        sizes = []
    if len(sizes) != 2 or 0 in sizes:
        raise ConfigError(
            f"{where}: expected a weight_block_size of two positive numbers, got {block!r}"
        )
    return sizes[0], sizes[1]
