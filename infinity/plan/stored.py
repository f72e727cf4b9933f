"""The bytes of a model's weights as its checkpoint stores them, block by block. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.formats import PLAIN, stored_nbytes
from infinity.plan.shapes import ModelShape, linears, norms, numel_of


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Bytes of a block: of its routed experts (0 without), and of the rest. `is_encoded` says
    whether they are codes that a device decodes before it computes with them."""

    experts_nbytes: int
    rest_nbytes: int
    are_experts_encoded: bool
    is_rest_encoded: bool


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Bytes of the model. `head_nbytes` is 0 if the embedding is the head. `formats` names the
    formats, for a reader. `unused_nbytes` are in the files, but no pass reads them."""

    blocks: tuple[StoredBlock, ...]
    embedding_nbytes: int
    norm_nbytes: int
    head_nbytes: int
    formats: str
    unused_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that training reads."""
        blocks = sum(block.experts_nbytes + block.rest_nbytes for block in self.blocks)
        return blocks + self.embedding_nbytes + self.norm_nbytes + self.head_nbytes


def stored_of_shape(shape: ModelShape) -> StoredModel:
    """Returns the bytes of the published checkpoint, by the rule of the model's file."""
    parts = frozenset(shape.stored.parts) if shape.stored is not None else frozenset()
    name = PLAIN if shape.stored is None else shape.stored.format
    blocks = []
    for layer in range(shape.layers):
        nbytes = {True: 0, False: 0}
        encoded = {True: False, False: False}
        for linear in linears(shape, layer):
            format_name = name if linear.part in parts else PLAIN
            is_expert = linear.part == "experts"
            one_nbytes = stored_nbytes(format_name, linear.rows, linear.columns)
            nbytes[is_expert] += linear.count * one_nbytes
            encoded[is_expert] |= format_name != PLAIN
        nbytes[False] += 2 * sum(numel_of(size) for size in norms(shape).values())
        blocks.append(StoredBlock(nbytes[True], nbytes[False], encoded[True], encoded[False]))
    table_nbytes = 2 * shape.vocab * shape.hidden
    return StoredModel(
        blocks=tuple(blocks),
        embedding_nbytes=table_nbytes,
        norm_nbytes=2 * shape.hidden,
        head_nbytes=0 if shape.tied else table_nbytes,
        formats=PLAIN if name == PLAIN else f"{name} ({', '.join(sorted(parts))}), rest {PLAIN}",
    )
