"""Makes the pictures of README and the documentation: python scripts/pictures.py

`largest.png` is by the planner, with what was measured beside it (bench/results); `step.png` is one
simulated step, with its operations in turn and overlapped. Each title says the finding and is
computed from the figures.
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from infinity.cli import app
from infinity.config import SwapConfig
from infinity.observe.painter import find_pyplot, paint
from infinity.plan import Batch, forecast, gantt, load_hardware, load_model
from infinity.plan.answer import duration
from infinity.plan.predict import Forecast
from infinity.simulate.clock import Timeline
from infinity.state.moments import moments_of

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "bench" / "results"
HARDWARE = ROOT / "infinity" / "plan" / "hardware" / "rtx4090-1nvme.toml"
MEMORY_GB = (32, 64, 128, 256)
COLORS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
CHECKPOINTS = {
    "gpt-oss-120b": "gpt-oss 120B",
    "qwen3-235b": "Qwen3 235B",
    "glm-4.6": "GLM-4.6",
    "deepseek-v3": "DeepSeek-V3",
    "kimi-k2-int4": "Kimi K2, INT4",
}
SIZES = ("1B", "2B", "4B", "8B", "16B", "32B", "48B", "64B", "80B", "96B", "112B", "128B", "144B")


def planned(machine: Path, *arguments: str) -> dict[str, Any] | None:
    """Returns the plan as JSON; None where the run does not fit."""
    done = CliRunner().invoke(app, ["plan", *arguments, "--hardware", str(machine), "--json"])
    if done.exit_code:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found if found["answer"]["fits"] else None


def with_memory(folder: Path, gigabytes: int) -> Path:
    """Writes the machine with another size of host memory."""
    memory = tomllib.loads(HARDWARE.read_text())["host"]["memory"]
    path = folder / f"{gigabytes}.toml"
    path.write_text(
        HARDWARE.read_text().replace(f'memory = "{memory}"', f'memory = "{gigabytes}GB"', 1)
    )
    return path


def points(found: Sequence[dict[str, Any] | None]) -> list[tuple[float, float]]:
    return [
        (each["model"]["num_params"] / 1e9, each["tokens_per_s"])
        for each in found
        if each is not None
    ]


def draw_largest(path: Path) -> None:
    """Draws tokens/s over the size of the model, for sizes of host memory, on one GPU."""
    pyplot = find_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.6))
    with tempfile.TemporaryDirectory() as folder:
        machines = {size: with_memory(Path(folder), size) for size in MEMORY_GB}
        adapters = {
            size: [planned(machine, "--model", name, "--lora", "16") for name in CHECKPOINTS]
            for size, machine in machines.items()
        }
        trained = {
            size: [planned(machine, "--params", name, "--accumulation", "4") for name in SIZES]
            for size, machine in machines.items()
        }
    for axis, lines in ((left, adapters), (right, trained)):
        for color, size in zip(COLORS, MEMORY_GB, strict=True):
            line = sorted(points(lines[size]))
            if line:
                axis.plot(*zip(*line, strict=True), "o-", color=color, label=f"{size} GB of memory")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("parameters, billions")
        axis.grid(alpha=0.3, which="both")
    name_checkpoints(left, adapters)
    left.set_ylabel("tokens/s")
    draw_measured(left, measured_adapters())
    draw_measured(right, measured_training())
    largest = {
        size: max((x for x, _ in points(line)), default=0.0) for size, line in adapters.items()
    }
    least = min(size for size in MEMORY_GB if largest[size] > 1000)
    left.set_title(f"A LoRA over 1 T parameters fits one 24 GB card and {least} GB of memory")
    most = max(x for line in trained.values() for x, _ in points(line))
    right.set_title(f"All weights of {most:.0f} B parameters train with one 2 TB drive")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8, loc="lower left")
    figure.text(
        0.01, 0.01,
        "Lines: infinity plan for one RTX 4090, one drive of 7 GB/s, 32,768 tokens a step (right: "
        "131,072). Hollow: measured on two CPU cores without a GPU, with one virtual drive.",
        fontsize=8, color="#555555",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def name_checkpoints(axis: Any, found: dict[int, list[dict[str, Any] | None]]) -> None:
    """Writes the name of each checkpoint above its fastest point."""
    for place, name in enumerate(CHECKPOINTS.values()):
        at = points([line[place] for line in found.values()])
        if at:
            x, y = max(at, key=lambda each: each[1])
            axis.annotate(name, (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)


def measured_adapters() -> list[tuple[float, float, str]]:
    """(billions of parameters, tokens/s, what) of the steps over bases larger than memory."""
    trillion = json.loads((RESULTS / "trillion.json").read_text())
    beyond = json.loads((RESULTS / "beyond_memory.json").read_text())
    return [
        (
            trillion["parameters"] / 1e9,
            trillion["tokens"] / trillion["step_s"][0],
            f"{trillion['host']} budget,\na step of {trillion['tokens']} tokens",
        ),
        (
            beyond["parameters"] / 1e9,
            beyond["tokens"] / beyond["steps"][0]["seconds"],
            f"{beyond['host']} budget,\na step of {beyond['tokens']} tokens",
        ),
    ]


def measured_training() -> list[tuple[float, float, str]]:
    """(billions of parameters, tokens/s, what) of steps over all weights."""
    scale = json.loads((RESULTS / "scale.json").read_text())
    tokens = scale["settings"]["sequence"]
    found = [
        (each["num_parameters"] / 1e9, tokens / each["step_s"], "") for each in scale["results"]
    ]
    x, y, _ = found[-1]
    return [*found[:-1], (x, y, f"{scale['settings']['host']} budget,\nsteps of {tokens} tokens")]


def draw_measured(axis: Any, found: Sequence[tuple[float, float, str]]) -> None:
    xs, ys, names = zip(*found, strict=True)
    axis.plot(xs, ys, "s", markerfacecolor="none", color="#c1121f", label="measured, no GPU")
    for x, y, name in zip(xs, ys, names, strict=True):
        axis.annotate(name, (x, y), (8, 0), textcoords="offset points", va="center", fontsize=7.5)
    axis.set_xlim(right=max(axis.get_xlim()[1], 3 * max(xs)))


def one_after_the_other(found: Forecast) -> Forecast:
    """Returns the forecast with its operations in the same order, each after the one before."""
    timeline = found.step.timeline
    order = sorted(range(len(timeline.operations)), key=lambda index: timeline.start_s[index])
    operations = tuple(timeline.operations[index] for index in order)
    ends = tuple(accumulate(each.duration_s for each in operations))
    step = replace(
        found.step, step_s=ends[-1], timeline=Timeline(operations, (0.0, *ends[:-1]), ends)
    )
    return replace(found, step=step)


def draw_step(path: Path) -> None:
    """Draws one offloaded step twice, on one axis: its operations in turn, and overlapped."""
    kinds = ("parameters", "master", "moments", "gradients")
    table = {
        "tiers": {"host": {"capacity": "85%"}, "nvme": [{"path": "/mnt/nvme"}]},
        "placement": {kind: ["host", "nvme"] for kind in kinds},
        "precision": {"compute": "bfloat16"},
        "schedule": {"micro_batch": 1},
    }
    config = SwapConfig.load(table)
    model = load_model("gpt-10b", torch.bfloat16, moments_of(config))
    after = forecast(config, model, load_hardware("rtx4090-desktop"), Batch(65536, 2048, 1))
    before = one_after_the_other(after)
    end = 1.02 * before.step.step_s
    ratio = after.step.step_s / after.step.busy_s["compute"]
    first, second = (
        replace(gantt.picture_of(each), start=-0.02 * end, end=end) for each in (before, after)
    )
    paint(
        path,
        replace(
            first,
            title=f"Before: all weights of {after.model.name}, every transfer in its turn: "
            f"{duration(before.step.step_s)} a step",
            time_label="",
            legend={},
        ),
        replace(
            second,
            title=f"After: transfers and updates beside compute: {duration(after.step.step_s)}, "
            f"{ratio:.2f} times what compute alone takes",
            time_label=f"seconds (simulated; {after.hardware.name}; "
            f"{after.batch.tokens_per_step:,} tokens a step)",
        ),
    )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    draw_step(PICTURES / "step.png")
    draw_largest(PICTURES / "largest.png")
    print(f"wrote {PICTURES / 'step.png'} and {PICTURES / 'largest.png'}")
