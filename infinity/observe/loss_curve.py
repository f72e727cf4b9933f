"""A loss curve in a notebook that draws itself anew in its place while a model trains.

    curve = LossCurve(num_steps=300)
    for batch in loader:
        ...
        curve.add(loss)

Elsewhere nothing is shown: `repr(curve)` is a line with the last loss. The picture is SVG, made
here; IPython, which a notebook has, is looked for when the first loss is added. Under a Trainer:
`infinity.integrations.loss_curve`.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from typing import Any, SupportsFloat

from infinity.sizes import clock_of

_WIDTH, _HEIGHT, _LEFT = 640, 180, 56
_MAX_POINTS = 400  # Of the drawn line; a screen shows no more.
_LEAST_GAP_S = 0.25  # Between two drawings.


class LossCurve:
    """Losses by step, their curve, and the time that is left. One thread adds."""

    def __init__(self, num_steps: int | None = None) -> None:
        self.losses: list[float] = []
        self.steps: list[int] = []
        self._num_steps = num_steps
        self._began_s = time.monotonic()
        self._shown_s = float("-inf")
        self._display: Any = None

    def add(self, loss: SupportsFloat, step: int | None = None) -> None:
        """Adds the loss of `step`, by default the next one, and draws the curve if it is time."""
        detach = getattr(loss, "detach", None)  # A tensor's, without importing torch.
        self.losses.append(float(loss if detach is None else detach()))
        self.steps.append((self.steps[-1] if self.steps else 0) + 1 if step is None else step)
        is_last = self.steps[-1] == self._num_steps
        if is_last or time.monotonic() - self._shown_s >= _LEAST_GAP_S:
            self.show()

    def show(self) -> None:
        """Draws the curve in its place now, in a notebook."""
        if self._display is None:
            self._display = _new_display()
        if self._display is not None:
            self._display.update(self)
        self._shown_s = time.monotonic()

    def __repr__(self) -> str:
        return f"<LossCurve: {self.caption()}>"

    def caption(self) -> str:
        """Returns the step, the loss, and the time that is left."""
        if not self.losses:
            return "no steps yet"
        of = f" of {self._num_steps}" if self._num_steps else ""
        text = f"step {self.steps[-1]}{of}, loss {self.losses[-1]:.4g}"
        if self._num_steps and self.steps[-1] < self._num_steps:
            passed_s = time.monotonic() - self._began_s
            left_s = passed_s / self.steps[-1] * (self._num_steps - self.steps[-1])
            text += f", {clock_of(left_s)} left"
        return text

    def _repr_html_(self) -> str:
        done = 100 * self.steps[-1] / self._num_steps if self._num_steps and self.steps else 0
        bar = (
            f"<progress max='100' value='{done:.1f}' style='width:{_WIDTH}px'></progress>"
            if self._num_steps
            else ""
        )
        return f"{self._title()}<div>{self.caption()}</div>{bar}{self._svg()}"

    def _title(self) -> str:
        """Returns what the curve shows: how far the loss has fallen or risen."""
        first, last = (self.losses[0], self.losses[-1]) if self.losses else (0.0, 0.0)
        if first == last or not math.isfinite(first - last):
            return ""
        verb = "fell" if last < first else "rose"
        return f"<div><b>The loss {verb} from {first:.4g} to {last:.4g}</b></div>"

    def _svg(self) -> str:
        """Returns the curve, between the smallest and the largest finite loss."""
        every = -(-len(self.losses) // _MAX_POINTS) or 1
        points = [
            (step, loss)
            for step, loss in list(zip(self.steps, self.losses, strict=True))[::-every]
            if abs(loss) < float("inf")
        ]
        if not points:
            return ""
        low, high = min(loss for _, loss in points), max(loss for _, loss in points)
        last = max(self._num_steps or 0, self.steps[-1], 2)

        def x(step: int) -> float:
            return _LEFT + (step - 1) / (last - 1) * (_WIDTH - _LEFT - 10)

        def y(loss: float) -> float:
            return 12 + (high - loss) / ((high - low) or 1.0) * (_HEIGHT - 40)

        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        style = "font: 11px sans-serif; fill: currentColor"
        return (
            f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='Loss by step'>"
            f"<text x='{_LEFT - 6}' y='16' text-anchor='end' style='{style}'>{high:.4g}</text>"
            f"<text x='{_LEFT - 6}' y='{_HEIGHT - 24}' text-anchor='end' style='{style}'>{low:.4g}"
            f"</text><text x='{_LEFT}' y='{_HEIGHT - 6}' style='{style}'>step 1</text>"
            f"<text x='{_WIDTH - 10}' y='{_HEIGHT - 6}' text-anchor='end' style='{style}'>"
            f"step {last}</text><polyline points='{line}' fill='none' stroke='currentColor' "
            f"stroke-width='1.6'/><circle cx='{x(points[0][0]):.1f}' cy='{y(points[0][1]):.1f}' "
            "r='3' fill='currentColor'/></svg>"
        )


def _new_display() -> Any:
    """Returns a place in the output of the running cell; None outside of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return importlib.import_module("IPython.display").display(display_id=True)
