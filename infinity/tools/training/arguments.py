"""The arguments of TRL's trainer for a configuration file: HF's words for the keys of `[train]`."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch

from infinity.bounded import MalformedError, field, integer, table_of
from infinity.checkpoint.run.program import check_kinds
from infinity.config import SwapConfig
from infinity.errors import ConfigError
from infinity.tools.training.job_data import JobData


def require_trackers(names: tuple[str, ...]) -> None:
    """Raises ConfigError, which names the package, for a tracker that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"train.report_to: {', '.join(missing)} is not installed; expected the package of each "
            f"tracker: pip install {' '.join(missing)}"
        )


def trainer_arguments(config: SwapConfig, data: JobData) -> Any:
    """Returns trl.SFTConfig or trl.DPOConfig for `[train]`, `[optimizer]` and `[data]`.

    Raises ConfigError for a micro-batch that does not divide the batch.
    """
    import trl

    assert config.train is not None and config.data is not None
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
        "max_length": config.data.sequence_length,
    }
    if train.method == "dpo":
        return _on_one_device(trl.DPOConfig(**options, beta=train.dpo_beta))
    if data.is_ready:
        options |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
        options |= {"remove_unused_columns": False}
    settings = trl.SFTConfig(
        **options,
        packing=config.data.packing and not data.is_ready,
        completion_only_loss=_learns_completions(config, data),
    )
    return _on_one_device(settings)


def name_of_checkpointing() -> str:
    """Returns the argument of a trainer that asks for checkpointing of activations."""
    import trl

    names = ("activation_checkpointing", "gradient_checkpointing")  # Up to transformers 5.22.
    return next(name for name in names if name in trl.SFTConfig.__dataclass_fields__)


def _learns_completions(config: SwapConfig, data: JobData) -> bool | None:
    """Returns whether a loss is over completions only; None lets TRL tell by the records, which it
    cannot where they are token ids with `completion_mask`."""
    assert config.data is not None
    if not config.data.assistant_only_loss:
        return False
    parts = [data.train] if data.held_out is None else [data.train, data.held_out]
    return True if any("completion_mask" in part.column_names for part in parts) else None


def _on_one_device(arguments: Any) -> Any:
    """Makes one process use one GPU, where Trainer would take all that it sees."""
    if arguments.n_gpu > 1:
        vars(arguments)["_n_gpu"] = 1
    return arguments


def batch_of(config: SwapConfig) -> tuple[int, int]:
    """Returns (sequences of a micro-batch, micro-batches of a step)."""
    assert config.train is not None
    train, most = config.train, config.schedule.micro_batch
    if most is None or most >= train.batch_size:
        return train.batch_size, train.gradient_accumulation_steps
    if train.batch_size % most:
        raise ConfigError(
            f"schedule.micro_batch: expected a divisor of train.batch_size={train.batch_size}; "
            f"got {most}"
        )
    return most, train.gradient_accumulation_steps * (train.batch_size // most)


def _schedule(config: SwapConfig) -> dict[str, Any]:
    """Returns the arguments of transformers' `get_scheduler`."""
    assert config.train is not None
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


def state_of(state: Any) -> dict[str, Any]:
    """Returns the part of a TrainerState that a continuation needs, the same on every rank."""
    kept = ("global_step", "epoch", "best_metric", "best_global_step", "stateful_callbacks")
    table = dataclasses.asdict(state)
    return {key: table[key] for key in kept}


def check_state(state: Any, step: int) -> None:
    """Raises MalformedError unless `state` is of the kind that `state_of` returns after `step`."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

    own = state_of(TrainerState(global_step=step))
    if not isinstance(state, dict) or state.keys() != own.keys():
        raise MalformedError(f"the trainer's state is no table of {', '.join(own)}")
    integer(state["global_step"], "global_step", least=step, most=step)
    for key in ("epoch", "best_metric", "best_global_step"):
        check_kinds(state[key], None if state[key] is None else 0.0, key)
    callbacks = table_of(state["stateful_callbacks"], "stateful_callbacks")
    for known in (TrainerControl(), EarlyStoppingCallback()):
        name, expected = type(known).__name__, known.state()
        for part, values in expected.items() if name in callbacks else ():
            saved = table_of(field(table_of(callbacks[name], name), part), f"{part} of {name}")
            if not saved.keys() <= values.keys():
                raise MalformedError(f"{part} of {name} has {sorted(saved.keys() - values.keys())}")
            check_kinds(saved, values, f"{part} of {name}")
