"""Converts the values of a DeepSpeed configuration: one pure function for each kind of key.

Each function takes the value and the facts around it, and returns an `Outcome`. The table of
`infinity.config.deepspeed_keys` assigns the functions to keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from infinity.config.reading import show_value
from infinity.sizes import GIB, KIB, PAGE_NBYTES

Decision = Literal["same", "mapped", "ignored", "refused"]

AUTO = "auto"
# DeepSpeed's own defaults of keys that depend on another one.
_BUFFER_COUNT, _BUFFER_NUMEL = 5, 100_000_000
_LR, _WARMUP_STEPS, _COS_MIN_RATIO = 1e-3, 1000, 1e-4
_MIN_BLOCK_NBYTES, _MAX_BLOCK_NBYTES = 64 * KIB, GIB
_TIER_OF_DEVICE = {"none": "device", "cpu": "host", "nvme": "nvme"}
_SCHEDULE_OF_TYPE = {
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
_ADAMS = ("adam", "adamw")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one key. `settings` are keys of a swap-tier file, dotted, and values."""

    verdict: Decision
    reason: str
    settings: dict[str, Any] = field(default_factory=dict)


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

    @property
    def compute_nbytes(self) -> int:
        """Bytes of an element of the weights."""
        return 2 if is_on(self.get("bf16.enabled", self.get("bfloat16.enabled"))) else 4

    @property
    def stage(self) -> int:
        """The ZeRO stage of the file; 0 if it names none."""
        stage = self.get("zero_optimization.stage", 0)
        return stage if isinstance(stage, int) else 0


Convert = Callable[[Any, Facts], Outcome]


def is_on(value: Any) -> bool:
    return value is True or value == 1


def says_nothing(value: Any) -> bool:
    """Whether a value, or the `enabled` of a section, is neutral."""
    if isinstance(value, Mapping):
        return not value or not is_on(value.get("enabled", True))
    return value in (None, False, 0, -1, "", "none") or value == []


def _wrong(expected: str, value: Any) -> Outcome:
    return Outcome("refused", f"expected {expected}; got {show_value(value)}")


def as_count(value: Any) -> int | None:
    """A whole number at least 0, as DeepSpeed takes it: 5e8 and "5e8" too."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if number >= 0 and number.is_integer() else None


def stage(value: Any, facts: Facts) -> Outcome:
    if as_count(value) not in (0, 1, 2, 3):
        return _wrong("0, 1, 2 or 3", value)
    kinds = ("parameters", "master", "moments", "gradients")
    placement = {f"placement.{kind}": "device" for kind in kinds}
    reason = "what the offload sections do not move rests on the device"
    return Outcome("mapped", reason, placement)


def offload_param_device(value: Any, facts: Facts) -> Outcome:
    tier = _TIER_OF_DEVICE.get(str(value).lower() if value is not None else "none")
    if tier is None:
        return _wrong('"none", "cpu" or "nvme"', value)
    if facts.stage != 3 and tier != "device":
        return Outcome("ignored", "DeepSpeed offloads parameters at stage 3 only")
    if tier == "nvme" and not facts.get("zero_optimization.offload_param.nvme_path"):
        return Outcome("refused", '"nvme" needs zero_optimization.offload_param.nvme_path')
    return Outcome("mapped", "cpu is host here", {"placement.parameters": tier})


def offload_optimizer_device(value: Any, facts: Facts) -> Outcome:
    tier = _TIER_OF_DEVICE.get(str(value).lower() if value is not None else "none")
    if tier is None:
        return _wrong('"none", "cpu" or "nvme"', value)
    if tier == "nvme" and not facts.get("zero_optimization.offload_optimizer.nvme_path"):
        return Outcome("refused", '"nvme" needs zero_optimization.offload_optimizer.nvme_path')
    placement = {"placement.master": tier, "placement.moments": tier}
    if tier != "device":
        placement["placement.gradients"] = "host"
    reason = "cpu is host here; gradients stay in host memory, which saves 8 bytes of NVMe traffic"
    return Outcome("mapped", reason, placement)


def nvme_path(section: str) -> Convert:
    def convert(value: Any, facts: Facts) -> Outcome:
        if str(facts.get(f"{section}.device", "none")).lower() != "nvme":
            return Outcome("ignored", "the device beside it is not nvme")
        if section.endswith("offload_param") and facts.stage != 3:
            return Outcome("ignored", "DeepSpeed offloads parameters at stage 3 only")
        if not isinstance(value, str) or not value:
            return _wrong("a path", value)
        reason = "two different paths become two entries, and are striped"
        return Outcome("mapped", reason, {"tiers.nvme[].path": value})

    return convert


def param_buffers(value: Any, facts: Facts) -> Outcome:
    section = "zero_optimization.offload_param"
    if str(facts.get(f"{section}.device", "none")).lower() != "nvme":
        return Outcome("ignored", "the device beside it is not nvme")
    count = as_count(facts.get(f"{section}.buffer_count", _BUFFER_COUNT))
    numel = as_count(facts.get(f"{section}.buffer_size", _BUFFER_NUMEL))
    if not count or not numel:
        return _wrong("a number of at least 1", value)
    reason = "buffer_count * buffer_size elements in bytes; no limit of a parameter's size here"
    return Outcome("mapped", reason, {"schedule.window": count * numel * facts.compute_nbytes})


def ratio(value: Any, facts: Facts) -> Outcome:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        return _wrong("a number from 0 to 1", value)
    if value == 1:
        return Outcome("ignored", "all of it is offloaded, as here")
    device = str(facts.get("zero_optimization.offload_optimizer.device", "none")).lower()
    tier = _TIER_OF_DEVICE.get(device, "host")
    if tier == "device":
        return Outcome("ignored", "the optimizer is not offloaded")
    places = ["device", tier] if value else "device"
    reason = "the device is filled first, as far as tiers.device.capacity goes: bytes, not a share"
    return Outcome("mapped", reason, {"placement.master": places, "placement.moments": places})


def old_offload(ours: tuple[str, ...]) -> Convert:
    def convert(value: Any, _: Facts) -> Outcome:
        if not is_on(value):
            return Outcome("ignored", "it is off")
        reason = "an old spelling of the offload section with device cpu"
        return Outcome("mapped", reason, {f"placement.{kind}": "host" for kind in ours})

    return convert


def prefetch_size(value: Any, _: Facts) -> Outcome:
    numel = as_count(value)
    if numel is None:
        return _wrong("a number of elements", value)
    if numel == 0:
        return Outcome("mapped", "0 turns prefetching off", {"schedule.prefetch": False})
    reason = "how far ahead follows from the recorded order and schedule.window, in bytes"
    return Outcome("ignored", reason)


def block_size(value: Any, _: Facts) -> Outcome:
    nbytes = as_count(value)
    if not nbytes:
        return _wrong("a number of bytes", value)
    aligned = min(max(nbytes, _MIN_BLOCK_NBYTES), _MAX_BLOCK_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
    if aligned == nbytes:
        return Outcome("same", "bytes of one request", {"io.block_size": aligned})
    reason = "whole pages from 64 KiB to 1 GiB"
    return Outcome("mapped", reason, {"io.block_size": aligned})


def queue_depth(value: Any, facts: Facts) -> Outcome:
    depth = as_count(value)
    if not depth:
        return _wrong("a number of at least 1", value)
    reason = "requests in flight on one path; DeepSpeed counts them for each worker"
    return Outcome("mapped", reason, {"io.queue_depth": min(depth, 4096)})


def threads(value: Any, _: Facts) -> Outcome:
    threads = as_count(value)
    if not threads:
        return _wrong("a number of at least 1", value)
    reason = "workers of the thread engine; io_uring needs none"
    return Outcome("mapped", reason, {"io.threads": min(threads, 1024)})


def bf16(value: Any, _: Facts) -> Outcome:
    dtype = "bfloat16" if is_on(value) else "float32"
    return Outcome("mapped", "with an exact fp32 master", {"precision.compute": dtype})


def fp16(value: Any, _: Facts) -> Outcome:
    if not is_on(value):
        return Outcome("ignored", "it is off")
    return Outcome("refused", 'there is no fp16 with loss scaling; use bf16: {"enabled": true}')


def of_fp16(value: Any, facts: Facts) -> Outcome:
    if is_on(facts.get("fp16.enabled")):
        return Outcome("refused", "part of fp16, which is refused")
    return Outcome("ignored", "fp16 is not on")


def optimizer_type(value: Any, facts: Facts) -> Outcome:
    if not isinstance(value, str) or value.lower() not in _ADAMS:
        return Outcome("refused", f"the optimizer here is AdamW; there is no {show_value(value)}")
    settings: dict[str, Any] = {"optimizer.name": "adamw", "optimizer.no_decay": []}
    is_torch = is_on(facts.get("optimizer.params.torch_adam"))
    if not is_torch and facts.get("optimizer.params.weight_decay") is None:
        settings["optimizer.weight_decay"] = 0.0
    if not facts.has("optimizer.params.lr"):
        settings["optimizer.lr"] = _LR
    reason = (
        "with DeepSpeed's defaults where it says nothing; every parameter decays, as there: name "
        "those that shall not in optimizer.no_decay"
    )
    return Outcome("mapped", reason, settings)


def adam_w_mode(value: Any, facts: Facts) -> Outcome:
    if is_on(value):
        return Outcome("ignored", "decoupled weight decay, as here")
    if facts.get("optimizer.params.weight_decay", 0) == 0:
        return Outcome("ignored", "without weight decay the two modes are one")
    reason = "weight decay is added to the gradient"
    return Outcome("mapped", reason, {"optimizer.name": "adam"})


def bias_correction(value: Any, _: Facts) -> Outcome:
    if is_on(value):
        return Outcome("ignored", "moments are always corrected")
    return Outcome("refused", "the correction of moments cannot be turned off")


def scheduler_type(value: Any, facts: Facts) -> Outcome:
    schedule = _SCHEDULE_OF_TYPE.get(value) if isinstance(value, str) else None
    if schedule is None:
        known = ", ".join(_SCHEDULE_OF_TYPE)
        return Outcome("refused", f"known are {known}; in a loop of your own use any of PyTorch's")
    settings: dict[str, Any] = {"train.schedule": schedule}
    if not facts.has("scheduler.params.warmup_num_steps"):
        settings["train.warmup_steps"] = _WARMUP_STEPS
    if schedule != "cosine" and not facts.has("scheduler.params.warmup_max_lr"):
        settings["optimizer.lr"] = _LR
    if schedule == "cosine" and not facts.has("scheduler.params.cos_min_ratio"):
        settings["train.min_lr_ratio"] = _COS_MIN_RATIO
    reason = (
        "with DeepSpeed's defaults where it says nothing; the warm-up is linear here, there "
        "logarithmic unless warmup_type says linear"
    )
    return Outcome("mapped", reason, settings)


def warmup_steps(value: Any, _: Facts) -> Outcome:
    steps = as_count(value)
    if steps is None:
        return _wrong("a number of steps", value)
    reason = "in equal parts; the first step already learns"
    return Outcome("mapped", reason, {"train.warmup_steps": steps})


def total_steps(value: Any, _: Facts) -> Outcome:
    steps = as_count(value)
    if not steps:
        return _wrong("a number of steps", value)
    return Outcome("mapped", "the end of the schedule is the end here", {"train.steps": steps})


def warmup_min(value: Any, _: Facts) -> Outcome:
    if value == 0:
        return Outcome("ignored", "the warm-up begins near 0, as here")
    return Outcome("refused", "the warm-up begins near 0 here")


def warmup_max(value: Any, facts: Facts) -> Outcome:
    own = facts.get("optimizer.params.lr")
    if own is None or own == value:
        return Outcome("mapped", "the peak of the schedule", {"optimizer.lr": value})
    reason = "DeepSpeed's scheduler overrules optimizer.params.lr"
    return Outcome("mapped", reason, {"optimizer.lr": value})


def warmup_type(value: Any, _: Facts) -> Outcome:
    if value == "linear":
        return Outcome("ignored", "the warm-up is linear, as here")
    if value == "log":
        return Outcome("mapped", "the warm-up is linear here: another course to the same peak")
    return _wrong('"linear" or "log"', value)


def micro_batch(value: Any, _: Facts) -> Outcome:
    size = as_count(value)
    if not size:
        return _wrong("a number of at least 1", value)
    return Outcome("same", "sequences of one forward", {"train.batch_size": size})


def accumulation(value: Any, _: Facts) -> Outcome:
    steps = as_count(value)
    if not steps:
        return _wrong("a number of at least 1", value)
    return Outcome(
        "same", "backward passes of a step", {"train.gradient_accumulation_steps": steps}
    )


def train_batch(value: Any, facts: Facts) -> Outcome:
    total = as_count(value)
    micro = as_count(facts.get("train_micro_batch_size_per_gpu"))
    steps = as_count(facts.get("gradient_accumulation_steps"))
    if not total:
        return _wrong("a number of at least 1", value)
    if micro and steps:
        ranks, rest = divmod(total, micro * steps)
        if rest or not ranks:
            return Outcome("refused", f"it is no multiple of {micro} * {steps}, as it has to be")
        if ranks == 1:
            return Outcome("ignored", "it is the product of the other two")
        reason = (
            f"it counts {ranks} ranks; with fewer, raise train.gradient_accumulation_steps for the "
            "same batch"
        )
        return Outcome("ignored", reason)
    if total % (micro or steps or 1):
        return Outcome("refused", f"it is no multiple of {micro or steps}, as it has to be")
    if micro:
        reason = "divided by the micro-batch, for one rank"
        return Outcome("mapped", reason, {"train.gradient_accumulation_steps": total // micro})
    reason = "divided by the accumulation, for one rank"
    return Outcome("mapped", reason, {"train.batch_size": total // (steps or 1)})


def clipping(value: Any, _: Facts) -> Outcome:
    return Outcome("same", "the global 2-norm; 0 is off", {"optimizer.max_grad_norm": value})


def steps_per_print(value: Any, _: Facts) -> Outcome:
    steps = as_count(value)
    if not steps or steps > 1_000_000_000:  # 2000000000 is a customary "never".
        return Outcome("ignored", "it prints nothing")
    return Outcome("same", "steps between log lines", {"train.log_every": steps})


def recompute(value: Any, _: Facts) -> Outcome:
    if not is_on(value):
        return Outcome("ignored", "it is off")
    reason = "activations are recomputed; they stay on the device and are not partitioned"
    return Outcome("mapped", reason, {"train.activation_checkpointing": True})
