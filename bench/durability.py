"""What does durability cost: seconds and bytes of a step, and of a checkpoint?

    python bench/durability.py --path /mnt/nvme0 --save bench/results/durability.json
    python bench/durability.py --path /mnt/nvme0 --modes checkpoint --shapes 27x1024 26x2048 \
        --gradients nvme --sequence 32 --every 1 --rounds 2 \
        --save bench/results/checkpoint_sizes.json

GPT-2-like models in bfloat16 with parameters, masters and moments on NVMe train by turns in one
process, the same batches each:

    none         nothing is kept; every other figure stands beside this one, round by round
    copied       a checkpoint every few steps, durability "none": a streamed copy
    checkpoint   the same with durability "checkpoint": links to the swap files
    step         every step is committed

A round is the steps from one checkpoint to the next, up to when all state is where it rests, so
that no mode leaves work to the next. Seconds of a checkpoint are its own, after that. Bytes are
those the kernel counted for the process (/proc/self/io). Losses must be equal to the last bit. With
several `--shapes` the checkpoint's cost is seen beside the size of the state: the second command is
for 348 million and 1.3 billion parameters, one after the other.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import arguments, print_table, save, spread
from jobs import Job, measured, medians
from rich.console import Console

import infinity
from infinity.tools.training.process import keep_freed_memory

MODES = ("none", "copied", "checkpoint", "step")
KINDS = ("parameters", "master", "moments")
VOCABULARY = 8192


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["12x768"], help="layers x width")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--gradients", default="host", help="the tier they are on")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--host", default="1GiB")
    parser.add_argument("--every", type=int, default=4, help="steps from checkpoint to checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    keep_freed_memory()
    console = Console()
    found = []
    for shape in words.shapes:
        with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-durability-") as scratch:
            sides = [Side(mode, shape, words, Path(scratch) / mode) for mode in words.modes]
            found.append(measure(sides, words, console))
            for side in sides:
                side.job.engine.close()
    report(found, words, console)


def gpt2(config: dict[str, Any], shape: str, sequence: int) -> Job:
    """`shape`: "layers x width"."""
    layers, width = map(int, shape.split("x"))
    return Job(config, layers, width, sequence, vocabulary=VOCABULARY, checkpointing=True)


class Side:
    """One mode: a model, its optimizer, and a round of them."""

    def __init__(self, mode: str, shape: str, words: argparse.Namespace, directory: Path) -> None:
        directory.mkdir()
        self.mode = mode
        self.every = words.every
        self.checkpoints = directory / "checkpoints"
        durability = "none" if mode == "copied" else mode
        config = {
            "tiers": {
                "host": {"capacity": words.host},
                "nvme": [{"path": str(directory / "swap")}],
            },
            "placement": dict.fromkeys(KINDS, "nvme") | {"gradients": words.gradients},
            "precision": {"compute": "bfloat16"},
            "checkpoint": {
                "directory": str(self.checkpoints), "keep": 1, "durability": durability,
            },
        }  # fmt: skip
        self.job = gpt2(config, shape, words.sequence)

    def round(self, batches: list[torch.Tensor]) -> dict[str, Any]:
        """Steps, and what their mode does; what it took and wrote."""
        losses, commit_s, job = [], 0.0, self.job
        with measured(job.engine) as steps:
            for ids in batches:
                losses.append(job.step([ids]))
                if self.mode == "step":
                    before_s = time.perf_counter()
                    infinity.checkpoint.commit(job.model, job.optimizer)
                    commit_s += time.perf_counter() - before_s
            job.engine.flush()
        with measured(job.engine) as saving:
            if self.mode in ("copied", "checkpoint"):
                infinity.checkpoint.save(self.checkpoints, job.model, job.optimizer, keep=1)
        return {
            "losses": losses,
            "step_s": steps["seconds"] / len(batches),
            "step_nbytes": steps["written_nbytes"] / len(batches),
            "commit_s": commit_s / len(batches),
            "checkpoint_s": saving["seconds"],
            "checkpoint_nbytes": saving["written_nbytes"],
        }

    def space_nbytes(self) -> int:
        """Blocks on the drive, a linked file once."""
        there = {}
        for path in self.checkpoints.parent.rglob("*"):
            status = path.lstat()
            there[status.st_ino] = status.st_blocks * 512
        return sum(there.values())


def measure(sides: list[Side], words: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Rounds by turns, after one that is not counted."""
    source = torch.Generator().manual_seed(0)
    num_parameters = sides[0].job.num_parameters
    rounds: list[dict[str, dict[str, Any]]] = []
    with console.status(f"{num_parameters:,} parameters"):
        for _ in range(words.rounds + 1):
            batches = [
                torch.randint(VOCABULARY, (1, words.sequence), generator=source)
                for _ in range(words.every)
            ]
            rounds.append({side.mode: side.round(batches) for side in sides})
    for each in rounds:
        losses = [each[mode].pop("losses") for mode in words.modes]
        assert all(one == losses[0] for one in losses), "durability changed a loss"
    rounds = rounds[1:]
    results: dict[str, Any] = {}
    for side in sides:
        mine = [each[side.mode] for each in rounds]
        ratios = [each[side.mode]["step_s"] / each[words.modes[0]]["step_s"] for each in rounds]
        results[side.mode] = {
            **medians(mine),
            **spread(ratios, "step_ratio"),
            "space_nbytes": side.space_nbytes(),
        }
    return {"num_parameters": num_parameters, "modes": results, "rounds": rounds}


def report(found: list[dict[str, Any]], words: argparse.Namespace, console: Console) -> None:
    def of_checkpoint(name: str, places: int, count: int) -> Callable[[Any], str]:
        return lambda row: (
            f"{row[name] / count:.{places}f}" if row["mode"] in ("copied", "checkpoint") else ""
        )

    for each in found:
        count = each["num_parameters"]
        columns: dict[str, Any] = {
            "mode": "{mode}", "step s": "{step_s:.2f}",
            f"beside {words.modes[0]}": "{step_ratio:.2f}",
            "low - high": "{step_ratio_low:.2f} - {step_ratio_high:.2f}",
            "written B/p": lambda row, count=count: f"{row['step_nbytes'] / count:.1f}",
            "checkpoint s": of_checkpoint("checkpoint_s", 2, 1),
            "checkpoint B/p": of_checkpoint("checkpoint_nbytes", 2, count),
            "space B/p": lambda row, count=count: f"{row['space_nbytes'] / count:.1f}",
        }  # fmt: skip
        title = f"{count:,} parameters, a checkpoint every {words.every} steps"
        rows = ({"mode": mode, **row} for mode, row in each["modes"].items())
        print_table(title, columns, rows, console)
    save(words.save, words, free_nbytes=shutil.disk_usage(words.path).free, results=found)


if __name__ == "__main__":
    main()
