"""The shapes of a causal language model: the parameters of each block, and those outside blocks.

They are those of transformers' own class, built on meta, or of a GPT-like model. Names of modules
are those of transformers, as an adapter's targets name them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from infinity.config import AdapterConfig
from infinity.config.schema.inputs import ALL_LINEAR, AUTO_TARGETS
from infinity.config.schema.train import Purpose
from infinity.errors import ConfigError
from infinity.modules.reading.configuration import (
    HEADS,
    auto_class,
    embedding_of,
    empty_model,
    is_router,
    mlps_of,
    names_scorer,
    positions_of,
    scores_sequences,
    text_model_of,
    towers,
)
from infinity.plan.tables import Table

# Where weights are used: the number of a block, or a place outside blocks. Passes over text read no
# "tower"; no pass reads "unused".
Place = int | Literal["embedding", "norm", "head", "tower", "unused"]
PartKey = tuple[Place, bool]  # With whether they are of routed experts.
# Parts of a block, and places outside, whose weights a checkpoint stores in one format.
Part = Literal["attention", "dense", "shared", "experts", "router", "embedding", "head"]
_AUTO_PARTS = ("attention", "dense", "shared")
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k",
    "top_k_experts", "top_k", "num_selected_experts",
)  # fmt: skip


class PublishedFormat(Table):
    """The format of the matrices of `parts` in the published checkpoint. `others` are exceptions;
    other weights are bf16. The names of formats are those that the codecs find in checkpoints."""

    format: str
    parts: tuple[Part, ...]
    others: dict[Part, str] = Field(default_factory=dict)

    def of(self, weight: Weight, place: Place) -> str:
        """Returns the format of a weight, "" for bf16."""
        part = place if place in self.parts else weight.part
        is_matrix = weight.is_linear or (part == place and len(weight.shape) == 2)
        return self.others.get(part, self.format) if is_matrix and part in self.parts else ""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, by its name below the block. Experts are one, with a row for each expert.
    `is_linear`: a matrix that an adapter can be attached to, or a stack of these."""

    name: str
    shape: tuple[int, ...]
    part: Part = "dense"
    is_linear: bool = False

    @property
    def numel(self) -> int:
        """The elements of all experts."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The last part of the name of its module."""
        return self.name.removesuffix(".weight").rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The parameters of a block. `attention_width`: the products per token and position, of scores
    and of mixing the values (1 without attention). Each token passes `experts_per_token` of the
    `num_experts` routed experts. `mlp_params`: those of MLPs that `slice_mlps` finds."""

    weights: tuple[Weight, ...]
    attention_width: int
    num_experts: int = 0
    experts_per_token: int = 0
    mlp_params: int = 0

    def numel(self, *, of_experts: bool) -> int:
        """Returns the elements of routed experts, or of all other parameters."""
        return sum(w.numel for w in self.weights if (w.part == "experts") == of_experts)

    def per_token(self, routed_numel: int) -> int:
        """Returns the elements that a token uses of those of all routed experts."""
        return routed_numel * self.experts_per_token // max(self.num_experts, 1)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A causal language model, whose tied head has no weight of its own, or one that `scores`
    sequences. `hub` is its name on the Hugging Face hub; `max_positions` its longest sequence, if
    that is known. `tower`: the frozen parts beside the text model, of `tower_depth` layers, which
    are read with images alone."""

    name: str
    hidden: int
    blocks: tuple[BlockShape, ...]
    embedding: tuple[Weight, ...]
    norm: tuple[Weight, ...]  # All other parameters outside blocks.
    head: tuple[Weight, ...]
    hub: str = ""
    stored: PublishedFormat | None = None
    max_positions: int | None = None
    tower: tuple[Weight, ...] = ()
    tower_depth: int = 0
    scores: bool = False
    hf_config: Any = None  # The configuration that transformers has made the class of.

    @property
    def has_experts(self) -> bool:
        """Whether some block has routed experts."""
        return any(block.num_experts for block in self.blocks)

    @property
    def num_params(self) -> int:
        """All parameters but those of the tower."""
        outside = numel_of((*self.embedding, *self.norm, *self.head))
        return outside + sum(numel_of(block.weights) for block in self.blocks)


def numel_of(weights: tuple[Weight, ...]) -> int:
    """Returns the elements of all of them."""
    return sum(weight.numel for weight in weights)


def scaled_gpt(num_params: int) -> ModelShape:
    """Returns a GPT-like shape with about this number of parameters: blocks of 12 hidden^2, and a
    width of 150 per block, between the shapes of ZeRO-Infinity's table."""
    hidden = max(256, round((num_params * 150 / 12) ** (1 / 3) / 256) * 256)
    layers = max(1, round(num_params / (12 * hidden**2)))
    return gpt_shape(f"GPT-like, {num_params / 1e9:,.0f} B asked", layers, hidden)


def gpt_shape(name: str, layers: int, hidden: int, vocab: int = 50304) -> ModelShape:
    """Returns the shapes of GPT-2, which has biases and a tied head."""
    linear = {
        "attn.c_attn": (3 * hidden, hidden), "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (4 * hidden, hidden), "mlp.c_proj": (hidden, 4 * hidden),
    }  # fmt: skip
    weights = [Weight(f"ln_{i}.{of}", (hidden,)) for i in (1, 2) for of in ("weight", "bias")]
    for module, size in linear.items():
        part: Part = "attention" if module.startswith("attn") else "dense"
        weights.append(Weight(f"{module}.weight", size, part, is_linear=True))
        weights.append(Weight(f"{module}.bias", size[:1], part))
    block = BlockShape(tuple(weights), 2 * hidden, mlp_params=8 * hidden**2)
    table, norm = Weight("weight", (vocab, hidden)), Weight("weight", (hidden,))
    return ModelShape(name, hidden, (block,) * layers, (table,), (norm,), ())


def model_on_meta(
    hf_config: Any, where: str, *, trusts_code: bool = False, purpose: Purpose = "generates text",
    num_labels: int = 0,
) -> Any:  # fmt: skip
    """Returns the model of a configuration without memory and without values: of a reward model,
    a classifier or an encoder the one that scores sequences. `num_labels` are those of the head
    over sequences that a run adds, 0 for none. Raises ConfigError."""
    hf_config.num_labels, kind = num_labels or hf_config.num_labels, None
    if names_scorer(hf_config) and purpose == "generates text":
        purpose = "scores sequences"
    for chosen in (purpose, "scores sequences", "generates text"):
        with suppress(ConfigError):
            kind = kind or auto_class(hf_config, where, trusts_code=trusts_code, purpose=chosen)
    with torch.device("meta"):  # Nobody reads values: transformers draws none on this device.
        return empty_model(hf_config, torch.bfloat16, where, trusts_code=trusts_code, kind=kind)


def shape_of_model(
    model: Any, name: str, where: str, *, hub: str = "", stored: PublishedFormat | None = None
) -> ModelShape:
    """Returns the shapes of a model on meta. Raises ConfigError for one without blocks."""
    config = model.config.get_text_config()
    layers = _layers_of(text_model_of(model))
    if layers is None or not hasattr(config, "hidden_size"):
        lacks = "list of layers" if layers is None else "hidden_size"
        raise ConfigError(f"{where}: {type(model).__name__} has no {lacks} to plan")
    beside = towers(model).values()
    seen: set[int] = {id(p) for tower in beside for p in tower.parameters()}
    blocks = tuple(_block_of(layer, config, seen, where) for layer in layers)
    rest: defaultdict[Place, list[Weight]] = defaultdict(list)
    for full_name, (place, _) in places_of(model).items():
        if not isinstance(place, int):
            weight = Weight(full_name, tuple(model.get_parameter(full_name).shape))
            rest[place].append(weight)
    return ModelShape(
        name=name,
        hidden=int(config.hidden_size),
        blocks=blocks,
        embedding=tuple(rest["embedding"]),
        norm=tuple(rest["norm"]),
        head=tuple(rest["head"]),
        hub=hub,
        stored=stored,
        max_positions=positions_of(config),
        tower=tuple(rest["tower"]),
        tower_depth=sum(len(_layers_of(tower) or ()) for tower in beside),
        scores=scores_sequences(model),
        hf_config=model.config,
    )


def places_of(model: Any) -> dict[str, PartKey]:
    """Returns where each parameter of a model is used, and whether it is of routed experts. A
    parameter with several names has the first of them."""
    text, output = text_model_of(model), model.get_output_embeddings()
    found: dict[int, PartKey] = {}

    def put(module: nn.Module | None, place: Place) -> None:
        for name, parameter in module.named_parameters() if module is not None else ():
            of_experts = isinstance(place, int) and _part_of(name) == "experts"
            found.setdefault(id(parameter), (place, of_experts))

    for tower in towers(model).values():
        put(tower, "tower")
    for number, layer in enumerate(_layers_of(text) or ()):
        put(layer, number)
    table = embedding_of(model)
    for module in (*text.modules(), table):
        if isinstance(module, nn.Embedding) or module is table:
            put(module, "embedding")
    put(output, "head")
    for name in HEADS if scores_sequences(model) else ():
        put(getattr(model, name, None), "head")
    return {
        name: found.get(id(parameter), ("norm", False))
        for name, parameter in model.named_parameters()
    }


def _layers_of(text: nn.Module) -> nn.ModuleList | None:
    """Returns the outermost list of modules with the most parameters."""
    lists: list[nn.ModuleList] = []

    def walk(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList):
            lists.append(module)
            return
        for child in module.children():
            walk(child)

    walk(text)
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=None)


def _block_of(layer: nn.Module, config: Any, seen: set[int], where: str) -> BlockShape:
    """Returns a block; parameters that were `seen`, in a block before, are left out."""
    linear = {
        f"{name}.weight" for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }  # fmt: skip
    found: dict[str, Weight] = {}
    num_experts = 0
    for name, parameter in layer.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        part, shape, is_linear = _part_of(name), tuple(parameter.shape), name in linear
        one = _ONE_EXPERT.search(name) if part == "experts" else None
        if one is not None:  # A list of experts becomes a stack.
            name = f"{name[: one.start()]}.experts.{name[one.end() :]}"
            before = found.get(name)
            shape = (1 if before is None else before.shape[0] + 1, *shape)
        elif part == "experts":
            is_linear = len(shape) > 2
        if part == "experts":
            num_experts = max(num_experts, shape[0])
        found[name] = Weight(name, shape, part, is_linear)
    top_k = _experts_per_token(layer, config, where) if num_experts else 0
    has_attention = any(_is_attention(name) for name in found)
    width = _attention_width(config) if has_attention else 1
    top_k = min(top_k, num_experts)
    return BlockShape(tuple(found.values()), width, num_experts, top_k, mlp_params_of(layer))


def mlp_params_of(block: nn.Module) -> int:
    """Returns the parameters of a block's MLPs that `slice_mlps` finds."""
    return sum(p.numel() for mlp in mlps_of(block).values() for p in mlp.parameters())


_ONE_EXPERT = re.compile(r"\.\w*experts\.(\d+)\.")


def _part_of(name: str) -> Part:
    parts = name.split(".")
    if any("shared" in part for part in parts[:-1]) and not is_router(name):
        return "shared"
    if any("experts" in part for part in parts[:-1]):
        return "experts"
    if is_router(name):
        return "router"
    return "attention" if _is_attention(name) or "linear_attn" in name else "dense"


def _is_attention(name: str) -> bool:
    return re.search(r"(^|[._])(attn|attention)", name) is not None and "linear_attn" not in name


def _experts_per_token(layer: nn.Module, config: Any, where: str) -> int:
    for holder in (config, *layer.modules()):
        for key in _TOP_K:
            value = getattr(holder, key, None)
            if isinstance(value, int) and not (holder is config and key == "top_k"):
                return value
    raise ConfigError(
        f"{where}: expected the number of experts that a token passes "
        f"({', '.join(_TOP_K[:3])}); none of these keys is there"
    )


def _attention_width(config: Any) -> int:
    """Returns the products per token and position. Sliding windows and sparse attention count as
    full attention."""
    try:
        heads = getattr(config, "num_attention_heads", None)
    except RuntimeError:  # It differs by layer.
        heads = None
    if not isinstance(heads, int):
        return 2 * int(config.hidden_size)
    if getattr(config, "kv_lora_rank", None):
        latent = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        return heads * int(latent)
    # An attribute that differs by layer (Gemma 4) cannot be asked of the configuration itself.
    width = config.to_dict().get("head_dim")
    return 2 * heads * (width if isinstance(width, int) else int(config.hidden_size) // heads)


def adapter_size(block: BlockShape, adapter: AdapterConfig, layer: int = 0) -> tuple[int, int]:
    """Returns the parameters of a block's adapters, and of its experts that are trained in full:
    all of them, and those that multiply a token. A block without a target has none."""
    plain = sum(_params(weight, adapter) for weight in block.weights if _is_target(weight, adapter))
    routed = 0
    if adapter.experts:
        stacks = (w for w in block.weights if w.part == "experts" and w.is_linear)
        routed = sum(_params(weight, adapter) for weight in stacks)
    if block.num_experts:
        numbers = [re.findall(r"\d+", name) for name in adapter.experts_full or ()]
        count = sum(number[:1] == [str(layer)] for number in numbers)
        routed += count * block.numel(of_experts=True) // block.num_experts
    return plain + routed, plain + block.per_token(routed)


def refuse_unknown_targets(shape: ModelShape, adapter: AdapterConfig) -> None:
    """Raises ConfigError for a target that no block has, with the names that there are, and for
    routed experts that the model has not."""
    if (adapter.experts or adapter.experts_full) and not shape.has_experts:
        key = "adapter.experts" if adapter.experts else "adapter.experts_full"
        raise ConfigError(f"{key}: {shape.name} has no routed experts; leave it out")
    if set(adapter.targets) & {AUTO_TARGETS, ALL_LINEAR}:
        return
    found = (weight for block in shape.blocks for weight in block.weights)
    names = {w.module for w in found if w.is_linear and w.part != "experts"}
    for target in adapter.targets:
        if target.rpartition(".")[2] not in names:
            raise ConfigError(
                f"adapter.targets: {target!r} is no linear layer of {shape.name}; expected some of "
                f"{', '.join(sorted(names))}, or {AUTO_TARGETS!r}"
            )


def _is_target(weight: Weight, adapter: AdapterConfig) -> bool:
    if weight.part == "experts" or not weight.is_linear:
        return False
    if AUTO_TARGETS in adapter.targets:
        return weight.part in _AUTO_PARTS
    if ALL_LINEAR in adapter.targets:
        return True
    return any(target.rpartition(".")[2] == weight.module for target in adapter.targets)


def _params(weight: Weight, adapter: AdapterConfig) -> int:
    *stacked, rows, columns = weight.shape
    magnitudes = rows if adapter.method == "dora" else 0
    return math.prod(stacked) * (adapter.rank * (rows + columns) + magnitudes)
