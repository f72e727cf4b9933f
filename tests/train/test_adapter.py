"""`infinity train` with [adapter]: the bits of TRL and PEFT in memory, in PEFT's format."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    Mamba2Config,
    Qwen3MoeConfig,
)

from infinity.checkpoint.huggingface.import_weights import weight_source
from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.integrations.server_layouts import warn_unused
from infinity.modules.reading.configuration import is_router, published_config
from infinity.tools.convert.spread import plan_gather, plan_spread, run_gather, run_spread
from infinity.tools.training.adapter import auto_targets, expert_targets
from infinity.tools.training.base_identity import identify, read_identity
from infinity.tools.training.merge import plan_merge
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled
from tests.support.quantized import tiny_causal_lm, write_decoded, write_quantized

from .jobs import job_table, lines_of, metrics, run
from .plain import train as train_plainly

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SMALL, num_hidden_layers=2),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=16, decoder_sparse_step=1,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SMALL, num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, moe_intermediate_size=16, kv_lora_rank=8,
        q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    ),
}  # fmt: skip
STEPS = 4


def save_base(directory: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A small job, its base on nvme; tests change what they are about."""
    return job_table(
        tmp_path,
        model={"path": str(tmp_path / "base"), "seed": 5},
        adapter={"rank": 4, "alpha": 8},
        train={"steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2},
        optimizer={"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1},
    )


def plain(
    table: dict[str, Any], base: Path | None = None, data: Any = None, **options: Any
) -> tuple[Any, list[tuple[float, float]]]:
    """(model, [(loss, norm)]) of the same run by TRL and PEFT with everything in memory."""
    config = SwapConfig.load(table)
    assert config.adapter and config.model
    model: Any = AutoModelForCausalLM.from_pretrained(base or config.model.path, dtype="auto")
    adapter = config.adapter
    torch.manual_seed(config.model.seed)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=adapter.rank, lora_alpha=8, use_rslora=adapter.rslora,
        use_dora=adapter.method == "dora", target_modules=auto_targets(model),
        target_parameters=expert_targets(model) if adapter.experts else None,
    )  # fmt: skip
    model = peft.get_peft_model(model, lora).train()
    with tempfile.TemporaryDirectory() as directory:
        steps = train_plainly(table, model, Path(directory), data, **options)
    return model, [(loss, norm) for loss, norm, _ in steps]


def values_of(model: Any) -> dict[str, torch.Tensor]:
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


@pytest.mark.parametrize(
    ("kind", "adapter"),
    sampled(
        [
            ("llama", {}),
            ("llama", {"method": "dora", "rslora": True}),
            ("qwen3_moe", {}),
            ("deepseek_v3", {}),
        ],
        lambda case: case[0] != "qwen3_moe",
    ),
)
def test_a_run_has_the_bits_of_peft_in_memory(tmp_path, table, kind, adapter, caplog) -> None:
    """Loss and gradient norm of each step, the adapter, and the logits of plain PEFT with it."""
    base = save_base(tmp_path / "base", kind)
    table["adapter"] |= adapter
    warn_unused.cache_clear()
    run(table)
    said = (
        "vLLM 0.33.0 does not use the factors of 'kv_b_proj'; to serve the adapter there, merge it"
    )
    assert caplog.text.count(said) == (kind == "deepseek_v3")
    expected, outcomes = plain(table)
    assert metrics(table) == outcomes
    saved = load_file(tmp_path / "output" / "adapter_model.safetensors")
    assert_same(saved, values_of(expected), is_ordered=False)
    described = json.loads((tmp_path / "output" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    assert not list((tmp_path / "output").glob("model*.safetensors"))

    loaded: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "output").eval()
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected.eval()(ids).logits)


def test_factors_that_a_server_uses_in_one_type_of_model_are_not_called_unused(caplog) -> None:
    """MiniCPM3 in vLLM calls kv_b_proj; other latent attention reads its matrix."""
    modules = frozenset({"layers.0.kv_b_proj", "layers.0.o_proj"})
    warn_unused.cache_clear()
    warn_unused(modules, "minicpm3")
    assert not caplog.text
    warn_unused(modules, "kimi_k2")
    assert 'set adapter.targets = ["o_proj"]' in caplog.text


def test_an_adapter_of_experts_has_the_numbers_of_peft(tmp_path, table) -> None:
    """To rounding, as its product is computed as factors. Names and shapes are PEFT's."""
    base = save_base(tmp_path / "base", "qwen3_moe", torch.float32)
    table["adapter"] |= {"experts": True}
    table["train"]["steps"] = 4
    run(table)
    expected, outcomes = plain(table)
    assert metrics(table) == [pytest.approx(each, rel=1e-4) for each in outcomes]
    saved = load_file(tmp_path / "output" / "adapter_model.safetensors")
    wanted = values_of(expected)
    assert saved.keys() == wanted.keys() and any("experts" in name for name in saved)
    for name, value in saved.items():
        assert torch.allclose(value, wanted[name], rtol=1e-2, atol=1e-3), name
    loaded: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    peft.PeftModel.from_pretrained(loaded, tmp_path / "output")


@pytest.mark.parametrize("codec", sampled(["fp8", "int4", "nf4"], "int4".__eq__))
def test_a_run_over_a_quantised_base_has_the_bits_of_the_decoded_one(
    tmp_path, table, codec
) -> None:
    write_quantized(tiny_causal_lm("deepseek-v3"), tmp_path / "base", codec)
    write_decoded(tmp_path / "base", tmp_path / "decoded")
    (tmp_path / "text.txt").write_bytes(bytes(32 + i * 7 % 60 for i in range(4000)))
    table["train"]["steps"] = 4
    run(table)
    expected, outcomes = plain(table, tmp_path / "decoded")
    assert metrics(table) == outcomes
    saved = load_file(tmp_path / "output" / "adapter_model.safetensors")
    assert_same(saved, values_of(expected), is_ordered=False)


def test_a_step_fetches_a_block_once_for_all_its_batches(tmp_path, table) -> None:
    large = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL | large), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    base_nbytes = sum(2 * parameter.numel() for parameter in model.model.layers.parameters())
    table["tiers"]["host"]["capacity"] = "6MiB"
    table["train"] |= {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 1}
    table["output"]["directory"] = str(tmp_path / "one")
    run(table)
    table["train"] |= {"gradient_accumulation_steps": 3}
    table["output"]["directory"] = str(tmp_path / "three")
    run(table)

    def read_nbytes(name: str) -> int:
        return lines_of(tmp_path / name)[2]["nvme_read_nbytes"]

    # Twice the base, and the adapter with its state.
    assert base_nbytes < read_nbytes("one") < 2.5 * base_nbytes
    # What stays in memory differs with the time of the reads; fetched for each batch it were 3.
    assert read_nbytes("three") < 1.3 * read_nbytes("one")


def test_resumed_over_a_base_that_was_spread_meanwhile_it_is_the_same_run(tmp_path, table) -> None:
    base = save_base(tmp_path / "base")
    table["train"]["steps"] = 4
    whole = table | {"output": {"directory": str(tmp_path / "whole")}}
    run(whole)
    table["checkpoint"] = {"every": 2}
    run(table | {"train": table["train"] | {"steps": 2}})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as drive:
        run_spread(plan_spread(base, [Path(drive)], "move"))
        assert (base / "model.safetensors").is_symlink()
        told = (base / "config.json").read_text()
        (base / "config.json").write_text(
            told.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1.0')
        )
        changed = r"config\.json: rms_norm_eps is '1\.0' and was '1e-06'\. .*--accept-changes"
        with pytest.raises(ConfigError, match=changed):
            run(table, resume=True)
        (base / "config.json").write_text(told)
        run(table, resume=True)
        run_gather(plan_gather(base))
    assert metrics(table) == metrics(whole)
    saved, wanted = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("output", "whole")
    )
    assert_same(saved, wanted, is_ordered=False)


def test_another_adapter_is_no_continuation(tmp_path, table) -> None:
    save_base(tmp_path / "base")
    table["train"]["steps"] = 2
    table["checkpoint"] = {"every": 2}
    run(table)
    adapter, written = table["adapter"], tmp_path / "output/checkpoints"
    table["adapter"] = adapter | {"rank": 8}
    with pytest.raises(ConfigError, match="adapter.rank is 8 and was 4"):
        run(table, resume=True)
    table["adapter"] = [adapter | {"name": "one"}]
    with pytest.raises(ConfigError, match=r"name, which \[\[adapter\]\].*'one' and was not set"):
        run(table, resume_from=written)
    run(table)
    table["adapter"] = adapter
    table["output"] = {"directory": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match=r"\[adapter\] has not, is not set and was 'one'"):
        run(table, resume_from=tmp_path / "output/one/checkpoints")


def test_an_adapter_of_another_base_of_equal_shapes_is_refused_unless_any_will_do(
    tmp_path, table
) -> None:
    base = save_base(tmp_path / "base")
    table["train"]["steps"] = 1
    run(table)
    base.rename(tmp_path / "moved")
    table["model"]["path"] = str(tmp_path / "moved")
    table["adapter"] = {"resume": str(tmp_path / "output")}
    file = tmp_path / "moved" / "model.safetensors"
    values = load_file(file)
    values["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(values, file, metadata={"format": "pt"})
    table["output"] = {"directory": str(tmp_path / "second")}
    with pytest.raises(ConfigError, match=r"output was trained over another base, .*base: .*moved"):
        run(table)
    assert not (tmp_path / "second").exists() and not list((tmp_path / "swap").iterdir())
    table["adapter"]["any_base"] = True
    run(table)
    saved = read_identity(tmp_path / "second")
    assert saved is not None and saved == identify(weight_source(tmp_path / "moved"))
    assert saved != read_identity(tmp_path / "output")


def test_a_saved_adapter_that_does_not_fit_is_refused_by_name(tmp_path, table) -> None:
    save_base(tmp_path / "base")
    table["train"]["steps"] = 1
    run(table)
    saved, file = tmp_path / "output", tmp_path / "output" / "adapter_model.safetensors"
    own = load_file(file)
    table["output"] = {"directory": str(tmp_path / "second")}

    def refused(match: str, **adapter: Any) -> None:
        table["adapter"] = {"resume": str(saved)} | adapter
        with pytest.raises(ConfigError, match=match):
            run(table)
        assert not (tmp_path / "second").exists() and not list((tmp_path / "swap").iterdir())

    refused("adapter.rank is 8, and 4 in", rank=8)
    refused(r"adapter.targets is \('q_proj',\), and {.*} in", targets=["q_proj"])
    targets = json.loads((saved / "adapter_config.json").read_text())["target_modules"]
    refused("adapter.targets is", targets=[*targets, "embed_tokens"])
    name = next(iter(own))
    wrong = own | {name: torch.zeros(4, 7)}
    save_file(wrong, file)
    refused(f"of another base: '{name}' has shape \\(4, 7\\)")
    save_file({key: value for key, value in own.items() if key != name}, file)
    refused(f"lacks '{name}'")
    save_file(own | {"more": torch.zeros(1)}, file)
    refused("has 'more' beside")
    file.unlink()
    refused("has no adapter_model.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "lora_only"}, {"bias": "all"}, {"lora_bias": True},
        {"layer_replication": [[0, 1], [0, 2]]}, {"init_lora_weights": "pissa_niter_2"},
        {"init_lora_weights": "olora"},
    ],
)  # fmt: skip
def test_an_adapter_with_more_than_factors_is_refused_by_name(tmp_path, table, options) -> None:
    """To go on from, and to merge: the base has its own biases, each layer once, and the values that
    PiSSA takes out of it."""
    config = LlamaConfig(**SMALL, num_hidden_layers=2, attention_bias=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **options)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "saved")
    table["adapter"] = {"resume": str(tmp_path / "saved")}
    ((key, value),) = options.items()
    said = rf"{tmp_path}/saved has .*\({key} = {re.escape(repr(value))} in .*merge_and_unload"
    with pytest.raises(ConfigError, match=said):
        run(table)
    assert not (tmp_path / "output").exists() and not (tmp_path / "swap").exists()
    with pytest.raises(ConfigError, match=said):
        plan_merge(tmp_path / "base", tmp_path / "saved")


def test_an_adapter_that_eva_began_is_continued_over_its_base(tmp_path, table) -> None:
    base = save_base(tmp_path / "base")
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights="eva"
    )
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "saved")
    table["adapter"] = {"resume": str(tmp_path / "saved")}
    table["optimizer"] = {"lr": 0.0}
    run(table)
    saved, own = (
        load_file(tmp_path / n / "adapter_model.safetensors") for n in ("saved", "output")
    )
    assert_same(saved, own, is_ordered=False)


def test_an_adapter_of_mica_is_merged_and_not_continued(tmp_path, table) -> None:
    """It trains one of two factors."""
    base = save_base(tmp_path / "base")
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights="mica"
    )
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "saved")
    table["adapter"] = {"resume": str(tmp_path / "saved")}
    with pytest.raises(ConfigError, match=r"\(mica\).*`infinity merge` makes one model"):
        run(table)
    plan_merge(base, tmp_path / "saved")


def test_targets_that_the_model_lacks_are_refused(tmp_path, table) -> None:
    save_base(tmp_path / "base")
    table["adapter"] = {"targets": ["no_such_proj"]}
    with pytest.raises(ConfigError, match="'no_such_proj' is no module.*down_proj, gate_proj, k_"):
        run(table)
    table["adapter"] = {"experts": True}
    with pytest.raises(ConfigError, match="adapter.experts: LlamaForCausalLM has no packed"):
        run(table)
    save_base(tmp_path / "base", "deepseek_v3")
    table["adapter"] = {"targets": ["gate_proj", "up_proj"]}
    with pytest.raises(ConfigError, match="for its routed experts; set adapter.experts"):
        run(table)
    table["adapter"], table["model"] = {}, {"config": {"model_type": "llama", **SMALL}}
    with pytest.raises(ConfigError, match="expected model.path"):
        run(table)
    assert not (tmp_path / "swap").exists()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        ("qwen3_moe", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (
            "deepseek_v3",
            ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"],
        ),
    ],
)  # fmt: skip
def test_auto_targets_leave_out_head_and_routers(kind: str, expected: list[str]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]))
    assert auto_targets(model) == expected


def test_any_part_of_a_name_may_say_that_it_routes() -> None:
    """Of Gemma 4, HunYuan, LongCat, DBRX and others."""
    routers = ["router.proj", "mlp.gate.wg", "mlp.router.classifier", "modality_router",
               "mlp.gate.weight", "shared_expert_gate"]  # fmt: skip
    assert all(is_router(f"layers.0.{name}") for name in routers)
    others = ["mlp.gate_proj", "attn.output_gate", "mlp.shared_expert.gate_proj.weight"]
    assert not any(is_router(f"layers.0.{name}") for name in others)


def test_auto_targets_leave_out_what_the_kernel_of_a_mixer_reads_past_its_modules() -> None:
    """By what a mixer has: that of Nemotron-H and of Mamba has no name that says so."""
    config = Mamba2Config(
        vocab_size=64, hidden_size=32, num_heads=4, head_dim=16, state_size=8, n_groups=1,
        num_hidden_layers=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert auto_targets(model) == []


def test_auto_targets_are_longer_where_an_excluded_layer_ends_alike() -> None:
    model = torch.nn.ModuleDict({
        "mlp": torch.nn.ModuleDict({"down": torch.nn.Linear(2, 2), "gate": torch.nn.Linear(2, 2)}),
        "experts": torch.nn.ModuleList([torch.nn.ModuleDict({"down": torch.nn.Linear(2, 2)})]),
    })  # fmt: skip
    assert auto_targets(model) == ["mlp.down"]


def test_auto_targets_of_numbered_layers_are_longer_where_a_block_has_their_number() -> None:
    block = torch.nn.ModuleDict(
        {"ffn": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())}
    )
    model = torch.nn.ModuleDict({"h": torch.nn.ModuleList([block])})
    assert auto_targets(model) == ["ffn.0"]


def test_a_directory_of_kimi_trains_without_its_own_code(tmp_path: Path, table) -> None:
    model = tiny_causal_lm("kimi-k2", vocab_size=256)
    model.generation_config.eos_token_id = None
    write_quantized(model, tmp_path / "base", "int4")
    file = tmp_path / "base" / "config.json"
    published = json.loads(file.read_text())
    published.pop("rope_parameters", None)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}  # fmt: skip
    published |= {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "rope_theta": 5e4,
        "rope_scaling": yarn, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }  # fmt: skip
    file.write_text(json.dumps(published))
    config = published_config(tmp_path / "base")
    assert config.model_type == "deepseek_v3" and config.n_routed_experts == 8
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["rope_theta"] == 5e4 and config.rope_parameters["factor"] == 4.0
    table["train"] |= {"steps": 1}
    run(table)
    assert (tmp_path / "output" / "adapter_model.safetensors").exists()


def test_a_directory_that_needs_its_own_code_is_refused_without_a_question(tmp_path, table) -> None:
    save_base(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    own = {"model_type": "nobodys", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    with pytest.raises(
        ConfigError, match=r"model\.path: .*config\.json: .*'nobodys'.*has code of its own"
    ):
        run(table)


def test_tiles_that_a_codec_cannot_cut_are_copied_with_a_line(
    tmp_path: Path, table: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_causal_lm("llama", vocab_size=256, max_position_embeddings=128)
    write_quantized(model, tmp_path / "base", "awq")
    table["schedule"], table["train"]["steps"] = {"tile": "64KiB"}, 1
    with caplog.at_level("INFO", logger="infinity"):
        run(table)
    assert "cannot be cut into tiles in place and are copied" in caplog.text
