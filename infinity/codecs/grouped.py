"""The checkpoints of codes in groups under names of their own: GPTQ, AWQ, AutoRound, MLX, HQQ; and
what `infinity convert` makes of GGUF files.

Sources: AutoGPTQ and GPTQModel (`qlinear/`; `utils/model.py`: the two conventions of zeros),
AutoAWQ (`utils/packing_utils.py`), auto-round (`inference/backend.py`: with and without "zp+-1"),
mlx-lm (`utils.py`: quantize_model), hqq (`core/quantize.py`: HQQLinear.state_dict).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from infinity.codecs.affine import AffineGroups, ggml
from infinity.codecs.found import FoundTensors, Scheme, no_codec
from infinity.codecs.packing import WORD_BITS
from infinity.codecs.part import StoredPart
from infinity.codecs.records import RECORDS
from infinity.errors import ConfigError

_LEFTOVERS = (".qweight", ".qzeros", ".scales", ".g_idx")
# Of AutoRound, its layout and whether stored zeros are less by one.
_PACKINGS: Mapping[str, tuple[str, bool]] = {
    "auto_round": ("GPTQ", False),
    "auto_round:gptqmodel": ("GPTQ", False),
    "auto_round:auto_gptq": ("GPTQ", True),
    "auto_round:auto_awq": ("AWQ", False),
}


def grouped_scheme(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns the scheme of GPTQ, AWQ and AutoRound. Raises ConfigError."""
    layout, is_raised = _layout_of(quantization, where)
    allowed = [4] if layout == "AWQ" else [2, 4, 8]
    if (layout, is_raised) == ("GPTQ", False):
        allowed = list(range(2, 9))
    order = "-order" if quantization.get("desc_act") and layout == "GPTQ" else ""
    sizes, formats = [], []
    for pattern, bits, group in _sizes_of(quantization):
        formats.append((pattern, f"{layout.lower()}-int{bits}-g{group}{order}" if bits else ""))
        if not bits and pattern != "*":
            continue
        if bits not in allowed or not (group == -1 or (group or 0) > 0):
            told = f"{quantization.get('quant_method')} with {bits=}, group_size={group!r}"
            known = f"{' or '.join(map(str, allowed))} bits in groups of any size, or of -1"
            raise no_codec(where, told, known)
        sizes.append((bits, group))
    return Scheme(GroupedScheme(layout, [sizes[-1], *sizes], is_raised=is_raised), formats)


class GroupedScheme:
    """Codes of in x out with a scale and a zero per group of rows, under names of their own.

    sizes: (bits, columns of a group, -1 for a row) that weights may have
    """

    def __init__(self, layout: str, sizes: Iterable[tuple[int, int]], *, is_raised: bool) -> None:
        self._layout, self._sizes, self._is_raised = layout, list(dict.fromkeys(sizes)), is_raised

    def __call__(self, found: FoundTensors) -> None:
        """Finds the weights; see `Scheme`."""
        for codes in found.unused(".qweight"):
            self._add(found, codes.removesuffix(".qweight"))
        found.refuse_leftovers(_LEFTOVERS, self._layout)

    def _add(self, found: FoundTensors, module: str) -> None:
        names = [f"{module}.{part}" for part in ("qweight", "scales", "qzeros", "g_idx")]
        codes, scales, _, order = names
        dtype, _ = found.scales(scales)
        found.matrix(codes)
        fitting = list(self._fitting(found, codes, dtype))
        codec, shape = next(
            (pair for pair in fitting if self._stores(found, *pair, names[:3])), fitting[0]
        )
        columns, count = shape[1], -(-shape[1] // codec.group)
        if order in found.headers and check_order(found, order, columns, count, codec.group):
            found.add(f"{module}.weight", replace(codec, has_order=True), shape, names)
        else:  # Groups lie side by side, as g_idx says, too.
            found.add(f"{module}.weight", codec, shape, names[:3], aside=(order,))

    def _fitting(
        self, found: FoundTensors, codes: str, dtype: str
    ) -> Iterator[tuple[AffineGroups, tuple[int, int]]]:
        """Yields the codec and the shape of the weight for each size in config.json."""
        *_, first, last = found.headers[codes][1]
        for bits, group in self._sizes:
            if self._layout == "AWQ":
                rows, columns = last * WORD_BITS // bits, first
            else:
                rows, columns = last, first * WORD_BITS // bits
            size = max(columns, 1) if group == -1 else group
            yield (
                AffineGroups(size, dtype, bits, self._layout, True, self._is_raised),
                (rows, columns),
            )

    @staticmethod
    def _stores(
        found: FoundTensors, codec: AffineGroups, shape: tuple[int, int], names: list[str]
    ) -> bool:
        try:
            parts = codec.parts(shape)
        except ConfigError:
            return False
        stored = [found.headers.get(name, ("", ()))[1] for name in names]
        return stored == [part.shape for part in parts]


def mlx_scheme(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Returns the scheme of `weight` U32, `scales` and `biases` (transformers' metal: `qbiases`).
    `quantization` has bits and group size, and those of single modules under their names, or false
    where they are numbers. Raises ConfigError."""
    is_metal = quantization.get("quant_method") == "metal"
    layout, allowed = ("METAL", (2, 4, 8)) if is_metal else ("MLX", (2, 3, 4, 5, 6, 8))
    sizes: dict[str, tuple[Any, int]] = {}
    formats = [(module, "") for module, own in quantization.items() if own is False]
    modules = {module: own for module, own in quantization.items() if isinstance(own, Mapping)}
    for module, own in {**modules, "*": quantization}.items():
        bits, group = own.get("bits"), own.get("group_size", quantization.get("group_size"))
        mode = own.get("mode", quantization.get("mode", "affine"))
        if bits not in allowed or (group or 0) < 1 or mode != "affine":
            told = f"mode={mode!r}, bits={bits!r}, group_size={group!r}"
            told += "" if module == "*" else f" ({module})"
            known = f"mode='affine' in {', '.join(map(str, allowed))} bits"
            raise no_codec(where, f"{layout} with {told}", known)
        sizes[module] = bits, group
        formats.append((module, f"mlx-int{bits}-g{group}"))
    return Scheme(partial(_find_mlx, layout, sizes), formats)


def _find_mlx(layout: str, sizes: Mapping[str, tuple[Any, int]], found: FoundTensors) -> None:
    minima = "qbiases" if layout == "METAL" else "biases"
    for scales in found.unused(".scales"):
        module = scales.removesuffix(".scales")
        names = [f"{module}.{part}" for part in ("weight", "scales", minima)]
        dtype, _ = found.scales(scales)
        if names[0] not in found.headers:
            raise found.error(f"{names[0]!r} is missing, to which {scales!r} belongs")
        bits, group = sizes.get(module, sizes["*"])
        *leading, words = found.matrix(names[0])
        codec = AffineGroups(group, dtype, bits, layout)
        found.add(f"{module}.weight", codec, (*leading, words * WORD_BITS // bits), names)
    found.refuse_leftovers((".scales", f".{minima}"), layout)


# What HQQ stores beside codes, scales and zeros, of which only the first four are read.
_FACTS_OF_HQQ = (
    "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


def find_hqq(found: FoundTensors) -> None:
    """Finds `W_q`, `scale` and `zero`; small tensors beside them say how they are stored."""
    for codes in found.unused(".W_q"):
        _add_hqq(found, codes.removesuffix(".W_q"))
    found.refuse_leftovers((".W_q", ".scale_q", ".zero_q"), "HQQ")


def _add_hqq(found: FoundTensors, module: str) -> None:
    names = [f"{module}.{part}" for part in ("W_q", "scale", "zero")]
    dtype, _ = found.scales(names[1])
    facts = {fact: numbers_in(found, f"{module}.{fact}") for fact in _FACTS_OF_HQQ[:4]}
    shape, (bits,), (axis,) = facts["shape"], facts["nbits"] or (0,), facts["axis"] or (-1,)
    if bits not in (1, 2, 4, 8) or axis not in (0, 1) or len(shape) != 2:
        raise found.error(
            f"{names[0]!r} is quantized by HQQ with nbits={bits}, axis={axis}, shape={shape}; "
            "a codec exists for matrices in 1, 2, 4 or 8 bits. Quantise the model again so"
        )
    (group,) = facts["group_size"] or (shape[axis],)
    codec = AffineGroups(max(1, group), dtype, bits, "HQQ" if axis else "HQQ_DOWN", True)
    name, logical = f"{module}.weight", (shape[0], shape[1])
    parts = list(found.parts(name, codec, logical))
    stored = found.headers[names[0]]
    as_stored = StoredPart("", *stored)
    if as_stored.nbytes == parts[0].nbytes:
        parts[0] = as_stored  # view_as_float: the same bytes under another dtype.
    aside = [f"{module}.{fact}" for fact in _FACTS_OF_HQQ]
    found.add(name, codec, logical, names, parts=parts, aside=aside)


def numbers_in(found: FoundTensors, name: str) -> tuple[int, ...]:
    """Returns the integers of a small tensor, none if it is not there. Raises ConfigError."""
    dtype = found.headers.get(name, ("",))[0]
    if not dtype:
        return ()
    if dtype not in ("I32", "I64"):
        raise found.error(f"{name!r} is {dtype}; expected I32 or I64")
    kind = torch.int32 if dtype == "I32" else torch.int64
    content = bytearray(found.read(name))
    return tuple(torch.frombuffer(content, dtype=kind).tolist()) if content else ()


def find_gguf(found: FoundTensors) -> None:
    """Finds what `infinity convert` writes of a GGUF file: a tensor of records has its type as the
    last part of its name."""
    for kind, layout in RECORDS.items():
        assert layout.record is not None
        for name in found.unused(f".{kind}"):
            *leading, width = found.matrix(name)
            shape = (*leading, width // layout.record.nbytes * layout.record.numel)
            found.add(name.removesuffix(f".{kind}"), ggml(kind), shape, [name])
    found.refuse_leftovers((), "GGUF")


def check_order(found: FoundTensors, name: str, columns: int, groups: int, group: int) -> bool:
    """Returns whether a `g_idx` orders columns in another way than side by side. Raises ConfigError
    for one of another shape, and for a group that is not there."""
    if found.headers[name] != ("I32", (columns,)):
        dtype, shape = found.headers[name]
        raise found.error(f"{name!r} is {dtype} {shape}; expected I32 {(columns,)}")
    order = torch.frombuffer(bytearray(found.read(name)), dtype=torch.int32)
    if columns and not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise found.error(
            f"{name!r} names groups {int(order.min())} to {int(order.max())}; there are {groups}. "
            "Copy the checkpoint again"
        )
    return not torch.equal(order, (torch.arange(columns, device="cpu") // group).int())


def _layout_of(quantization: Mapping[str, Any], where: str) -> tuple[str, bool]:
    """Returns the layout, and whether stored zeros are less by one. Raises ConfigError."""
    method = quantization.get("quant_method")
    if method == "awq":
        version = str(quantization.get("version", "gemm")).lower()
        if version == "gemm":
            return "AWQ", False
        raise no_codec(where, f"awq with {version=}", "'gemm'")
    if method == "gptq":
        form = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
        if form in ("gptq", "gptq_v2"):
            return "GPTQ", form == "gptq"
        raise no_codec(where, f"gptq with checkpoint_format={form!r}", "'gptq' and 'gptq_v2'")
    packing = quantization.get("packing_format", "auto_round:auto_gptq")
    kind = quantization.get("data_type", "int")
    if packing not in _PACKINGS or kind != "int":
        told = f"auto-round with packing_format={packing!r}, data_type={kind!r}"
        raise no_codec(where, told, f"'int' in {', '.join(_PACKINGS)}")
    return _PACKINGS[packing]


def _sizes_of(quantization: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (pattern of modules, bits, group_size) of single modules, and then of all others. Bits
    are 0 where modules are not quantised."""
    for key in ("dynamic", "extra_config"):  # Of GPTQModel and of AutoRound.
        for pattern, own in (quantization.get(key) or {}).items():
            table = {**quantization, **(own or {})}
            bits = 16 if pattern.startswith("-:") else table.get("bits") or 16
            text = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
            if key == "extra_config":  # Most are whole names.
                text = pattern if re.fullmatch(r"[\w.-]+", pattern) else f"{text}$"
            yield text, 0 if bits > 8 else bits, table.get("group_size", 128)
    yield "*", quantization.get("bits"), quantization.get("group_size", 128)
