"""A step as a picture: one bar row per lane, over the milliseconds of the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError, UnsupportedError
from infinity.observe.step_summary import StepSummary, busy_by_track
from infinity.observe.tracer import Span, Track

_COLORS = {
    Track.COMPUTE: "#2a7f62",
    Track.ENGINE: "#8d99ae",
    Track.UPDATES: "#e09f3e",
    Track.STALLS: "#c1121f",
    Track.COPIES_IN: "#7b2cbf",
    Track.COPIES_OUT: "#9d4edd",
    Track.READS: "#1d6fa5",
    Track.WRITES: "#7a4419",
}
_PHASE_COLORS = ("#dde5e8", "#eef2f3")
_BAR_HEIGHT = 0.8


def find_pyplot() -> Any:
    """pyplot, drawing to files. Raises UnsupportedError when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError(
            "plots need matplotlib, which is not installed: pip install 'infinity-offload[plot]'"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def choose(steps: Sequence[StepSummary], number: int | None) -> StepSummary:
    """The step of that number, or the last. Raises ConfigError when it is not in the trace."""
    if not steps:
        raise ConfigError("the trace is empty: no step was over when it was written")
    if number is None:
        return steps[-1]
    for step in steps:
        if step.step == f"step {number}":
            return step
    have = ", ".join(step.step for step in steps)
    raise ConfigError(f"step {number} is not in the trace; it has {have}")


def draw(spans: Sequence[Span], step: StepSummary, path: Path) -> None:
    """Writes the picture; its format is that of the path's suffix. Raises as `find_pyplot`."""
    pyplot = find_pyplot()
    window = step.start_ns, step.start_ns + round(step.length_s * 1e9)
    busy = busy_by_track(spans, window)
    rows = [Track.PHASES, *busy]
    figure, axis = pyplot.subplots(figsize=(12, 0.9 + 0.45 * len(rows)))
    _draw_phases(axis, spans, step)
    for row, track in enumerate(busy, start=1):
        bars = [((start - step.start_ns) / 1e6, (end - start) / 1e6) for start, end in busy[track]]
        color = _COLORS.get(
            Track(track.partition(" ")[0]) if track not in _COLORS else Track(track)
        )
        axis.broken_barh(bars, (row - _BAR_HEIGHT / 2, _BAR_HEIGHT), color=color, linewidth=0)
    shares = {use.track: use.share for use in step.tracks}
    labels = [f"{track}  {shares[track]:.0%}" for track in busy]
    axis.set_yticks(range(len(rows)), ["", *labels])
    axis.set_ylim(len(rows) - 0.5, -0.6)
    axis.set_xlim(0, step.length_s * 1e3)
    axis.set_xlabel("milliseconds")
    bound = f", {step.bound.name}" if step.bound is not None else ""
    axis.set_title(f"{step.step}: {step.length_s:.3g} s{bound}", loc="left")
    axis.grid(axis="x", alpha=0.3)
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {str(path)!r}: {error}") from None
    finally:
        pyplot.close(figure)


def _draw_phases(axis: Any, spans: Sequence[Span], step: StepSummary) -> None:
    end_ns = step.start_ns + round(step.length_s * 1e9)
    phases = [
        span
        for span in spans
        if span.track == Track.PHASES and span.end_ns > step.start_ns and span.start_ns < end_ns
    ]
    for number, span in enumerate(phases):
        start_ms = (span.start_ns - step.start_ns) / 1e6
        length_ms = (span.end_ns - span.start_ns) / 1e6
        color = _PHASE_COLORS[number % len(_PHASE_COLORS)]
        axis.broken_barh([(start_ms, length_ms)], (-0.4, _BAR_HEIGHT), color=color, linewidth=0)
        if length_ms > 60 * step.length_s:  # Below 6 % of the step a name has no room.
            middle_ms = start_ms + length_ms / 2
            axis.text(middle_ms, 0, span.name, ha="center", va="center", fontsize=8, clip_on=True)
