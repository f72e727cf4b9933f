"""Models as shapes: their units and the FLOPs of each, without a tensor.

The units are those that `modules/reading/discover.py` makes of the same model: the embedding, every
block, the final norm and the head. A tied embedding is one unit with two uses. Expert matrices are
stacked, as in transformers. FLOPs are those of matrix products and attention: two per weight and
token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import Field

from infinity.config import AdapterConfig, SwapConfig
from infinity.config.extras import require_transformers
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import config_of_table
from infinity.plan.frozen_base import FrozenBase, PlannedPart, StoredModel, stored_of_shape
from infinity.plan.shapes import (
    ModelShape,
    PublishedFormat,
    Weight,
    adapter_size,
    gpt_shape,
    refuse_unknown_targets,
    shape_of_config,
)
from infinity.plan.tables import Table, read_table
from infinity.state.stored import StoredTensor
from infinity.state.units import (
    OF_ADAM,
    Moments,
    TensorFacts,
    Unit,
    layout_unit,
    layout_units,
    moments_of,
)
from infinity.tiers.ranges import rounded_nbytes


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


class _Gpt(Table):
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    vocab: int = Field(50304, gt=0)


class _ModelFile(Table):
    """The file of a model: `gpt`, or `config`, the keys of config.json that transformers reads.
    `stored` is the format of its checkpoint."""

    name: str
    source: str = ""
    hub: str = ""
    gpt: _Gpt | None = None
    config: dict[str, Any] | None = None
    stored: PublishedFormat | None = None


@functools.lru_cache(maxsize=32)
def load_shape(name: str) -> ModelShape:
    """Loads the shapes of a shipped model by name, or of a file by path. Raises ConfigError."""
    file = read_table(_ModelFile, "models", name)
    if file.gpt is not None:
        return gpt_shape(file.name, file.gpt.layers, file.gpt.hidden, file.gpt.vocab)
    if file.config is None or "model_type" not in file.config:
        raise ConfigError(
            f"models {name}: expected [gpt] with layers and hidden, or [config] with model_type "
            "and other keys of a config.json; got neither"
        )
    require_transformers(f"infinity plan of {name}")
    hf_config = config_of_table(dict(file.config))
    return shape_of_config(hf_config, file.name, name, hub=file.hub, stored=file.stored)


def model_for(
    config: SwapConfig,
    shape: ModelShape,
    stored: StoredModel | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> PlannedModel:
    """Returns the model as a configuration trains it: all weights, or an adapter over `stored`
    ones, by default those of the published checkpoint. `dtype` of trained and of decoded weights:
    None takes the configuration's."""
    dtype = dtype or getattr(torch, config.precision.compute_dtype)
    return model_of_shape(
        shape, dtype, moments_of(config.optimizer, config.precision), config.adapter, stored
    )


def model_of_shape(
    shape: ModelShape,
    dtype: torch.dtype,
    moments: Moments = OF_ADAM,
    adapter: AdapterConfig | None = None,
    stored: StoredModel | None = None,
) -> PlannedModel:
    """Returns units and hooked modules in the order of the forward. `dtype` is that of trained and
    of decoded weights.

    With an adapter, a block has two units: the adapter, which is trained, and the frozen weights,
    as many bytes as they have in the checkpoint. Raises ConfigError for a target that the model
    does not have.
    """
    if adapter is not None:
        refuse_unknown_targets(shape, adapter)
        stored = stored or stored_of_shape(shape)
    builder = _Builder(shape, dtype, adapter, stored if adapter is not None else None)
    embedding = builder.outside("embedding", shape.embedding, lambda base: base.embedding)
    builder.use((embedding,), 0, has_backward=adapter is None)
    for layer in range(len(shape.blocks)):
        builder.block(layer)
    builder.use((builder.outside("final norm", shape.norm, lambda base: base.norm),), 0)
    head = embedding
    has_head = bool(shape.head) if builder.stored is None else builder.stored.head.nbytes > 0
    if has_head:
        head = builder.outside("head", shape.head, lambda base: base.head)
    builder.use((head,), shape.vocab_numel)
    return builder.model(moments)


def facts_of_shape(
    name: str, size: tuple[int, ...], dtype: torch.dtype, *, is_trainable: bool
) -> TensorFacts:
    """Returns the facts of a contiguous tensor."""
    strides = torch.empty(size, device="meta").stride()
    return TensorFacts(name, size, tuple(strides), dtype, is_trainable)


class _Builder:
    """Collects the tensors of units, and the work of hooked modules.

    Stored bytes are tensors of uint8. The routed experts have a row each, so that they can be
    divided into chunks of experts.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        adapter: AdapterConfig | None,
        stored: StoredModel | None,
    ) -> None:
        self.stored = stored
        self._shape = shape
        self._dtype = dtype
        self._adapter = adapter
        self._units: list[tuple[str, list[TensorFacts]]] = []
        self._work: list[ModuleWork] = []
        self._trained_params = 0
        self._decoded_per_byte: dict[str, float] = {}
        self._tensors: dict[str, StoredTensor] = {}

    def use(self, units: tuple[int, ...], active_params: int, *, has_backward: bool = True) -> None:
        """Adds the work of a module outside blocks."""
        trained = None if self.stored is None else 0
        work = ModuleWork(units, active_params, trained_params=trained, has_backward=has_backward)
        self._work.append(work)

    def outside(
        self, name: str, weights: Sequence[Weight], part: Callable[[StoredModel], PlannedPart]
    ) -> int:
        """Adds the unit of weights outside blocks."""
        if self.stored is not None:
            return self._add_stored(name, {"weight": part(self.stored)})
        return self._add_trained(name, {weight.name: weight.shape for weight in weights})

    def block(self, layer: int) -> None:
        """Adds the units of a block, and their work."""
        block, name = self._shape.blocks[layer], f"block {layer}"
        experts, rest = (block.numel(of_experts=of_experts) for of_experts in (True, False))
        routed = block.per_token(experts)
        if self.stored is None or self._adapter is None:
            unit = self._add_trained(name, {w.name: w.shape for w in block.weights})
            self._work.append(ModuleWork((unit,), rest + routed, block.attention_width))
            return
        trained, active = adapter_size(block, self._adapter)
        stored = self.stored.blocks[layer]
        self._trained_params += trained
        needed = []
        if trained:
            needed.append(self._add_trained(name, {"adapter": (trained,)}))
        frozen = f"{name} (frozen)" if needed else name
        parts = {"weights": stored.rest}
        if stored.experts.nbytes:
            parts["experts"] = stored.experts
        needed.append(self._add_stored(frozen, parts, block.num_experts))
        for tensor, part in parts.items():
            if part.is_encoded:
                params = experts if tensor == "experts" else rest
                decoded_nbytes = params * self._dtype.itemsize
                self._decoded_per_byte[f"{frozen}.{tensor}"] = decoded_nbytes / part.nbytes
        self._work.append(
            ModuleWork(
                tuple(needed), rest + routed, block.attention_width, expert_params=routed,
                trained_params=active,
            )
        )  # fmt: skip

    def model(self, moments: Moments) -> PlannedModel:
        """Returns the model of everything that was added."""
        units, frozen = layout_units(self._units, moments), None
        if self.stored is not None and self._adapter is not None:
            frozen = FrozenBase(
                self.stored, self._adapter, self._shape.num_params, self._trained_params,
                self._decoded_per_byte, self._tensors,
            )  # fmt: skip
        return PlannedModel(
            name=self._shape.name,
            units=units,
            hooked_modules=tuple(self._work),
            held_nbytes=max(unit.weight_nbytes for unit in units)
            if frozen is None
            else _held_nbytes(units, self._work),
            num_params=self._shape.num_params,
            checkpoint_width=self._shape.hidden,
            frozen=frozen,
        )

    def _add_trained(self, name: str, tensors: Mapping[str, tuple[int, ...]]) -> int:
        return self._add(
            name,
            [
                facts_of_shape(f"{name}.{tensor}", size, self._dtype, is_trainable=True)
                for tensor, size in tensors.items()
            ],
        )

    def _add_stored(self, name: str, parts: Mapping[str, PlannedPart], num_experts: int = 0) -> int:
        facts = []
        for tensor, part in parts.items():
            size: tuple[int, ...] = (part.nbytes,)
            if tensor == "experts":
                size = (num_experts, 1, -(-part.nbytes // num_experts))
            full_name = f"{name}.{tensor}"
            facts.append(facts_of_shape(full_name, size, torch.uint8, is_trainable=False))
            if part.tensor:
                self._tensors[full_name] = part.tensor
        return self._add(name, facts)

    def _add(self, name: str, facts: list[TensorFacts]) -> int:
        self._units.append((name, facts))
        return len(self._units) - 1


def model_of_module(module: torch.nn.Module, config: Any, hf_config: Any) -> PlannedModel:
    """Returns the planned model of a module, which may be on meta and partly frozen. `hf_config` is
    its configuration of transformers."""
    from infinity.engine.lay_out import facts_of
    from infinity.modules.reading.discover import discover_units
    from infinity.modules.reading.dtypes import Dtypes

    layout, dtypes = discover_units(module), Dtypes(module, config.precision)
    units = layout_units(
        (
            (name, [facts_of(member, dtypes) for member in members])
            for name, members in layout.units
        ),
        moments_of(config.optimizer, config.precision),
    )
    text_config = hf_config.get_text_config()
    hidden = int(text_config.hidden_size)
    routed = getattr(text_config, "num_experts_per_tok", None)
    is_frozen = any(not unit.state_numel for unit in units)
    hooked_modules = []
    for hooked in layout.hooked_modules:
        is_block = any(True for _ in hooked.module.children())
        # A table that rows are taken from multiplies nothing.
        is_table = isinstance(hooked.module, torch.nn.Embedding)
        active = {True: 0, False: 0}  # By whether they are trained.
        for tensor in (tensor for unit in hooked.units for tensor in units[unit].tensors):
            if not is_table:
                active[tensor.facts.is_trainable] += _active(tensor.facts.shape, routed)
        hooked_modules.append(
            ModuleWork(
                tuple(hooked.units),
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
        return math.prod(size[1:]) * min(experts_per_token, size[0])
    return math.prod(size)


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
