"""Small training jobs in a directory of their own, and the processes that run them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.forked import COMMAND, Script, wait_until

# What every job has; a test adds keys of [train] and whole sections behind it.
CONFIG = """
[tiers.host]
capacity = "24MiB"
huge_pages = false
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


# Takes no step beyond the first so many until it is asked to end: who watches it may be slow.
HELD = """
import sys, time
from infinity.tools.training.program import Run
limit, is_stopped = int(sys.argv.pop(1)), Run._is_stopped

def hold(run, interrupt):
    while run.num_steps >= limit and interrupt.received is None:
        time.sleep(0.01)
    return is_stopped(run, interrupt)

Run._is_stopped = hold
"""


def start(job: Path, *arguments: str, at_most: int | None = None) -> Script:
    """`infinity train`, in a process that has everything imported."""
    held = () if at_most is None else (at_most,)
    code = COMMAND if at_most is None else HELD + COMMAND
    return Script(code, *held, "train", job / "job.toml", *arguments)


def wait_for_steps(job: Path, count: int, process: Script | subprocess.Popen[str]) -> None:
    metrics = job / "output" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count, process)
