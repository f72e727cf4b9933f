"""The bytes of a model in its checkpoint: where training reads a frozen base."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from infinity.codecs import AffineGroups, Codec, FloatBlocks, Plain, TableBlocks, mxfp4, nvfp4
from infinity.codecs import stored_nbytes as nbytes_of_parts
from infinity.codecs.floats import MX_BLOCK
from infinity.codecs.part import Decoder
from infinity.errors import ConfigError
from infinity.plan.shapes import ModelShape, PartKey, Place, Weight
from infinity.sizes import joined
from infinity.state.stored import StoredSlice, StoredTensor
from infinity.storage.protocol import FileRange


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Weights of a model in its checkpoint. `is_encoded` says whether they are codes that a device
    decodes before it computes with them.

    `tensor` has the ranges of the files, as a parameter of the planned shape: bytes, or a row for
    each expert. It is empty if the files are not there. `matrices` are counted among the bytes, and
    are not in `tensor`: by shape, those that the engine may divide by rows.
    """

    nbytes: int
    is_encoded: bool = False
    tensor: StoredTensor = ()
    matrices: Matrices = ()


Matrices = tuple[tuple[tuple[int, ...], PlannedPart], ...]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The parts of a model. There is no "head" if the embedding is the head. `formats` names the
    formats, for a reader."""

    parts: Mapping[PartKey, PlannedPart]
    formats: str

    def part(self, place: Place, *, of_experts: bool = False) -> PlannedPart:
        """Returns the weights of a place; of no bytes if there are none."""
        return self.parts.get((place, of_experts), PlannedPart(0))

    @property
    def unused_nbytes(self) -> int:
        """Bytes in the files that no pass over text reads."""
        return self.part("unused").nbytes + self.part("tower").nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that training on text reads."""
        return sum(part.nbytes for part in self.parts.values()) - self.unused_nbytes

    @property
    def is_quantised(self) -> bool:
        """Whether some weights of blocks are codes, which cannot be trained."""
        return any(p.is_encoded for (place, _), p in self.parts.items() if isinstance(place, int))


class _PlannedBytes(Decoder):
    """Stands for the codec of ranges that a plan counts and nobody decodes."""

    @override
    def decode(
        self, parts: Sequence[torch.Tensor], shape: tuple[int, ...], out: torch.Tensor
    ) -> None:
        raise AssertionError("a plan reads no weights")

    @override
    def rows(self, shape: tuple[int, ...], start: int, stop: int) -> Sequence[tuple[int, int]]:
        return [(start * shape[1], stop * shape[1])]  # Of a stack: (experts, bytes of one).


def stored_bytes(ranges: Iterable[FileRange]) -> StoredTensor:
    """Returns a planned parameter of bytes that rests in these ranges."""
    parts = _in_files(ranges)
    nbytes = sum(part.nbytes for part in parts)
    return (StoredSlice("", (slice(0, nbytes),), (0,), (nbytes,), _PlannedBytes(), parts),)


def stored_experts(
    of_experts: Mapping[int, Iterable[FileRange]], stacks: Iterable[FileRange], count: int
) -> StoredTensor:
    """Returns a planned parameter with a row for each of `count` experts. `of_experts` are ranges
    of single experts; a range of `stacks` has all experts one behind the other."""
    codec = _PlannedBytes()
    single = [
        StoredSlice("", (expert,), (), (), codec, _in_files(ranges))
        for expert, ranges in sorted(of_experts.items())
    ]
    stacked = [
        StoredSlice("", (slice(0, count),), (0,), (count, stack.nbytes // count), codec, (stack,))
        for stack in stacks
    ]
    return (*single, *stacked)


def _in_files(ranges: Iterable[FileRange]) -> tuple[FileRange, ...]:
    """Returns the ranges in the order of files and offsets, neighbours as one."""
    in_order = sorted(ranges, key=lambda part: (part.path, part.offset_nbytes))
    return joined(in_order, lambda part: part.path)


PLAIN = "bf16"


def stored_of_shape(
    shape: ModelShape, format_of: Callable[[Weight, Place], str] | None = None, plain: str = PLAIN
) -> StoredModel:
    """Returns the bytes of the published checkpoint. `format_of` a weight is "" for `plain` ones;
    None takes that of the model's file."""
    if format_of is None:
        format_of = shape.stored.of if shape.stored else lambda *_: ""
    used: dict[str, set[str]] = {}

    def part(weights: Iterable[Weight], place: Place = "norm") -> PlannedPart:
        nbytes, is_encoded, matrices = 0, False, []
        for weight in weights:
            own = format_of(weight, place)
            *stacked, rows, columns = weight.shape if own or weight.is_linear else (weight.numel, 1)
            if weight.part == "experts" and "gate_up" in weight.module and rows % 2 == 0:
                stacked, rows = [*stacked, 2], rows // 2  # Files have the two apart.
            one_nbytes = stored_nbytes(own or plain, rows, columns)
            if len(weight.shape) == 2 and (weight.is_linear or place in ("embedding", "head")):
                matrices.append((weight.shape, PlannedPart(one_nbytes, bool(own))))
            nbytes += math.prod(stacked) * one_nbytes
            if own:
                is_encoded = True
                used.setdefault(own, set()).add(weight.part if isinstance(place, int) else place)
        return PlannedPart(nbytes, is_encoded, matrices=tuple(matrices))

    parts: dict[PartKey, PlannedPart] = {
        ("embedding", False): part(shape.embedding, "embedding"),
        ("norm", False): part(shape.norm),
        ("head", False): part(shape.head, "head"),
        ("tower", False): part(shape.tower),
    }
    for layer, block in enumerate(shape.blocks):
        for is_routed in (True, False):
            weights = (w for w in block.weights if (w.part == "experts") == is_routed)
            parts[layer, is_routed] = part(weights, layer)
    said = [f"{name} ({', '.join(sorted(of))})" for name, of in used.items()]
    return StoredModel(parts, ", ".join([*said, f"rest {plain}"]) if said else plain)


_CODECS: dict[str, Codec] = {
    PLAIN: Plain("BF16"),
    "fp32": Plain("F32"),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "nvfp4-g32": nvfp4(block=MX_BLOCK),
    "nf4": TableBlocks(),
    "nf4-single": TableBlocks(nested_block=0),
}


# Of compressed-tensors, or else of the named writer; a group of -1 is a whole row.
_INTEGERS = re.compile(r"(gptq-|awq-|mlx-|quark-|)int([2-8])-g(-1|[1-9]\d*)(-zeros)?(-order)?")
# Rows and columns of a block, as `FloatBlocks` has them, and the dtype of the scales.
_FLOATS = re.compile(r"fp8-(\d+)x(\d+)(?:-(bf16|f16|f32|u8))?")


def stored_nbytes(format_name: str, rows: int, columns: int) -> int:
    """Returns the bytes of a matrix of [rows, columns] with its scales. Raises ConfigError for an
    unknown format, and for a matrix that the format cannot store."""
    codec = _CODECS.get(format_name)
    if found := _INTEGERS.fullmatch(format_name):
        writer, bits, group = found[1].rstrip("-").upper(), int(found[2]), int(found[3])
        size = columns if group == -1 else group
        has_order = found[5] is not None and size < columns  # One group has no order.
        codec = AffineGroups(size, bits=bits, has_zeros=bool(found[4]), has_order=has_order)
        if writer == "MLX":
            codec = AffineGroups(size, bits=bits, layout=writer)
        elif writer:
            codec = AffineGroups(size, "F16", bits, writer, True, has_order=has_order)
    elif blocks := _FLOATS.fullmatch(format_name):
        block = int(blocks[1]), int(blocks[2])
        codec = FloatBlocks(block, (blocks[3] or "f32").upper())
    if codec is None:
        raise ConfigError(
            f"stored.format: expected one of {', '.join(_CODECS)}, fp8-128x128, int4-g32, "
            "gptq-int4-g128, awq-int4-g128, mlx-int4-g64 or other blocks, bits and groups; got "
            f"{format_name!r}"
        )
    return nbytes_of_parts(codec, (rows, columns))
