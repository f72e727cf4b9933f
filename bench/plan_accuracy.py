"""How close is `infinity plan` to a run on this machine?

    python bench/plan_accuracy.py --path /mnt/nvme0 --save bench/results/plan_accuracy.json \\
        --plot bench/results/plots/plan_accuracy.png
    python bench/plan_accuracy.py --only "wide" "at the step"
    python bench/plan_accuracy.py --quick            two of them: does it run?

For each configuration: measure the machine, predict, run, measure and predict again, so that a
change of the machine's speed in between is seen; the mean of the two predictions stands beside the
median step after the third (the second is the first to have an update in it). Nothing was fitted to
any of these runs: a prediction knows the model, the budgets and what the machine was measured to
do. It needs a machine that does nothing else. Under a minute each, 10 minutes in all; each row is
printed and saved as it is finished. Needs the `hf` extra.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Results, arguments, print_table, say
from rich.console import Console

from infinity.config import SwapConfig
from infinity.plan import Batch, forecast
from infinity.plan.predict import Forecast
from infinity.tools.plan.measure import measure
from infinity.tools.plan.subject import model_of_config

KINDS = ("parameters", "master", "moments", "gradients")
_FIRST_COUNTED = 3


@dataclass(frozen=True)
class Case:
    """A GPT-2-like model and how it is trained; `placement` and `more` go over everything on
    NVMe."""

    name: str
    hidden: int
    layers: int
    host: str
    batch: int
    accumulation: int = 1
    sequence: int = 128
    dtype: str = "float32"
    steps: int = 8
    placement: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("small", 512, 8, "64MiB", 1),
    Case("larger batch", 512, 8, "64MiB", 8),
    Case("micro-batches", 512, 8, "64MiB", 2, accumulation=2),
    Case("bfloat16", 512, 8, "64MiB", 4, dtype="bfloat16"),
    Case("deep", 512, 24, "128MiB", 2),
    Case("wide", 1024, 6, "160MiB", 2),
    Case("wide, weights fit the host", 1024, 6, "768MiB", 1),
    Case("wide, larger batch", 1024, 6, "160MiB", 8, steps=6),
    Case("long sequences", 512, 8, "64MiB", 2, sequence=512),
    Case("gradients on the host", 768, 8, "384MiB", 2, placement={"gradients": "host"}),
    Case("moments on both", 768, 8, "512MiB", 2, placement={"moments": ["host", "nvme"]}),
    Case("all on the host", 768, 6, "1GiB", 2, placement=dict.fromkeys(KINDS, "host")),
    Case("at the step", 768, 8, "128MiB", 2, more={"schedule": {"updates": "at_step"}}),
    Case("bfloat16, moments of 8 bits", 768, 8, "128MiB", 2, dtype="bfloat16",
         more={"precision": {"compute": "bfloat16", "moments": "8bit"}}),
)  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, plot=True, quick="the first and the last")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    words = parser.parse_args()
    cases = CASES[:: len(CASES) - 1] if words.quick else CASES
    results = Results(words.save, {})
    for case in cases:
        if words.only and case.name not in words.only:
            continue
        row = compare(case, words.path.resolve())
        results.keep(row)
        say(
            f"{case.name}: predicted {row['predicted_to_ran']:.2f} of {row['step_s']:.2f} s, "
            f"read {row['read_to_ran']:.2f}, written {row['written_to_ran']:.2f}"
        )
    report(results.rows)
    if words.plot is not None:
        draw(results.rows, words.plot)


def configuration(case: Case, directory: Path) -> dict[str, Any]:
    return {
        "schema": 1,
        "tiers": {
            "host": {"capacity": case.host},
            "nvme": [{"path": str(directory / "swap")}],
        },
        "placement": dict.fromkeys(KINDS, "nvme") | case.placement,
        "precision": {"compute": case.dtype},
        "model": {
            "config": {
                "model_type": "gpt2", "vocab_size": 256, "n_embd": case.hidden,
                "n_layer": case.layers, "n_head": 8, "n_positions": case.sequence,
            }
        },
        "data": {
            "paths": ["python-stdlib"], "sequence_length": case.sequence, "max_bytes": "1MB",
        },
        "train": {
            "steps": case.steps, "batch_size": case.batch, "gradient_accumulation_steps":
            case.accumulation, "activation_checkpointing": True,
        },
        "output": {"directory": str(directory / "output"), "export": False},
        **case.more,
    }  # fmt: skip


def predicted(table: dict[str, Any], case: Case) -> Forecast:
    config = SwapConfig.load(table)
    model = model_of_config(config)
    batch = Batch(case.batch * case.sequence, case.sequence, case.accumulation)
    return forecast(config, model, measure(config, model, (), batch), batch)


def compare(case: Case, root: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=root, prefix="infinity-plan-") as temporary:
        directory = Path(temporary)
        table = configuration(case, directory)
        file = directory / "swap.json"
        file.write_text(json.dumps(table))
        before = predicted(table, case)
        command = [sys.executable, "-m", "infinity", "train", str(file), "--json"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
        after = predicted(table, case)
        lines = (directory / "output" / "metrics.jsonl").read_text().splitlines()
    # The last one also carries out the update it decides.
    steps = [json.loads(line) for line in lines][_FIRST_COUNTED:-1]
    ran_s = statistics.median(step["elapsed_s"] for step in steps)
    predictions_s = [before.step.step_s, after.step.step_s]

    def share(name: str) -> float:
        ran = statistics.median(step[f"{name}_nbytes"] for step in steps)
        return before.step.moved_nbytes.get(name, 0) / ran if ran else 1.0

    return {
        "name": case.name,
        "num_parameters": before.model.num_params,
        "step_s": ran_s,
        "steps_s": [step["elapsed_s"] for step in steps],
        "predictions_s": predictions_s,
        "predicted_to_ran": statistics.mean(predictions_s) / ran_s,
        "read_to_ran": share("nvme_read"),
        "written_to_ran": share("nvme_write"),
        "binding": before.step.binding,
    }


def report(rows: list[dict[str, Any]]) -> None:
    columns = {
        "": "{name}", "parameters": lambda row: f"{row['num_parameters'] / 1e6:.0f} M",
        "step s": "{step_s:.2f}",
        "predicted s": lambda row: " - ".join(f"{s:.2f}" for s in sorted(row["predictions_s"])),
        "of it": "{predicted_to_ran:.2f}", "read": "{read_to_ran:.2f}",
        "written": "{written_to_ran:.2f}", "binding": "{binding}",
    }  # fmt: skip
    console = Console()
    print_table("", columns, rows, console)
    console.print(f"median error {median_error(rows):.0%} over {len(rows)} configurations")


def median_error(rows: list[dict[str, Any]]) -> float:
    """Returns how far a prediction is off, as a share of what was run."""
    return statistics.median(abs(row["predicted_to_ran"] - 1) for row in rows)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(5, 4.4), constrained_layout=True)
    ends = [0.8 * min(r["step_s"] for r in rows), 1.25 * max(r["step_s"] for r in rows)]
    axes.plot(ends, ends, color="grey", lw=1)
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.9")
    for row in rows:
        low, high = sorted(row["predictions_s"])
        axes.plot([row["step_s"]] * 2, [low, high], color="C0", lw=1)
        axes.plot(row["step_s"], statistics.mean((low, high)), "o", color="C0", ms=5)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="step, seconds as run",
             ylabel="seconds as predicted (grey: within 10 %)")  # fmt: skip
    axes.set_title(
        f"The plan of a step is off by {median_error(rows):.0%} in the median of {len(rows)} runs",
        fontsize="medium",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(ticker.NullLocator())
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
