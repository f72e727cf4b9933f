"""Small training jobs in a directory of their own, and runs of them in this process and others."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console

from infinity.config import SwapConfig
from infinity.tools.training import program
from tests.support.forked import COMMAND, Script, wait_until
from tests.support.offloading import small_tiers

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


GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64,
    "vocab_size": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
TEXT = "".join(f"{i} and {i * i} are {i * i * i}\n" for i in range(400))


def job_table(directory: Path, **sections: Any) -> dict[str, Any]:
    """A job over `text.txt`, which is written if it is missing, with state on NVMe; all of it lies
    in the directory. `sections` come in the place of its own, or beside them."""
    if not (directory / "text.txt").exists():
        (directory / "text.txt").write_text(TEXT)
    return {
        "tiers": small_tiers(directory / "swap", "24MiB"),
        "model": {"config": dict(GPT2)},
        "data": {"paths": [str(directory / "text.txt")], "sequence_length": 32},
        "train": {"steps": 4, "batch_size": 2},
        "output": {"directory": str(directory / "output")},
    } | sections


def run(table: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The summary of a run that ends well, and what was `printed`."""
    console = Console(file=io.StringIO(), width=300)
    summary, code = program.train(SwapConfig.load(table), console=console, **options)
    assert code == 0
    return summary.to_dict() | {"printed": " ".join(console.file.getvalue().split())}


def lines_of(output: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in an output directory."""
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def metrics(table: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(line["loss"], line["grad_norm"]) for line in lines_of(table["output"]["directory"])]


def write_job(directory: Path, config: str) -> Path:
    """`text.txt` and `job.toml`; returns the directory."""
    (directory / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(800)))
    (directory / "job.toml").write_text(config)
    return directory


# Takes no step beyond the first so many until it is asked to end: who watches it may be slow.
HELD = """
import sys, time
from infinity.tools.training.program import Run
from tests.support.offloading import small_tiers
limit, is_stopped = int(sys.argv.pop(1)), Run._is_stopped

def hold(run):
    while run.num_steps >= limit and run.interrupt.received is None:
        time.sleep(0.01)
    return is_stopped(run)

Run._is_stopped = hold
"""


def start(job: Path, *arguments: str, at_most: int | None = None) -> Script:
    """`infinity train`, in a process that has everything imported."""
    held = () if at_most is None else (at_most,)
    code = COMMAND if at_most is None else HELD + COMMAND
    return Script(code, *held, "train", job / "job.toml", *arguments)


def run_and_kill(job: Path, count: int, processes: list[Any], name: str = "job.toml") -> None:
    """Kills `infinity train` behind so many steps, in a process of the fixture `processes`."""
    process = Script(HELD + COMMAND, count, "train", job / name)
    processes.append(process)
    wait_for_steps(job, count, process)
    process.kill()
    process.wait()


def wait_for_steps(job: Path, count: int, process: Script | subprocess.Popen[str]) -> None:
    metrics = job / "output" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= count, process)
