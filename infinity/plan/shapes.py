"""The shapes of a causal language model: a table of its dimensions, and the tensors of each part.

Names of modules are those of transformers, as an adapter's targets name them. Expert matrices are
stacked, as in transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from infinity.config import AdapterConfig
from infinity.config.schema.adapter import ALL_LINEAR, AUTO_TARGETS
from infinity.errors import ConfigError
from infinity.plan.files import Table


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


# Parts of a block whose weights a checkpoint stores in one format.
Part = Literal["attention", "dense", "shared", "experts", "router"]


class PublishedFormat(Table):
    """The format of the matrices of `parts` in the published checkpoint; other weights are bf16.
    The names of formats are those that the codecs find in checkpoints."""

    format: str
    parts: tuple[Part, ...]


class ModelShape(Table):
    """A causal language model; `hub` is its name on the Hugging Face hub. `gated` feed-forwards
    have three matrices, others two. Heads have `head_dim` values each, by default an even part of
    the hidden size."""

    name: str
    source: str = ""
    hub: str = ""
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    ffn: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int = Field(gt=0)
    gated: bool = True
    biases: bool = False
    tied: bool = False
    latent_attention: LatentAttention | None = None
    moe: Moe | None = None
    stored: PublishedFormat | None = None

    @property
    def head_width(self) -> int:
        """Values of one head."""
        return self.head_dim or self.hidden // self.heads

    def is_sparse(self, layer: int) -> bool:
        """Returns whether the block of this number has routed experts."""
        return self.moe is not None and layer >= self.moe.dense_layers


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


def numel_of(size: tuple[int, ...]) -> int:
    """Returns the number of elements."""
    return math.prod(size)


def attention(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a block's attention."""
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
    width, kv_width = heads * shape.head_width, shape.head_width * (shape.kv_heads or heads)
    tensors: dict[str, tuple[int, ...]] = {
        "q": (width, hidden),
        "k": (kv_width, hidden),
        "v": (kv_width, hidden),
        "out": (hidden, width),
    }
    if shape.biases:
        tensors |= {"qkv_bias": (width + 2 * kv_width,), "out_bias": (hidden,)}
    return tensors


def attention_width(shape: ModelShape) -> int:
    """Returns the products per token and position, of scores and of mixing the values."""
    latent = shape.latent_attention
    if latent is not None:
        return shape.heads * (latent.nope_head_dim + latent.rope_head_dim + latent.v_head_dim)
    return 2 * shape.heads * shape.head_width


def feed_forward(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a block's feed-forward."""
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


def norms(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a block's norms."""
    values = 2 if shape.biases else 1
    return {"norms": (2, values * shape.hidden)}


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix product of a block: the name of its module, and `count` matrices of [rows, columns]
    (several: one per expert)."""

    module: str
    part: Part
    rows: int
    columns: int
    count: int = 1

    @property
    def numel(self) -> int:
        """The elements of the weights of all `count` layers."""
        return self.rows * self.columns * self.count


def linears(shape: ModelShape, layer: int) -> list[Linear]:
    """Returns the matrix products of a block, by the names of transformers' modules."""
    found = _linears_of_attention(shape)
    moe = shape.moe
    if moe is None or not shape.is_sparse(layer):
        return found + _linears_of_mlp(shape, "dense", shape.ffn)
    found.append(Linear("gate", "router", moe.experts, shape.hidden))
    found += [
        Linear("gate_up_proj", "experts", 2 * moe.expert_ffn, shape.hidden, moe.experts),
        Linear("down_proj", "experts", shape.hidden, moe.expert_ffn, moe.experts),
    ]
    if moe.shared_experts:
        found += _linears_of_mlp(shape, "shared", moe.shared_experts * moe.expert_ffn)
    return found


def _linears_of_attention(shape: ModelShape) -> list[Linear]:
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent_attention
    if latent is None:
        width, kv_width = heads * shape.head_width, shape.head_width * (shape.kv_heads or heads)
        sizes = {
            "q_proj": (width, hidden),
            "k_proj": (kv_width, hidden),
            "v_proj": (kv_width, hidden),
            "o_proj": (hidden, width),
        }
    else:
        key_dim = latent.nope_head_dim + latent.rope_head_dim
        sizes = {
            "q_a_proj": (latent.q_rank, hidden),
            "q_b_proj": (heads * key_dim, latent.q_rank),
            "kv_a_proj_with_mqa": (latent.kv_rank + latent.rope_head_dim, hidden),
            "kv_b_proj": (heads * (latent.nope_head_dim + latent.v_head_dim), latent.kv_rank),
            "o_proj": (hidden, heads * latent.v_head_dim),
        }
    return [Linear(name, "attention", *size) for name, size in sizes.items()]


def _linears_of_mlp(shape: ModelShape, part: Part, width: int) -> list[Linear]:
    inward = ["gate_proj", "up_proj"] if shape.gated else ["up_proj"]
    found = [Linear(name, part, width, shape.hidden) for name in inward]
    return [*found, Linear("down_proj", part, shape.hidden, width)]


_AUTO_PARTS = ("attention", "dense", "shared")


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """Parameters of the adapters of one block: all of them, and those that multiply a token."""

    num_params: int
    active_params: int


def adapter_size(shape: ModelShape, layer: int, adapter: AdapterConfig) -> AdapterSize:
    """Returns the adapter of a block. A block without a target has none."""
    found = linears(shape, layer)
    plain = sum(_params(linear, adapter) for linear in found if _is_target(linear, adapter))
    experts = [linear for linear in found if linear.part == "experts" and adapter.experts]
    routed = sum(linear.count * _params(linear, adapter) for linear in experts)
    per_token = 0
    if experts and shape.moe is not None:
        per_token = routed * shape.moe.experts_per_token // shape.moe.experts
    return AdapterSize(plain + routed, plain + per_token)


def refuse_unknown_targets(shape: ModelShape, adapter: AdapterConfig) -> None:
    """Raises ConfigError for a target that no block has, with the names that there are, and for
    routed experts that the model has not."""
    if adapter.experts and shape.moe is None:
        raise ConfigError(f"adapter.experts: {shape.name} has no routed experts; leave it out")
    if set(adapter.targets) & {AUTO_TARGETS, ALL_LINEAR}:
        return
    found = {linear for layer in range(shape.layers) for linear in linears(shape, layer)}
    names = {linear.module for linear in found if linear.part != "experts"}
    for target in adapter.targets:
        if target.rpartition(".")[2] not in names:
            raise ConfigError(
                f"adapter.targets: {target!r} is no linear layer of {shape.name}; expected some of "
                f"{', '.join(sorted(names))}, or {AUTO_TARGETS!r}"
            )


def _is_target(linear: Linear, adapter: AdapterConfig) -> bool:
    if linear.part == "experts":
        return False
    if AUTO_TARGETS in adapter.targets:
        return linear.part in _AUTO_PARTS
    if ALL_LINEAR in adapter.targets:
        return True
    return any(target.rpartition(".")[2] == linear.module for target in adapter.targets)


def _params(linear: Linear, adapter: AdapterConfig) -> int:
    magnitudes = linear.rows if adapter.method == "dora" else 0
    return adapter.rank * (linear.rows + linear.columns) + magnitudes
