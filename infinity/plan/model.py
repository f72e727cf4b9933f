"""Models as shapes: their units and the FLOPs of each, without a tensor.

The units are those that `modules/reading/discover.py` makes of the same model: the embedding, every
block, the final norm and the head. A tied embedding is one unit with two uses. Expert matrices are
stacked, as in transformers. FLOPs are those of matrix products and attention: two per weight and
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from infinity.plan.files import read_table
from infinity.plan.frozen_base import FrozenBase
from infinity.plan.shapes import (
    ModelShape,
    attention,
    attention_width,
    feed_forward,
    norms,
    numel_of,
)
from infinity.state.units import OF_ADAM, Moments, TensorFacts, Unit, layout_unit


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """One forward of a hooked module: its units, the weights that multiply a token, and the width
    of attention scores and mixing (0 without attention, as outside blocks). `is_tile`: a tile of
    the block before it, used while that block is in use; `is_experts`: one of experts.

    `expert_params` of the active parameters are those of routed experts, if that is known.
    `trained_params`: of an adapter over frozen weights, per token and beside the active parameters;
    None if all weights are trained. `has_backward` is false where no gradient passes.
    """

    units: tuple[int, ...]
    active_params: int
    attention_width: int = 0
    is_tile: bool = False
    is_experts: bool = False
    expert_params: int = 0
    trained_params: int | None = None
    has_backward: bool = True

    def forward_flops(self, num_tokens: int, sequence_length: int) -> float:
        """Returns the FLOPs of `num_tokens` in sequences of this length. Causal attention covers
        half of the length."""
        attended = self.attention_width * sequence_length / 2
        return 2.0 * num_tokens * (self.active_params + (self.trained_params or 0) + attended)

    def gradient_ratio(self, sequence_length: int) -> float:
        """Returns the FLOPs of gradients over those of the forward: 2 where all weights are
        trained, 1 for frozen weights, whose own gradients are not needed."""
        if self.trained_params is None:
            return 2.0
        attended = self.attention_width * sequence_length / 2
        both = self.active_params + self.trained_params + attended
        return (self.active_params + 2 * (self.trained_params + attended)) / both if both else 1.0


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The facts of a model that the planner needs, from any source."""

    name: str
    units: tuple[Unit, ...]
    hooked_modules: tuple[ModuleWork, ...]
    held_nbytes: int  # The most weight bytes that nested modules use at the same time.
    num_params: int
    checkpoint_width: int  # Values per token that a checkpointed block saves.
    hf_config: Any = None  # The configuration of a transformers model.
    frozen: FrozenBase | None = None  # The base of an adapter; None if all weights are trained.

    @property
    def has_base_in_place(self) -> bool:
        """Whether frozen weights are read from the files of their checkpoint."""
        return self.frozen is not None and not self.frozen.is_copied

    def attached_nbytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit's weights where the device computes with them."""
        return unit.weight_nbytes if self.frozen is None else self.frozen.attached_nbytes(unit)

    @property
    def active_params(self) -> int:
        """The parameters that one token uses: of routed experts, the chosen ones."""
        return sum(hooked.active_params for hooked in self.hooked_modules)


def load_model(name: str, dtype: torch.dtype, moments: Moments = OF_ADAM) -> PlannedModel:
    """Loads a shipped model by name, or a file by path. Raises ConfigError with the shipped
    names."""
    return model_of_shape(load_shape(name), dtype, moments)


def load_shape(name: str) -> ModelShape:
    """Loads the shapes of a shipped model by name, or of a file by path. Raises ConfigError."""
    return read_table(ModelShape, "models", name)


def model_of_shape(
    shape: ModelShape, dtype: torch.dtype, moments: Moments = OF_ADAM
) -> PlannedModel:
    """Returns units and hooked modules in the order of the forward."""
    units: list[Unit] = []
    hooked_modules: list[ModuleWork] = []

    def add_unit(name: str, tensors: dict[str, tuple[int, ...]]) -> int:
        facts = [
            facts_of_shape(f"{name}.{tensor}", size, dtype, is_trainable=True)
            for tensor, size in tensors.items()
        ]
        units.append(layout_unit(len(units), name, facts, moments))
        return len(units) - 1

    embedding = add_unit("embedding", {"weight": (shape.vocab, shape.hidden)})
    hooked_modules.append(ModuleWork((embedding,), 0))
    for layer in range(shape.layers):
        tensors = attention(shape) | feed_forward(shape, layer) | norms(shape)
        active = sum(numel_of(size) for size in tensors.values())
        if shape.moe is not None and shape.is_sparse(layer):
            routed = sum(numel_of(s) for name, s in tensors.items() if name.startswith("experts."))
            active -= routed - routed * shape.moe.experts_per_token // shape.moe.experts
        unit = add_unit(f"block {layer}", tensors)
        hooked_modules.append(ModuleWork((unit,), active, attention_width(shape)))
    hooked_modules.append(ModuleWork((add_unit("final norm", {"weight": (shape.hidden,)}),), 0))
    head_params = shape.vocab * shape.hidden
    head = embedding if shape.tied else add_unit("head", {"weight": (shape.vocab, shape.hidden)})
    hooked_modules.append(ModuleWork((head,), head_params))
    return PlannedModel(
        name=shape.name,
        units=tuple(units),
        hooked_modules=tuple(hooked_modules),
        held_nbytes=max(unit.weight_nbytes for unit in units),
        num_params=sum(tensor.numel for unit in units for tensor in unit.tensors),
        checkpoint_width=shape.hidden,
    )


def facts_of_shape(
    name: str, size: tuple[int, ...], dtype: torch.dtype, *, is_trainable: bool
) -> TensorFacts:
    """Returns the facts of a contiguous tensor."""
    strides = torch.empty(size, device="meta").stride()
    return TensorFacts(name, size, tuple(strides), dtype, is_trainable)


def model_of_config(config: Any) -> PlannedModel:
    """Builds the model of a configuration file on meta with transformers; needs no weights."""
    from infinity.tools.training.model import build_model, plan_model

    plan = plan_model(config.model, reads_weights=False)
    return model_of_module(build_model(plan, config), config, plan.hf_config)


def model_of_module(module: torch.nn.Module, config: Any, hf_config: Any) -> PlannedModel:
    """Returns the planned model of a module, which may be on meta and partly frozen. `hf_config` is
    its configuration of transformers."""
    from infinity.engine.lay_out import facts_of
    from infinity.modules.reading.discover import discover_units
    from infinity.modules.reading.dtypes import Dtypes
    from infinity.state.moments import moments_of
    from infinity.tiers.ranges import rounded_nbytes

    layout, dtypes = discover_units(module), Dtypes(module, config)
    units = tuple(
        layout_unit(
            index,
            name,
            [facts_of(member, dtypes) for member in members],
            moments_of(config),
        )
        for index, (name, members) in enumerate(layout.units)
    )
    text_config = hf_config.get_text_config()
    hidden = int(text_config.hidden_size)
    routed = getattr(text_config, "num_experts_per_tok", None)
    is_frozen = any(not unit.state_numel for unit in units)
    hooked_modules = []
    for hooked, needed in zip(layout.hooked_modules, layout.module_units(), strict=True):
        is_block = any(True for _ in hooked.module.children())
        # A table that rows are taken from multiplies nothing.
        is_table = isinstance(hooked.module, torch.nn.Embedding)
        active = {True: 0, False: 0}  # By whether they are trained.
        for tensor in (tensor for unit in needed for tensor in units[unit].tensors):
            if not is_table:
                active[tensor.facts.is_trainable] += _active(tensor.facts.shape, routed)
        hooked_modules.append(
            ModuleWork(
                tuple(needed),
                active[False] if is_frozen else active[True],
                2 * hidden if is_block else 0,
                trained_params=active[True] if is_frozen else None,
                has_backward=not (is_table and is_frozen),
            )
        )
    return PlannedModel(
        name=str(hf_config.model_type),
        units=units,
        hooked_modules=tuple(hooked_modules),
        held_nbytes=layout.held_nbytes([rounded_nbytes(unit.weight_nbytes) for unit in units]),
        num_params=sum(tensor.numel for unit in units for tensor in unit.tensors),
        checkpoint_width=hidden,
        hf_config=hf_config,
    )


def _active(size: tuple[int, ...], experts_per_token: int | None) -> int:
    """Returns the weights of a tensor that multiply one token. Experts are stacked in front."""
    if len(size) == 3 and experts_per_token is not None:
        return numel_of(size[1:]) * min(experts_per_token, size[0])
    return numel_of(size)
