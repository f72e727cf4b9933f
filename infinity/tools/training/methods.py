"""The methods of `train.method`: records, trainer, and the arguments of that trainer.

"grpo" and "rloo" have prompts, rewards and a sampler; "reward" and "classify" have a head that
scores sequences. Written against transformers 5.23 and TRL 1.16.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from infinity.config.paths import is_adapter
from infinity.config.schema import changed
from infinity.config.schema.train import Grpo, Train
from infinity.config.swap import JobConfig
from infinity.errors import ConfigError, listed, refusing
from infinity.integrations.rollouts import AdapterReward, generates
from infinity.integrations.sampler import ServerSampler
from infinity.modules.reading.configuration import empty_model
from infinity.tools.training.adapter import attach_scorer, num_labels_of
from infinity.tools.training.chat import CHATML
from infinity.tools.training.embedding import batches
from infinity.tools.training.job_data import JobData
from infinity.tools.training.model import plan_model
from infinity.tools.training.settle import tokenizer_of
from infinity.tools.training.tokenizers import Tokenizer, open_same


def classes_of(train: Train) -> tuple[Any, Any]:
    """Returns the class that makes the steps, and that of its arguments. Raises ConfigError."""
    import transformers
    import trl

    name = train.facts.trainer
    if name == "Trainer":
        return transformers.Trainer, transformers.TrainingArguments
    if train.embed is not None:
        with refusing('train.method: "embed" needs sentence-transformers 6', ImportError):
            import sentence_transformers.base.sampler

        library: Any = sentence_transformers
        return getattr(library, name), library.SentenceTransformerTrainingArguments
    return getattr(trl, name), getattr(trl, f"{name.removesuffix('Trainer')}Config")


def measure_prompts(trainer: Any, config: JobConfig) -> tuple[int, int, str]:
    """Returns what `job_data.measure` does of other data: of the prompts the number of tokens and
    the largest id, and of all columns a digest. Raises ConfigError for too few prompts, and for one
    that leaves no space for a completion."""
    assert config.train.grpo is not None
    rows, length = trainer.train_dataset, config.data.sequence_length
    needed = trainer.args.generation_batch_size // trainer.num_generations
    if len(rows) < needed:
        raise ConfigError(
            f"the data has too little to train on: {len(rows)} prompts, and a step learns {needed} "
            "(train.batch_size * train.gradient_accumulation_steps / train.grpo.num_generations, "
            "times the number of ranks)"
        )
    most = length - config.train.grpo.max_completion_length
    digest, count, largest = hashlib.sha256(), 0, 0
    for number, row in enumerate(rows, 1):
        at = f"data.paths: prompt {number} of those that are learned"
        with refusing(f"{at}: the chat template cannot write it", Exception):
            [ids], *_ = trainer._tokenize_prompts([row["prompt"]])  # noqa: SLF001
        if not 0 < len(ids) <= most:
            raise ConfigError(
                f"{at} has {len(ids)} tokens; expected 1 to {most}: data.sequence_length={length} "
                "less train.grpo.max_completion_length"
            )
        count, largest = count + len(ids), max(largest, *ids)
        digest.update(json.dumps([ids, row], sort_keys=True, default=str).encode())
    return count, largest, digest.hexdigest()


def arguments_of(options: Grpo, config: JobConfig) -> dict[str, Any]:
    """Returns arguments of trl.GRPOConfig or trl.RLOOConfig."""
    return {
        "num_generations": options.num_generations,
        "max_completion_length": options.max_completion_length,
        "temperature": options.temperature,
        # Of all weights, TRL would load a reference itself.
        "beta": options.beta if config.adapter is not None else 0.0,
        "shuffle_dataset": config.data.shuffle,
        "remove_unused_columns": False,
    }


def give_reference(trainer: Any, reference: Any, beta: float) -> None:
    """Gives a trainer of all weights its reference, a second model."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(reference, temperature=trainer.temperature)
    trainer.ref_model, trainer.beta = reference, beta


def measuring(trainer: Any) -> Callable[[], dict[str, float]]:
    """Returns a call for the means of what a trainer that generates measures from now on: rewards,
    divergences, lengths, differences of log-probabilities."""
    if not generates(trainer):
        return dict
    metrics = trainer._metrics["train"]  # noqa: SLF001
    before = {name: len(values) for name, values in metrics.items()}

    def means() -> dict[str, float]:
        found = {}
        for name, values in metrics.items():
            new = [value for value in values[before.get(name, 0) :] if math.isfinite(value)]
            if new and name not in ("step_time", "num_tokens"):  # The run has its own.
                found[name] = sum(new) / len(new)
        return found

    return means


def rewards_of(config: JobConfig, model: Any, tokenizer: Tokenizer | None) -> list[Any]:
    """Returns reward functions, and the directory of a reward model, which TRL loads into memory,
    or one that is attached to `model` as an adapter. Raises ConfigError for one that cannot be."""
    options, found = config.train.grpo, list[Any]()
    assert options is not None
    sys.path.append(os.getcwd())  # Where `python -m` finds modules, too.
    remedy = f"; expected module:function, of a module that Python finds from {os.getcwd()}"
    for name in options.rewards:
        with refusing(f"train.grpo.rewards: {name}", Exception, remedy=remedy):  # Of the module.
            found.append(pkgutil.resolve_name(name))
            if not callable(found[-1]):
                raise TypeError(f"it is a {type(found[-1]).__name__}")
    path = options.reward_model
    if path is None:
        return found
    if is_adapter(path):
        return [*found, _adapter_reward(path, config, model, tokenizer)]
    if not (path / "config.json").is_file():
        raise ConfigError(f"train.grpo.reward_model: expected a directory of a model; got {path}")
    return [*found, str(path)]


def _adapter_reward(
    path: Path, config: JobConfig, model: Any, tokenizer: Tokenizer | None
) -> AdapterReward:
    where = f"train.grpo.reward_model: {path}"
    if config.adapter is None or tokenizer is None:
        raise ConfigError(
            f"{where} is an adapter, which scores over the frozen base of [adapter]; expected "
            "[adapter], or the directory of a whole model (infinity merge makes one)"
        )
    if (num_labels := num_labels_of(path)) != 1:
        raise ConfigError(f"{where} gives {num_labels or 'no'} scores; expected one")
    plan = plan_model(config.model, changed(config.train, {"method": "reward"}))
    scorer = empty_model(
        plan.hf_config, getattr(torch, config.precision.compute_dtype), where,
        trusts_code=config.model.trust_remote_code, kind=plan.model_class,
    )  # fmt: skip
    assert plan.weights is not None  # Which [adapter] needs.
    attach_scorer(model, scorer, path, plan.weights, any_base=config.adapter.any_base)
    writer = tokenizer.for_records()
    if tokenizer_of(path).value != "bytes":
        writer = open_same(tokenizer, path, "train.grpo.reward_model")
        writer.chat_template = writer.chat_template or CHATML
    return AdapterReward(model, scorer, writer)


@contextmanager
def telling_rewards(trainer: Any, prompts: Sequence[Any]) -> Iterator[None]:
    """Says of an error in the block which reward function raised it, and for what."""
    try:
        yield
    except Exception as error:
        frames = [*reversed(traceback.extract_tb(error.__traceback__))]
        called = [*takewhile(lambda frame: "trl" not in Path(frame.filename).parts, frames)]
        name = called[-1].name if called else "/".join(trainer.reward_func_names)
        where = f" ({called[0].filename}:{called[0].lineno})" if called else ""
        raise ConfigError(
            f"train.grpo.rewards: {name} fails in step {trainer.state.global_step + 1}, of the "
            f"prompts {listed([*dict.fromkeys(map(str, prompts))])}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}{where}"
        ) from error


def sampler_of(config: JobConfig) -> ServerSampler | None:
    """Returns the server of `train.grpo.sampler`, which is asked now; None where the model itself
    samples. Raises ConfigError."""
    options = config.train.grpo
    if options is None or not options.is_served:
        return None
    if config.adapter is None:
        raise ConfigError(
            f"train.grpo.sampler: {options.sampler} would get an adapter after each step, and this "
            'run trains all weights; expected [adapter], or sampler = "transformers"'
        )
    directory = options.sampler_directory or config.output.directory / "sampler"
    return ServerSampler(options.sampler, directory=directory)


def trainer_arguments(config: JobConfig, data: JobData) -> Any:
    """Returns the arguments of the trainer for `[train]`, `[optimizer]` and `[data]`.

    Raises ConfigError for a micro-batch that does not divide the batch.
    """
    train = config.train
    batch_size, accumulation = batch_of(config)
    options: dict[str, Any] = {
        "output_dir": str(config.output.directory),
        "max_steps": train.steps or -1,
        "num_train_epochs": train.epochs or 1.0,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": config.optimizer.lr,
        **_schedule(config),
        "max_grad_norm": 0.0,  # The optimizer clips.
        "seed": train.seed,
        "data_seed": config.data.seed,
        "train_sampling_strategy": "random" if config.data.shuffle else "sequential",
        "logging_steps": train.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if train.eval_every else "no",
        "eval_steps": train.eval_every or None,
        "save_strategy": "no",  # `infinity.tools.training.program` saves.
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "restore_callback_states_from_checkpoint": True,
        "report_to": list(train.report_to),
        "project": "infinity",  # Of trackio. W&B reads WANDB_PROJECT.
        "run_name": train.run_name or config.output.directory.name,
        "use_cpu": config.tiers.device.kind == "cpu" or not torch.cuda.is_available(),
        "bf16": False,  # The precision is the model's.
        name_of_checkpointing(): False,  # The model was built with it.
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if train.facts.trainer != "Trainer" and train.grpo is None and train.embed is None:
        options |= {"max_length": config.data.sequence_length}
    if train.diffusion is not None:
        options |= {"remove_unused_columns": False, "label_names": ["moments"]}
    elif train.embed is not None:
        options |= {"prompts": dict(train.embed.prompts), "batch_sampler": partial(batches, config)}
    elif train.grpo is not None:
        options |= arguments_of(train.grpo, config)
    elif train.method == "dpo":
        options |= {"beta": train.dpo_beta}
    elif train.facts.trainer == "SFTTrainer":
        if data.is_ready:
            options |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
            options |= {"remove_unused_columns": False}
        options |= {
            "packing": config.data.packing and not data.is_ready,
            "completion_only_loss": _learns_completions(config, data),
            "assistant_only_loss": data.processor is not None
            and config.data.assistant_only_loss
            and "messages" in data.train.column_names,
        }
    made = classes_of(train)[1](**options)
    if made.n_gpu > 1:  # One process uses one GPU, where Trainer would take all that it sees.
        vars(made)["_n_gpu"] = 1
    return made


def name_of_checkpointing() -> str:
    """Returns the argument of a trainer that asks for checkpointing of activations."""
    import trl

    names = ("activation_checkpointing", "gradient_checkpointing")  # Up to transformers 5.22.
    return next(name for name in names if name in trl.SFTConfig.__dataclass_fields__)


def _learns_completions(config: JobConfig, data: JobData) -> bool | None:
    """Returns whether a loss is over completions only; None lets TRL tell by the records, which it
    cannot where they are token ids with `completion_mask`."""
    if not config.data.assistant_only_loss:
        return False
    parts = [data.train] if data.held_out is None else [data.train, data.held_out]
    return True if any("completion_mask" in part.column_names for part in parts) else None


def batch_of(config: JobConfig) -> tuple[int, int]:
    """Returns (sequences of a micro-batch, micro-batches of a step)."""
    train, most = config.train, config.schedule.micro_batch
    if train.embed is not None and most is not None:
        raise ConfigError(
            'schedule.micro_batch: expected none with train.method = "embed", whose loss compares '
            f"the records of a batch and calls the model for each text; got {most}"
        )
    if most is None or most >= train.batch_size:
        return train.batch_size, train.gradient_accumulation_steps
    if train.batch_size % most:
        raise ConfigError(
            f"schedule.micro_batch: expected a divisor of train.batch_size={train.batch_size}; "
            f"got {most}"
        )
    return most, train.gradient_accumulation_steps * (train.batch_size // most)


def _schedule(config: JobConfig) -> dict[str, Any]:
    """Returns the arguments of transformers' `get_scheduler`."""
    train, ratio = config.train, config.train.min_lr_ratio
    options: dict[str, Any] = {"warmup_steps": train.warmup_steps}
    if train.schedule == "constant":
        return options | {"lr_scheduler_type": "constant_with_warmup"}
    if not ratio:
        return options | {"lr_scheduler_type": train.schedule}
    if train.schedule == "cosine":
        name, more = "cosine_with_min_lr", {"min_lr_rate": ratio}
    else:
        name, more = "polynomial", {"power": 1.0, "lr_end": ratio * config.optimizer.lr}
    return options | {"lr_scheduler_type": name, "lr_scheduler_kwargs": more}
