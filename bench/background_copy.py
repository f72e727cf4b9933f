"""What does training lose while a checkpoint is copied to another file system behind it?

    python bench/background_copy.py --path /mnt/nvme0 --to /mnt/other --save out.json

A GPT-2-like model in bfloat16 with parameters, masters and moments on NVMe trains at `--path`. In
each round a checkpoint is begun at `--to`, which must be another file system, and as many steps are
taken as it takes to copy it; then as many alone. What is lost is the time of the former beyond that
of the latter, as a share of the time of the copy. Losses must be equal to the last bit to those of
a run without checkpoints. Beside it: how long `async_save` itself takes, and a copy with training
at rest, in seconds and in seconds of a processor.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from common import print_table, save
from durability import KINDS, VOCABULARY, gpt2
from rich.console import Console

import infinity
from infinity.tools.training.process import keep_freed_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--to", type=Path, required=True, help="one on another file system")
    parser.add_argument("--shape", default="12x768", help="layers x width")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--host", default="1GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    words = parser.parse_args()
    keep_freed_memory()
    console = Console()
    with (
        tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-copy-") as near,
        tempfile.TemporaryDirectory(dir=words.to, prefix="infinity-copy-") as far,
    ):
        job = SavedJob(words, Path(near), Path(far))
        with console.status(f"{job.job.num_parameters:,} parameters"):
            rounds = [job.round() for _ in range(words.rounds + 1)][1:]
            job.job.engine.close()
            reference = SavedJob(words, Path(near), None)
            losses = [reference.step() for _ in job.losses]
            reference.job.engine.close()
        assert losses == job.losses, "a copy changed a loss"
    report(job.job.num_parameters, rounds, words, console)


class SavedJob:
    """A model in training; with `far`, one that is saved there."""

    def __init__(self, words: argparse.Namespace, near: Path, far: Path | None) -> None:
        self.words = words
        self.far = far
        self.losses: list[float] = []
        self._numbers = itertools.count()
        self._source = torch.Generator().manual_seed(0)
        config: dict[str, Any] = {
            "tiers": {
                "host": {"capacity": words.host},
                "nvme": [{"path": str(near / "swap")}],
            },
            "placement": dict.fromkeys(KINDS, "nvme") | {"gradients": "host"},
            "precision": {"compute": "bfloat16"},
        }
        if far is not None:
            config["checkpoint"] = {"directory": str(far), "keep": 1}
        self.job = gpt2(config, words.shape, words.sequence)

    def step(self) -> float:
        ids = torch.randint(VOCABULARY, (1, self.words.sequence), generator=self._source)
        self.losses.append(self.job.step([ids]))
        return self.losses[-1]

    def steps(self, count: int) -> float:
        """Seconds of one of so many steps, updates included."""
        start_s = time.perf_counter()
        for _ in range(count):
            self.step()
        self.job.engine.flush()
        return (time.perf_counter() - start_s) / count

    def round(self) -> dict[str, float]:
        assert self.far is not None
        self.job.engine.flush()
        start_s = time.perf_counter()
        saving = infinity.checkpoint.async_save(
            self.far, self.job.model, self.job.optimizer, keep=1, step=next(self._numbers)
        )
        assert not saving.done(), f"{self.far} is on the file system of the swap path: links"
        begun_s = time.perf_counter()
        copied = [begun_s]
        watcher = threading.Thread(target=note_end, args=(saving, copied))
        watcher.start()
        count = 0
        while not saving.done():
            self.step()
            count += 1
        self.job.engine.flush()
        end_s = time.perf_counter()
        watcher.join()
        copy_s = copied[-1] - begun_s
        nbytes = space_nbytes(saving.wait())
        alone_s = self.steps(count)  # As many: what is left to do at the end is done once.
        lost_s = end_s - begun_s - count * alone_s
        rest_s, cpu_s = time.perf_counter(), time.process_time()
        infinity.checkpoint.save(
            self.far, self.job.model, self.job.optimizer, keep=1, step=next(self._numbers)
        )
        rest_s, cpu_s = time.perf_counter() - rest_s, time.process_time() - cpu_s
        return {
            "alone_step_s": alone_s,
            "step_s": (end_s - begun_s) / count,
            "steps": count,
            "lost": lost_s / copy_s,
            "async_save_s": begun_s - start_s,
            "copy_nbytes": nbytes,
            "copy_s": copy_s,
            "copy_at_rest_s": rest_s,
            "copy_at_rest_cpu_s": cpu_s,
        }


def note_end(saving: infinity.checkpoint.Saving, times_s: list[float]) -> None:
    """Without wait(), which would hurry it."""
    while not saving.done():
        time.sleep(0.01)
    times_s.append(time.perf_counter())


def space_nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def report(
    num_parameters: int,
    rounds: list[dict[str, float]],
    words: argparse.Namespace,
    console: Console,
) -> None:
    columns = {
        "round": "{number}", "step alone s": "{alone_step_s:.2f}",
        "beside a copy s": "{step_s:.2f}", "steps": "{steps}", "lost": "{lost:.1%}",
        "async_save s": "{async_save_s:.3f}",
        "copy GB": lambda row: f"{row['copy_nbytes'] / 1e9:.2f}", "copy s": "{copy_s:.2f}",
        "at rest s": "{copy_at_rest_s:.2f}", "cpu s": "{copy_at_rest_cpu_s:.2f}",
    }  # fmt: skip
    title = f"{num_parameters:,} parameters, {words.path} to {words.to}"
    numbered = ({"number": number, **row} for number, row in enumerate(rounds, 1))
    print_table(title, columns, numbered, console)
    lost = sorted(row["lost"] for row in rounds)
    console.print(f"lost: {statistics.median(lost):.1%} ({lost[0]:.1%} to {lost[-1]:.1%})")
    save(words.save, words, free_nbytes=shutil.disk_usage(words.path).free, rounds=rounds)


if __name__ == "__main__":
    main()
