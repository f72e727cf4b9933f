"""A picture of the simulated step: a row per track, a bar per operation."""

from __future__ import annotations

from pathlib import Path

from infinity.bench.plots import check
from infinity.plan.predict import Forecast

_LANES = ("compute", "update", "gather", "sockets", "h2d", "d2h", "nvme")
_COLOURS = {
    "forward": "tab:blue",
    "backward": "tab:purple",
    "weights": "tab:green",
    "state": "tab:orange",
    "gradients": "tab:red",
}


def save(forecast: Forecast, path: Path) -> None:
    """Writes a PNG. Raises UnsupportedError when matplotlib is not installed."""
    pyplot = check()
    step = forecast.step
    tracks = [track for track in _LANES if step.busy_s.get(track)]
    figure, axis = pyplot.subplots(figsize=(12, 0.6 * len(tracks) + 1.6))
    timeline = step.timeline
    for row, track in enumerate(tracks):
        bars: dict[str, list[tuple[float, float]]] = {}
        for operation, start_s in zip(timeline.operations, timeline.start_s, strict=True):
            if operation.track == track and operation.duration_s:
                bar = (start_s, operation.duration_s)
                bars.setdefault(_kind(operation.name), []).append(bar)
        for kind, spans in bars.items():
            axis.broken_barh(spans, (row - 0.4, 0.8), facecolors=_COLOURS[kind], alpha=0.85)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    axis.legend(handles, _COLOURS, ncols=len(_COLOURS), loc="lower left", bbox_to_anchor=(0, 1))
    axis.set_yticks(range(len(tracks)), tracks)
    axis.invert_yaxis()
    for edge_s in (0.0, step.step_s):
        axis.axvline(edge_s, color="black", linewidth=0.8)
    axis.set_xlabel("seconds from the optimizer's decision")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


def _kind(name: str) -> str:
    """Returns the kind of an operation such as "forward with update: state of block 3": the data it
    moves, else its pass."""
    before, _, what = name.partition(": ")
    word = what.split(" of ")[0]
    return word if word in _COLOURS else before.split()[0]
