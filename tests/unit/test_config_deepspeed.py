"""DeepSpeed configurations, every key accounted for: golden reports, and the list of known keys."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from infinity.config import InvalidConfigError, SwapConfig, from_deepspeed
from infinity.config.deepspeed import rule_of, to_markdown, translate
from infinity.config.deepspeed_keys import RULES
from infinity.config.problems import known_keys
from infinity.errors import ConfigError
from tests.support.commands import run_command

FILES = Path(__file__).parent / "deepspeed"
ROOT = Path(__file__).resolve().parents[2]
GOOD = ("hf_stage3_nvme_auto", "infinity_stage3_1t", "minimal_stage2")

# As DeepSpeed's sources read them: runtime/config.py, runtime/constants.py, zero/config.py,
# zero/offload_config.py, swap_tensor/constants.py, precision_config.py, the schedulers' arguments.
KNOWN_KEYS = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "managed_gradient_accumulation gradient_clipping dataloader_drop_last steps_per_print "
    "dump_state disable_allgather communication_data_type seq_parallel_comm_data_type "
    "prescale_gradients gradient_predivide_factor gradient_allreduce_op sparse_gradients "
    "graph_harvesting zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "wall_clock_breakdown memory_breakdown vocabulary_size sparse_attention pipeline "
    "hybrid_engine elasticity flops_profiler autotuning nebula datastates compression_training "
    "tensorboard wandb comet csv_monitor comms_logger timers tensor_parallel expert_parallel "
    "weight_quantization quantize_training progressive_layer_drop curriculum_learning "
    "data_efficiency eigenvalue compile amp torch_autocast use_data_before_expert_parallelism "
    "log_level",
    "optimizer": "type legacy_fusion",
    "optimizer.params": "lr betas eps weight_decay torch_adam adam_w_mode max_grad_norm "
    "bias_correction amsgrad set_grad_none",
    "scheduler": "type",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type "
    "total_num_steps warmup_min_ratio cos_min_ratio last_batch_iteration",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states",
    "bfloat16": "enabled",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
    "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size "
    "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm "
    "load_from_fp32_weights elastic_checkpoint zenflow sub_group_size cpu_offload "
    "cpu_offload_param cpu_offload_use_pin_memory stage3_prefetch_bucket_size "
    "prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
    "stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients zeropp_loco_param mics_shard_size "
    "mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint "
    "override_module_apply log_trace_cache_warnings enable_sanity_checks "
    "save_muon_momentum_buffer_in_memory leaf_module",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu "
    "pin_memory",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory "
    "pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.zenflow": "topk_ratio select_strategy update_interval overlap_step",
    "zero_optimization.zeropp_loco_param": "err_beta reset_T",
    "aio": "block_size queue_depth intra_op_parallelism thread_count num_threads single_submit "
    "overlap_events use_gds",
    "activation_checkpointing": "partition_activations cpu_checkpointing "
    "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write writer",
}


def read(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text())
    return table


@pytest.mark.parametrize("name", [*GOOD, "refused"])
def test_report_is_the_golden_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """UPDATE_GOLDEN=1 writes them anew; read the difference before you commit it."""
    monkeypatch.chdir(FILES)
    result = run_command("config", "import", f"{name}.json")
    report, golden = result.stderr + "\n" + result.stdout, FILES / f"{name}.golden"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(report)
    assert report == golden.read_text()
    assert result.exit_code == (1 if name == "refused" else 0)


@pytest.mark.parametrize("name", [*GOOD, "refused"])
def test_every_key_of_a_file_is_named_once(name: str) -> None:
    def leaves(table: dict[str, Any], prefix: str) -> list[str]:
        found = []
        for key, value in table.items():
            rule = rule_of(f"{prefix}{key}")
            is_whole = rule is not None and rule.nested
            inner = value if isinstance(value, dict) and not is_whole else None
            found += leaves(inner, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
        return found

    named = [entry.key for entry in translate(read(name)).entries]
    assert named == leaves(read(name), "")


def test_every_known_key_has_a_rule_with_a_reason() -> None:
    places = [
        f"{section}.{key}".lstrip(".")
        for section, keys in KNOWN_KEYS.items()
        for key in keys.split()
    ]
    assert [place for place in places if rule_of(place) is None] == []
    assert all(rule.reason for rule in RULES)
    assert len({rule.key for rule in RULES}) == len(RULES)


def test_keys_of_ours_that_rules_name_exist() -> None:
    tables = known_keys(SwapConfig)
    known = {f"{table}.{key}".lstrip(".") for table, keys in tables.items() for key in keys}
    for rule in RULES:
        for key in rule.ours.replace(" or ", ", ").split(", "):
            assert not key or key in known, (rule.key, key)


def test_one_trillion_comes_out_as_it_was_meant() -> None:
    config = from_deepspeed(FILES / "infinity_stage3_1t.json")
    assert [str(tier.path) for tier in config.tiers.nvme] == ["/mnt/nvme0/swap", "/mnt/nvme1/swap"]
    assert config.placement.parameters == config.placement.moments == ("nvme",)
    assert config.placement.gradients == ("host",)
    assert config.schedule.window == 6 * 200_000_000 * 2
    assert (config.io.block_size, config.io.queue_depth, config.io.threads) == (1 << 20, 16, 8)
    assert config.precision.compute == "bfloat16"
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1.2e-4, (0.9, 0.95), 0.1)
    assert optimizer.max_grad_norm == 1.0 and optimizer.has_decay("norm.bias")
    train = config.train
    assert train is not None
    assert (train.steps, train.batch_size, train.gradient_accumulation_steps) == (50000, 4, 8)
    assert (train.schedule, train.warmup_steps, train.min_lr_ratio) == ("cosine", 2000, 0.1)
    assert train.activation_checkpointing


def test_without_offload_all_state_stays_on_the_device() -> None:
    for stage in ({"stage": 3}, True):
        config = from_deepspeed({"zero_optimization": stage})
        assert {tiers for kind, tiers in config.placement if kind != "frozen"} == {("device",)}
        assert not config.placement.reads_in_place


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (8, 4)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (2, 16)),
        ({"train_batch_size": 32}, (32, None)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2,
          "gradient_accumulation_steps": 3}, (2, 3)),
    ],
)  # fmt: skip
def test_two_of_three_batch_keys_give_the_third(
    batch: dict[str, int], expected: tuple[int, int | None]
) -> None:
    train = translate(batch).train
    assert (train["batch_size"], train.get("gradient_accumulation_steps")) == expected


@pytest.mark.parametrize(
    ("params", "weight_decay", "lr"),
    [({}, 0.0, 1e-3), ({"torch_adam": True}, 0.01, 1e-3), ({"weight_decay": 0.3}, 0.3, 1e-3),
     ({"lr": "auto"}, 0.0, 1e-4), ({"lr": 2e-4}, 0.0, 2e-4)],
)  # fmt: skip
def test_missing_optimizer_settings_have_deepspeeds_defaults(
    params: dict[str, Any], weight_decay: float, lr: float
) -> None:
    config = from_deepspeed({"optimizer": {"type": "Adam", "params": params}})
    assert (config.optimizer.weight_decay, config.optimizer.lr) == (weight_decay, lr)


def test_weight_decay_as_an_l2_term_is_that_of_adam() -> None:
    params = {"weight_decay": 0.1, "adam_w_mode": False}
    found = from_deepspeed({"optimizer": {"params": params, "type": "Adam"}}).optimizer
    assert (found.name, found.weight_decay) == ("adam", 0.1)
    found = from_deepspeed({"optimizer": {"type": "Adam"}}).optimizer
    assert found.name == "adamw", "without a weight decay the two are one"


def test_the_scheduler_overrules_the_learning_rate_whatever_the_order() -> None:
    table = {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    assert from_deepspeed(table).optimizer.lr == 0.02


def test_refused_keys_are_one_error_and_may_be_skipped() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        from_deepspeed(FILES / "refused.json")
    places = {problem.place for problem in caught.value.problems}
    assert {"fp16.enabled", "gradient_acumulation_steps", "optimizer.type"} <= places
    assert "progressive_layer_drop" not in places, "what is off is not refused"
    config = from_deepspeed(FILES / "refused.json", skip_refused=True)
    assert config.optimizer.lr == 1e-5


def test_a_start_of_the_warm_up_below_zero_is_refused_and_zero_is_not() -> None:
    for value, verdict in ((-1, "refused"), (1e-6, "refused"), (0, "ignored")):
        (entry,) = translate({"scheduler": {"params": {"warmup_min_lr": value}}}).entries
        assert entry.verdict == verdict, value


def test_a_wrong_value_is_an_error_that_names_both_keys() -> None:
    said = r"optimizer\.params\.lr, our optimizer\.lr: expected a number >= 0"
    with pytest.raises(InvalidConfigError, match=said):
        from_deepspeed({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}})


def test_an_argument_that_is_no_file_and_no_dict_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a path, a dict, .* got list"):
        from_deepspeed([1])  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match="expected a table"):
        from_deepspeed({"zero_optimization": 3})


def test_the_written_file_is_what_the_library_reads(tmp_path: Path) -> None:
    for name in GOOD:
        out = tmp_path / f"{name}.toml"
        result = run_command("config", "import", FILES / f"{name}.json", "--out", out)
        assert result.exit_code == 0 and "mapped" in result.stdout
        written, direct = SwapConfig.load(out), from_deepspeed(FILES / f"{name}.json")
        for section in ("tiers", "placement", "io", "schedule", "precision", "optimizer", "train"):
            assert getattr(written, section) == getattr(direct, section), (name, section)


def test_nothing_is_written_when_a_key_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "swap.toml"
    result = run_command("config", "import", FILES / "refused.json", "--out", out)
    assert result.exit_code == 1 and not out.exists()
    assert "--skip-refused" in result.stderr
    result = run_command("config", "import", FILES / "refused.json", "--out", out, "--skip-refused")
    assert result.exit_code == 0 and SwapConfig.load(out)


def test_json_report_has_every_key_and_the_configuration() -> None:
    path = FILES / "infinity_stage3_1t.json"
    answer = json.loads(run_command("config", "import", path, "--report", "json").stdout)
    assert {entry["verdict"] for entry in answer["keys"]} == {"same", "mapped", "ignored"}
    assert SwapConfig.load(answer["config"]).train.steps == 50000


def test_reference_is_a_command() -> None:
    """The site shows the same table (scripts/site_pages.py)."""
    assert run_command("config", "schema", "--deepspeed").stdout == to_markdown()
