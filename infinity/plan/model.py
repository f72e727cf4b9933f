"""Models as shapes: their units and the FLOPs of each, without a tensor.

The units are those that `modules/discover.py` makes of the same model: the embedding, every block,
the final norm and the head. A tied embedding is one unit with two uses. Expert matrices are
stacked, as in transformers. FLOPs are those of matrix products and attention: two per weight and
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from infinity.plan.files import Table, read_table
from infinity.state.units import OF_ADAM, Moments, TensorFacts, Unit, layout_unit


class LatentAttention(Table):
    """Multi-head latent attention. Source: DeepSeek-V2 (2024), section 2.1."""

    q_rank: int
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int


class Moe(Table):
    """Blocks after the first `dense_layers` have `experts` of width `expert_ffn`. Each token passes
    `experts_per_token` of them and all of the `shared_experts`."""

    experts: int
    experts_per_token: int
    expert_ffn: int
    shared_experts: int = 0
    dense_layers: int = 0


class ModelShape(Table):
    """A causal language model. `gated` feed-forwards have three matrices, others two."""

    name: str
    source: str = ""
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    ffn: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int | None = None
    vocab: int = Field(gt=0)
    gated: bool = True
    biases: bool = False
    tied: bool = False
    latent_attention: LatentAttention | None = None
    moe: Moe | None = None


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """One forward of a hooked module: its units, the weights that multiply a token, and the width
    of attention scores and mixing (0 without attention, as outside blocks). `is_tile`: a tile of
    the block before it, used while that block is in use."""

    units: tuple[int, ...]
    active_params: int
    attention_width: int = 0
    is_tile: bool = False

    def forward_flops(self, num_tokens: int, sequence_length: int) -> float:
        """Returns the FLOPs of `num_tokens` in sequences of this length. Causal attention covers
        half of the length."""
        attended = self.attention_width * sequence_length / 2
        return 2.0 * num_tokens * (self.active_params + attended)


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

    @property
    def active_params(self) -> int:
        return sum(hooked.active_params for hooked in self.hooked_modules)


def load_model(name: str, dtype: torch.dtype, moments: Moments = OF_ADAM) -> PlannedModel:
    """Loads a shipped model by name, or a file by path. Raises ConfigError with the shipped
    names."""
    return model_of_shape(read_table(ModelShape, "models", name), dtype, moments)


def scaled_gpt(num_params: int) -> ModelShape:
    """Returns a GPT-like shape with about this number of parameters: blocks of 12 hidden^2, and a
    width of 150 per block, between the shapes of ZeRO-Infinity's table."""
    hidden = max(256, round((num_params * 150 / 12) ** (1 / 3) / 256) * 256)
    layers = max(1, round(num_params / (12 * hidden**2)))
    return ModelShape(
        name=f"GPT-like, {num_params / 1e9:,.0f} B asked",
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=hidden // 128,
        vocab=50304,
        gated=False,
        biases=True,
        tied=True,
    )


def model_of_shape(
    shape: ModelShape, dtype: torch.dtype, moments: Moments = OF_ADAM
) -> PlannedModel:
    """Returns units and hooked modules in the order of the forward."""
    units: list[Unit] = []
    hooked_modules: list[ModuleWork] = []

    def add_unit(name: str, tensors: dict[str, tuple[int, ...]]) -> int:
        facts = [_facts(f"{name}.{each}", size, dtype) for each, size in tensors.items()]
        units.append(layout_unit(len(units), name, facts, moments))
        return len(units) - 1

    embedding = add_unit("embedding", {"weight": (shape.vocab, shape.hidden)})
    hooked_modules.append(ModuleWork((embedding,), 0))
    for layer in range(shape.layers):
        tensors = _attention(shape) | _feed_forward(shape, layer) | _norms(shape)
        active = sum(_numel(size) for size in tensors.values())
        if shape.moe is not None and layer >= shape.moe.dense_layers:
            routed = sum(_numel(s) for name, s in tensors.items() if name.startswith("experts."))
            active -= routed - routed * shape.moe.experts_per_token // shape.moe.experts
        unit = add_unit(f"block {layer}", tensors)
        hooked_modules.append(ModuleWork((unit,), active, _attention_width(shape)))
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


def _facts(name: str, size: tuple[int, ...], dtype: torch.dtype) -> TensorFacts:
    strides = torch.empty(size, device="meta").stride()
    return TensorFacts(name, size, tuple(strides), dtype, is_trainable=True)


def _numel(size: tuple[int, ...]) -> int:
    count = 1
    for extent in size:
        count *= extent
    return count


def _attention(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, heads = shape.hidden, shape.heads
    latent = shape.latent_attention
    if latent is not None:
        key_dim = latent.nope_head_dim + latent.rope_head_dim
        return {
            "q_down": (latent.q_rank, hidden),
            "q_norm": (latent.q_rank,),
            "q_up": (heads * key_dim, latent.q_rank),
            "kv_down": (latent.kv_rank + latent.rope_head_dim, hidden),
            "kv_norm": (latent.kv_rank,),
            "kv_up": (heads * (latent.nope_head_dim + latent.v_head_dim), latent.kv_rank),
            "out": (hidden, heads * latent.v_head_dim),
        }
    kv_width = hidden // heads * (shape.kv_heads or heads)
    tensors: dict[str, tuple[int, ...]] = {
        "q": (hidden, hidden),
        "k": (kv_width, hidden),
        "v": (kv_width, hidden),
        "out": (hidden, hidden),
    }
    if shape.biases:
        tensors |= {"qkv_bias": (hidden + 2 * kv_width,), "out_bias": (hidden,)}
    return tensors


def _attention_width(shape: ModelShape) -> int:
    """Returns the products per token and position, of scores and of mixing the values."""
    latent = shape.latent_attention
    if latent is not None:
        return shape.heads * (latent.nope_head_dim + latent.rope_head_dim + latent.v_head_dim)
    return 2 * shape.hidden


def _feed_forward(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, moe = shape.hidden, shape.moe
    inner = 3 if shape.gated else 2
    if moe is None or layer < moe.dense_layers:
        tensors: dict[str, tuple[int, ...]] = {"ffn": (inner, shape.ffn, hidden)}
        return tensors | ({"ffn_bias": (shape.ffn + hidden,)} if shape.biases else {})
    tensors = {
        "router": (moe.experts, hidden),
        "experts.ffn": (moe.experts, inner, moe.expert_ffn, hidden),
    }
    if moe.shared_experts:
        tensors["shared.ffn"] = (inner, moe.shared_experts * moe.expert_ffn, hidden)
    return tensors


def _norms(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    values = 2 if shape.biases else 1
    return {"norms": (2, values * shape.hidden)}


def model_of_config(config: Any) -> PlannedModel:
    """Builds the model of a configuration file on meta with transformers; needs no weights."""
    from infinity.engine.build import facts_of
    from infinity.engine.dtypes import Dtypes
    from infinity.modules.discover import discover_units
    from infinity.state.moments import moments_of
    from infinity.tiers.ranges import rounded_nbytes
    from infinity.training.model import build_model, plan_model

    plan = plan_model(config.model, reads_weights=False)
    module = build_model(plan, config)
    anatomy = discover_units(module)
    dtypes = Dtypes(module, config)
    units = tuple(
        layout_unit(
            index,
            name,
            [facts_of(each, dtypes) for each in members],
            moments_of(config),
        )
        for index, (name, members) in enumerate(anatomy.units)
    )
    text_config = plan.hf_config.get_text_config()
    hidden = int(text_config.hidden_size)
    routed = getattr(text_config, "num_experts_per_tok", None)
    hooked_modules = []
    for hooked, needed in zip(anatomy.hooked_modules, anatomy.module_units(), strict=True):
        is_block = any(True for _ in hooked.module.children())
        active = 0
        # A table that rows are taken from multiplies nothing.
        if not isinstance(hooked.module, torch.nn.Embedding):
            for unit in needed:
                active += sum(_active(tensor.facts.shape, routed) for tensor in units[unit].tensors)
        hooked_modules.append(ModuleWork(tuple(needed), active, 2 * hidden if is_block else 0))
    return PlannedModel(
        name=str(plan.hf_config.model_type),
        units=units,
        hooked_modules=tuple(hooked_modules),
        held_nbytes=anatomy.held_nbytes([rounded_nbytes(unit.weight_nbytes) for unit in units]),
        num_params=sum(tensor.numel for unit in units for tensor in unit.tensors),
        checkpoint_width=hidden,
        hf_config=plan.hf_config,
    )


def _active(size: tuple[int, ...], experts_per_token: int | None) -> int:
    """Returns the weights of a tensor that multiply one token. Experts are stacked in front."""
    if len(size) == 3 and experts_per_token is not None:
        return _numel(size[1:]) * min(experts_per_token, size[0])
    return _numel(size)
