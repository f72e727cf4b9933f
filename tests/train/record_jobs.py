"""Records of small jobs, and the rows that are trained on."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.config import SwapConfig
from infinity.tools.training.job_data import measure, open_data
from infinity.tools.training.ranks import JobRank
from infinity.tools.training.tokenizers import ByteTokenizer
from infinity.tools.training.trainer import make_trainer

MODEL = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=256, tie_word_embeddings=False,
    bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def small_job(tmp_path: Path) -> dict[str, Any]:
    """A job over `data.jsonl`, which tests write."""
    return {
        "tiers": {"host": {"capacity": "24MiB", "huge_pages": False}},
        "model": {"config": MODEL.to_diff_dict()},
        "data": {
            "paths": [str(tmp_path / "data.jsonl")], "sequence_length": 256, "held_out": 0.0,
            "tokenizer": "bytes",
        },
        "train": {"steps": 1, "batch_size": 1},
        "output": {"directory": str(tmp_path / "output")},
    }  # fmt: skip


def adapter_job(
    tmp_path: Path, base: Path, records: list[Any], *, length: int, steps: int
) -> dict[str, Any]:
    """A job of an adapter over a base on NVMe. `length`: of a sequence."""
    return {
        "tiers": {"host": {"capacity": "24MiB", "huge_pages": False}, "nvme": [{"path": str(tmp_path / "swap")}]},
        "model": {"path": str(base), "seed": 5},
        "adapter": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]},
        "data": {
            "paths": [str(write(tmp_path / "data.jsonl", records))], "sequence_length": length,
            "held_out": 0.0,
        },
        "train": {"steps": steps, "batch_size": 2, "gradient_accumulation_steps": 2},
        "optimizer": {"lr": 1e-2, "max_grad_norm": 0.5},
        "output": {"directory": str(tmp_path / "output")},
    }  # fmt: skip


def rows_of(
    table: dict[str, Any], template: str | None = None
) -> tuple[list[tuple[str, str]], str]:
    """([(text, learned text)] of each row that is trained on, the digest of the data)."""
    config = SwapConfig.load(table)
    tokenizer = ByteTokenizer()
    tokenizer.for_records().chat_template = template
    with infinity.init_empty_weights():
        model = AutoModelForCausalLM.from_config(MODEL)
    data = open_data(config, tokenizer, ExitStack(), vocab_size=256)
    trainer = make_trainer(config, model, data, tokenizer, JobRank())
    rows = []
    for row in trainer.train_dataset:
        learned = [label for label in row["labels"] if label != -100]
        rows.append((bytes(row["input_ids"]).decode(), bytes(learned).decode()))
    return rows, measure(trainer.train_dataset, data.files, 1)[-1]
