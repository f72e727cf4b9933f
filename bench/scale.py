"""Does a step stay as cheap per parameter, and as small in memory, as the model grows?

    python bench/scale.py --path /mnt/nvme0 --save scale.json --plot scale.png
    python bench/scale.py ... --only 3B              one more row of the same file
    python bench/scale.py --quick                    two toy models: does it run?

GPT-like models from 125 million parameters to more state than the machine has memory, each in a
process of its own through the same host budget: everything on NVMe, gradients too, bfloat16 with
an fp32 master, one micro-batch of one sequence. Bytes are those the kernel counted for the process,
and peak memory is the kernel's (VmHWM). No model is ever whole in memory: weights are made on the
drive, unit by unit.

On two cores and a drive of 4 GB/s about 1, 2, 5 and 12 minutes; the last takes 50 GB of the drive.
Each row is printed and saved as it is finished, and its files are removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Results, arguments, high_water_nbytes, print_table, say

# (name, layers, width): the shapes of the GPT-3 paper's table 2.1, its 2.7 B made larger.
SHAPES = (
    ("125M", 12, 768),
    ("350M", 24, 1024),
    ("1.3B", 24, 2048),
    ("3B", 34, 2688),
)
QUICK = (("toy", 2, 128), ("toy, twice as deep", 4, 128))
STATE_NBYTES = 12 + 4  # Weight, residual, moments; a gradient.


def main() -> None:
    parser = arguments(__doc__, plot=True, quick="two toy models, one minute")
    parser.add_argument("--host", default="1GiB")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="counted, after two that are not")
    parser.add_argument("--tile", default="auto", help="[schedule] tile of the engine")
    parser.add_argument("--only", nargs="+", choices=[name for name, *_ in SHAPES])
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        print("\n" + json.dumps(train(**words.worker)))
        return
    settings = {key: getattr(words, key) for key in ("host", "sequence", "tile")}
    results = Results(words.save, settings)
    for name, layers, width in QUICK if words.quick else SHAPES:
        if words.only and name not in words.only:
            continue
        needed_nbytes = (12 * layers * width * width + 51_000 * width) * STATE_NBYTES
        if shutil.disk_usage(words.path).free < needed_nbytes * 1.1:
            say(f"{name}: left out, the drive has no room for {needed_nbytes / 1e9:.0f} GB")
            continue
        say(f"{name}: {needed_nbytes / 1e9:.1f} GB of state ...")
        with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-scale-") as scratch:
            case = {
                "layers": layers, "width": width, "swap": scratch, "host": words.host,
                "sequence": words.sequence, "steps": words.steps, "tile": words.tile,
            }  # fmt: skip
            line = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(case)]
            answer = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout
        results.keep({"name": name, **json.loads(answer.splitlines()[-1])})
        report(results.rows, words)


def train(
    layers: int, width: int, swap: str, host: str, sequence: int, steps: int, tile: str
) -> dict[str, Any]:
    """In a process of its own: medians over the counted steps."""
    import torch
    from jobs import Job, measured, medians

    from infinity.tools.training.process import keep_freed_memory

    keep_freed_memory()
    config = {
        "tiers": {"host": {"capacity": host}, "nvme": [{"path": swap}]},
        "placement": {"gradients": "nvme"},
        "precision": {"compute": "bfloat16"},
        "schedule": {"tile": tile},
    }
    start_s = time.perf_counter()
    job = Job(config, layers, width, sequence)
    setup_s, numel = time.perf_counter() - start_s, job.num_parameters
    ids = torch.randint(50257, (1, sequence))
    rounds = []
    say(f"  ready after {setup_s:.0f} s")
    for number in range(steps + 2):
        with measured(job.engine) as found:
            job.layer_major_step([ids])
        rounds.append(found)
        say(f"  step {number + 1} of {steps + 2}: {found['seconds']:.1f} s")
    job.engine.close()
    middle = medians(rounds[2:])
    return {
        "num_parameters": numel,
        "step_s": middle["seconds"],
        "ns_per_parameter": middle["seconds"] / numel * 1e9,
        "read_per_parameter": middle["read_nbytes"] / numel,
        "written_per_parameter": middle["written_nbytes"] / numel,
        "peak_rss_nbytes": high_water_nbytes(),
        "setup_s": setup_s,
        "rounds": rounds,
    }


def report(found: list[dict[str, Any]], words: argparse.Namespace) -> None:
    columns = {
        "model": "{name}", "parameters": "{num_parameters:,}", "step s": "{step_s:.1f}",
        "ns/parameter": "{ns_per_parameter:.1f}", "read B/p": "{read_per_parameter:.1f}",
        "written B/p": "{written_per_parameter:.1f}",
        "peak RSS GiB": lambda row: f"{row['peak_rss_nbytes'] / (1 << 30):.2f}",
    }  # fmt: skip
    title = f"everything on NVMe, host budget {words.host}, {words.sequence} tokens"
    print_table(title, columns, found)
    if words.plot is not None:
        draw(found, words)


def draw(found: list[dict[str, Any]], words: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    numbers = [each["num_parameters"] for each in found]
    times = [each["ns_per_parameter"] for each in found]
    left.plot(numbers, times, "o-")
    left.set(
        ylabel="ns per parameter and step",
        title=f"{min(times):.0f} to {max(times):.0f} ns a parameter, whatever the size",
    )
    memory = [each["peak_rss_nbytes"] / (1 << 30) for each in found]
    state = [number * STATE_NBYTES / (1 << 30) for number in numbers]
    right.plot(numbers, memory, "o-", label="peak RSS")
    right.plot(numbers, state, "--", color="grey", label="training state")
    right.set(
        ylabel=f"GiB (host budget {words.host})", yscale="log",
        title=f"{state[-1] / state[0]:.0f} x the state, {memory[-1] / memory[0]:.1f} x the memory",
    )  # fmt: skip
    right.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_locator(ticker.NullLocator())
    right.legend()
    for axes in (left, right):
        axes.set(xscale="log", xlabel="parameters")
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.set_xticks(numbers, [each["name"] for each in found])
        axes.grid(alpha=0.3)
    left.set_ylim(0, 1.1 * max(times))
    figure.savefig(words.plot, dpi=120)


if __name__ == "__main__":
    main()
