"""A picture of the simulated step: a row per track, a bar per operation."""

from __future__ import annotations

from pathlib import Path

from infinity.observe.painter import Bars, TrackPicture, paint
from infinity.plan.predict import Forecast

_TRACKS = ("compute", "update", "gather", "sockets", "h2d", "d2h", "nvme")
_COLORS = {
    "forward": "tab:blue",
    "backward": "tab:purple",
    "weights": "tab:green",
    "state": "tab:orange",
    "gradients": "tab:red",
}


def save(forecast: Forecast, path: Path) -> None:
    """Writes the picture, in the format of the suffix. Raises as `paint`."""
    step = forecast.step
    busy = [track for track in _TRACKS if step.busy_s.get(track)]
    # Reads of the first units may begin long before the step, while it waits for something else.
    margin_s = 0.03 * step.step_s
    ranks = "" if forecast.num_ranks == 1 else f", one of {forecast.num_ranks} ranks"
    picture = TrackPicture(
        title=f"{forecast.model.name} on {forecast.hardware.name}{ranks}\n"
        f"one simulated step of {step.step_s:.3g} s, between the lines",
        time_label="seconds from the optimizer's decision",
        tracks=[(track, _bars(forecast, track)) for track in busy],
        edges=(0.0, step.step_s),
        legend=_COLORS,
        start=-margin_s,
        end=step.step_s + margin_s,
    )
    paint(picture, path)


def _bars(forecast: Forecast, track: str) -> list[Bars]:
    timeline = forecast.step.timeline
    bars: dict[str, list[tuple[float, float]]] = {}
    for operation, start_s in zip(timeline.operations, timeline.start_s, strict=True):
        if operation.track == track and operation.duration_s:
            bar = (start_s, operation.duration_s)
            bars.setdefault(_kind(operation.name), []).append(bar)
    return [Bars(_COLORS[kind], group) for kind, group in bars.items()]


def _kind(name: str) -> str:
    """Returns what an operation moves, or else its pass.

    "forward with update: state of block 3" moves "state".
    """
    before, _, what = name.partition(": ")
    word = what.split(" of ")[0]
    return word if word in _COLORS else before.split()[0]
