"""A recorded step as a picture: a row of bars per track, over the milliseconds of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from infinity.errors import ConfigError
from infinity.observe.step_summary import StepSummary, busy_by_track, busy_from_ns
from infinity.observe.timeline import clipped
from infinity.observe.tracer import Span, Track
from infinity.sizes import format_nbytes
from infinity.tools.pictures.painter import Bars, NamedInterval, TrackPicture, paint

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
_OTHER_COLOR = "#577590"
_PHASE_COLORS = ("#dde5e8", "#eef2f3")


def choose(steps: Sequence[StepSummary], number: int | None) -> StepSummary:
    """Returns step `number`, or the last step. Raises ConfigError for one not in the trace."""
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
    """Writes the picture of one step, in the format of the suffix. Raises as `paint`."""
    paint(path, picture_of(spans, step))


def picture_of(spans: Sequence[Span], step: StepSummary) -> TrackPicture:
    """Returns the picture of one step: when each track was busy, and for what share of the step."""
    busy = busy_by_track(spans, (step.start_ns, _end_ns(step)))
    shares = {use.track: use.share for use in step.tracks}
    return TrackPicture(
        title=_finding(step),
        time_label="milliseconds from the start of the step",
        tracks=[
            (f"{track}  {shares[track]:.0%}", [Bars(_color(track), _bars(busy[track], step))])
            for track in busy
        ],
        intervals=_phases(spans, step),
        end=step.length_s * 1e3,
        unit_s=1e-3,
    )


def named_picture_of(spans: Sequence[Span], step: StepSummary) -> TrackPicture:
    """Returns `picture_of` with a bar for each span, named after it and cut at the step's ends."""
    picture = picture_of(spans, step)
    window = step.start_ns, _end_ns(step)
    found: dict[str, list[tuple[float, float, str]]] = {use.track: [] for use in step.tracks}
    for span in spans:
        inside = clipped([(busy_from_ns(span), span.end_ns)], window)
        if str(span.track) in found and inside:
            ((start, length),) = _bars(inside, step)
            found[str(span.track)].append((start, length, _name(span)))
    tracks = [
        (label, [Bars(_color(track), [bar[:2] for bar in bars], [bar[2] for bar in bars])])
        for (label, _), (track, bars) in zip(picture.tracks, found.items(), strict=True)
    ]
    return replace(picture, tracks=tracks)


def _finding(step: StepSummary) -> str:
    waits = f"the training thread waits {step.stall_s / step.length_s:.0%} of {step.length_s:.3g} s"
    if step.bound is None:
        return f"{step.step}: {waits}"
    bound = step.bound
    return f"{step.step} is {bound.name}: {bound.resource} busy {bound.share:.0%}; {waits}"


def _name(span: Span) -> str:
    moved = f", {format_nbytes(span.args['nbytes'])}" if "nbytes" in span.args else ""
    return span.name + moved


def _end_ns(step: StepSummary) -> int:
    return step.start_ns + round(step.length_s * 1e9)


def _color(track: str) -> str:
    kind = Track(track) if track in _COLORS else Track(track.partition(" ")[0])
    return _COLORS.get(kind, _OTHER_COLOR)


def _bars(intervals: Sequence[tuple[int, int]], step: StepSummary) -> list[tuple[float, float]]:
    return [((start - step.start_ns) / 1e6, (end - start) / 1e6) for start, end in intervals]


def _phases(spans: Sequence[Span], step: StepSummary) -> list[NamedInterval]:
    phases = [
        span
        for span in spans
        if span.track == Track.PHASES
        and span.end_ns > step.start_ns
        and span.start_ns < _end_ns(step)
    ]
    return [
        NamedInterval(
            span.name,
            (span.start_ns - step.start_ns) / 1e6,
            (span.end_ns - span.start_ns) / 1e6,
            _PHASE_COLORS[number % len(_PHASE_COLORS)],
        )
        for number, span in enumerate(phases)
    ]
