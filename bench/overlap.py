"""Do both passes hide the optimizer? Plain steps with all state on NVMe, in blocks of equal steps.

    python bench/overlap.py --path /mnt/nvme0 --save bench/results/overlap.json
    python bench/overlap.py --quick                    a small model: does it run?

A GPT-2-like model in bfloat16 trains in one process on three sides by turns: with everything on the
host (C is a step of it), on NVMe with updates before the next forward ("deferred"), and on NVMe
with updates in both passes. A turn is a block of consecutive steps of one side; the first step is
not counted, and all transfers of the side are over when the block ends. B is the time that the
bytes of a step take when nothing else happens, measured in the same round. A step cannot be faster
than the larger of C and B. P is its processor time on all cores that it may use, in which threads
of torch that spin count: how busy the cores are. No layer-major order.

Clipping: "none"; "never", with a norm that no gradient reaches; "always".
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Results, arguments, print_table, say
from jobs import Job, measured, medians
from rich.console import Console
from step import VOCABULARY, bare_s, side

from infinity.tools.training.process import keep_freed_memory

NORMS = {"none": None, "never": 1e9, "always": 1e-6}
SIDES = ("host", "deferred", "both_passes")
COUNTERS = (
    "read_wait_s", "write_wait_s", "update_s", "early_updates_kept", "early_updates_undone",
    "state_held_back_nbytes", "chunks_read_in_backward",
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, quick="a small model, one round")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards of a step")
    parser.add_argument("--clipping", nargs="+", default=["none"], choices=NORMS)
    parser.add_argument("--host", default="4GiB")
    parser.add_argument("--compute", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gradients", default="host", choices=["host", "nvme"])
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a block")
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    words.sequence = max(512, *words.tokens)
    if words.quick:
        words.layers, words.width, words.host, words.rounds = 4, 256, "256MiB", 1
        words.tokens, words.steps = [64], 3
    keep_freed_memory()
    varied = {"path", "tokens", "micro_batches", "clipping", "gradients", "save", "quick"}
    what = {name: value for name, value in vars(words).items() if name not in varied}
    results = Results(words.save, what)
    console = Console()
    for clipping in words.clipping:
        with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-overlap-") as scratch:
            options = {"max_norm": NORMS[clipping]}
            sides = {
                name: side("host", words, Path(scratch), **options)
                if name == "host"
                else side("nvme", words, Path(scratch), updates=name, **options)
                for name in SIDES
            }
            for tokens in words.tokens:
                row = measure(sides, tokens, clipping, words)
                results.keep(row)
                show([row], words, console)
            for job in sides.values():
                job.engine.close()
            del sides, job
            gc.collect()  # The next sides need the memory.
    if len(results.rows) > 1:
        show(results.rows, words, console)


def block(job: Job, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """One block of steps of a side: the median of those that are counted, and the losses. `ids`: a
    row is a micro-batch."""
    found, losses = [], []
    for _ in range(steps + 1):
        with measured(job.engine, COUNTERS) as each:
            losses.append(job.step(ids.split(1)))
        found.append(each)
    job.engine.flush()
    return medians(found[1:]) | {"losses": losses}


def measure(
    sides: dict[str, Job], tokens: int, clipping: str, words: argparse.Namespace
) -> dict[str, Any]:
    """Rounds of blocks of all sides and of bare bytes, by turns."""
    source = torch.Generator().manual_seed(tokens)
    ids = torch.randint(VOCABULARY, (words.micro_batches, tokens), generator=source)
    rounds: list[dict[str, Any]] = []
    for number in range(words.rounds):
        # The policy has learned its share, and the order of uses is known, after three steps.
        steps = words.steps + 3 * (number == 0)
        # No side is always the one behind the long writes of another.
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        each = {name: block(sides[name], ids, steps) for name in order}
        losses = [each[name]["losses"] for name in SIDES]
        assert losses[0] == losses[1] == losses[2], "placement or schedule changed a loss"
        moved = each["both_passes"]["read_nbytes"], each["both_passes"]["written_nbytes"]
        each["bytes"] = {"seconds": bare_s(*map(int, moved), words)}
        floor_s = max(each["host"]["seconds"], each["bytes"]["seconds"])
        each["ratios"] = {name: each[name]["seconds"] / floor_s for name in SIDES[1:]}
        each["processor_s"] = each["both_passes"]["cpu_s"] / len(os.sched_getaffinity(0))
        rounds.append(each)
        told = ", ".join(f"{name} {each[name]['seconds']:.2f} s" for name in (*SIDES, "bytes"))
        say(f"{tokens} tokens, clipping {clipping}, round {number + 1} of {words.rounds}: {told}")
    return {
        "name": f"{words.micro_batches}x{tokens} {clipping} {words.gradients}",
        "micro_batches": words.micro_batches,
        "tokens": tokens,
        "clipping": clipping,
        "gradients": words.gradients,
        "seconds": {
            name: statistics.median(each[name]["seconds"] for each in rounds)
            for name in (*SIDES, "bytes")
        },
        "ratios": {
            name: statistics.median(each["ratios"][name] for each in rounds) for name in SIDES[1:]
        },
        "processor_s": statistics.median(each["processor_s"] for each in rounds),
        "rounds": rounds,
        "num_parameters": sides["host"].num_parameters,
    }


def show(found: list[dict[str, Any]], words: argparse.Namespace, console: Console) -> None:
    title = (
        f"{found[0]['num_parameters']:,} parameters, {words.compute}, host budget {words.host}, "
        f"gradients on {words.gradients}"
    )
    columns = {
        "tokens": "{micro_batches}x{tokens:,}", "clipping": "{clipping}",
        "in memory s (C)": "{seconds[host]:.2f}", "bytes s (B)": "{seconds[bytes]:.2f}",
        "deferred s": "{seconds[deferred]:.2f}", "both passes s": "{seconds[both_passes]:.2f}",
        "deferred to max(C, B)": "{ratios[deferred]:.2f}",
        "both passes to max(C, B)": "{ratios[both_passes]:.2f}", "P s": "{processor_s:.2f}",
    }  # fmt: skip
    print_table(title, columns, found, console)


if __name__ == "__main__":
    main()
