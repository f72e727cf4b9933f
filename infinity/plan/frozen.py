"""A frozen base that rests in its checkpoint, with an adapter: units and work, as `plan.model`.

A block has two units: the adapter, which is trained, and the frozen weights, as many bytes as they
have in the checkpoint. Stored bytes are tensors of uint8 here; the routed experts have a row each,
so that they can be divided into chunks of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from infinity.config import AdapterConfig
from infinity.plan.adapters import AdapterSize, adapter_size, refuse_unknown_targets
from infinity.plan.frozen_base import FrozenBase
from infinity.plan.model import ModuleWork, PlannedModel, facts_of_shape
from infinity.plan.shapes import ModelShape, attention_width, linears, norms, numel_of
from infinity.plan.stored import PlannedPart, StoredBlock, StoredModel
from infinity.state.stored import StoredTensor
from infinity.state.units import OF_ADAM, Moments, TensorFacts, Unit, layout_unit
from infinity.tiers.ranges import rounded_nbytes


def frozen_model(
    shape: ModelShape,
    stored: StoredModel,
    adapter: AdapterConfig,
    dtype: torch.dtype,
    moments: Moments = OF_ADAM,
) -> PlannedModel:
    """Returns units and hooked modules in the order of the forward. `dtype` is that of adapters and
    of decoded weights. Raises ConfigError for a target that the model does not have."""
    refuse_unknown_targets(shape, adapter)
    builder = _Builder(shape, dtype, moments)
    embedding = builder.add_frozen("embedding", {"weight": stored.embedding})
    builder.work.append(ModuleWork((embedding,), 0, trained_params=0, has_backward=False))
    trained = 0
    for layer, block in enumerate(stored.blocks):
        size = adapter_size(shape, layer, adapter)
        trained += size.num_params
        builder.add_block(layer, block, size)
    norm = builder.add_frozen("final norm", {"weight": stored.norm})
    builder.work.append(ModuleWork((norm,), 0, trained_params=0))
    head = embedding
    if stored.head.nbytes:
        head = builder.add_frozen("head", {"weight": stored.head})
    builder.work.append(ModuleWork((head,), shape.vocab * shape.hidden, trained_params=0))
    units, base_params = builder.units, builder.num_params + _outside_params(shape)
    return PlannedModel(
        name=shape.name,
        units=tuple(units),
        hooked_modules=tuple(builder.work),
        held_nbytes=_held_nbytes(units, builder.work),
        num_params=base_params,
        checkpoint_width=shape.hidden,
        frozen=FrozenBase(
            stored, adapter, base_params, trained, builder.decoded_per_byte, builder.tensors
        ),
    )


def copied_model(model: PlannedModel, dtype: torch.dtype) -> PlannedModel:
    """Returns the model as the engine trains it where it copies the base: with placement.frozen =
    "copy"."""
    frozen = model.frozen
    assert frozen is not None

    def decoded(facts: TensorFacts) -> TensorFacts:
        *rows, last = facts.shape
        nbytes = last * frozen.attached_per_byte(facts.name)
        size = (*rows, int(nbytes) // dtype.itemsize)
        return facts_of_shape(facts.name, size, dtype, is_trainable=False)

    units = [
        unit
        if unit.state_numel
        else layout_unit(
            unit.index, unit.name, [decoded(spec.facts) for spec in unit.tensors], unit.moments
        )
        for unit in model.units
    ]
    return replace(
        model,
        units=tuple(units),
        held_nbytes=_held_nbytes(units, model.hooked_modules),
        frozen=replace(frozen, decoded_per_byte={}, tensors={}, is_copied=True),
    )


def _held_nbytes(units: Sequence[Unit], work: Sequence[ModuleWork]) -> int:
    return max(
        sum(rounded_nbytes(units[unit].weight_nbytes) for unit in hooked.units) for hooked in work
    )


def _outside_params(shape: ModelShape) -> int:
    return (1 if shape.tied else 2) * shape.vocab * shape.hidden + shape.hidden


class _Builder:
    """Collects units and work of a shape."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, moments: Moments) -> None:
        self._shape = shape
        self._dtype = dtype
        self._moments = moments
        self.units: list[Unit] = []
        self.work: list[ModuleWork] = []
        self.num_params = 0
        self.decoded_per_byte: dict[str, float] = {}
        self.tensors: dict[str, StoredTensor] = {}

    def add_frozen(self, name: str, parts: Mapping[str, PlannedPart], num_experts: int = 0) -> int:
        """Adds a unit of stored bytes; a tensor called "experts" has a row per expert."""
        facts = []
        for tensor, part in parts.items():
            size: tuple[int, ...] = (part.nbytes,)
            if tensor == "experts":
                size = (num_experts, 1, -(-part.nbytes // num_experts))
            full_name = f"{name}.{tensor}"
            facts.append(facts_of_shape(full_name, size, torch.uint8, is_trainable=False))
            if part.tensor:
                self.tensors[full_name] = part.tensor
        return self._add(name, facts)

    def add_block(self, layer: int, block: StoredBlock, size: AdapterSize) -> None:
        """Adds the adapter and the frozen weights of a block, and their work."""
        shape, name = self._shape, f"block {layer}"
        needed = []
        if size.num_params:
            adapter = facts_of_shape(
                f"{name}.adapter", (size.num_params,), self._dtype, is_trainable=True
            )
            needed.append(self._add(name, [adapter]))
        experts = rest = routed = 0
        for linear in linears(shape, layer):
            if linear.part == "experts" and shape.moe is not None:
                experts += linear.numel
                routed += linear.numel * shape.moe.experts_per_token // shape.moe.experts
            else:
                rest += linear.numel
        rest += sum(numel_of(size) for size in norms(shape).values())
        self.num_params += experts + rest
        frozen = f"{name} (frozen)" if needed else name
        parts = {"weights": block.rest}
        if block.experts.nbytes:
            parts["experts"] = block.experts
        num_experts = shape.moe.experts if shape.moe is not None else 0
        needed.append(self.add_frozen(frozen, parts, num_experts))
        for tensor, part in parts.items():
            if part.is_encoded:
                params = experts if tensor == "experts" else rest
                decoded_nbytes = params * self._dtype.itemsize
                self.decoded_per_byte[f"{frozen}.{tensor}"] = decoded_nbytes / part.nbytes
        self.work.append(
            ModuleWork(
                tuple(needed),
                rest + routed,
                attention_width(shape),
                expert_params=routed,
                trained_params=size.active_params,
            )
        )

    def _add(self, name: str, facts: list[TensorFacts]) -> int:
        self.units.append(layout_unit(len(self.units), name, facts, self._moments))
        return len(self.units) - 1
