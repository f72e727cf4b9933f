"""Writes an INT4 mixture of experts with the names, sizes and layout of published ones.

The architecture is DeepSeek-V3's, which is Kimi-K2's; experts are INT4 in groups of 32 as
compressed-tensors packs them, the rest is bfloat16 (docs/formats/quantized.md). One shard a layer.
The bytes of a tensor are holes of the file, random, or given, so a terabyte needs no drive.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ITEM_NBYTES = {"BF16": 2, "F32": 4, "I32": 4}
GROUP = 32
_POOL_NBYTES = 1 << 26
# Returns the bytes of a tensor; None leaves a hole, which reads as zeros.
Fill = Callable[[str, str, tuple[int, ...]], bytes | None]


@dataclass(frozen=True)
class Shape:
    """The numbers of a DeepSeek-V3 configuration."""

    layers: int
    hidden: int
    experts: int
    expert_width: int
    dense_width: int
    heads: int
    vocabulary: int
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    chosen: int = 8
    is_quantized: bool = True  # Else experts are bfloat16, too.

    def config(self) -> dict[str, Any]:
        """Returns config.json."""
        made = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_width,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "routed_scaling_factor": 2.827,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                           "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
                "config_groups": {"group_0": {
                    "targets": ["Linear"], "input_activations": None, "output_activations": None,
                    "weights": {"num_bits": 4, "type": "int", "symmetric": True,
                                "strategy": "group", "group_size": GROUP, "dynamic": False,
                                "actorder": None},
                }},
            },
        }  # fmt: skip
        if not self.is_quantized:
            del made["quantization_config"]
        return made

    @property
    def num_parameters(self) -> int:
        return sum(_numel(shape) for _, _, shape, is_code in self._logical() if not is_code)

    def _logical(self) -> Iterator[tuple[int, str, tuple[int, ...], bool]]:
        for layer in (-1, *range(self.layers)):
            for name, dtype, shape in self.tensors(layer):
                if name.endswith("_packed"):
                    yield layer, name, (shape[0], shape[1] * 8), False
                elif not name.endswith(("_scale", "_shape")):
                    yield layer, name, shape, dtype == "I32"

    def tensors(self, layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yields (name, dtype, shape) of the tensors of a layer; -1: those outside of layers."""
        h = self.hidden
        if layer < 0:
            yield "model.embed_tokens.weight", "BF16", (self.vocabulary, h)
            yield "model.norm.weight", "BF16", (h,)
            yield "lm_head.weight", "BF16", (self.vocabulary, h)
            return
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", "BF16", (h,)
        yield f"{at}post_attention_layernorm.weight", "BF16", (h,)
        attention = f"{at}self_attn."
        yield f"{attention}q_a_proj.weight", "BF16", (self.q_rank, h)
        yield f"{attention}q_a_layernorm.weight", "BF16", (self.q_rank,)
        q_rows = self.heads * (self.nope + self.rope)
        yield f"{attention}q_b_proj.weight", "BF16", (q_rows, self.q_rank)
        yield f"{attention}kv_a_proj_with_mqa.weight", "BF16", (self.kv_rank + self.rope, h)
        yield f"{attention}kv_a_layernorm.weight", "BF16", (self.kv_rank,)
        kv_rows = self.heads * (self.nope + self.value)
        yield f"{attention}kv_b_proj.weight", "BF16", (kv_rows, self.kv_rank)
        yield f"{attention}o_proj.weight", "BF16", (h, self.heads * self.value)
        mlp = f"{at}mlp."
        if layer == 0:
            yield from _mlp(mlp, h, self.dense_width)
            return
        yield f"{mlp}gate.weight", "BF16", (self.experts, h)
        yield f"{mlp}gate.e_score_correction_bias", "F32", (self.experts,)
        yield from _mlp(f"{mlp}shared_experts.", h, self.expert_width)
        for expert in range(self.experts):
            for name, dtype, (rows, columns) in _mlp(
                f"{mlp}experts.{expert}.", h, self.expert_width
            ):
                if not self.is_quantized:
                    yield name, dtype, (rows, columns)
                    continue
                yield f"{name}_packed", "I32", (rows, columns // 8)
                yield f"{name}_scale", "BF16", (rows, columns // GROUP)
                yield f"{name}_shape", "I32", (2,)


def _mlp(at: str, hidden: int, width: int) -> Iterator[tuple[str, str, tuple[int, int]]]:
    yield f"{at}gate_proj.weight", "BF16", (width, hidden)
    yield f"{at}up_proj.weight", "BF16", (width, hidden)
    yield f"{at}down_proj.weight", "BF16", (hidden, width)


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


KIMI_K2 = Shape(
    layers=61, hidden=7168, experts=384, expert_width=2048, dense_width=18432, heads=64,
    vocabulary=163840,
)  # fmt: skip


def lora_over(base: Path) -> Any:
    """Returns the model of a base, without values, with an adapter of rank 8 on its attention."""
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    import infinity

    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))


def write_base(shape: Shape, directory: Path, fill: Fill) -> int:
    """Writes config.json, the index and the shards; returns the bytes of all shards (their sizes,
    with holes)."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1))
    places: dict[str, str] = {}
    total = 0
    for number, layer in enumerate((*range(shape.layers), -1), start=1):
        file = f"model-{number:05}-of-{shape.layers + 1:05}.safetensors"
        tensors = list(shape.tensors(layer))
        places.update(dict.fromkeys((name for name, _, _ in tensors), file))
        total += _write_shard(directory / file, tensors, fill)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_shard(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]], fill: Fill) -> int:
    entries: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + _numel(shape) * ITEM_NBYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        base = file.tell()
        file.truncate(base + end)
        for name, dtype, shape in tensors:
            content = fill(name, dtype, shape)
            if name.endswith("_shape"):
                rows, columns = next(s for n, _, s in tensors if n == name[:-6] + "_packed")
                content = struct.pack("<ii", rows, columns * 8)
            if content is not None:
                file.seek(base + entries[name]["data_offsets"][0])
                file.write(content)
        # Writes that are still under way would slow down the first ceiling and the first step.
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return base + end


def random_fill(seed: int, std: float = 0.02) -> Fill:
    """Returns a fill with random codes, and scales that give weights of about `std`."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(0, 256, (_POOL_NBYTES,), generator=generator, dtype=torch.uint8).numpy()
    # Slices of one pool, each from another place: drawing takes longer than writing.
    drawn = torch.randn(_POOL_NBYTES // 2, generator=generator).mul_(std).bfloat16()
    drawn = drawn.view(torch.int16).numpy()
    used = 0

    def fill(name: str, dtype: str, shape: tuple[int, ...]) -> bytes | None:
        nonlocal used
        if name.endswith("_packed"):
            nbytes = _numel(shape) * ITEM_NBYTES[dtype]
            used = (used + 4099) % (_POOL_NBYTES - nbytes)
            return bytes(pool[used : used + nbytes])
        if name.endswith("_scale"):
            scale = torch.full((1,), std / 4.6).bfloat16()  # 4.6: the deviation of codes -8 .. 7.
            return scale.view(torch.int16).numpy().tobytes() * _numel(shape)
        if name.endswith("norm.weight"):
            return torch.ones(shape).bfloat16().view(torch.int16).numpy().tobytes()
        if dtype == "F32":
            return torch.zeros(shape).numpy().tobytes()
        count = _numel(shape)
        if count < len(drawn):
            used = (used + 4099) % (len(drawn) - count)
            return drawn[used : used + count].tobytes()
        weights = torch.randn(shape, generator=generator) * std
        return weights.bfloat16().view(torch.int16).numpy().tobytes()

    return fill


def sparse_fill(tokens: list[int], hidden: int, seed: int = 0) -> Fill:
    """Returns a fill of holes, but for norms, routers and the embedding of a few tokens: these make
    tokens choose experts of their own, although every other weight is zero."""
    small = random_fill(seed, std=1.0)

    def fill(name: str, dtype: str, shape: tuple[int, ...]) -> bytes | None:
        if name.endswith(("norm.weight", "gate.weight")) or dtype == "F32":
            return small(name, dtype, shape)
        if name == "model.embed_tokens.weight":
            rows = torch.randn(
                (max(tokens) + 1, hidden), generator=torch.Generator().manual_seed(9)
            )
            return rows.bfloat16().view(torch.int16).numpy().tobytes()
        return None

    return fill
