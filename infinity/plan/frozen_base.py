"""The facts about a frozen base that its forecast needs beside units and work."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from typing_extensions import override

from infinity.codecs import AffineGroups, Codec, FloatBlocks, Plain, TableBlocks, mxfp4, nvfp4
from infinity.codecs import stored_nbytes as nbytes_of_parts
from infinity.codecs.part import Decoder
from infinity.config import AdapterConfig
from infinity.errors import ConfigError
from infinity.plan.shapes import ModelShape, numel_of
from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.stored import (
    StoredSlice,
    StoredTensor,
    StoredWeights,
    lay_out_stored,
    stored_tiles,
)
from infinity.state.units import TensorFacts, Unit
from infinity.storage.protocol import FileRange


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The frozen weights of a model. `decoded_per_byte` has, by tensor, the bytes that one stored
    byte becomes on the device; tensors that are used as they are stored are left out. `tensors` has
    the ranges of files, by tensor; empty if the files are not there. `is_copied`: the engine copies
    the weights, decoded, to the tiers of `parameters`, and reads them there."""

    stored: StoredModel
    adapter: AdapterConfig
    num_params: int
    trained_params: int
    decoded_per_byte: Mapping[str, float]
    tensors: Mapping[str, StoredTensor]
    is_copied: bool = False

    def in_place(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Returns the units with frozen weights in the files of their checkpoint, and the pages
        that a read of them takes: the engine's own functions cut and cover the ranges."""
        specs = [spec.facts for unit in units if not unit.state_numel for spec in unit.tensors]
        tiles: defaultdict[str, list[TensorFacts]] = defaultdict(list)
        for facts in specs:
            tiles[_full_name(facts.name)].append(facts)
        found: dict[str, StoredTensor] = {}
        for name, parts in tiles.items():
            starts = list(accumulate((facts.shape[0] for facts in parts), initial=0))
            cut = stored_tiles(self.tensors.get(name, ()), starts)
            assert cut is not None
            found.update(zip((facts.name for facts in parts), cut, strict=True))

        def stored(unit: Unit) -> StoredWeights:
            if not self.tensors:
                return StoredWeights(unit.weight_nbytes, (), ())
            return lay_out_stored({spec.name: found[spec.name] for spec in unit.tensors})

        return tuple(u if u.state_numel else replace(u, stored=stored(u)) for u in units)

    def decoded_nbytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's weights (or of a chunk's) that are decoded for a use."""
        return int(
            sum(
                tensor.weight_nbytes * self.decoded_per_byte.get(_full_name(tensor.name), 0.0)
                for tensor in unit.tensors
            )
        )

    def attached_per_byte(self, tensor: str) -> float:
        """Returns the bytes that a stored byte of a tensor is where the device computes."""
        return self.decoded_per_byte.get(_full_name(tensor), 1.0)

    def attached_nbytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's weights where the device computes with them."""
        if unit.state_numel:
            return unit.weight_nbytes
        tensors = unit.tensors
        found = sum(
            tensor.weight_nbytes * self.attached_per_byte(tensor.name) for tensor in tensors
        )
        return align_up(int(found), PAGE_NBYTES)


def _full_name(tensor: str) -> str:
    """Returns the name of the tensor of which a chunk is a part."""
    return tensor.partition(".tiles.")[0]


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Weights of a model in its checkpoint. `is_encoded` says whether they are codes that a device
    decodes before it computes with them.

    `tensor` has the ranges of the files, as a parameter of the planned shape: bytes, or a row for
    each expert. It is empty if the files are not there.
    """

    nbytes: int
    is_encoded: bool = False
    tensor: StoredTensor = ()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The weights of a block: routed experts (no bytes without), and the rest."""

    experts: PlannedPart
    rest: PlannedPart


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Bytes of the model. `head` has none if the embedding is the head. `formats` names the
    formats, for a reader. `unused_nbytes` are in the files, but no pass reads them."""

    blocks: tuple[StoredBlock, ...]
    embedding: PlannedPart
    norm: PlannedPart
    head: PlannedPart
    formats: str
    unused_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that training reads."""
        blocks = sum(block.experts.nbytes + block.rest.nbytes for block in self.blocks)
        return blocks + self.embedding.nbytes + self.norm.nbytes + self.head.nbytes


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
    parts = joined(ranges)
    nbytes = sum(part.nbytes for part in parts)
    return (StoredSlice("", (slice(0, nbytes),), (0,), (nbytes,), _PlannedBytes(), parts),)


def stored_experts(
    of_experts: Mapping[int, Iterable[FileRange]], stacks: Iterable[FileRange], count: int
) -> StoredTensor:
    """Returns a planned parameter with a row for each of `count` experts. `of_experts` are ranges
    of single experts; a range of `stacks` has all experts one behind the other."""
    codec = _PlannedBytes()
    single = [
        StoredSlice("", (expert,), (), (), codec, joined(ranges))
        for expert, ranges in sorted(of_experts.items())
    ]
    stacked = [
        StoredSlice("", (slice(0, count),), (0,), (count, stack.nbytes // count), codec, (stack,))
        for stack in stacks
    ]
    return (*single, *stacked)


def joined(ranges: Iterable[FileRange]) -> tuple[FileRange, ...]:
    """Returns the ranges in the order of files and offsets, neighbours as one."""
    found: list[FileRange] = []
    for part in sorted(ranges, key=lambda part: (part.path, part.offset_nbytes)):
        last = found[-1] if found else None
        if last and last.path == part.path and last.end_nbytes == part.offset_nbytes:
            found[-1] = replace(last, nbytes=last.nbytes + part.nbytes)
        else:
            found.append(part)
    return tuple(found)


def stored_of_shape(shape: ModelShape) -> StoredModel:
    """Returns the bytes of the published checkpoint, by the rule of the model's file."""
    parts = frozenset(shape.stored.parts) if shape.stored is not None else frozenset()
    name = PLAIN if shape.stored is None else shape.stored.format
    blocks = []
    for block in shape.blocks:
        nbytes = {True: 0, False: 0}
        encoded = {True: False, False: False}
        for weight in block.weights:
            is_encoded = weight.is_linear and weight.part in parts
            *stacked, rows, columns = weight.shape if weight.is_linear else (weight.numel, 1)
            one_nbytes = stored_nbytes(name if is_encoded else PLAIN, rows, columns)
            of_experts = weight.part == "experts"
            nbytes[of_experts] += math.prod(stacked) * one_nbytes
            encoded[of_experts] |= is_encoded
        experts, rest = (PlannedPart(nbytes[key], encoded[key]) for key in (True, False))
        blocks.append(StoredBlock(experts, rest))
    return StoredModel(
        blocks=tuple(blocks),
        embedding=PlannedPart(2 * numel_of(shape.embedding)),
        norm=PlannedPart(2 * numel_of(shape.norm)),
        head=PlannedPart(2 * numel_of(shape.head)),
        formats=PLAIN if name == PLAIN else f"{name} ({', '.join(sorted(parts))}), rest {PLAIN}",
    )


PLAIN = "bf16"
_CODECS: dict[str, Codec] = {
    PLAIN: Plain("BF16"),
    "fp8-128x128": FloatBlocks(),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "nf4": TableBlocks(),
}


# Of compressed-tensors, or else of the named writer; a group of -1 is a whole row.
_INTEGERS = re.compile(r"(gptq-|awq-|mlx-|)int([2-8])-g(-1|[1-9]\d*)")


def stored_nbytes(format_name: str, rows: int, columns: int) -> int:
    """Returns the bytes of a matrix of [rows, columns] with its scales. Raises ConfigError for an
    unknown format, and for a matrix that the format cannot store."""
    codec = _CODECS.get(format_name)
    if found := _INTEGERS.fullmatch(format_name):
        writer, bits, group = found[1].rstrip("-").upper(), int(found[2]), int(found[3])
        size = columns if group == -1 else group
        codec = AffineGroups(size, bits=bits)
        if writer == "MLX":
            codec = AffineGroups(size, bits=bits, layout=writer)
        elif writer:  # GPTQ stores the group of each column, whatever it is.
            codec = AffineGroups(size, "F16", bits, writer, True, has_order=writer == "GPTQ")
    if codec is None:
        raise ConfigError(
            f"stored.format: expected one of {', '.join(_CODECS)}, int4-g32, gptq-int4-g128, "
            f"awq-int4-g128, mlx-int4-g64 or other bits and groups; got {format_name!r}"
        )
    return nbytes_of_parts(codec, (rows, columns))
