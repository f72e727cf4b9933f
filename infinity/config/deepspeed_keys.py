"""Every key of a DeepSpeed configuration, and what becomes of it here: a table, and nothing else.

What walks a file through it is `infinity.config.deepspeed`; docs/DEEPSPEED.md is written from it.
The keys and their defaults are those of DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py
and offload_config.py, swap_tensor/aio_config.py, runtime/precision_config.py, and the documentation
of the sections).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinity.config import deepspeed_values as values
from infinity.config.deepspeed_values import Convert, Decision, Facts, Outcome, says_nothing


@dataclass(frozen=True, slots=True)
class Rule:
    """One key. `usual` is its verdict for a value that has an effect, `ours` the keys it sets.

    With `nested` the rule holds for every key inside the section `key`, too.
    """

    key: str
    usual: Decision
    ours: str
    reason: str
    convert: Convert
    nested: bool = False


def _same(key: str, ours: str, reason: str = "the same meaning") -> Rule:
    return Rule(key, "same", ours, reason, lambda value, _: Outcome("same", reason, {ours: value}))


def _mapped(key: str, ours: str, reason: str, convert: Convert, *, nested: bool = False) -> Rule:
    return Rule(key, "mapped", ours, reason, convert, nested)


def _ignored(key: str, reason: str, *, nested: bool = False) -> Rule:
    return Rule(key, "ignored", "", reason, lambda *_: Outcome("ignored", reason), nested)


def _refused(key: str, reason: str, *, nested: bool = False, neutral: tuple[Any, ...] = ()) -> Rule:
    """Returns a rule that refuses every value but the `neutral` ones."""

    def convert(value: Any, _: Facts) -> Outcome:
        if says_nothing(value) or value in neutral:
            return Outcome("ignored", "it is off")
        return Outcome("refused", reason)

    return Rule(key, "refused", "", reason, convert, nested)


_ZERO = "zero_optimization"
_PARAM = f"{_ZERO}.offload_param"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"
_UNPLANNED = "no budget in elements: tiers.device.capacity and schedule.window are bytes"
_GATHERED = "it tunes DeepSpeed's collectives"
_EXACT = "an approximation of traffic between ranks; weights and gradients are moved exactly here"

RULES: tuple[Rule, ...] = (
    # Batch
    _mapped("train_batch_size", "train.batch_size or train.gradient_accumulation_steps",
            "as far as the other two do not say it", values.train_batch),
    Rule("train_micro_batch_size_per_gpu", "same", "train.batch_size", "sequences of one forward",
         values.micro_batch),
    Rule("gradient_accumulation_steps", "same", "train.gradient_accumulation_steps",
         "backward passes of a step", values.accumulation),
    _ignored("managed_gradient_accumulation", "optimizer.step() is yours to call"),
    Rule("gradient_clipping", "same", "optimizer.max_grad_norm", "the global 2-norm; 0 is off",
         values.clipping),
    _ignored("dataloader_drop_last", "the last batch of an epoch may be smaller"),
    # Optimizer
    _mapped("optimizer.type", "optimizer.name", "Adam and AdamW, decoupled weight decay",
            values.optimizer_type),
    _same("optimizer.params.lr", "optimizer.lr"),
    _same("optimizer.params.betas", "optimizer.betas"),
    _same("optimizer.params.eps", "optimizer.eps"),
    _same("optimizer.params.weight_decay", "optimizer.weight_decay"),
    _ignored("optimizer.params.torch_adam", "one kernel, with the bits of torch's fused one"),
    _mapped("optimizer.params.adam_w_mode", "optimizer.name",
            "false, with a weight decay: adam, which adds it to the gradient", values.adam_w_mode),
    Rule("optimizer.params.bias_correction", "refused", "", "moments are always corrected",
         values.bias_correction),
    _refused("optimizer.params.amsgrad", "there is no amsgrad"),
    _ignored("optimizer.params.fused", "one kernel, with the bits of torch's fused one"),
    _ignored("optimizer.params.set_grad_none", "zero_grad() forgets gradients"),
    _refused("optimizer.params.max_grad_norm", "DeepSpeed ignores or refuses it here; say "
             "gradient_clipping"),
    _ignored("optimizer.legacy_fusion", "one kernel for all"),
    _ignored("zero_allow_untested_optimizer", "the optimizer is infinity's own"),
    _ignored("zero_force_ds_cpu_optimizer", "the optimizer is infinity's own"),
    # Scheduler
    _mapped("scheduler.type", "train.schedule", "WarmupLR constant, WarmupDecayLR linear, "
            "WarmupCosineLR cosine", values.scheduler_type),
    _mapped("scheduler.params.warmup_num_steps", "train.warmup_steps", "in equal parts",
            values.warmup_steps),
    _mapped("scheduler.params.total_num_steps", "train.steps", "the end of the schedule",
            values.total_steps),
    _mapped("scheduler.params.warmup_max_lr", "optimizer.lr", "the peak", values.warmup_max),
    Rule("scheduler.params.warmup_min_lr", "refused", "", "other than 0: the warm-up begins near 0",
         values.warmup_min),
    _refused("scheduler.params.warmup_min_ratio", "the warm-up begins near 0"),
    Rule("scheduler.params.warmup_type", "mapped", "", "the warm-up is linear", values.warmup_type),
    _same("scheduler.params.cos_min_ratio", "train.min_lr_ratio",
          "learning rate at the end, relative to the peak"),
    _ignored("scheduler.params.last_batch_iteration", "a resumed run knows its step"),
    # Precision
    _mapped("bf16.enabled", "precision.compute", "bfloat16 with an exact fp32 master", values.bf16),
    _mapped("bfloat16.enabled", "precision.compute", "the old name of bf16", values.bf16),
    _ignored("bf16.immediate_grad_update", "gradients are summed as they become complete"),
    _ignored("bf16.check_grad_overflow", "`infinity train` stops at a norm that is not finite"),
    _ignored("bf16.bf16_master_weights_and_grads", "the master is exact fp32; it costs 2 bytes "
             "more per parameter than bf16 alone"),
    _ignored("bf16.bf16_optimizer_states", "moments are kept as [precision] says"),
    _ignored("bf16.auto_cast", "inputs are not cast"),
    Rule("fp16.enabled", "refused", "", "there is no fp16 with loss scaling; use bf16",
         values.fp16),
    *(Rule(f"fp16.{key}", "ignored", "", "fp16 is not on", values.of_fp16) for key in (
        "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
        "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads", "fused_mode",
    )),
    _ignored("data_types.grad_accum_dtype", "gradients are always summed in float32"),
    _ignored("data_types.param_dtype", "precision.compute decides"),
    _ignored("data_types.buffer_dtype", "buffers keep the model's dtype"),
    _refused("torch_autocast", "there is no autocast; precision.compute is the dtype of weights "
             "and arithmetic", nested=True),
    _refused("amp", "there is no Apex; use bf16", nested=True),
    # ZeRO
    _mapped(f"{_ZERO}.stage", "placement", "state that is not offloaded rests on the device",
            values.stage),
    _mapped(f"{_PARAM}.device", "placement.parameters", "none: device, cpu: host, nvme: nvme",
            values.offload_param_device),
    _mapped(f"{_PARAM}.nvme_path", "tiers.nvme[].path", "where device is nvme",
            values.nvme_path(_PARAM)),
    _ignored(f"{_PARAM}.pin_memory", "the arena is pinned where the device is CUDA"),
    _mapped(f"{_PARAM}.buffer_count", "schedule.window", "buffer_count * buffer_size, in bytes",
            values.param_buffers),
    _mapped(f"{_PARAM}.buffer_size", "schedule.window", "buffer_count * buffer_size, in bytes",
            values.param_buffers),
    _ignored(f"{_PARAM}.max_in_cpu", "weights stay in host memory as far as tiers.host.capacity "
             'allows; ["host", "nvme"] in placement.parameters lets some rest there'),
    _mapped(f"{_OPTIMIZER}.device", "placement.master, placement.moments, placement.gradients",
            "none: device, cpu: host, nvme: nvme; gradients in host memory",
            values.offload_optimizer_device),
    _mapped(f"{_OPTIMIZER}.nvme_path", "tiers.nvme[].path", "where device is nvme",
            values.nvme_path(_OPTIMIZER)),
    _ignored(f"{_OPTIMIZER}.pin_memory", "the arena is pinned where the device is CUDA"),
    _ignored(f"{_OPTIMIZER}.buffer_count", "state moves in chunks of schedule.update_chunk bytes"),
    _ignored(f"{_OPTIMIZER}.buffer_size", "state moves in chunks of schedule.update_chunk bytes"),
    _ignored(f"{_OPTIMIZER}.pipeline", "the update always reads ahead and writes behind"),
    _ignored(f"{_OPTIMIZER}.pipeline_read", "the update always reads ahead"),
    _ignored(f"{_OPTIMIZER}.pipeline_write", "the update always writes behind"),
    _ignored(f"{_OPTIMIZER}.fast_init", "weights are streamed once into their tiers"),
    _mapped(f"{_OPTIMIZER}.ratio", "placement.master, placement.moments",
            "below 1: the device first, then the tier", values.ratio),
    _ignored(f"{_OPTIMIZER}.super_offload", "updates are hidden behind the forward, with clipping "
             "too: schedule.updates"),
    _ignored(f"{_OPTIMIZER}.cpuadam_cores_perc", "train.threads is for all that computes"),
    _mapped(f"{_ZERO}.cpu_offload", "placement.master, placement.moments, placement.gradients",
            "old spelling", values.old_offload(("master", "moments", "gradients"))),
    _mapped(f"{_ZERO}.cpu_offload_params", "placement.parameters", "old spelling",
            values.old_offload(("parameters",))),
    _mapped(f"{_ZERO}.cpu_offload_param", "placement.parameters", "old spelling",
            values.old_offload(("parameters",))),
    _ignored(f"{_ZERO}.cpu_offload_use_pin_memory", "the arena is pinned where the device is CUDA"),
    _mapped(f"{_ZERO}.stage3_prefetch_bucket_size", "schedule.prefetch", "0 turns it off",
            values.prefetch_size),
    _mapped(f"{_ZERO}.prefetch_bucket_size", "schedule.prefetch", "0 turns it off",
            values.prefetch_size),
    *(_ignored(f"{_ZERO}.{key}", _UNPLANNED) for key in (
        "stage3_max_live_parameters", "max_live_parameters", "stage3_max_reuse_distance",
        "max_reuse_distance", "stage3_param_persistence_threshold", "param_persistence_threshold",
        "stage3_model_persistence_threshold", "model_persistence_threshold",
    )),
    _ignored(f"{_ZERO}.sub_group_size", "state moves in chunks of schedule.update_chunk bytes"),
    *(_ignored(f"{_ZERO}.{key}", _GATHERED) for key in (
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm",
        "use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        "round_robin_gradients", "mics_shard_size", "mics_hierarchical_params_gather",
    )),
    _ignored(f"{_ZERO}.zero_hpz_partition_size",
             'distributed.shard_over = "node" does it for frozen weights'),
    *(_ignored(f"{_ZERO}.{key}", _EXACT, nested=key.endswith("param")) for key in (
        "zero_quantized_weights", "zero_quantized_gradients", "zeropp_loco_param",
    )),
    _refused(f"{_ZERO}.zero_quantized_nontrainable_weights", "frozen weights are kept exactly; "
             "there is no int8"),
    _refused(f"{_ZERO}.zenflow", "it changes the arithmetic of the update: late and partial ones",
             nested=True),
    *(_ignored(f"{_ZERO}.{key}", "an export always writes whole weights") for key in (
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    )),
    *(_ignored(f"{_ZERO}.{key}", "units are found by themselves; infinity.offload(units=...) "
               "names others", nested=key == "leaf_module") for key in (
        "stage3_module_granularity_threshold", "module_granularity_threshold", "leaf_module",
    )),
    _ignored(f"{_ZERO}.ignore_unused_parameters", "a parameter without a gradient is not touched"),
    _ignored(f"{_ZERO}.load_from_fp32_weights", "the master takes the value of the file"),
    _ignored(f"{_ZERO}.elastic_checkpoint", "checkpoints do not depend on placement"),
    _ignored(f"{_ZERO}.legacy_stage1", "it has no effect in DeepSpeed either"),
    _ignored(f"{_ZERO}.memory_efficient_linear", "no function of PyTorch is replaced"),
    _ignored(f"{_ZERO}.override_module_apply", "no function of PyTorch is replaced"),
    _ignored(f"{_ZERO}.pipeline_loading_checkpoint", "checkpoints are streamed"),
    _ignored(f"{_ZERO}.log_trace_cache_warnings", "infinity trace says what was not foreseen"),
    _ignored(f"{_ZERO}.enable_sanity_checks", "checks are always on"),
    _ignored(f"{_ZERO}.save_muon_momentum_buffer_in_memory", "there is no Muon"),
    # Asynchronous I/O
    Rule("aio.block_size", "same", "io.block_size", "whole pages from 64 KiB to 1 GiB",
         values.block_size),
    _mapped("aio.queue_depth", "io.queue_depth", "on one path, not for each worker",
            values.queue_depth),
    *(_mapped(f"aio.{key}", "io.threads", "workers of the thread engine",
              values.threads) for key in (
        "intra_op_parallelism", "thread_count", "num_threads",
    )),
    _ignored("aio.single_submit", "requests are submitted in batches"),
    _ignored("aio.overlap_events", "the queue is always kept filled"),
    _ignored("aio.use_gds", "bytes go through pinned host memory"),
    # Activations
    *(_mapped(f"activation_checkpointing.{key}", "train.activation_checkpointing",
              "recomputed; not offloaded, not partitioned", values.recompute) for key in (
        "partition_activations", "cpu_checkpointing",
    )),
    *(_ignored(f"activation_checkpointing.{key}", "PyTorch's own is used") for key in (
        "contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary",
        "profile",
    )),
    # Between ranks
    *(_ignored(key, _GATHERED) for key in (
        "communication_data_type", "seq_parallel_communication_data_type",
        "seq_parallel_comm_data_type", "prescale_gradients", "gradient_predivide_factor",
        "disable_allgather", "use_data_before_expert_parallelism",
    )),
    _refused("gradient_allreduce_op", "gradients of ranks are averaged", neutral=("mean",)),
    _refused("sparse_gradients", "gradients of embeddings are dense"),
    *(_refused(key, "state is split over data-parallel ranks only", nested=True) for key in (
        "tensor_parallel", "expert_parallel", "autotp", "sequence_parallel_size",
    )),
    _ignored("pipeline", "it counts for a PipelineModule only", nested=True),
    _refused("elasticity", "the batch of a run does not change with its ranks", nested=True),
    # Keys that change the arithmetic
    *(_refused(key, "it changes the arithmetic of training", nested=True) for key in (
        "sparse_attention", "compression_training", "quantize_training", "progressive_layer_drop",
        "curriculum_learning", "data_efficiency", "eigenvalue", "weight_quantization",
    )),
    _ignored("hybrid_engine", "generate() works on the offloaded model", nested=True),
    _ignored("compile", "no DeepCompile; compile blocks with torch before offloading", nested=True),
    _ignored("graph_harvesting", "CUDA graphs are not used"),
    # Saving
    *(_ignored(f"checkpoint.{key}", "see [checkpoint]", nested=True) for key in (
        "tag_validation", "use_node_local_storage", "parallel_write", "writer", "load_universal",
        "checkpoint_serialization", "async_io", "type",
    )),
    _ignored("nebula", "see [checkpoint]", nested=True),
    _ignored("datastates", "see [checkpoint]", nested=True),
    # Reports
    Rule("steps_per_print", "same", "train.log_every", "steps between log lines",
         values.steps_per_print),
    *(_ignored(key, reason, nested=True) for key, reason in (
        ("wall_clock_breakdown", "`infinity train --trace` says where time goes"),
        ("memory_breakdown", "the summary of a run has peak memory"),
        ("dump_state", "`infinity config show` prints every value"),
        ("timers", "`infinity train --trace` says where time goes"),
        ("flops_profiler", "`infinity train --trace` says where time goes"),
        ("comms_logger", "the summary of a run counts bytes on every link"),
        ("tensorboard", "metrics.jsonl has one object a step"),
        ("wandb", "metrics.jsonl has one object a step"),
        ("comet", "metrics.jsonl has one object a step"),
        ("csv_monitor", "metrics.jsonl has one object a step"),
        ("monitor_config", "metrics.jsonl has one object a step"),
        ("log_level", "logging.getLogger(\"infinity\") has the messages"),
        ("autotuning", "see `infinity tune` and `infinity plan`"),
        ("vocabulary_size", "the model's configuration has it"),
        ("zero_allow_comm_data_type_fp32", "it tunes DeepSpeed's collectives"),
    )),
)  # fmt: skip
