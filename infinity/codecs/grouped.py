"""The checkpoints of codes in groups under names of their own: GPTQ, AWQ, AutoRound, MLX, HQQ; and
what `infinity convert` makes of GGUF files.

Sources: AutoGPTQ and GPTQModel (`qlinear/`; `utils/model.py`: the two conventions of zeros),
AutoAWQ (`utils/packing_utils.py`), auto-round (`inference/backend.py`: with and without "zp+-1"),
mlx-lm (`utils.py`: quantize_model), hqq (`core/quantize.py`: HQQLinear.state_dict).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from infinity.codecs.affine import AffineGroups, ggml
from infinity.codecs.found import FoundTensors, no_codec
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


class GroupedScheme:
    """Codes of in x out with a scale and a zero per group of rows, under names of their own."""

    def __init__(self, quantization: Mapping[str, Any], where: str) -> None:
        self._layout, self._is_raised = _layout_of(quantization, where)
        self._sizes = list(dict.fromkeys(_sizes_of(quantization)))
        self._has_order = bool(quantization.get("desc_act"))
        allowed = [4] if self._layout == "AWQ" else [2, 4, 8]
        if (self._layout, self._is_raised) == ("GPTQ", False):
            allowed = list(range(2, 9))
        for bits, group in self._sizes:
            is_size = isinstance(group, int) and (group > 0 or group == -1)
            if bits not in allowed or not is_size:
                told = f"{quantization.get('quant_method')} with {bits=}, group_size={group!r}"
                known = f"{' or '.join(map(str, allowed))} bits in groups of any size, or of -1"
                raise no_codec(where, told, known)

    @property
    def format(self) -> str:
        """The layout, and the bits and the columns of a group of most weights, in one word."""
        bits, group = self._sizes[0]
        order = "-order" if self._has_order and self._layout == "GPTQ" else ""
        return f"{self._layout.lower()}-int{bits}-g{group}{order}"

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
            codec = AffineGroups(
                codec.group, dtype, codec.bits, self._layout, True, self._is_raised, True
            )
            found.add(f"{module}.weight", codec, shape, names)
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


class MlxScheme:
    """`weight` U32, `scales` and `biases` (transformers' metal: `qbiases`); `quantization` has bits
    and group size, and those of single modules under their names."""

    def __init__(self, quantization: Mapping[str, Any], where: str) -> None:
        is_metal = quantization.get("quant_method") == "metal"
        self._layout, self._minima = ("METAL", "qbiases") if is_metal else ("MLX", "biases")
        allowed = (2, 4, 8) if is_metal else (2, 3, 4, 5, 6, 8)
        modules = {key: own for key, own in quantization.items() if isinstance(own, Mapping)}
        self._sizes: dict[str, tuple[Any, int]] = {}
        for module, own in {"": quantization, **modules}.items():
            bits, group = own.get("bits"), own.get("group_size", quantization.get("group_size"))
            mode = own.get("mode", quantization.get("mode", "affine"))
            is_size = isinstance(group, int) and group > 0
            if bits not in allowed or not is_size or mode != "affine":
                told = f"mode={mode!r}, bits={bits!r}, group_size={group!r}"
                told += f" ({module})" if module else ""
                known = f"mode='affine' in {', '.join(map(str, allowed))} bits"
                raise no_codec(where, f"{self._layout} with {told}", known)
            self._sizes[module] = bits, group

    @property
    def format(self) -> str:
        """As `GroupedScheme.format`."""
        bits, group = self._sizes[""]
        return f"mlx-int{bits}-g{group}"

    def __call__(self, found: FoundTensors) -> None:
        """Finds the weights; see `Scheme`."""
        for scales in found.unused(".scales"):
            module = scales.removesuffix(".scales")
            names = [f"{module}.{part}" for part in ("weight", "scales", self._minima)]
            dtype, _ = found.scales(scales)
            if names[0] not in found.headers:
                raise found.error(f"{names[0]!r} is missing, to which {scales!r} belongs")
            bits, group = self._sizes.get(module, self._sizes[""])
            *leading, words = found.matrix(names[0])
            codec = AffineGroups(group, dtype, bits, self._layout)
            found.add(f"{module}.weight", codec, (*leading, words * WORD_BITS // bits), names)
        found.refuse_leftovers((".scales", f".{self._minima}"), self._layout)


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
    facts = {fact: _numbers_in(found, f"{module}.{fact}") for fact in _FACTS_OF_HQQ[:4]}
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


def _numbers_in(found: FoundTensors, name: str) -> tuple[int, ...]:
    """Returns the integers of a small tensor, none if it is not there. Raises ConfigError."""
    dtype = found.headers.get(name, ("",))[0]
    if not dtype:
        return ()
    if dtype not in ("I32", "I64"):
        raise found.error(f"{name!r} is {dtype}; expected I32 or I64, as hqq writes it")
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
    return not torch.equal(order, (torch.arange(columns) // group).int())


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


def _sizes_of(quantization: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields (bits, group_size) of config.json, and those of single modules."""
    bits, group = quantization.get("bits"), quantization.get("group_size", 128)
    yield bits, group
    for key in ("dynamic", "extra_config"):  # Of GPTQModel and of AutoRound.
        modules = quantization.get(key)
        for own in modules.values() if isinstance(modules, Mapping) else ():
            own_bits = own.get("bits", bits) if isinstance(own, Mapping) else bits
            if isinstance(own_bits, int) and own_bits <= 8:  # Else they are not quantised.
                own_group = own.get("group_size", group) if isinstance(own, Mapping) else group
                yield own_bits, own_group
