"""Draws pictures by the planner: python scripts/pictures.py [step] [models]

README.md shows the step. The models take many minutes; no page shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from infinity.config import SwapConfig
from infinity.errors import CapacityError
from infinity.plan import Batch, forecast, load_hardware, load_model
from infinity.plan.hardware import Hardware
from infinity.plan.model import model_of_shape
from infinity.plan.predict import Forecast
from infinity.plan.shapes import scaled_gpt
from infinity.simulate.clock import Timeline
from infinity.state.units import moments_of
from infinity.tools.pictures.timeline import find_pyplot, paint
from infinity.tools.plan import gantt
from infinity.tools.plan.catalogue import plan_cell
from infinity.tools.plan.report import duration

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
KINDS = ("parameters", "master", "moments", "gradients")


def table_of(kinds: Sequence[str]) -> dict[str, Any]:
    """Returns a file's table: state fills host memory, then the drives."""
    return {
        "tiers": {"host": {"capacity": "85%"}, "nvme": [{"path": "/mnt/nvme"}]},
        "placement": {kind: ["host", "nvme"] for kind in kinds},
        "precision": {"compute": "bfloat16"},
    }


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
    table = table_of(KINDS) | {"schedule": {"micro_batch": 1}}
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
            title="After: transfers and updates while the model computes: "
            f"{duration(after.step.step_s)}, {ratio:.2f} times what compute alone takes",
            time_label=f"seconds (simulated; {after.hardware.name}; "
            f"{after.batch.tokens_per_step:,} tokens a step)",
        ),
    )


# Drawn over host memory, in GB.
MEMORIES = (16, 32, 64, 128, 256, 512)
GPU = "rtx4090-1nvme"
LINES = {
    "qwen3-8b": "Qwen3 8B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B",
    "gpt-oss-120b": "gpt-oss 120B",
    "qwen3-235b": "Qwen3 235B-A22B",
    "deepseek-v3": "DeepSeek-V3, 671B",
    "kimi-k2-int4": "Kimi K2, 1T",
}
# Host budget in GB, parameters, and what was run; bench/results has scale.json, beyond_memory.json
# and trillion.json.
MEASURED = (
    (1.07, 3.08e9, "3.1 B, all weights", "s"),
    (4.29, 94.6e9, "94.6 B, adapter, INT4", "o"),
    (6.44, 1026e9, "1.03 T, adapter, INT4 (a file of zeros)", "o"),
)


def with_memory(machine: Hardware, gigabytes: float) -> Hardware:
    """Returns the machine with another size of host memory."""
    host = machine.host.model_copy(update={"memory": int(gigabytes * 1e9)})
    return machine.model_copy(update={"host": host})


def largest(machine: Hardware, *, spills: bool) -> float:
    """Returns the most parameters of a GPT-like model whose weights are all trained."""
    table = table_of(KINDS) if spills else {
        "tiers": {"host": {"capacity": "85%"}}, "precision": {"compute": "bfloat16"},
        "placement": dict.fromkeys(KINDS, "host"),
    }  # fmt: skip
    config = SwapConfig.load(table)
    low, high = 1e8, 1e12
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        model = model_of_shape(scaled_gpt(int(middle)), torch.bfloat16, moments_of(config))
        try:
            fits = not forecast(config, model, machine, Batch(2048, 2048, 1)).obstacles
        except CapacityError:
            fits = False
        low, high = (middle, high) if fits else (low, middle)
    return low


def draw_models(path: Path) -> None:
    """Draws the largest model and the rate of adapters over host memory, for one GPU."""
    pyplot = find_pyplot()
    machine = load_hardware(GPU)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6.4))
    for spills, color, what in (
        (True, "#1f6fa8", "state in memory and on one drive of 2 TB"),
        (False, "#888888", "state in host memory alone"),
    ):
        sizes = [largest(with_memory(machine, each), spills=spills) for each in MEMORIES]
        left.plot(MEMORIES, sizes, color=color, marker=".", label=f"planned, all weights: {what}")
    for memory, size, name, marker in MEASURED:
        left.plot(memory, size, marker, color="#c0392b", markersize=8, fillstyle="none")
        left.annotate(
            name, (memory, size), xytext=(-4, -18), textcoords="offset points", fontsize=9
        )
    for marker, what in (("s", "all weights"), ("o", "an adapter")):
        label = f"measured, {what}: host budget (two cores, no GPU)"
        left.plot([], [], marker, color="#c0392b", fillstyle="none", label=label)
    left.set_yscale("log")
    left.set_ylim(1e9, 4e12)
    left.set_xlim(0.8, 700)
    left.set_yticks([1e9, 1e10, 1e11, 1e12], ["1 B", "10 B", "100 B", "1 T"])
    left.legend(loc="upper left", bbox_to_anchor=(0.0, -0.12), fontsize=9, frameon=False)
    ends = []
    for name, title in LINES.items():
        rates = [plan_cell(name, GPU, with_memory(machine, each), 16) for each in MEMORIES]
        found = [
            (m, c.tokens_per_s) for m, c in zip(MEMORIES, rates, strict=True) if c.tokens_per_s
        ]
        (line,) = right.plot(*zip(*found, strict=True), marker=".")
        ends.append((found[-1], title, line.get_color()))
        if name == "deepseek-v3":
            rate = next(rate for memory, rate in found if memory == 128)
    place = float("inf")
    for (memory, tokens_per_s), title, color in sorted(ends, key=lambda end: -end[0][1]):
        place = min(tokens_per_s, place / 1.15)  # The height of a line of text, on this axis.
        right.annotate(title, (memory, place), xytext=(6, -3), textcoords="offset points",
                       fontsize=9, color=color)  # fmt: skip
    right.set_yscale("log")
    right.set_xlim(13, 2200)
    right.set_yticks([100, 1000, 10000], ["100", "1,000", "10,000"])
    right.set_ylabel("tokens/s")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.set_xlabel("host memory, GB")
        axis.minorticks_off()
    left.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    right.set_xticks(MEMORIES, [str(each) for each in MEMORIES])
    left.set_ylabel("parameters")
    left.set_title("The drive, not memory, bounds the model that one GPU trains", loc="left")
    right.set_title(f"Planned: LoRA over 671 B, 128 GB: {rate:,.0f} tokens/s",
                    loc="left")  # fmt: skip
    figure.text(
        0.51, 0.06,
        "Lines: predicted by infinity plan for one RTX 4090 of 24 GB and one drive of 7 GB/s.\n"
        "Measured are the three red marks on the left alone; no rate on the right is.\n"
        "Right: LoRA of rank 16, 32,768 tokens a step, as `infinity new` would set it.",
        fontsize=9, color="#555555",
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


DRAWN = {"step": draw_step, "models": draw_models}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or DRAWN:
        DRAWN[name](PICTURES / f"{name}.png")
        print(f"wrote {PICTURES / f'{name}.png'}")
