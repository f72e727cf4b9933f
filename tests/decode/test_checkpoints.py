"""Whole checkpoints in the published layouts: every tensor is found, and decodes to its weight."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity.checkpoint import weight_source
from infinity.checkpoint.huggingface.export_weights import plan_export
from infinity.codecs import AffineGroups, FloatBlocks, Plain, TableBlocks, mxfp4, nvfp4
from infinity.tools.convert.rewrite import write_directory
from infinity.tools.training.merge import plan_merge
from tests.support.quantized import (
    LAYOUTS,
    TINY_CONFIGS,
    decoded_weights,
    find_logical,
    read_headers,
    tiny_causal_lm,
    write_decoded,
    write_quantized,
)

transformers = pytest.importorskip("transformers")

# Layouts that a model is published in, or that say most about its names.
PUBLISHED = [
    ("deepseek-v3", "fp8", 72),
    ("kimi-k2", "int4", 48),
    ("kimi-k2", "fp8", 72),
    ("deepseek-v3", "fp4-experts", 72),
    ("deepseek-v3", "mxfp4-packed", 48),
    ("gpt-oss", "mxfp4", 6),
    ("qwen3-moe", "fp8-bf16-scales", 84),
    ("qwen3-moe", "nf4", 84),
    ("glm4-moe", "fp8", 69),
    ("llama", "int4-dense", 21),
    ("llama", "nf4", 21),
    ("llama", "bf16", 0),
    ("deepseek-v3", "nvfp4", 72),
    ("deepseek-v3", "modelopt-nvfp4", 72),
    ("qwen3.5-moe", "modelopt-nvfp4", 35),
    ("nemotron-h", "modelopt-nvfp4", 16),
    ("qwen3-moe", "modelopt-fp8", 84),
    ("qwen3-moe", "mxfp8", 84),
    ("llama", "fp8-rows", 21),
    ("llama", "fbgemm", 21),
    ("llama", "quark-fp8", 21),
    ("llama", "gptq", 21),
    ("llama", "fp4", 21),
    ("llama", "gptq-order", 21),
    ("qwen3-moe", "awq", 84),
    ("llama", "auto-round", 21),
    ("llama", "mlx", 23),
    ("llama", "metal", 21),
    ("llama", "hqq", 21),
    ("llama", "llm-int8", 21),
    ("llama", "quark-int4", 21),
    ("deepseek-v3", "int4-zeros", 72),
    ("llama", "int8-packed", 21),
    ("llama", "int8", 21),
]
CODECS = {
    "fp8": {FloatBlocks()},
    "fp8-bf16-scales": {FloatBlocks(scale="BF16")},
    "int4": {AffineGroups()},
    "int4-dense": {AffineGroups()},
    "fp4-experts": {mxfp4(), FloatBlocks(scale="F8_E8M0")},
    "mxfp4-packed": {mxfp4()},
    "mxfp4": {mxfp4(is_transposed=True)},
    "bf16": set(),
    "nvfp4": {nvfp4()},
    "modelopt-nvfp4": {nvfp4("TIMES")},
    "modelopt-fp8": {FloatBlocks((0, 0))},
    "mxfp8": {FloatBlocks((1, 32), "U8")},
    "fp8-rows": {FloatBlocks((1, 0), "BF16", product="BF16")},
    "fbgemm": {FloatBlocks((1, 0))},
    "quark-fp8": {FloatBlocks((0, 0))},
    "gptq": {AffineGroups(32, "F16", 4, "GPTQ", True, True)},
    "gptq-order": {AffineGroups(32, "BF16", 8, "GPTQ", True, has_order=True)},
    "awq": {AffineGroups(32, "F16", 4, "AWQ", True)},
    "auto-round": {AffineGroups(32, "F16", 2, "GPTQ", True)},
    "mlx": {AffineGroups(64, layout="MLX")},
    "metal": {AffineGroups(32, layout="METAL")},
    "hqq": {AffineGroups(64, "BF16", 4, "HQQ", True)},
    "llm-int8": {
        AffineGroups(192, "F32", 8, "LLM.int8"),
        AffineGroups(320, "F32", 8, "LLM.int8"),
    },
    "quark-int4": {AffineGroups(32, "BF16", 4, "QUARK_SIGNED", True)},
    "int4-zeros": {AffineGroups(has_zeros=True)},
    "int8-packed": {AffineGroups(192, bits=8), AffineGroups(320, bits=8)},
    "int8": {AffineGroups(192, "BF16", 8, "BYTES"), AffineGroups(320, "BF16", 8, "BYTES")},
}


@functools.cache
def model_of(name: str) -> Any:
    return tiny_causal_lm(name)


@functools.cache
def plain_weights(name: str) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as scratch:
        write_quantized(model_of(name), Path(scratch) / "plain", "bf16")
        return decoded_weights(Path(scratch) / "plain")


@pytest.mark.parametrize(("name", "layout", "num_quantised"), PUBLISHED)
def test_a_published_layout_decodes_to_the_weights(
    name: str, layout: str, num_quantised: int, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    write_quantized(model_of(name), directory, layout)
    found = find_logical(directory)
    quantised = {key for key, encoded in found.items() if not isinstance(encoded.codec, Plain)}
    assert len(quantised) == num_quantised
    codecs = {found[key].codec for key in quantised}
    if layout in ("nf4", "fp4"):
        assert all(isinstance(codec, TableBlocks) for codec in codecs)
    else:
        assert codecs == CODECS[layout]
    expected = plain_weights(name)
    decoded = decoded_weights(directory)
    assert decoded.keys() == expected.keys()
    for key, weight in expected.items():
        assert decoded[key].shape == weight.shape
        assert decoded[key].dtype in (weight.dtype, found[key].dtype)
        if key in quantised:
            error = (decoded[key].float() - weight.float()).norm() / weight.float().norm()
            assert 0 < error < (0.6 if layout == "auto-round" else 0.15)  # That has two bits.
        else:
            assert torch.equal(decoded[key], weight)


def test_every_model_has_a_published_layout() -> None:
    assert set(TINY_CONFIGS) - {name for name, _, _ in PUBLISHED} == {"ernie-moe"}, "in bf16"
    assert {layout for _, layout, _ in PUBLISHED} == set(LAYOUTS)


@pytest.mark.parametrize("layout", ["fp8", "int4"])
def test_files_have_odd_offsets_several_shards_and_published_names(
    layout: str, tmp_path: Path
) -> None:
    write_quantized(model_of("kimi-k2"), tmp_path / "model", layout, num_shards=3)
    places = read_headers(tmp_path / "model")
    assert len({place[2] for place in places.values()}) == 3
    assert all(place[3] % 4 for place in places.values() if place[0] in ("I32", "F32"))
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: place[2].name for name, place in places.items()}
    stem = "model.layers.2.mlp.experts.7.up_proj.weight"
    suffixes = {"fp8": ("", "_scale_inv"), "int4": ("_packed", "_scale", "_shape")}[layout]
    assert {name for name in places if name.startswith(stem)} == {stem + end for end in suffixes}


def test_a_decoded_copy_loads_in_transformers(tmp_path: Path) -> None:
    write_quantized(model_of("kimi-k2"), tmp_path / "int4", "int4")
    write_decoded(tmp_path / "int4", tmp_path / "bf16")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", output_loading_info=True, dtype=torch.bfloat16
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    decoded = decoded_weights(tmp_path / "int4")
    up = [decoded[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(8)]
    packed = model.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(packed[:, packed.shape[1] // 2 :], torch.stack(up))


def test_experts_that_mlx_lm_has_stacked_are_those_of_the_class(tmp_path: Path) -> None:
    """mlx-lm `models/qwen3_moe.py`, sanitize: `switch_mlp` in place of `experts.0`, `experts.1`."""
    write_quantized(model_of("qwen3-moe"), tmp_path / "apart", "mlx", num_shards=1)
    file = tmp_path / "apart" / "model-00001-of-00001.safetensors"
    stored: dict[str, Any] = {}
    for name, tensor in load_file(file).items():
        number = re.search(r"\.experts\.(\d+)\.", name)
        key = name.replace(f".experts.{number[1]}.", ".switch_mlp.") if number else name
        stored.setdefault(key, []).append(tensor)
    (tmp_path / "stacked").mkdir()
    (tmp_path / "stacked" / "config.json").write_text((tmp_path / "apart/config.json").read_text())
    made = {key: torch.stack(own) if len(own) > 1 else own[0] for key, own in stored.items()}
    save_file(made, tmp_path / "stacked" / "model.safetensors")
    loaded, model = [], tiny_causal_lm("qwen3-moe")
    for directory in ("apart", "stacked"):
        plan = weight_source(tmp_path / directory).plan(model)
        found: dict[str, torch.Tensor] = {}
        plan.load(found.__setitem__)
        assert plan.stored().keys() == found.keys(), "all are read in place"
        loaded.append(found)
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(loaded[1][name], weight) for name, weight in loaded[0].items())
    # Both are exported and merged under the names that transformers reads.
    names = set(weight_source(tmp_path / "apart").names())
    assert set(plan_export(model, max_shard_nbytes=1 << 30).shard_of) == names
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    for directory in ("apart", "stacked"):
        plan = plan_merge(tmp_path / directory, tmp_path / "adapter", any_base=True)
        write_directory(plan, tmp_path / f"{directory}-merged")
    merged = [decoded_weights(tmp_path / f"{name}-merged") for name in ("apart", "stacked")]
    assert merged[0].keys() == merged[1].keys() == names
    assert all(torch.equal(merged[1][name], weight) for name, weight in merged[0].items())
