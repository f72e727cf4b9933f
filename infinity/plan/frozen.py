"""A frozen base that rests in its checkpoint, with an adapter: units and work, as `plan.model`.

A block has two units: the adapter, which is trained, and the frozen weights, as many bytes as they
have in the checkpoint. Stored bytes are tensors of uint8 here; the routed experts have a row each,
so that they can be divided into chunks of experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.config import AdapterConfig
from infinity.plan.adapters import AdapterSize, adapter_size, refuse_unknown_targets
from infinity.plan.frozen_base import FrozenBase
from infinity.plan.model import ModuleWork, PlannedModel, facts_of_shape
from infinity.plan.shapes import ModelShape, attention_width, linears, norms, numel_of
from infinity.plan.stored import StoredBlock, StoredModel
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
    embedding = builder.add_frozen("embedding", {"weight": stored.embedding_nbytes})
    builder.work.append(ModuleWork((embedding,), 0, trained_params=0, has_backward=False))
    trained = 0
    for layer, block in enumerate(stored.blocks):
        size = adapter_size(shape, layer, adapter)
        trained += size.num_params
        builder.add_block(layer, block, size)
    norm = builder.add_frozen("final norm", {"weight": stored.norm_nbytes})
    builder.work.append(ModuleWork((norm,), 0, trained_params=0))
    head = embedding
    if stored.head_nbytes:
        head = builder.add_frozen("head", {"weight": stored.head_nbytes})
    builder.work.append(ModuleWork((head,), shape.vocab * shape.hidden, trained_params=0))
    units, base_params = builder.units, builder.num_params + _outside_params(shape)
    return PlannedModel(
        name=shape.name,
        units=tuple(units),
        hooked_modules=tuple(builder.work),
        held_nbytes=max(
            sum(rounded_nbytes(units[unit].weight_nbytes) for unit in hooked.units)
            for hooked in builder.work
        ),
        num_params=base_params,
        checkpoint_width=shape.hidden,
        frozen=FrozenBase(stored, adapter, base_params, trained, builder.decoded_per_byte),
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

    def add_frozen(self, name: str, tensors: Mapping[str, int], num_experts: int = 0) -> int:
        """Adds a unit of stored bytes; a tensor called "experts" has a row per expert."""
        facts = []
        for tensor, nbytes in tensors.items():
            size: tuple[int, ...] = (nbytes,)
            if tensor == "experts":
                size = (num_experts, 1, -(-nbytes // num_experts))
            facts.append(facts_of_shape(f"{name}.{tensor}", size, torch.uint8, is_trainable=False))
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
        tensors = {"weights": block.rest_nbytes}
        if block.experts_nbytes:
            tensors["experts"] = block.experts_nbytes
        num_experts = shape.moe.experts if shape.moe is not None else 0
        needed.append(self.add_frozen(frozen, tensors, num_experts))
        for tensor, is_encoded, params in (
            ("weights", block.is_rest_encoded, rest),
            ("experts", block.are_experts_encoded, experts),
        ):
            if is_encoded and tensors.get(tensor):
                decoded_nbytes = params * self._dtype.itemsize
                self.decoded_per_byte[f"{frozen}.{tensor}"] = decoded_nbytes / tensors[tensor]
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
