"""Draws a simulated step with its operations in turn and overlapped: python scripts/pictures.py"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from infinity.config import SwapConfig
from infinity.observe.painter import paint
from infinity.plan import Batch, forecast, gantt, load_hardware, load_model
from infinity.plan.answer import duration
from infinity.plan.predict import Forecast
from infinity.simulate.clock import Timeline
from infinity.state.moments import moments_of

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
            title=f"After: transfers and updates beside compute: {duration(after.step.step_s)}, "
            f"{ratio:.2f} times what compute alone takes",
            time_label=f"seconds (simulated; {after.hardware.name}; "
            f"{after.batch.tokens_per_step:,} tokens a step)",
        ),
    )


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    draw_step(PICTURES / "step.png")
    print(f"wrote {PICTURES / 'step.png'}")
