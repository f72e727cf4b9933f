"""The subject of a plan: a model, a batch and a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infinity.config import JobConfig, NvmeTier, SwapConfig
from infinity.config.extras import require_release
from infinity.config.paths import is_adapter
from infinity.config.schema import changed
from infinity.config.schema.train import METHODS, Purpose
from infinity.errors import CapacityError, ConfigError
from infinity.plan.directory import ModelDirectory, read_directory
from infinity.plan.hardware import Hardware, load_hardware
from infinity.plan.layout import PlannedModel
from infinity.plan.model import load_shape, model_for, model_of_module
from infinity.plan.predict import Forecast, forecast_again
from infinity.plan.shapes import scaled_gpt
from infinity.simulate.job import MOST_SEQUENCES, UNKNOWN_BATCH, Batch, most_tokens
from infinity.tiers.open_device import device_kind
from infinity.tools.mlp_slices import without_mlps
from infinity.tools.plan.data_facts import has_image_records, planned_batch
from infinity.tools.plan.measure import measure
from infinity.tools.training.denoising import Denoising
from infinity.tools.training.model import (
    build_model,
    plan_model,
    reference_path,
    refuse_untrainable,
)

_SEQUENCE_LENGTH, _SEQUENCES = 2048, 16
_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_count(text: str, option: str = "--params") -> int:
    """Returns a number: "7B", "1.5T", "124M", "350000". Raises ConfigError."""
    number, unit = text[:-1], text[-1:]
    if unit.isdigit():
        number, unit = text, ""
    try:
        count = int(float(number) * _UNITS.get(unit, 1 if unit == "" else float("nan")))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(f"{option} {text!r}: expected a number such as 124M, 70B or 1T")
    return count


def planned_model(
    config: SwapConfig,
    directory: ModelDirectory | None,
    name: str | None,
    params: str | None,
    drives: int | None,
    *,
    is_scored: bool = False,
) -> tuple[PlannedModel, int | None]:
    """Returns the model of a directory, by its shapes, or of the file; and the drives that hold its
    checkpoint (None: all). `is_scored`: nothing of it is trained."""
    is_stored = is_scored or bool(config.every_adapter)
    if drives is not None and not is_stored:
        raise ConfigError("--drives is for an adapter's frozen checkpoint; add --lora RANK")
    if directory is not None:
        if is_stored:
            drives = drives or directory.num_drives or None  # None before it is downloaded.
        has_images = bool(directory.shape.tower) and has_image_records(config)
        if not is_scored:
            refuse_untrainable(directory.path, config, has_images=has_images)
        model = model_for(
            config, directory.shape, directory.stored, is_frozen=is_scored, has_images=has_images
        )
        return model, drives
    if name is not None or params is not None:
        head = _head_of(config, is_scored=is_scored)
        shape = load_shape(name, *head) if name else scaled_gpt(parse_count(params or ""))
        is_sliced = config.train is not None and config.train.mlp_tokens is not None
        if is_sliced and not any(block.mlp_params for block in shape.blocks):
            raise without_mlps(shape.name)
        return model_for(config, shape, is_frozen=is_scored), drives
    job = JobConfig.of(config)
    require_release("transformers", "infinity plan of a file's [model]")
    if is_denoiser(config):
        Denoising(job)  # Raises for a pipeline that `infinity train` does not train.
    return model_of_config(job), None


def _head_of(config: SwapConfig, *, is_scored: bool) -> tuple[Purpose, int]:
    """Returns the purpose of the model, and the labels of the head over sequences that a run adds,
    0 for none."""
    train = None if is_scored else config.train
    purpose = METHODS["sft"].purpose if train is None else train.facts.purpose
    labels = () if train is None else train.labels
    return purpose, len(labels) or 1 if purpose == "scores sequences" else 0


def frozen_directory_of(
    config: SwapConfig, named: ModelDirectory | None, *, is_scored: bool
) -> ModelDirectory | None:
    """Returns the directory of the model, which is `named` or that of a file's frozen one, with the
    head of its run; None where all weights of the file's are trained."""
    purpose, num_labels = _head_of(config, is_scored=is_scored)
    if named is not None and purpose == METHODS["sft"].purpose:
        return named
    if named is not None:
        return read_directory(named.path, purpose=purpose, num_labels=num_labels)
    if (not config.every_adapter and not is_scored) or is_denoiser(config):
        return None
    told = config.model
    if told is None or told.path is None:
        raise ConfigError(
            "expected model.path, the directory of the frozen model; got none. "
            "Without a directory, plan a shipped model with --model"
        )
    return read_directory(
        told.path, trusts_code=told.trust_remote_code, ignore=told.ignore, purpose=purpose,
        num_labels=num_labels,
    )  # fmt: skip


def is_denoiser(config: SwapConfig) -> bool:
    """Whether the model is the transformer of a pipeline of diffusers."""
    return config.train is not None and config.train.diffusion is not None


def machine_for(
    name: str | None,
    config: SwapConfig,
    model: PlannedModel,
    batch: Batch,
    directory: ModelDirectory | None,
) -> Hardware:
    """Returns the named machine, or this one as it is measured now."""
    if name is not None:
        return load_hardware(name)
    if directory is not None and not directory.files and not config.tiers.nvme:
        # The drive that the checkpoint will be on.
        tier = NvmeTier.model_validate({"path": directory.path})
        config = changed(config, {"tiers.nvme": (tier,)})
    return measure(config, model, files_of(config, directory), batch)


def files_of(config: SwapConfig, directory: ModelDirectory | None) -> Sequence[Path]:
    """Returns the files of the weights of a directory, or of the transformer of diffusers."""
    if directory is not None:
        return directory.files
    path = config.model.path if is_denoiser(config) and config.model is not None else None
    return [] if path is None else sorted(path.glob("*.safetensors"))


def model_of_config(config: JobConfig) -> PlannedModel:
    """Builds the model of a configuration file on meta with transformers; needs no weights."""
    plan = plan_model(config.model, config.train, reads_weights=bool(config.adapter))
    return model_of_module(build_model(plan, config), config, plan.hf_config)


def has_reference(config: SwapConfig) -> bool:
    """Whether a second model gets half of the budgets: a teacher, or that before training. Raises
    ConfigError as a run."""
    has_job = None not in (config.model, config.data, config.train)
    return has_job and reference_path(JobConfig.of(config)) is not None


def batch_for(
    config: SwapConfig, tokens: int | None, sequence: int | None, accumulation: int | None
) -> Batch:
    """Returns the batch of the file, if it has one; options take precedence."""
    if accumulation and config.train is not None:
        config = changed(config, {"train.gradient_accumulation_steps": accumulation})
    own = planned_batch(config)
    if own == UNKNOWN_BATCH:
        sequence = sequence or _SEQUENCE_LENGTH
        num_tokens = tokens or _SEQUENCES * sequence
        if config.every_adapter and config.schedule.micro_batch is not None:
            return Batch(num_tokens * (accumulation or 1), sequence)
        return Batch(num_tokens, sequence, accumulation or 1)
    sequence = sequence or own.sequence_length
    return replace(
        own,
        num_tokens=tokens or own.num_tokens // own.sequence_length * sequence,
        sequence_length=sequence,
    )


def sweep_for(
    config: SwapConfig, hardware: str | None, tokens: int | None, sequence: int | None
) -> Batch:
    """Returns the batch of a sweep of `infinity score`, by default as many tokens as it takes."""
    if hardware is None:
        on_host = device_kind(config.tiers.device) == "cpu"
    else:
        on_host = load_hardware(hardware).shares_host_memory
    length = sequence or _SEQUENCE_LENGTH
    num_tokens = min(tokens or most_tokens(on_host=on_host), MOST_SEQUENCES * length)
    return Batch(num_tokens, min(length, num_tokens), has_backward=False)


def on_other_drives(config: SwapConfig, model: PlannedModel, found: Forecast) -> Forecast | None:
    """Returns the forecast with the checkpoint on all drives if it is on fewer, else on one; None
    where that makes no difference or does not fit."""
    nvme = found.hardware.nvme
    if model.frozen is None or nvme is None or nvme.drives == 1:
        return None
    if nvme.checkpoint_read_gb_per_s is not None:
        return None  # It is on drives of its own, whose number is not known.
    is_spread = found.shard_drives in (None, nvme.drives)
    try:
        return forecast_again(found, config, model, shard_drives=1 if is_spread else None)
    except CapacityError:
        return None


def with_generation(config: SwapConfig, model: PlannedModel, found: Forecast) -> Forecast:
    """Returns the forecast with the sweeps in which "grpo" and "rloo" generate before a step, with
    the model that is trained, and score what was generated."""
    options = None if config.train is None else config.train.grpo
    if options is None:
        return found
    batch = replace(found.batch, has_backward=False)
    rows = batch.tokens_per_step // batch.sequence_length
    # One call generates all: no micro-batches pass block by block.
    alone = changed(config, {"schedule.micro_batch": None})
    token = Batch(rows, 1, has_backward=False)
    path = options.reward_model
    has_scores = options.is_served or options.beta > 0 or (path is not None and is_adapter(path))
    return replace(
        found,
        num_generated=options.max_completion_length,
        of_token=None if options.is_served else forecast_again(found, alone, model, batch=token),
        of_scores=forecast_again(found, config, model, batch=batch) if has_scores else None,
    )
