"""Models of text and images train on text by their own class: what `new` writes, `train` trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from infinity.checkpoint.huggingface.import_weights import weight_source
from infinity.modules.reading.configuration import towers
from infinity.tools.cli import app
from infinity.tools.convert.rewrite import write_directory
from infinity.tools.serving.export import plan_export
from infinity.tools.training.merge import plan_merge, read_changes
from tests.support.exhaustive import sampled
from tests.support.forked import COMMAND, run_script
from tests.support.quantized import write_quantized

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def rope(*section: int) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    return {"rope_parameters": parameters}


LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
DEEPSEEK = TEXT | ROUTED | {
    "model_type": "deepseek_v3", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 4,
    "head_dim": None,
}  # fmt: skip
SEES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "image_size": 16,
}  # fmt: skip
QWEN_SEES = SEES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", {
        "text_config": DEEPSEEK, "tie_word_embeddings": False, "projection_hidden_size": 16,
        "vision_config": SIGLIP | {"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2},
    }),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {
        "text_config": TEXT | rope(2, 1, 1), "vision_config": QWEN_SEES}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {
        "text_config": TEXT | MOE | rope(2, 1, 1), "vision_config": QWEN_SEES}),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", {
        "text_config": TEXT | LINEAR, "vision_config": QWEN_SEES}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {
        "text_config": TEXT | LINEAR | MOE | {"shared_expert_intermediate_size": 16},
        "vision_config": QWEN_SEES}),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration", {
        "text_config": TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "vision_config": SIGLIP}),
    "llama4": ("Llama4ForConditionalGeneration", {
        "text_config": TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 4,
                               "interleave_moe_layer_step": 1, "attention_chunk_size": 64},
        "vision_config": SIGLIP | {"intermediate_size": 64, "vision_output_dim": 16,
                                   "projector_input_dim": 16, "projector_output_dim": 16}}),
    "gemma3": ("Gemma3ForConditionalGeneration", {
        "text_config": TEXT, "vision_config": SIGLIP, "mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4ForConditionalGeneration", {
        "text_config": TEXT | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512,
                               "layer_types": ["sliding_attention", "full_attention"],
                               "num_kv_shared_layers": 0}, "vision_config": None}),
    "mistral3": ("Mistral3ForConditionalGeneration", {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 8}}),
    "glm4v": ("Glm4vForConditionalGeneration", {
        "text_config": TEXT | rope(2, 1, 1), "vision_config": SEES}),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", {
        "text_config": TEXT | ROUTED | rope(1, 1, 0), "vision_config": SEES}),
    "internvl": ("InternVLForConditionalGeneration", {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": SIGLIP | {"image_size": [16, 16], "patch_size": [8, 8]}}),
    "smolvlm": ("SmolVLMForConditionalGeneration", {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": SIGLIP, "scale_factor": 2}),
}  # fmt: skip
OFTEN = ("kimi_k25", "qwen3_vl_moe", "llama4")
MACHINE = """
name = "a small machine"
source = "made up"
host = { memory = "16GB", update_gb_per_s = 10, sum_gb_per_s = 10 }
device = { tflops = 0.1 }
nvme = { capacity = "1TB", read_gb_per_s = 2.0, write_gb_per_s = 1.0 }
"""


def saved(model_type: str, directory: Path) -> Any:
    """A random model in its directory, and the model."""
    name, keys = CASES[model_type]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(model_type, **keys))
    model.save_pretrained(directory)
    return model


def trained(base: Path, directory: Path, *options: str) -> Path:
    """Writes the file by `new`, and trains it."""
    (directory / "machine.toml").write_text(MACHINE)
    (directory / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(99)))
    file = directory / "run.toml"
    arguments = ["new", base, "--data", directory / "text.txt", "--sequence", 64, "--batch", 2,
                 "--hardware", directory / "machine.toml", "-o", file]  # fmt: skip
    result = CliRunner().invoke(app, [*map(str, arguments), *options])
    assert result.exit_code == 0, result.output
    end = run_script(COMMAND, "train", file, "--set", "train.steps=2", "--json")
    assert end.returncode == 0, end.stderr[-2000:]
    return directory / "run-output"


@pytest.mark.parametrize("model_type", sampled(CASES, OFTEN.__contains__))
def test_an_adapter_of_the_text_model_is_one_of_the_class(model_type: str, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path / "base")
    output = trained(tmp_path / "base", tmp_path)
    names = set(load_file(output / "adapter_model.safetensors"))
    beside = tuple(f"base_model.model.{name}." for name in towers(model))
    assert names and not any(name.startswith(beside) for name in names)
    assert all("language_model." in name or "text_model." in name for name in names)
    adapted = PeftModel.from_pretrained(model, str(output))
    assert {
        name.replace(".default", "") for name in adapted.state_dict() if "lora_" in name
    } == names


@pytest.mark.parametrize("layout", ["int4", "modelopt-nvfp4"])
def test_a_quantised_kimi_trains_in_place(layout: str, tmp_path: Path) -> None:
    """With experts as wide as a group of codes; transformers saves its layers as `blocks`."""
    name, keys = CASES["kimi_k25"]
    wide = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 8}
    config = transformers.AutoConfig.for_model(
        "kimi_k25", **keys | {"text_config": keys["text_config"] | wide}
    )
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).to(torch.bfloat16)
    base = tmp_path / "base"
    write_quantized(model, base, layout)
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    plan = weight_source(base).plan(model)
    experts = {target for target in plan.view.targets if ".experts." in target}
    assert experts and experts <= {*plan.stored()}
    output = trained(base, tmp_path)
    factors = load_file(output / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in factors.items() if "lora_B" in name)
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before


def apart(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a matrix for each expert, as llm-compressor and AutoAWQ write what they quantise."""
    found = dict(stored)
    for name in [name for name in stored if name.endswith(".experts.down_proj")]:
        stem, down = name.removesuffix("down_proj"), found.pop(name)
        both = found.pop(f"{stem}gate_up_proj")
        if both.shape[1] != 2 * down.shape[2]:  # Llama 4 computes with the transpose.
            both, down = both.mT, down.mT
        for number, (one, other) in enumerate(zip(both, down, strict=True)):
            parts = zip(("gate", "up", "down"), (*one.chunk(2), other), strict=True)
            found |= {f"{stem}{number}.{k}_proj.weight": part.contiguous() for k, part in parts}
    return found


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "llama4"])
def test_packed_experts_have_their_merge_and_export_in_each_layout(
    model_type: str, tmp_path: Path
) -> None:
    """Qwen3-VL-MoE is published with transposed experts; transformers 5 saves them as they are."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    kind = type(saved(model_type, base))
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(1)
    model = get_peft_model(
        kind.from_pretrained(base),
        LoraConfig(target_modules=[], target_parameters=experts, init_lora_weights=False),
    )
    model.save_pretrained(adapter)
    expected = model.merge_and_unload().state_dict()
    stored = load_file(base / "model.safetensors")
    turned = {n: t.mT.contiguous() for n, t in stored.items() if n.endswith("experts.down_proj")}
    layouts = {"saved": stored, "published": stored | turned, "apart": apart(stored)}
    if model_type == "llama4":
        del layouts["published"]
    for layout, tensors in layouts.items():
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        write_directory(plan_merge(base, adapter, any_base=True), tmp_path / layout)
        got = kind.from_pretrained(tmp_path / layout).state_dict()
        assert all(torch.equal(value, got[name]) for name, value in expected.items())
        plan = weight_source(base).plan(kind.from_pretrained(tmp_path / layout))
        assert {n for n in plan.view.targets if ".experts." in n} <= {*plan.stored()}, "in place"
        if model_type == "qwen3_vl_moe" and layout != "apart":
            _, adapted, changes, _ = read_changes(base, adapter, any_base=False, is_merged=False)
            plan_export(adapter, adapted, changes, "vllm")(tmp_path / layout)
            served = load_file(tmp_path / layout / "adapter_model.safetensors")
            assert len(served) == 2 * 2 * TEXT["num_hidden_layers"]


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", pytest.param("llama4", marks=pytest.mark.exhaustive)]
)
def test_all_weights_train_but_those_beside_the_text_model(model_type: str, tmp_path: Path) -> None:
    before = saved(model_type, tmp_path / "base")
    after = type(before).from_pretrained(trained(tmp_path / "base", tmp_path, "--full"))
    beside, values = tuple(f"{name}." for name in towers(before)), dict(before.named_parameters())
    for name, parameter in after.named_parameters():
        is_equal = torch.equal(parameter, values[name])
        assert is_equal == name.startswith(beside), name


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("clip", {}, "no class that generates text for 'clip'"),
        ("t5", {}, "its encoder takes other text than its decoder"),
        ("falcon_mamba", {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 256},
         '"auto" finds no linear layer in FalconMambaForCausalLM'),
    ],
)  # fmt: skip
def test_what_train_refuses_new_and_plan_refuse_with_the_same_words(
    model_type: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    if keys:
        config = transformers.AutoConfig.for_model(model_type, **keys)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "text.txt").write_text("one\n" * 200)
    file = tmp_path / "run.toml"
    file.write_text(
        f'model.path = "{tmp_path}"\noutput.directory = "{tmp_path}/out"\nadapter.rank = 2\n'
        f'data = {{paths = ["{tmp_path}/text.txt"], sequence_length = 32}}\ntrain = {{steps = 2, batch_size = 2}}\n'
    )
    words = []
    plan = ["plan", "--model", tmp_path, "--lora", 2, "--hardware", "dgx-2"]
    for command in (plan, ["new", tmp_path], ["plan", file, "--hardware", "dgx-2"]):
        result = CliRunner().invoke(app, list(map(str, command)))
        assert result.exit_code == 2
        words.append(" ".join(result.output.split()))
    words.append(" ".join(run_script(COMMAND, "train", file).stderr.split()))
    assert all(said in text for text in words), words
