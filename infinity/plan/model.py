"""Models to plan, from shapes or from a module on meta, without their weights.

The units are those that `modules/reading/discover.py` makes of the same model: the embedding, every
block, the final norm and the head. A tied embedding is one unit with two uses. Expert matrices are
stacked, as in transformers. FLOPs are those of matrix products and attention: two per weight and
token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field

from infinity.config import AdapterConfig, SwapConfig
from infinity.config.extras import require_release
from infinity.config.schema.train import Purpose
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import CLASS_NAME, config_of_table
from infinity.modules.reading.discover import discover_units
from infinity.modules.reading.dtypes import Dtypes
from infinity.plan.frozen_base import PLAIN, PlannedPart, StoredModel, stored_of_shape
from infinity.plan.layout import (
    FrozenBase,
    ModuleWork,
    PlannedModel,
    PlannedWeight,
    UnitTensors,
    facts_of_shape,
    nbytes_of,
)
from infinity.plan.shapes import (
    ModelShape,
    Place,
    PublishedFormat,
    Weight,
    adapter_size,
    gpt_shape,
    mlp_params_of,
    model_on_meta,
    numel_of,
    refuse_unknown_targets,
    shape_of_model,
)
from infinity.plan.tables import Table
from infinity.state.units import OF_ADAM, Moments, moments_of


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
def load_shape(name: str, purpose: Purpose = "generates text", num_labels: int = 0) -> ModelShape:
    """Loads the shapes of a shipped model by name, or of a file by path, with the head of a purpose
    (`model_on_meta`). Raises ConfigError."""
    file = _ModelFile.read("models", name)
    if file.gpt is not None:
        return gpt_shape(file.name, file.gpt.layers, file.gpt.hidden, file.gpt.vocab)
    if file.config is None or "model_type" not in file.config:
        raise ConfigError(
            f"models {name}: expected [gpt] with layers and hidden, or [config] with model_type "
            "and other keys of a config.json; got neither"
        )
    require_release("transformers", f"infinity plan of {name}")
    hf_config = config_of_table(dict(file.config))
    model = model_on_meta(hf_config, name, purpose=purpose, num_labels=num_labels)
    return shape_of_model(model, file.name, name, hub=file.hub, stored=file.stored)


def model_for(
    config: SwapConfig,
    shape: ModelShape,
    stored: StoredModel | None = None,
    *,
    dtype: torch.dtype | None = None,
    is_frozen: bool = False,
    has_images: bool = False,
) -> PlannedModel:
    """Returns the model as a configuration trains it: all weights, or an adapter over `stored`
    ones, by default those of the published checkpoint. `is_frozen`: these alone. `dtype` of trained
    and of decoded weights: None takes the configuration's. `has_images`: the tower is read, too."""
    dtype = dtype or getattr(torch, config.precision.compute_dtype)
    if is_frozen:
        return model_of_shape(shape, dtype, stored=stored or stored_of_shape(shape))
    if not config.every_adapter:
        stored = None
    return model_of_shape(
        shape, dtype, moments_of(config.optimizer, config.precision), config.every_adapter, stored,
        has_images=has_images,
    )  # fmt: skip


def model_of_shape(
    shape: ModelShape,
    dtype: torch.dtype,
    moments: Moments = OF_ADAM,
    adapters: Sequence[AdapterConfig] = (),
    stored: StoredModel | None = None,
    *,
    has_images: bool = False,
) -> PlannedModel:
    """Returns units and hooked modules in the order of the forward. `dtype` is that of trained and
    of decoded weights. `has_images`: with the bytes of the tower, whose arithmetic is not counted.

    With `stored`, or an adapter, weights are frozen, as many bytes as they have in the checkpoint,
    and adapters are a unit of their own in each block; a token passes one of several. Raises
    ConfigError for a target that the model does not have.
    """
    groups: list[UnitTensors] = []
    works: list[ModuleWork] = []
    for adapter in adapters:
        refuse_unknown_targets(shape, adapter)
        stored = stored or stored_of_shape(shape)

    def add(*units: UnitTensors, **said: Any) -> None:
        numbers = range(len(groups), len(groups) + len(units))
        groups.extend(units)
        works.append(ModuleWork(tuple(numbers), **said))

    def outside(name: str, place: Place, weights: tuple[Weight, ...]) -> UnitTensors:
        # Of several tables, the first may be the head, too.
        heads = weights[:1] if place == "embedding" else weights
        if stored is None:
            active = {weight.name: weight.numel * (weight in heads) for weight in weights}
            return _trained(name, weights, dtype, active)
        first, *others = _stored(f"{name}.weight", stored, place, numel_of(weights), dtype)
        others = [replace(tensor, multiplied=0) for tensor in others]
        return UnitTensors(name, (replace(first, multiplied=numel_of(heads)), *others))

    add(
        outside("embedding", "embedding", shape.embedding),
        multiplies=False, has_backward=stored is None,
    )  # fmt: skip
    depth = shape.tower_depth or 1
    tower = stored.part("tower").nbytes // depth if stored is not None and has_images else 0
    for layer in range(depth) if tower else ():
        facts = facts_of_shape(f"tower {layer}", (tower // 2,), torch.bfloat16, is_trainable=False)
        unit = UnitTensors(f"tower {layer}", (PlannedWeight(facts, 0, tower),))
        add(unit, multiplies=False, has_backward=False)
    trained_params = 0
    for layer, block in enumerate(shape.blocks):
        sizes = [adapter_size(block, adapter, layer) for adapter in adapters] or [(0, 0)]
        trained, active = map(sum, zip(*sizes, strict=True))
        units = _units_of_block(shape, layer, dtype, (trained, active // len(sizes)), stored)
        add(*units, attention_width=block.attention_width, mlp_params=block.mlp_params)
        trained_params += trained
    add(outside("final norm", "norm", shape.norm), multiplies=False)
    if shape.scores and adapters:  # PEFT trains a copy of the head.
        add(_trained("head", shape.head, dtype, {}))
        trained_params += numel_of(shape.head)
    elif bool(shape.head) if stored is None else stored.part("head").nbytes > 0:
        add(outside("head", "head", shape.head))
    elif not shape.scores:
        works.append(ModuleWork((0,)))  # The embedding.
    frozen = None
    if stored is not None:
        frozen = FrozenBase(stored, tuple(adapters), trained_params)
    return PlannedModel(
        shape.name, tuple(groups), tuple(works), moments, shape.num_params, shape.hidden,
        shape.hf_config, frozen,
    )  # fmt: skip


def _units_of_block(
    shape: ModelShape,
    layer: int,
    dtype: torch.dtype,
    of_adapters: tuple[int, int],
    stored: StoredModel | None,
) -> list[UnitTensors]:
    """`of_adapters`: the parameters of the block's adapters, and those that multiply a token."""
    block, name = shape.blocks[layer], f"block {layer}"
    if stored is None:
        active = {w.name: block.per_token(w.numel) for w in block.weights if w.part == "experts"}
        return [_trained(name, block.weights, dtype, active)]
    units = []
    if of_adapters[0]:
        weight = Weight("adapter", of_adapters[:1])
        units.append(_trained(name, (weight,), dtype, {weight.name: of_adapters[1]}))
    frozen = f"{name} (frozen)" if units else name
    params = block.numel(of_experts=False)
    tensors = _stored(f"{frozen}.weights", stored, layer, params, dtype)
    if stored.part(layer, of_experts=True).nbytes:
        params, num_experts = block.numel(of_experts=True), block.num_experts
        [tensor] = _stored(f"{frozen}.experts", stored, layer, params, dtype, num_experts)
        tensors.append(replace(tensor, multiplied=block.per_token(params)))
    return [*units, UnitTensors(frozen, tuple(tensors))]


def _trained(
    name: str, weights: tuple[Weight, ...], dtype: torch.dtype, active: Mapping[str, int]
) -> UnitTensors:
    """Returns a unit that is trained. `active`: the elements that a token uses of some weights."""
    return UnitTensors(name, tuple(
        PlannedWeight(
            facts_of_shape(f"{name}.{weight.name}", weight.shape, dtype, is_trainable=True),
            active.get(weight.name, weight.numel),
        )
        for weight in weights
    ))  # fmt: skip


def _stored(
    name: str,
    stored: StoredModel,
    place: Place,
    params: int,
    dtype: torch.dtype,
    num_experts: int = 0,
) -> list[PlannedWeight]:
    """Returns `params` frozen parameters: each matrix, and in one what is left; with a row for each
    of `num_experts`."""
    part = stored.part(place, of_experts=num_experts > 0)
    found = []
    for number, (size, one) in enumerate(part.matrices):
        found.append(_tensor(f"{name}.{number}", size, one, place, math.prod(size), dtype))
    rest = replace(part, nbytes=part.nbytes - sum(one.nbytes for _, one in part.matrices))
    params -= sum(tensor.multiplied for tensor in found)
    if rest.nbytes or not found:
        size = (num_experts, 1, -1) if num_experts else (-1,)
        found.append(_tensor(name, size, rest, place, params, dtype))
    return found


def _tensor(
    name: str, size: tuple[int, ...], part: PlannedPart, place: Place, params: int,
    dtype: torch.dtype,
) -> PlannedWeight:  # fmt: skip
    """Returns frozen parameters of a size, whose last side follows from the others."""
    is_encoded = part.is_encoded and isinstance(place, int)
    # What is not encoded is used as it is.
    numel = params if is_encoded else part.nbytes // torch.bfloat16.itemsize
    rows = max(math.prod(size[:-1]), 1)
    stored_nbytes = rows * -(-part.nbytes // rows) if len(size) > 2 else part.nbytes
    dtype = dtype if is_encoded else torch.bfloat16
    size = (*size[:-1], -(-numel // rows))
    facts = facts_of_shape(name, size, dtype, is_trainable=False)
    return PlannedWeight(facts, params, stored_nbytes, is_encoded, part.tensor)


def model_of_module(module: torch.nn.Module, config: SwapConfig, hf_config: Any) -> PlannedModel:
    """Returns the planned model of a module, which may be on meta and partly frozen: under adapters
    in its files, in the dtype that computes. `hf_config` is its configuration of transformers, or
    the table of config.json of diffusers."""
    from infinity.engine.lay_out import facts_of

    if isinstance(hf_config, dict):
        kind, top_k = hf_config[CLASS_NAME], None
        hidden = hf_config["num_attention_heads"] * hf_config["attention_head_dim"]
        hf_config = None
    else:
        kind, text_config = str(hf_config.model_type), hf_config.get_text_config()
        hidden = int(text_config.hidden_size)
        top_k = getattr(text_config, "num_experts_per_tok", None)
    layout, dtypes = discover_units(module), Dtypes(module, config.precision)
    groups = []
    for name, members in layout.units:
        facts = [facts_of(member, dtypes) for member in members]
        weights = [PlannedWeight(of, _active(of.shape, top_k)) for of in facts]
        groups.append(UnitTensors(name, tuple(replace(w, stored_nbytes=w.nbytes) for w in weights)))
    is_frozen = not all(any(t.facts.is_trainable for t in group.tensors) for group in groups)
    around = {chain[-1]: chain[-2] if len(chain) > 1 else None for chain in layout.chains}
    works = []
    for number, hooked in enumerate(layout.hooked_modules):
        # A table that rows are taken from multiplies nothing.
        is_table = isinstance(hooked.module, torch.nn.Embedding)
        works.append(
            ModuleWork(
                tuple(hooked.units), 2 * hidden if hooked.is_block else 0, around[number],
                multiplies=not is_table, has_backward=not (is_table and is_frozen),
                mlp_params=mlp_params_of(hooked.module) if hooked.is_block else 0,
            )
        )  # fmt: skip
    every, frozen = [tensor for group in groups for tensor in group.tensors], None
    num_params = sum(math.prod(tensor.facts.shape) for tensor in every)
    if config.every_adapter:
        base = [tensor for tensor in every if not tensor.facts.is_trainable]
        stored = StoredModel({("norm", False): PlannedPart(nbytes_of(base))}, PLAIN)
        num_trained = num_params - sum(math.prod(tensor.facts.shape) for tensor in base)
        frozen = FrozenBase(stored, config.every_adapter, num_trained)
    return PlannedModel(
        kind, tuple(groups), tuple(works), moments_of(config.optimizer, config.precision),
        num_params, hidden, hf_config, frozen,
    )  # fmt: skip


def _active(size: tuple[int, ...], experts_per_token: int | None) -> int:
    """Returns the weights of a tensor that multiply one token. Experts are stacked in front."""
    if len(size) == 3 and experts_per_token is not None:
        return math.prod(size[1:]) * min(experts_per_token, size[0])
    return math.prod(size)
