"""The same run by TRL, PyTorch and PEFT alone, with everything in memory: the reference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import trl
from transformers import Trainer, TrainingArguments

from infinity.config import SwapConfig
from infinity.tools.training.job_data import split_rows
from infinity.tools.training.methods import name_of_checkpointing
from infinity.tools.training.tokenizers import ByteTokenizer
from infinity.tools.training.trainer import parameter_groups

KINDS: dict[str, Any] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "classify": (Trainer, TrainingArguments),
}
Steps = list[tuple[float, float, float]]  # (loss, norm of the gradients, learning rate)


def sequences(config: SwapConfig) -> datasets.Dataset:
    """The text of a job, as TRL takes tokens: those that are not held out."""
    assert config.data
    text = b"".join(source.location.read_bytes() for source in config.data.paths)
    length = config.data.sequence_length
    rows = np.frombuffer(text, np.uint8)[: len(text) // length * length].reshape(-1, length)
    learned, _ = split_rows(
        len(rows), held_out=config.data.held_out, seed=config.data.seed, shuffle=config.data.shuffle
    )
    ids = rows[learned].tolist()
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def train(
    table: dict[str, Any],
    model: Any,
    directory: Path,
    data: Any = None,
    processor: Any = None,
    **options: Any,
) -> Steps:
    """Trains `model` in place by TRL's own trainer with the keys of a job. No key of infinity's
    optimizer, placement or checkpoints has a part in it."""
    config = SwapConfig.load(table)
    assert config.train and config.data
    job, own = config.train, config.optimizer
    schedule: dict[str, Any] = {"lr_scheduler_type": job.schedule}
    if job.schedule == "constant":
        schedule = {"lr_scheduler_type": "constant_with_warmup"}
    elif job.min_lr_ratio:
        assert job.schedule == "cosine"
        schedule = {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": job.min_lr_ratio},
        }
    arguments = {
        "output_dir": str(directory), "per_device_train_batch_size": job.batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps, "learning_rate": own.lr,
        "max_steps": job.steps or -1, "num_train_epochs": job.epochs or 1, **schedule,
        "warmup_steps": job.warmup_steps, "max_grad_norm": own.max_grad_norm or 0.0,
        "seed": job.seed, "data_seed": config.data.seed, "logging_steps": 1, "use_cpu": True,
        "bf16": False, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        name_of_checkpointing(): job.activation_checkpointing,
        "max_length": config.data.sequence_length,
        "train_sampling_strategy": "random" if config.data.shuffle else "sequential",
    } | options  # fmt: skip
    optimizer = torch.optim.AdamW(
        parameter_groups(model, own), lr=own.lr, betas=own.betas, eps=own.eps, fused=True
    )
    kind, settings = KINDS[job.method]
    if job.method in ("classify", "embed"):
        del arguments["max_length"]
    trainer = kind(
        model=model, args=settings(**arguments), optimizers=(optimizer, None),
        train_dataset=sequences(config) if data is None else data,
        processing_class=processor or ByteTokenizer().for_records(),
    )  # fmt: skip
    if job.method == "classify":  # The mean of the micro-batches, not their sum.
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [(row["loss"], row.get("grad_norm", math.nan), row["learning_rate"]) for row in rows]
