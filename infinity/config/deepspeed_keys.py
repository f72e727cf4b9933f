"""Every key of a DeepSpeed configuration: the setting here that it becomes, or why there is none.

`infinity.config.deepspeed` walks a file through the table; docs/DEEPSPEED.md shows it. The keys and
their defaults are those of DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py and
offload_config.py, swap_tensor/aio_config.py, runtime/precision_config.py, and the documentation of
the sections).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from infinity.config.values import PLACED_KINDS, show_value
from infinity.sizes import GIB, KIB, PAGE_NBYTES

Decision = Literal["same", "mapped", "ignored", "refused", "unknown"]

AUTO = "auto"
# DeepSpeed's own defaults of keys that depend on another one.
_BUFFER_COUNT, _BUFFER_NUMEL = 5, 100_000_000
_LR, _WARMUP_STEPS, _COS_MIN_RATIO = 1e-3, 1000, 1e-4
_MIN_BLOCK_NBYTES, _MAX_BLOCK_NBYTES = 64 * KIB, GIB
_NEVER_STEPS = 1_000_000_000  # 2000000000 is a customary "never print".
_TIER_OF_DEVICE = {"none": "device", "cpu": "host", "nvme": "nvme"}
SCHEDULE_OF_TYPE = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one key of a DeepSpeed file. `settings`: the keys of a swap-tier file that it
    sets, dotted, and their values."""

    verdict: Decision
    reason: str
    settings: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    value: Any = None

    @property
    def is_lost(self) -> bool:
        """Whether the file requests something that the translation does not do."""
        return self.verdict in ("refused", "unknown")


@dataclass(frozen=True, slots=True)
class Facts:
    """The full configuration, for keys whose meaning depends on another one."""

    table: Mapping[str, Any]

    def get(self, place: str, default: Any = None) -> Any:
        """Returns the value at a dotted place. "auto" counts as absent."""
        node: Any = self.table
        for key in place.split("."):
            if not isinstance(node, Mapping) or key not in node:
                return default
            node = node[key]
        return default if node == AUTO else node

    def has(self, place: str) -> bool:
        """Whether the file has the key at a dotted place, "auto" included."""
        section, _, key = place.rpartition(".")
        around = self.get(section)
        return isinstance(around, Mapping) and key in around

    def device(self, section: str) -> str:
        """The device of an offload section."""
        return str(self.get(f"{section}.device", "none")).lower()


Found = Outcome | dict[str, Any]
Convert = Callable[[Any, Facts], Found]


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

    def outcome(self, value: Any, facts: Facts) -> Outcome:
        """Returns what becomes of a value in a file."""
        if value == AUTO:
            where = f"; set {self.ours}, or leave its default" if self.ours else ""
            return Outcome("ignored", f"the Trainer's arguments fill in an auto{where}")
        found = self.convert(value, facts)
        return found if isinstance(found, Outcome) else Outcome(self.usual, self.reason, found)


def _is_on(value: Any) -> bool:
    return value is True or value == 1


def _wrong(expected: str, value: Any) -> Outcome:
    return Outcome("refused", f"expected {expected}; got {show_value(value)}")


def _count(value: Any) -> int | None:
    """A whole number at least 0, as DeepSpeed takes it: 5e8 and "5e8" too."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number >= 0 and number.is_integer() else None


# -- Values ----------------------------------------------------------------------------------------
#
# A function returns settings, which have the verdict and the reason of their rule, or an outcome.

_OFF = Outcome("ignored", "it is off")
_NOT_ON_NVME = Outcome("ignored", "the device beside it is not nvme")
_BELOW_STAGE_3 = Outcome("ignored", "DeepSpeed offloads parameters at stage 3 only")


def _number(ours: str, least: int = 1, most: int = 2**63) -> Convert:
    """Returns the conversion of a whole number, cut to `most`."""

    def convert(value: Any, _: Facts) -> Found:
        number = _count(value)
        if number is None or number < least:
            return _wrong(f"a number of at least {least}", value)
        return {ours: min(number, most)}

    return convert


def _switch(ours: Mapping[str, Any]) -> Convert:
    """Returns the conversion of a flag that makes these settings."""
    return lambda value, _: dict(ours) if _is_on(value) else _OFF


def _stage(value: Any, _: Facts) -> Found:
    if _count(value) not in (0, 1, 2, 3):
        return _wrong("0, 1, 2 or 3", value)
    return {f"placement.{kind}": "device" for kind in PLACED_KINDS}


def _device(section: str, *kinds: str) -> Convert:
    def convert(value: Any, facts: Facts) -> Found:
        tier = _TIER_OF_DEVICE.get(str(value).lower() if value is not None else "none")
        if tier is None:
            return _wrong('"none", "cpu" or "nvme"', value)
        if section == _PARAM and tier != "device" and facts.get(f"{_ZERO}.stage", 0) != 3:
            return _BELOW_STAGE_3
        if tier == "nvme" and not facts.get(f"{section}.nvme_path"):
            return Outcome("refused", f'"nvme" needs {section}.nvme_path')
        placement = {f"placement.{kind}": tier for kind in kinds}
        if section == _OPTIMIZER and tier != "device":
            placement["placement.gradients"] = "host"
        return placement

    return convert


def _nvme_path(section: str) -> Convert:
    def convert(value: Any, facts: Facts) -> Found:
        if facts.device(section) != "nvme":
            return _NOT_ON_NVME
        if section == _PARAM and facts.get(f"{_ZERO}.stage", 0) != 3:
            return _BELOW_STAGE_3
        if not isinstance(value, str) or not value:
            return _wrong("a path", value)
        return {"tiers.nvme[].path": value}

    return convert


def _param_buffers(value: Any, facts: Facts) -> Found:
    if facts.device(_PARAM) != "nvme":
        return _NOT_ON_NVME
    count = _count(facts.get(f"{_PARAM}.buffer_count", _BUFFER_COUNT))
    numel = _count(facts.get(f"{_PARAM}.buffer_size", _BUFFER_NUMEL))
    if not count or not numel:
        return _wrong("a number of at least 1", value)
    is_narrow = _is_on(facts.get("bf16.enabled", facts.get("bfloat16.enabled")))
    return {"schedule.window": count * numel * (2 if is_narrow else 4)}


def _ratio(value: Any, facts: Facts) -> Found:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        return _wrong("a number from 0 to 1", value)
    if value == 1:
        return Outcome("ignored", "all of it is offloaded, as here")
    tier = _TIER_OF_DEVICE.get(facts.device(_OPTIMIZER), "host")
    if tier == "device":
        return Outcome("ignored", "the optimizer is not offloaded")
    places = ["device", tier] if value else "device"
    return {"placement.master": places, "placement.moments": places}


def _prefetch_size(value: Any, _: Facts) -> Found:
    numel = _count(value)
    if numel is None:
        return _wrong("a number of elements", value)
    if numel == 0:
        return {"schedule.prefetch": False}
    reason = "how far ahead follows from the recorded order and schedule.window, in bytes"
    return Outcome("ignored", reason)


def _block_size(value: Any, _: Facts) -> Found:
    nbytes = _count(value)
    if not nbytes:
        return _wrong("a number of bytes", value)
    aligned = min(max(nbytes, _MIN_BLOCK_NBYTES), _MAX_BLOCK_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
    settings = {"io.block_size": aligned}
    is_cut = aligned != nbytes
    return Outcome("mapped", "whole pages from 64 KiB to 1 GiB", settings) if is_cut else settings


def _bf16(value: Any, _: Facts) -> Found:
    return {"precision.compute": "bfloat16" if _is_on(value) else "float32"}


def _optimizer_type(value: Any, facts: Facts) -> Found:
    if not isinstance(value, str) or value.lower() not in ("adam", "adamw"):
        return Outcome("refused", f"the optimizer here is AdamW; there is no {show_value(value)}")
    settings: dict[str, Any] = {"optimizer.name": "adamw", "optimizer.no_decay": []}
    is_torch = _is_on(facts.get("optimizer.params.torch_adam"))
    if not is_torch and facts.get("optimizer.params.weight_decay") is None:
        settings["optimizer.weight_decay"] = 0.0
    if not facts.has("optimizer.params.lr"):
        settings["optimizer.lr"] = _LR
    return settings


def _adam_w_mode(value: Any, facts: Facts) -> Found:
    if _is_on(value):
        return Outcome("ignored", "decoupled weight decay, as here")
    if facts.get("optimizer.params.weight_decay", 0) == 0:
        return Outcome("ignored", "without weight decay the two modes are one")
    return {"optimizer.name": "adam"}


def _bias_correction(value: Any, _: Facts) -> Found:
    if _is_on(value):
        return Outcome("ignored", "moments are always corrected")
    return Outcome("refused", "the correction of moments cannot be turned off")


def _scheduler_type(value: Any, facts: Facts) -> Found:
    schedule = SCHEDULE_OF_TYPE.get(value) if isinstance(value, str) else None
    if schedule is None:
        known = ", ".join(SCHEDULE_OF_TYPE)
        return Outcome("refused", f"known are {known}; in a loop of your own use any of PyTorch's")
    settings: dict[str, Any] = {"train.schedule": schedule}
    if not facts.has("scheduler.params.warmup_num_steps"):
        settings["train.warmup_steps"] = _WARMUP_STEPS
    if schedule != "cosine" and not facts.has("scheduler.params.warmup_max_lr"):
        settings["optimizer.lr"] = _LR
    if schedule == "cosine" and not facts.has("scheduler.params.cos_min_ratio"):
        settings["train.min_lr_ratio"] = _COS_MIN_RATIO
    return settings


def _warmup_type(value: Any, _: Facts) -> Found:
    if value == "linear":
        return Outcome("ignored", "the warm-up is linear, as here")
    return {} if value == "log" else _wrong('"linear" or "log"', value)


def _train_batch(value: Any, facts: Facts) -> Found:
    total = _count(value)
    micro = _count(facts.get("train_micro_batch_size_per_gpu"))
    steps = _count(facts.get("gradient_accumulation_steps"))
    if not total:
        return _wrong("a number of at least 1", value)
    if micro and steps:
        ranks, rest = divmod(total, micro * steps)
        if rest or not ranks:
            return Outcome("refused", f"it is no multiple of {micro} * {steps}, as it has to be")
        said = f"it counts {ranks} ranks; with fewer, raise train.gradient_accumulation_steps"
        return Outcome("ignored", said if ranks > 1 else "it is the product of the other two")
    if total % (micro or steps or 1):
        return Outcome("refused", f"it is no multiple of {micro or steps}, as it has to be")
    if micro:
        return {"train.gradient_accumulation_steps": total // micro}
    return {"train.batch_size": total // (steps or 1)}


def _steps_per_print(value: Any, _: Facts) -> Found:
    steps = _count(value)
    if not steps or steps > _NEVER_STEPS:
        return Outcome("ignored", "it prints nothing")
    return {"train.log_every": steps}


# -- Keys that have a counterpart ------------------------------------------------------------------

_ZERO = "zero_optimization"
_PARAM, _OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_TIERS = "none: device, cpu: host, nvme: nvme"
_PATHS = "where device is nvme; two different paths become two entries, and are striped"
_BUFFERS = "buffer_count * buffer_size elements in bytes; no limit of a parameter's size here"
_RECOMPUTED = "activations are recomputed; they stay on the device and are not partitioned"


def _same(key: str, ours: str, reason: str = "the same meaning", of: Convert | None = None) -> Rule:
    return Rule(key, "same", ours, reason, of or (lambda value, _: {ours: value}))


def _mapped(key: str, ours: str, reason: str, convert: Convert) -> Rule:
    return Rule(key, "mapped", ours, reason, convert)


def _old(key: str, *kinds: str) -> Rule:
    ours = {f"placement.{kind}": "host" for kind in kinds}
    reason = "an old spelling of the offload section with device cpu"
    return _mapped(f"{_ZERO}.{key}", ", ".join(ours), reason, _switch(ours))


_COUNTERPARTS: tuple[Rule, ...] = (
    _mapped("train_batch_size", "train.batch_size or train.gradient_accumulation_steps",
            "as far as the other two do not say it, for one rank", _train_batch),
    _same("train_micro_batch_size_per_gpu", "train.batch_size", "sequences of one forward",
          _number("train.batch_size")),
    _same("gradient_accumulation_steps", "train.gradient_accumulation_steps",
          "backward passes of a step", _number("train.gradient_accumulation_steps")),
    _same("gradient_clipping", "optimizer.max_grad_norm", "the global 2-norm; 0 is off"),
    _mapped("optimizer.type", "optimizer.name", "Adam and AdamW, with DeepSpeed's defaults where "
            "it says nothing; every parameter decays, as there: name those that shall not in "
            "optimizer.no_decay", _optimizer_type),
    *(_same(f"optimizer.params.{key}", f"optimizer.{key}")
      for key in ("lr", "betas", "eps", "weight_decay")),
    _mapped("optimizer.params.adam_w_mode", "optimizer.name",
            "false, with a weight decay: adam, which adds it to the gradient", _adam_w_mode),
    Rule("optimizer.params.bias_correction", "refused", "", "moments are always corrected",
         _bias_correction),
    _mapped("scheduler.type", "train.schedule", "WarmupLR constant, WarmupDecayLR linear, "
            "WarmupCosineLR cosine, with DeepSpeed's defaults where it says nothing; the warm-up "
            "is linear here, there logarithmic unless warmup_type says linear", _scheduler_type),
    _mapped("scheduler.params.warmup_num_steps", "train.warmup_steps",
            "in equal parts; the first step already learns", _number("train.warmup_steps", 0)),
    _mapped("scheduler.params.total_num_steps", "train.steps", "the end of the schedule",
            _number("train.steps")),
    _mapped("scheduler.params.warmup_max_lr", "optimizer.lr",
            "the peak; it overrules optimizer.params.lr", lambda value, _: {"optimizer.lr": value}),
    _mapped("scheduler.params.warmup_type", "",
            "the warm-up is linear here: another course to the same peak", _warmup_type),
    _same("scheduler.params.cos_min_ratio", "train.min_lr_ratio",
          "learning rate at the end, relative to the peak"),
    _mapped("bf16.enabled", "precision.compute", "with an exact fp32 master", _bf16),
    _mapped("bfloat16.enabled", "precision.compute", "the old name of bf16", _bf16),
    _mapped(f"{_ZERO}.stage", "placement", "what the offload sections do not move rests on the "
            "device", _stage),
    _mapped(f"{_PARAM}.device", "placement.parameters", _TIERS, _device(_PARAM, "parameters")),
    _mapped(f"{_PARAM}.nvme_path", "tiers.nvme[].path", _PATHS, _nvme_path(_PARAM)),
    _mapped(f"{_PARAM}.buffer_count", "schedule.window", _BUFFERS, _param_buffers),
    _mapped(f"{_PARAM}.buffer_size", "schedule.window", _BUFFERS, _param_buffers),
    _mapped(f"{_OPTIMIZER}.device", "placement.master, placement.moments, placement.gradients",
            f"{_TIERS}; gradients stay in host memory, which saves 8 bytes of NVMe traffic",
            _device(_OPTIMIZER, "master", "moments")),
    _mapped(f"{_OPTIMIZER}.nvme_path", "tiers.nvme[].path", _PATHS, _nvme_path(_OPTIMIZER)),
    _mapped(f"{_OPTIMIZER}.ratio", "placement.master, placement.moments", "below 1: the device "
            "first, as far as tiers.device.capacity goes, then the tier", _ratio),
    _old("cpu_offload", "master", "moments", "gradients"),
    _old("cpu_offload_params", "parameters"),
    _old("cpu_offload_param", "parameters"),
    *(_mapped(f"{_ZERO}.{key}", "schedule.prefetch", "0 turns it off", _prefetch_size)
      for key in ("stage3_prefetch_bucket_size", "prefetch_bucket_size")),
    _same("aio.block_size", "io.block_size", "bytes of one request", _block_size),
    _mapped("aio.queue_depth", "io.queue_depth", "requests in flight on one path; DeepSpeed counts "
            "them for each worker", _number("io.queue_depth", most=4096)),
    *(_mapped(f"aio.{key}", "io.threads", "workers of the thread engine; io_uring needs none",
              _number("io.threads", most=1024))
      for key in ("intra_op_parallelism", "thread_count", "num_threads")),
    *(_mapped(f"activation_checkpointing.{key}", "train.activation_checkpointing", _RECOMPUTED,
              _switch({"train.activation_checkpointing": True}))
      for key in ("partition_activations", "cpu_checkpointing")),
    _same("steps_per_print", "train.log_every", "steps between log lines", _steps_per_print),
)  # fmt: skip

# -- Keys without a counterpart --------------------------------------------------------------------

# "section: keys" -> why nothing here depends on them. A "*" stands for the keys inside a section.
_IGNORED = {
    "managed_gradient_accumulation": "optimizer.step() is yours to call",
    "dataloader_drop_last": "the last batch of an epoch may be smaller",
    "optimizer.params: torch_adam fused": "one kernel, with the bits of torch's fused one",
    "optimizer.params: set_grad_none": "zero_grad() forgets gradients",
    "optimizer: legacy_fusion": "one kernel for all",
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": "the optimizer is infinity's own",
    "scheduler.params: last_batch_iteration": "a resumed run knows its step",
    "bf16: immediate_grad_update": "gradients are summed as they become complete",
    "bf16: check_grad_overflow": "`infinity train` stops at a norm that is not finite",
    "bf16: bf16_master_weights_and_grads": "the master is exact fp32; it costs 2 bytes more per "
    "parameter than bf16 alone",
    "bf16: bf16_optimizer_states": "moments are kept as [precision] says",
    "bf16: auto_cast": "inputs are not cast",
    "fp16: auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
    "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads fused_mode":
    "part of fp16, which is off or refused",
    "data_types: grad_accum_dtype": "gradients are always summed in float32",
    "data_types: param_dtype": "precision.compute decides",
    "data_types: buffer_dtype": "buffers keep the model's dtype",
    f"{_PARAM}: pin_memory": "the arena is pinned where the device is CUDA",
    f"{_PARAM}: max_in_cpu": "weights stay in host memory as far as tiers.host.capacity allows; "
    '["host", "nvme"] in placement.parameters lets some rest there',
    f"{_OPTIMIZER}: pin_memory": "the arena is pinned where the device is CUDA",
    f"{_OPTIMIZER}: buffer_count buffer_size":
    "state moves in chunks of schedule.update_chunk bytes",
    f"{_OPTIMIZER}: pipeline pipeline_read pipeline_write":
    "the update always reads ahead and writes behind",
    f"{_OPTIMIZER}: fast_init": "weights are streamed once into their tiers",
    f"{_OPTIMIZER}: super_offload": "updates are hidden behind the forward, with clipping too: "
    "schedule.updates",
    f"{_OPTIMIZER}: cpuadam_cores_perc": "train.threads is for all that computes",
    f"{_ZERO}: cpu_offload_use_pin_memory": "the arena is pinned where the device is CUDA",
    f"{_ZERO}: stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance "
    "max_reuse_distance stage3_param_persistence_threshold param_persistence_threshold "
    "stage3_model_persistence_threshold model_persistence_threshold":
    "no budget in elements: tiers.device.capacity and schedule.window are bytes",
    f"{_ZERO}: sub_group_size": "state moves in chunks of schedule.update_chunk bytes",
    f"{_ZERO}: contiguous_gradients reduce_scatter reduce_bucket_size overlap_comm "
    "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size "
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential round_robin_gradients "
    "mics_shard_size mics_hierarchical_params_gather": "it tunes DeepSpeed's collectives",
    f"{_ZERO}: zero_hpz_partition_size":
    'distributed.shard_over = "node" does it for frozen weights',
    f"{_ZERO}: zero_quantized_weights zero_quantized_gradients zeropp_loco_param*":
    "an approximation of traffic between ranks; weights and gradients are moved exactly here",
    f"{_ZERO}: stage3_gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save":
    "an export always writes whole weights",
    f"{_ZERO}: stage3_module_granularity_threshold module_granularity_threshold leaf_module*":
    "units are found by themselves; infinity.offload(units=...) names others",
    f"{_ZERO}: ignore_unused_parameters": "a parameter without a gradient is not touched",
    f"{_ZERO}: load_from_fp32_weights": "the master takes the value of the file",
    f"{_ZERO}: elastic_checkpoint": "checkpoints do not depend on placement",
    f"{_ZERO}: legacy_stage1": "it has no effect in DeepSpeed either",
    f"{_ZERO}: memory_efficient_linear override_module_apply":
    "no function of PyTorch is replaced",
    f"{_ZERO}: pipeline_loading_checkpoint": "checkpoints are streamed",
    f"{_ZERO}: log_trace_cache_warnings": "infinity trace says what was not foreseen",
    f"{_ZERO}: enable_sanity_checks": "checks are always on",
    f"{_ZERO}: aio*": "transformers' page has it here; DeepSpeed reads it outside",
    f"{_ZERO}: save_muon_momentum_buffer_in_memory": "there is no Muon",
    "aio: single_submit": "requests are submitted in batches",
    "aio: overlap_events": "the queue is always kept filled",
    "aio: use_gds": "bytes go through pinned host memory",
    "activation_checkpointing: contiguous_memory_optimization number_checkpoints "
    "synchronize_checkpoint_boundary profile": "PyTorch's own is used",
    "communication_data_type seq_parallel_communication_data_type seq_parallel_comm_data_type "
    "prescale_gradients gradient_predivide_factor disable_allgather "
    "use_data_before_expert_parallelism zero_allow_comm_data_type_fp32":
    "it tunes DeepSpeed's collectives",
    "pipeline*": "it counts for a PipelineModule only",
    "hybrid_engine*": "generate() works on the offloaded model",
    "compile*": "no DeepCompile; compile blocks with torch before offloading",
    "graph_harvesting": "CUDA graphs are not used",
    "checkpoint: tag_validation* use_node_local_storage* parallel_write* writer* load_universal* "
    "checkpoint_serialization* async_io* type*": "see [checkpoint]",
    "nebula* datastates*": "see [checkpoint]",
    "wall_clock_breakdown* timers* flops_profiler*": "`infinity train --trace` says where time "
    "goes",
    "memory_breakdown*": "the summary of a run has peak memory",
    "dump_state*": "`infinity config show` prints every value",
    "comms_logger*": "the summary of a run counts bytes on every link",
    "tensorboard* wandb* comet* csv_monitor* monitor_config*": "metrics.jsonl has one object a "
    "step",
    "log_level*": 'logging.getLogger("infinity") has the messages',
    "autotuning*": "see `infinity tune` and `infinity plan`",
    "vocabulary_size*": "the model's configuration has it",
}  # fmt: skip

# As above: why a value that has an effect is refused.
_REFUSED = {
    "optimizer.params: amsgrad": "there is no amsgrad",
    "optimizer.params: max_grad_norm": "DeepSpeed ignores or refuses it here; say "
    "gradient_clipping",
    "scheduler.params: warmup_min_lr warmup_min_ratio": "the warm-up begins near 0 here",
    "fp16: enabled": 'there is no fp16 with loss scaling; use bf16: {"enabled": true}',
    "torch_autocast*": "there is no autocast; precision.compute is the dtype of weights and "
    "arithmetic",
    "amp*": "there is no Apex; use bf16",
    f"{_ZERO}: zero_quantized_nontrainable_weights": "frozen weights are kept exactly; there is no "
    "int8",
    f"{_ZERO}: zenflow*": "it changes the arithmetic of the update: late and partial ones",
    "gradient_allreduce_op": "gradients of ranks are averaged",
    "sparse_gradients": "gradients of embeddings are dense",
    "tensor_parallel* expert_parallel* autotp* sequence_parallel_size*":
    "state is split over data-parallel ranks only",
    "elasticity*": "the batch of a run does not change with its ranks",
    "sparse_attention* compression_training* quantize_training* progressive_layer_drop* "
    "curriculum_learning* data_efficiency* eigenvalue* weight_quantization*":
    "it changes the arithmetic of training",
}  # fmt: skip


def _without(decision: Decision, table: Mapping[str, str]) -> Iterator[Rule]:
    for places, reason in table.items():
        section, _, names = places.rpartition(": ")
        for name in names.split():
            key = f"{section}.{name}".lstrip(".").removesuffix("*")
            convert = _unless_off if decision == "refused" else lambda *_: {}
            yield Rule(key, decision, "", reason, convert, name.endswith("*"))


def _unless_off(value: Any, _: Facts) -> Found:
    """For a key that is refused, unless its value, or the `enabled` of a section, is neutral."""
    is_off = value in (None, False, 0, "", "none", "mean", [])
    if isinstance(value, Mapping):
        is_off = not value or not _is_on(value.get("enabled", True))
    return _OFF if is_off else {}


RULES = (*_COUNTERPARTS, *_without("ignored", _IGNORED), *_without("refused", _REFUSED))
