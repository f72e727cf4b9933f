"""Small training jobs in a directory of their own, and the processes that run them."""

from __future__ import annotations

import time
from pathlib import Path

from tests.forked import Script

# What every job has; a test adds keys of [train] and whole sections behind it.
CONFIG = """
[tiers.host]
capacity = "64MiB"
[[tiers.nvme]]
path = "swap"
[model.config]
model_type = "gpt2"
n_layer = 2
n_embd = 16
n_head = 2
n_positions = 64
vocab_size = 256
bos_token_id = 0
eos_token_id = 0
[data]
paths = ["text.txt"]
sequence_length = 32
[output]
directory = "output"
[train]
batch_size = 2
"""


def write_job(directory: Path, config: str) -> Path:
    """`text.txt` and `job.toml`; returns the directory."""
    (directory / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(800)))
    (directory / "job.toml").write_text(config)
    return directory


COMMAND = "from infinity.cli import main; main()"


def start(job: Path, *arguments: str) -> Script:
    """`infinity train`, in a process that has everything imported."""
    return Script(COMMAND, "train", job / "job.toml", *arguments)


def wait_for_steps(job: Path, count: int, process: Script) -> None:
    metrics = job / "output" / "metrics.jsonl"
    deadline_s = time.monotonic() + 90
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "no steps were taken"
        time.sleep(0.005)
