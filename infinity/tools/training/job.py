"""Prepares a run: reads and checks everything, and touches no tier."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint import weight_source
from infinity.checkpoint.durable import check_space
from infinity.checkpoint.huggingface.export_weights import plan_export
from infinity.checkpoint.run.directory import list_checkpoints
from infinity.checkpoint.run.load import Loaded
from infinity.config import JobConfig
from infinity.config.machine import host_memory
from infinity.config.paths import is_adapter
from infinity.errors import CapacityError, ConfigError
from infinity.integrations.card import versions
from infinity.integrations.evaluation import MOST_BATCHES
from infinity.integrations.sampler import ServerSampler
from infinity.modules.reading.configuration import end_of_head, model_for_text, positions_of
from infinity.modules.tiling.layers import Tiled
from infinity.sizes import format_nbytes
from infinity.state.spare_generations import is_elsewhere
from infinity.tools.training.adapter import adapter_nbytes
from infinity.tools.training.base_identity import identify, settings_of, sha256_of
from infinity.tools.training.denoising import Denoising
from infinity.tools.training.embedding import digest_of, token_ids
from infinity.tools.training.images import digest_of_images, most_nbytes
from infinity.tools.training.job_data import (
    JobData,
    TokenFile,
    check_ends,
    measure,
    open_data,
    refuse_stranger,
)
from infinity.tools.training.latents import cache_of, measure_images
from infinity.tools.training.methods import batch_of, classes_of, measure_prompts, sampler_of
from infinity.tools.training.model import ModelPlan, build_model, build_reference, plan_model
from infinity.tools.training.output import OutputDirectory
from infinity.tools.training.ranks import JobRank
from infinity.tools.training.teacher import Teacher
from infinity.tools.training.tokenizers import Tokenizer, open_tokenizer, refusing_texts
from infinity.tools.training.trainer import make_trainer

# Keys of `Job.others`.
HELD_OUT = "held-out data"
BASE_CONFIG = "base's config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The result of the preparation, which has not touched a tier."""

    plan: ModelPlan
    tokenizer: Tokenizer | None  # None for images.
    data: JobData
    num_tokens: int
    tokens_sha256: str
    base: dict[str, Any] | None  # The identity of the base's weights.
    base_settings: dict[str, str]  # Of its config.json: `settings_of`.
    others: dict[str, str]  # The SHA-256 of what else the numbers depend on.
    trainer: Any  # Over the model on meta.
    num_steps: int  # Of the whole run.
    num_parameters: int
    model: Any
    reference: Any  # The model that "dpo" compares with, or a teacher, or None.
    prompt_ids: list[int]
    output: OutputDirectory | None  # None on ranks that write nothing there.
    resume: Loaded | None
    rank: JobRank
    sampler: ServerSampler | None  # None where the model generates, if it does.
    started_s: float

    def receipt(self) -> dict[str, Any]:
        """Returns facts that the bits of the run depend on, beside its settings. `tiles` counts
        what is cut already, `tile` is the limit of bytes for it."""
        device = f"CPU, {torch.backends.cpu.get_cpu_capability()}"
        tiled = [module for module in self.model.modules() if isinstance(module, Tiled)]
        if not self.trainer.args.use_cpu:
            device = torch.cuda.get_device_name()
        return {
            "tokens_sha256": self.tokens_sha256,
            "others": self.others,
            "base": self.base,
            "versions": versions(),
            "device": device,
            "threads": torch.get_num_threads(),
            "ranks": self.rank.count,
            "tiles": sum(len(module.tiles) for module in tiled),
            "tile": max((module.limit_nbytes for module in tiled), default=0),
        }


def prepare(
    configs: Sequence[JobConfig], stack: ExitStack, resumed: Sequence[Loaded | None], rank: JobRank
) -> list[Job]:
    """Checks everything that can be refused without making a swap file. Returns a job for each
    configuration: one, or those of several adapters over one model."""
    config = configs[0]
    started_s = time.perf_counter()
    if config.train.threads != "auto":
        torch.set_num_threads(config.train.threads)
    batch_of(config)
    classes_of(config.train)
    sampler = sampler_of(config)
    read = read_model(config)
    model = build_model(read[0], config, configs[1:])
    jobs: list[Job] = []
    with refusing_texts(str(config.data.tokenizer)):
        for found, resume in zip(configs, resumed, strict=True):
            try:
                job = _prepare(
                    found, stack, resume, rank, model, *read, sampler=sampler, started_s=started_s
                )
            except ConfigError as error:
                if found.adapter is not None and len(configs) > 1:
                    error.args = (f"adapter {found.adapter.name!r}: {error}",)
                raise
            jobs.append(job)
    has_text = jobs[0].tokenizer is not None and jobs[0].data.processor is None
    if config.model.path is not None and has_text:
        where, trusts_code = str(config.model.path / "config.json"), config.model.trust_remote_code
        plan = read[0]
        model_for_text(plan.hf_config, where, trusts_code=trusts_code, kind=plan.model_class)
    return jobs


def _prepare(
    config: JobConfig, stack: ExitStack, resume: Loaded | None, rank: JobRank, model: Any,
    plan: ModelPlan, tokenizer: Tokenizer | None, prompt_ids: list[int], *,
    sampler: ServerSampler | None, started_s: float,
) -> Job:  # fmt: skip
    output = None
    if rank.is_first:
        output = OutputDirectory(config, resumed=resume.path if resume is not None else None)
        stack.callback(output.close)
        _check_checkpoint_space(model, config, output.path)
        if config.output.export:
            max_nbytes = config.output.max_shard_size
            check_space(
                output.path,
                plan_export(model, max_shard_nbytes=max_nbytes).nbytes
                if config.adapter is None
                else adapter_nbytes(model, config.adapter.peft_name),
            )
    where = output.path if output is not None else None
    # Rank 0 has claimed the output directory, in which latents may lie.
    with rank.in_turn() if tokenizer is None else nullcontext():
        data = open_data(
            config, tokenizer, stack, directory=where,
            vocab_size=plan.vocab_size if tokenizer is not None else 0,
        )  # fmt: skip
    if data.processor is not None:
        base = model if config.adapter is None else model.get_base_model()
        if "pixel_values" not in inspect.signature(base.forward).parameters:
            raise ConfigError(
                f"model.path: {type(base).__name__} takes no images, and the records have some; "
                "expected a model of text and images, or records without images"
            )
        _check_data_memory(config, data, rank)
    reference = build_reference(config)
    trainer = make_trainer(config, model, data, tokenizer, rank, reference=reference)
    if config.train.diffusion is not None:
        trainer.denoising = Denoising(config)
    if config.train.distill is not None and tokenizer is not None:
        if config.data.packing or data.processor is not None:
            raise ConfigError(
                'train.method: "distill" finds a sequence by its token ids; expected data without '
                "packing and without images"
            )
        teacher = Teacher(config.train.distill, plan.vocab_size, tokenizer, reference, where)
        teacher.refuse_unknown([trainer.train_dataset, trainer.eval_dataset])
        trainer.teacher = teacher
    _check_ends(trainer, config)
    num_tokens, largest, sha256 = _measured(trainer.train_dataset, trainer, config, data.files)
    if tokenizer is not None:
        refuse_stranger(largest, tokenizer, plan.vocab_size, "data.paths")
    base_settings = {} if plan.weights is None else settings_of(plan.weights.path)
    return Job(
        plan=plan, tokenizer=tokenizer, data=data, model=model, reference=reference,
        num_tokens=num_tokens, tokens_sha256=sha256,
        others=_others(trainer, config, base_settings) | _held_out(trainer, config, data),
        base=None if plan.weights is None else asdict(identify(plan.weights)),
        base_settings=base_settings,
        trainer=trainer, num_steps=trainer.count_steps(), prompt_ids=prompt_ids, output=output,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        resume=resume, rank=rank, sampler=sampler, started_s=started_s,
    )  # fmt: skip


def _check_ends(trainer: Any, config: JobConfig) -> None:
    """Raises ConfigError for a sequence without the token at which a head over sequences reads."""
    scores = config.train.facts.purpose == "scores sequences"
    if scores and (end := end_of_head(trainer.model.config)) is not None:
        check_ends(filter(None, (trainer.train_dataset, trainer.held_out)), end)


def _measured(
    rows: Any, trainer: Any, config: JobConfig, files: Sequence[TokenFile]
) -> tuple[int, int, str]:
    """Returns the number of tokens in rows, the largest, and their SHA-256."""
    length = config.data.sequence_length
    if config.train.grpo is not None:
        return measure_prompts(trainer, config)
    if config.train.diffusion is not None:
        return measure_images(rows, cache_of(config))
    if config.train.embed is not None:
        rows = token_ids(rows, trainer.model.tokenizer, length)
    return measure(rows, files, length)


def _held_out(trainer: Any, config: JobConfig, data: JobData) -> dict[str, str]:
    """Returns the digest of the data that is evaluated, by its name; none without such data, and
    where it is a part of the one text whose digest is that of the tokens."""
    if trainer.held_out is None or len(data.files) == 1:
        return {}
    rows = trainer.held_out
    sha256 = _measured(rows, trainer, config, data.files[-1:])[2]
    return {HELD_OUT: sha256 + digest_of_images(rows) if _has_images(rows) else sha256}


def _has_images(rows: Any) -> bool:
    return "images_sha256" in (getattr(rows, "column_names", None) or ())


def _others(trainer: Any, config: JobConfig, base_settings: dict[str, str]) -> dict[str, str]:
    found = {} if trainer.teacher is None else {"teacher": trainer.teacher.sha256}
    if base_settings:
        text = json.dumps(base_settings, sort_keys=True)
        found[BASE_CONFIG] = hashlib.sha256(text.encode()).hexdigest()
    if _has_images(trainer.train_dataset):
        found["images"] = digest_of_images(trainer.train_dataset)
    if trainer.denoising is not None:
        found["numbers of VAE and scheduler"] = trainer.denoising.sha256()
    if config.train.embed is not None:
        found["modules of sentence-transformers"] = digest_of(trainer.model)
    options = config.train.grpo
    if options is not None and (path := options.reward_model) is not None:
        is_safe = any(path.glob("*.safetensors")) and not is_adapter(path)
        found["reward model"] = (
            identify(weight_source(path)).samples_sha256
            if is_safe
            else sha256_of(*sorted([*path.glob("*.bin"), *path.glob("adapter_*")]))
        )
    return found


def _check_checkpoint_space(model: Any, config: JobConfig, output: Path) -> None:
    """Raises StorageError if the drive has no space for the checkpoints of what is trained that lie
    there at once: a new one is complete before the oldest goes. On the drive of the swap directory
    checkpoints are links, and `offload` reserves their space."""
    place, swap, count = config.checkpoint_directory, config.tiers.nvme, 1
    if config.checkpoint is None or (swap and not is_elsewhere(swap, place)):
        return
    if every := config.checkpoint.every:
        count = max(1, config.checkpoint.keep + 1 - len(list_checkpoints(place)))
        count = min(count, -(-config.train.steps // every)) if config.train.steps else count
    trained: int = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moment_nbytes = 1 if config.precision.moments == "8bit" else 4
    check_space(
        place if place.is_dir() else output,
        count * trained * (4 + moment_nbytes * config.optimizer.num_moments),
        path=place,
        operation="checkpoint",
        needs="a checkpoint needs" if count == 1 else f"{count} checkpoints need",
        remedy="; free space, lower checkpoint.keep, or name another checkpoint.directory",
    )


def _check_data_memory(config: JobConfig, data: JobData, rank: JobRank) -> None:
    """Raises CapacityError if the images of a step have no memory beside the arena: those of its
    micro-batches and of the step before, which Trainer holds until it has them, of one that the
    loader has ahead, on each rank of the node, and of a window of an evaluation beside them."""
    (size, count), train = batch_of(config), config.train
    needed_nbytes = most_nbytes(data.train, size * (2 * count + 1))
    needed_nbytes *= 1 if rank.topology is None else rank.topology.node_count
    if train.eval_every and data.held_out is not None:
        rows = min(train.eval_batches * train.batch_size, size * MOST_BATCHES, len(data.held_out))
        needed_nbytes += most_nbytes(data.held_out, rows)
    memory = host_memory()
    arena_nbytes = config.tiers.host.budget_nbytes(memory.nbytes)
    if arena_nbytes + needed_nbytes > memory.most_nbytes:
        raise CapacityError(
            "host", needed_nbytes=arena_nbytes + needed_nbytes,
            available_nbytes=memory.most_nbytes, key="tiers.host.capacity",
            detail=f"the arena of {format_nbytes(arena_nbytes)} and the images of a step",
            remedy="lower tiers.host.capacity, train.batch_size, "
            "train.gradient_accumulation_steps or train.eval_batches, or give smaller images",
        )  # fmt: skip


def read_model(config: JobConfig) -> tuple[ModelPlan, Tokenizer | None, list[int]]:
    """Returns the plan of the model, the tokenizer, and the prompt of `[train.sample]`."""
    if config.train.diffusion is not None:
        Denoising(config)  # Raises for a directory that it cannot train.
        return plan_model(config.model), None, []
    plan, length = plan_model(config.model, config.train), config.data.sequence_length
    positions = positions_of(plan.hf_config)
    if positions is not None and length > positions:
        raise ConfigError(
            f"data.sequence_length={length} exceeds the model's {positions} positions"
        )
    tokenizer = open_tokenizer(config.data.tokenizer)
    sample = config.train.sample
    if sample is None:
        return plan, tokenizer, []
    # Random weights learn texts of a file, which have no token before them.
    encode = tokenizer.encode if config.model.path is None else tokenizer.begin
    ids = encode(sample.prompt)
    if not ids:
        raise ConfigError("train.sample.prompt gives no token")
    refuse_stranger(max(ids), tokenizer, plan.vocab_size, "train.sample.prompt")
    if positions is not None and len(ids) + sample.new_tokens > positions:
        raise ConfigError(
            f"train.sample: a prompt of {len(ids)} tokens and new_tokens={sample.new_tokens} "
            f"exceed the model's {positions} positions"
        )
    return plan, tokenizer, ids
