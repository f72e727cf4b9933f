"""Recorded steps: each as a timeline, with idle time by cause and bytes by link."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from infinity.errors import ConfigError
from infinity.observe.step_summary import Stall, StepSummary, busy_from_ns, without_wrappers
from infinity.observe.tracer import Span, Track
from infinity.sizes import format_nbytes
from infinity.tools.pictures.timeline import (
    LINK_COLUMNS,
    Bars,
    PageRow,
    PageTable,
    TrackPicture,
    bars_of,
    kind_of_bytes,
    legend_of,
    link_row,
    milliseconds,
)

# Tracks whose bars mean one thing. Those of transfers are coloured by what they move.
_TRACK_KINDS: dict[str, str] = {
    Track.UPDATES: "state",
    Track.STALLS: "waiting",
    Track.ENGINE: "other",
}
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


def picture_of(spans: Sequence[Span], step: StepSummary) -> TrackPicture:
    """Returns the picture of one step, and its tables: a row for each track with its share of the
    step, a bar for each span, named after it and cut at the step's ends.

    `tables` list every stall only if the summary does: `summarize(num_stalls=...)`.
    """
    backward = [
        (span.start_ns, span.end_ns)
        for span in spans
        if span.track == Track.PHASES and span.name.startswith("backward")
    ]
    found: dict[str, list[tuple[str, float, float, str]]] = {use.track: [] for use in step.tracks}
    for span in spans:
        start_ns = max(busy_from_ns(span), step.start_ns)
        end_ns = min(span.end_ns, _end_ns(step))
        if str(span.track) in found and start_ns < end_ns:
            start, length = (start_ns - step.start_ns) / 1e6, (end_ns - start_ns) / 1e6
            found[span.track].append((_kind_of(span, backward), start, length, _name(span)))
    tracks = [(f"{use.track}  {use.share:.0%}", bars_of(found[use.track])) for use in step.tracks]
    return TrackPicture(
        title=_finding(step),
        time_label="milliseconds from the start of the step",
        tracks=tracks,
        legend=legend_of(tracks),
        intervals=_phases(spans, step),
        end=step.length_s * 1e3,
        unit_s=1e-3,
        name=step.step,
        tables=(idle_by_cause(step), by_link(step)),
    )


def _finding(step: StepSummary) -> str:
    waits = f"the training thread waits {step.stall_s / step.length_s:.0%} of {step.length_s:.3g} s"
    if step.bound is None:
        return f"{step.step}: {waits}"
    bound = step.bound
    return f"{step.step} is {bound.name}: {bound.resource} busy {bound.share:.0%}; {waits}"


def _name(span: Span) -> str:
    moved = f", {format_nbytes(span.args['nbytes'])}" if "nbytes" in span.args else ""
    return without_wrappers(span.name) + moved


def _kind_of(span: Span, backward: Sequence[tuple[int, int]]) -> str:
    """Returns the kind of a span, which gives its colour; of compute, the pass it begins in."""
    if span.track == Track.COMPUTE:
        is_backward = any(start <= span.start_ns < end for start, end in backward)
        return "backward" if is_backward else "forward"
    return _TRACK_KINDS.get(span.track) or kind_of_bytes(span.name)


def _end_ns(step: StepSummary) -> int:
    return step.start_ns + round(step.length_s * 1e9)


def _phases(spans: Sequence[Span], step: StepSummary) -> list[Bars]:
    phases = [
        span
        for span in spans
        if span.track == Track.PHASES
        and span.end_ns > step.start_ns
        and span.start_ns < _end_ns(step)
    ]
    return [
        Bars(
            _PHASE_COLORS[number % len(_PHASE_COLORS)],
            [((span.start_ns - step.start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6)],
            [span.name],
        )
        for number, span in enumerate(phases)
    ]


# -- Its tables -----------------------------------------------------------------------------------


_MAX_CAUSES = 12
_DOTTED_NAME = re.compile(r"(?<!\S)\w+(?:\.\w+)+(?: \(\w+\))?(?!\S)")


def idle_by_cause(step: StepSummary) -> PageTable:
    """Returns the waits of the training thread, those that differ in the unit alone as one."""
    units = {
        transfer.partition(" of ")[2] for stall in step.largest for transfer in stall.waits_for
    } - {""}
    # A wait may end without a transfer of its unit, so dotted names in causes count as units.
    units |= {word for stall in step.largest for word in _DOTTED_NAME.findall(stall.cause)}
    groups: dict[str, list[Stall]] = {}
    for stall in step.largest:
        groups.setdefault(kind_of(stall.cause, units), []).append(stall)
    ordered = sorted(groups.items(), key=lambda group: -_sum_s(group[1]))
    shown = ordered[:_MAX_CAUSES]
    rest = [stall for _, stalls in ordered[_MAX_CAUSES:] for stall in stalls]
    rows: list[PageRow] = []
    for kind, stalls in [*shown, *([("other causes", rest)] if rest else [])]:
        share = _sum_s(stalls) / step.length_s
        cells = (kind, str(len(stalls)), milliseconds(_sum_s(stalls)), f"{share:.1%}")
        rows.append((cells, share))
    return PageTable(
        "Idle time of the training thread, by cause",
        ("cause", "waits", "time", "of the step"),
        rows,
        f"Outside the tracks (data, loss, norms, logging): {milliseconds(step.other_s)}, "
        f"{step.other_s / step.length_s:.1%}."
        if rows
        else "The training thread did not wait.",
    )


def kind_of(cause: str, units: Iterable[str]) -> str:
    """Returns the cause with "a unit" in the place of a unit's name, the longest that is in it."""
    for unit in sorted(units, key=len, reverse=True):
        if f" {unit} " in f" {cause} ":
            return f" {cause} ".replace(f" {unit} ", " a unit ").strip()
    return cause


def by_link(step: StepSummary) -> PageTable:
    """Returns the bytes of each track that moved any, and their rate while the track was busy."""
    rows = [
        link_row(
            use.track,
            use.nbytes,
            use.busy_s,
            use.share,
            f"{use.nbytes / use.busy_s / 1e9:.2f} GB/s" if use.busy_s else "",
        )
        for use in step.tracks
        if use.nbytes
    ]
    return PageTable(
        "Bytes by link",
        LINK_COLUMNS,
        rows,
        "Bytes are those of transfers that began in the step."
        if rows
        else "Nothing moved between tiers.",
    )


def _sum_s(stalls: Iterable[Stall]) -> float:
    return sum(stall.stall_s for stall in stalls)
