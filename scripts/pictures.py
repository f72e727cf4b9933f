"""Draws the picture of README.md by the planner, in seconds: python scripts/pictures.py

A test compares the figures in the picture and in README.md with those of `infinity plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from infinity.config import SwapConfig
from infinity.plan import Batch, forecast, load_hardware, load_model
from infinity.plan.predict import Forecast
from infinity.simulate.clock import Timeline
from infinity.state.units import moments_of
from infinity.tools.pictures.timeline import TrackPicture, paint
from infinity.tools.plan import gantt
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


def step_pictures() -> tuple[TrackPicture, TrackPicture]:
    """Returns one offloaded step twice, on one axis: its operations in turn, and overlapped."""
    table = table_of(KINDS) | {"schedule": {"micro_batch": 1}}
    config = SwapConfig.load(table)
    model = load_model("gpt-10b", torch.bfloat16, moments_of(config.optimizer, config.precision))
    after = forecast(config, model, load_hardware("rtx4090-desktop"), Batch(65536, 2048, 1))
    before = one_after_the_other(after)
    end = 1.02 * before.step.step_s
    ratio = after.step.step_s / after.step.busy_s["compute"]
    first, second = (
        replace(gantt.picture_of(each), start=-0.02 * end, end=end) for each in (before, after)
    )
    return (
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


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    paint(PICTURES / "step.png", *step_pictures())
    print(f"wrote {PICTURES / 'step.png'}")
