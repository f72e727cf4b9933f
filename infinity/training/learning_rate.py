"""The learning rate over the steps of a run, as a factor of its peak."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def lr_ratio(
    step: int, *, steps: int, schedule: Schedule, warmup_steps: int, min_lr_ratio: float
) -> float:
    """Returns the factor for the update of `step`, counted from 0.

    The factor rises in equal parts, (step + 1) / warmup_steps, so that no step has rate 0. Then it
    falls along a line or half a cosine and reaches `min_lr_ratio` at the last step. With 4 steps,
    one of them warm-up, linear to 0: 1, 2/3, 1/3, 0.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    # The last update has number steps - 1. The first one after the warm-up is at the peak or just
    # past it.
    first = max(warmup_steps - 1, 0)
    done = min((step - first) / max(steps - 1 - first, 1), 1.0)
    fall = done if schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
    return 1.0 - (1.0 - min_lr_ratio) * fall
