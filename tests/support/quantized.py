"""Writes tiny checkpoints in the layouts in which quantised models are published.

    model = tiny_causal_lm("deepseek-v3")
    write_quantized(model, "k2", "int4")       # a directory with several shards and an index
    write_decoded("k2", "k2-bf16")             # the same values as plain bfloat16

Names are those of the published files, because transformers writes them. Headers are not padded and
no tensor starts at a multiple of four bytes, as in files of older writers.
"""

from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.huggingface.weight_tensors import read_config
from infinity.codecs import (
    AffineGroups,
    Codec,
    FloatBlocks,
    LogicalTensor,
    TableBlocks,
    logical_tensors,
    mxfp4,
    nvfp4,
)
from infinity.codecs.part import flat_bytes

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
# Tensors start at this remainder of 8.
ODD_OFFSET = 1

Names = list[str]
# Of one stored tensor: dtype as safetensors calls it, shape, bytes.
Stored = tuple[str, tuple[int, ...], torch.Tensor]

_PROJECTIONS = re.compile(r"\.(?:layers|blocks)\.\d+\..*(_proj|_proj_with_mqa)\.weight$")
_OF_MLX = re.compile(r"(_proj|embed_tokens|lm_head)\.weight$")
_EXPERTS = re.compile(r"\.experts\.\d+\..*_proj\.weight$")
_PACKED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one publisher stores quantised weights.

    codec_of: returns the codec of a tensor by name, None for one that stays plain
    table: `quantization_config` of config.json, or the content of another `file`
    lists_plain: whether the table lists the modules that stay plain
    suffixes: other ends of names than those that the codec writes; "/scale" replaces the last part
        of the name of the weight
    dtypes: other dtypes of parts than those that the codec writes, by suffix
    """

    codec_of: Callable[[str], Codec | None]
    table: Mapping[str, Any]
    lists_plain: bool = False
    suffixes: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    file: str = CONFIG_NAME


def _matching(pattern: re.Pattern[str], codec: Codec) -> Callable[[str], Codec | None]:
    return lambda name: codec if pattern.search(name) else None


def _compressed_table(form: str, kind: str, ignore: list[str], **changes: Any) -> dict[str, Any]:
    group: dict[str, Any] = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "group_size": 32,
            "num_bits": 4,
            "observer": "minmax",
            "observer_kwargs": {},
            "strategy": "group",
            "symmetric": True,
            "type": kind,
            **changes,
        },
    }
    return {
        "config_groups": {"group_0": group},
        "format": form,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


_FP8_TABLE = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_MXFP4_TABLE = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
_NVFP4_OF_MODELOPT = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head"],
}
_FP8_OF_QUARK = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": {}}
_INT4_OF_QUARK = {"dtype": "int4", "qscheme": "per_group", "group_size": 32}
_INT4_IGNORED = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]
_NF4_TABLE = {
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_skip_modules": ["lm_head"],
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}


def _fp4_or_fp8(name: str) -> Codec | None:
    if _EXPERTS.search(name):
        return mxfp4()
    return FloatBlocks(scale="F8_E8M0") if _PROJECTIONS.search(name) else None


LAYOUTS: dict[str, Layout] = {
    # DeepSeek-V3, R1 and V3.2, Kimi-K2.
    "fp8": Layout(_matching(_PROJECTIONS, FloatBlocks()), _FP8_TABLE),
    # Qwen3-FP8.
    "fp8-bf16-scales": Layout(
        _matching(_PROJECTIONS, FloatBlocks(scale="BF16")), _FP8_TABLE, lists_plain=True
    ),
    # Kimi-K2-Thinking, K2.5: experts only.
    "int4": Layout(
        _matching(_EXPERTS, AffineGroups()),
        _compressed_table("pack-quantized", "int", _INT4_IGNORED),
    ),
    # The same for every projection, as for models without experts.
    "int4-dense": Layout(
        _matching(_PROJECTIONS, AffineGroups()),
        _compressed_table("pack-quantized", "int", ["lm_head"]),
    ),
    # gpt-oss.
    "mxfp4": Layout(_matching(_PACKED_EXPERTS, mxfp4(is_transposed=True)), _MXFP4_TABLE),
    # MXFP4 of compressed-tensors.
    "mxfp4-packed": Layout(
        _matching(_EXPERTS, mxfp4()),
        _compressed_table("mxfp4-pack-quantized", "float", _INT4_IGNORED),
    ),
    "mxfp8": Layout(
        _matching(_PROJECTIONS, FloatBlocks((1, 32), "U8")),
        _compressed_table("mxfp8-quantized", "float", ["lm_head"], num_bits=8),
        suffixes={"_scale_inv": "_scale"},
    ),
    # RedHatAI's NVFP4.
    "nvfp4": Layout(
        _matching(_PROJECTIONS, nvfp4()),
        _compressed_table(
            "nvfp4-pack-quantized", "float", ["lm_head"], group_size=16, strategy="tensor_group"
        ),
    ),
    # NVIDIA's NVFP4, and its FP8, which config.json does not mention.
    "modelopt-nvfp4": Layout(
        _matching(_PROJECTIONS, nvfp4("TIMES")),
        {"producer": {"name": "modelopt"}, "quantization": _NVFP4_OF_MODELOPT},
        suffixes={"_packed": "", "_global_scale": "_scale_2"},
        file="hf_quant_config.json",
    ),
    "modelopt-fp8": Layout(
        _matching(_PROJECTIONS, FloatBlocks((0, 0))),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        suffixes={"_scale_inv": "_scale"},
    ),
    # RedHatAI's FP8-dynamic: a scale per row.
    "fp8-rows": Layout(
        _matching(_PROJECTIONS, FloatBlocks((1, 0), "BF16", product="BF16")),
        _compressed_table(
            "float-quantized", "float", ["lm_head"], num_bits=8, strategy="channel", group_size=None
        ),
        suffixes={"_scale_inv": "_scale"},
    ),
    "fbgemm": Layout(
        _matching(_PROJECTIONS, FloatBlocks((1, 0))),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        suffixes={"_scale_inv": "_scale"},
    ),
    "quark-fp8": Layout(
        _matching(_PROJECTIONS, FloatBlocks((0, 0))),
        {"quant_method": "quark", "global_quant_config": _FP8_OF_QUARK},
        suffixes={"_scale_inv": "_scale"},
    ),
    "gptq": Layout(
        _matching(_PROJECTIONS, AffineGroups(32, "F16", 4, "GPTQ", True, True)),
        {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01},
        file="quantize_config.json",
    ),
    "gptq-order": Layout(
        _matching(_PROJECTIONS, AffineGroups(32, "BF16", 8, "GPTQ", True, has_order=True)),
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 32,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "awq": Layout(
        _matching(_PROJECTIONS, AffineGroups(32, "F16", 4, "AWQ", True)),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "auto-round": Layout(
        _matching(_PROJECTIONS, AffineGroups(32, "F16", 2, "GPTQ", True)),
        {
            "quant_method": "auto-round",
            "bits": 2,
            "group_size": 32,
            "data_type": "int",
            "packing_format": "auto_round",
            "sym": False,
        },
    ),
    # mlx-lm, hqq through transformers, LLM.int8 of bitsandbytes, quark.
    "mlx": Layout(
        _matching(_OF_MLX, AffineGroups(64, layout="MLX")),
        {"group_size": 64, "bits": 4, "model.norm": False},
    ),
    "metal": Layout(
        _matching(_PROJECTIONS, AffineGroups(32, layout="METAL")),
        {"quant_method": "metal", "bits": 4, "group_size": 32, "modules_to_not_convert": None},
    ),
    "hqq": Layout(
        _matching(_PROJECTIONS, AffineGroups(64, "BF16", 4, "HQQ", True)),
        {"quant_method": "hqq", "skip_modules": ["lm_head"]},
    ),
    "llm-int8": Layout(
        _matching(_PROJECTIONS, AffineGroups(0, "F32", 8, "LLM.int8")),
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
    ),
    "quark-int4": Layout(
        _matching(_PROJECTIONS, AffineGroups(32, "BF16", 4, "QUARK_SIGNED", True)),
        {"quant_method": "quark", "global_quant_config": {"weight": _INT4_OF_QUARK}},
    ),
    # llm-compressor's W4A16_ASYM, W8A16 and W8A8.
    "int4-zeros": Layout(
        _matching(_PROJECTIONS, AffineGroups(has_zeros=True)),
        _compressed_table("pack-quantized", "int", ["lm_head"], symmetric=False),
    ),
    "int8-packed": Layout(
        _matching(_PROJECTIONS, AffineGroups(0, bits=8)),
        _compressed_table(
            "pack-quantized", "int", ["lm_head"], num_bits=8, strategy="channel", group_size=None
        ),
    ),
    "int8": Layout(
        _matching(_PROJECTIONS, AffineGroups(0, "BF16", 8, "BYTES")),
        _compressed_table(
            "int-quantized", "int", ["lm_head"], num_bits=8, strategy="channel", group_size=None
        ),
    ),
    # DeepSeek-V4: experts in FP4, the rest in FP8, with scales that are powers of two.
    "fp4-experts": Layout(
        _fp4_or_fp8,
        {**_FP8_TABLE, "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        suffixes={"_packed": "", "_scale": "/scale", "_scale_inv": "/scale"},
        dtypes={"_packed": "I8", "_scale": "F8_E8M0"},
    ),
    # bitsandbytes with double quantisation.
    "nf4": Layout(_matching(_PROJECTIONS, TableBlocks()), _NF4_TABLE),
    "fp4": Layout(
        _matching(_PROJECTIONS, TableBlocks(kind="fp4")),
        {**_NF4_TABLE, "bnb_4bit_quant_type": "fp4"},
    ),
    # Not quantised.
    "bf16": Layout(lambda _: None, {}),
}


def write_quantized(
    model: Any, directory: str | Path, codec_name: str, *, num_shards: int = 3
) -> None:
    """Writes a transformers model as a quantised checkpoint of one of the LAYOUTS.

    Creates the directory. Tensors that are not quantised keep the dtype that they have in the
    model; a router has that of the model, as published, where its class computes it in fp32.
    Asserts that the layout stores some tensor of the model.
    """
    layout, target = LAYOUTS[codec_name], Path(directory)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, max_shard_size="100GB")
        weights = _read_plain(Path(scratch) / "model.safetensors")
        config = json.loads((Path(scratch) / CONFIG_NAME).read_text())
    del config["transformers_version"]  # What is published is older, and has experts apart.
    stored: dict[str, Stored] = {}
    plain: Names = []
    for name, weight in weights.items():
        codec = layout.codec_of(name)
        if isinstance(codec, AffineGroups) and not codec.group:  # A scale per row.
            codec = replace(codec, group=weight.shape[-1])
        if codec is None:
            plain.append(name)
            is_router = name.endswith(".gate.weight")
            stored[name] = _plain(weight.to(model.dtype) if is_router else weight)
        else:
            stored.update(_encoded(name, weight, codec, layout))
    if layout.table:
        assert len(plain) < len(weights), f"{codec_name} stores no tensor of this model"
    if layout.table and layout.file == CONFIG_NAME:
        config["quantization_config"] = {**layout.table, **_skipped(layout, plain)}
    elif layout.table:
        (target / layout.file).write_text(json.dumps(layout.table))
    (target / CONFIG_NAME).write_text(json.dumps(config, indent=2))
    write_shards(target, stored, num_shards)


def _skipped(layout: Layout, plain: Names) -> dict[str, Any]:
    modules = [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]
    return {"modules_to_not_convert": modules} if layout.lists_plain else {}


def _plain(weight: torch.Tensor) -> Stored:
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
    return names[weight.dtype], tuple(weight.shape), flat_bytes(weight)


def _encoded(name: str, weight: torch.Tensor, codec: Codec, layout: Layout) -> dict[str, Stored]:
    shape = tuple(weight.shape)
    encoding = codec.encode(weight)
    stored: dict[str, Stored] = {}
    for part, content in zip(encoding.codec.parts(shape), encoding.parts, strict=True):
        suffix = layout.suffixes.get(part.suffix, part.suffix)
        own, slash, end = suffix.partition("/")
        full = f"{name.rpartition('.')[0]}.{end}" if slash else f"{name}{own}"
        stored[full] = (layout.dtypes.get(part.suffix, part.dtype), part.shape, content)
    if isinstance(codec, AffineGroups) and codec.layout == "HQQ":
        facts = {"shape": shape, "nbits": (codec.bits,), "axis": (1,), "group_size": (codec.group,)}
        for fact, numbers in facts.items():
            content = flat_bytes(torch.tensor(numbers, dtype=torch.int32))
            length = (len(numbers),) if len(numbers) > 1 else ()
            stored[f"{name.rpartition('.')[0]}.{fact}"] = ("I32", length, content)
    for suffix, tensor in encoding.aside.items():
        dtype = {torch.uint8: "U8", torch.int32: "I32"}[tensor.dtype]
        stored[f"{name}{suffix}"] = (dtype, tuple(tensor.shape), flat_bytes(tensor))
    return stored


def write_shards(directory: Path, stored: Mapping[str, Stored], num_shards: int) -> None:
    """Writes tensors in the order given into shards of about equal size, and their index."""
    total = sum(content.numel() for _, _, content in stored.values())
    shards: list[dict[str, Stored]] = [{} for _ in range(num_shards)]
    done = 0
    for name, tensor in stored.items():
        shards[min(done * num_shards // max(total, 1), num_shards - 1)][name] = tensor
        done += tensor[2].numel()
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{num_shards:05}.safetensors"
        _write_file(directory / file, shard)
        places.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX_NAME).write_text(json.dumps(index))


def _write_file(path: Path, tensors: Mapping[str, Stored]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, content) in tensors.items():
        start, end = end, end + content.numel()
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * ((ODD_OFFSET - len(header)) % 8)
    data = b"".join(tensor[2].numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def read_headers(directory: str | Path) -> dict[str, tuple[str, tuple[int, ...], Path, int, int]]:
    """Returns (dtype, shape, file, first byte, bytes) of every tensor of a directory."""
    found = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with path.open("rb") as file:
            (nbytes,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(nbytes))
        for name, entry in entries.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                found[name] = (entry["dtype"], shape, path, 8 + nbytes + start, end - start)
    return found


def read_tensor_bytes(place: tuple[str, tuple[int, ...], Path, int, int]) -> bytes:
    """Returns the bytes of a tensor of `read_headers`."""
    _, _, path, start, nbytes = place
    with path.open("rb") as file:
        file.seek(start)
        return file.read(nbytes)


def find_logical(directory: str | Path) -> dict[str, LogicalTensor]:
    """Returns the logical tensors of a directory."""
    places = read_headers(directory)
    return logical_tensors(
        read_config(Path(directory)),
        {name: place[:2] for name, place in places.items()},
        read=lambda name: read_tensor_bytes(places[name]),
        where=str(directory),
    )


def decoded_weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """Returns every logical tensor of a directory, decoded by the references of the codecs."""
    places = read_headers(directory)
    weights = {}
    for name, encoded in find_logical(directory).items():
        contents = (read_tensor_bytes(places[stored]) for stored in encoded.names)
        parts = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
        values = encoded.codec.values(parts, encoded.shape)
        weights[name] = values.to(encoded.dtype).contiguous()
    return weights


def write_decoded(directory: str | Path, target: str | Path, *, num_shards: int = 1) -> None:
    """Writes the weights of a quantised directory, decoded, as a plain checkpoint."""
    target = Path(target)
    target.mkdir(parents=True)
    config = json.loads((Path(directory) / CONFIG_NAME).read_text())
    for key in ("quantization_config", "quantization"):
        config.pop(key, None)
    (target / CONFIG_NAME).write_text(json.dumps(config))
    stored = {name: _plain(weight) for name, weight in decoded_weights(directory).items()}
    write_shards(target, stored, num_shards)


def _read_plain(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def tiny_causal_lm(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Any:
    """Returns a random transformers model of an architecture in TINY_CONFIGS, on the CPU.

    `changes` are values of its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = TINY_CONFIGS[name]
    config = AutoConfig.for_model(kind, **{**values, **changes})
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 192,  # Not a multiple of 128: the last blocks of FP8 are short.
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_TINY_MLA: dict[str, Any] = {
    **_TINY,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,  # kv_a_proj_with_mqa has 144 rows.
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_TINY_EXPERTS: dict[str, Any] = {
    **_TINY,
    "head_dim": 48,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
}
TINY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", _TINY_MLA),
    "kimi-k2": ("deepseek_v3", {**_TINY_MLA, "n_group": 1, "routed_scaling_factor": 2.827}),
    "gpt-oss": (
        "gpt_oss",
        {
            **_TINY,
            "head_dim": 48,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": ("qwen3_moe", {**_TINY_EXPERTS, "num_experts": 8}),
    "glm4-moe": (
        "glm4_moe",
        {**_TINY_EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1},
    ),
    "ernie-moe": ("ernie4_5_moe", {**_TINY_EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "llama": ("llama", {**_TINY, "intermediate_size": 320}),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {
            **_TINY_EXPERTS,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            **_TINY_EXPERTS,
            "layers_block_type": ["mamba", "moe", "attention"],
            "ssm_state_size": 8,
            "mamba_num_heads": 12,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 64,
            "use_mamba_kernels": False,
        },
    ),
}
