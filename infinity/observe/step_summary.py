"""Summary of each step of a trace: shares of the tracks, largest stalls, the bound. Pure.

A track is busy while it has a span; the track of a drive while blocks of a request are with the
drive (from the first that was issued to the last that completed), not while requests merely wait
their turn. Tracks that share a resource (the training thread; one drive's reads and writes; copies)
are also counted together, without counting a moment twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infinity.observe.timeline import THREAD_TRACKS, Interval, clipped, total_s, union, without
from infinity.observe.tracer import Span, Track

_COPIES = (Track.COPIES_IN, Track.COPIES_OUT)
_THREAD = "training thread"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackUse:
    """Busy time of a track in a step. `nbytes`: of transfers that began in the step."""

    track: str
    busy_s: float
    share: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A wait of the training thread. `waits_for`: the transfers that were not done when it began.

    `asked_before_s`: the time from the request of the last of them to complete to the stall.
    `queued_s`: the time that it still waited in the drive's queue after the stall began. None if
    the trace does not know the transfer.
    """

    cause: str
    start_s: float  # After the step's start.
    stall_s: float
    share: float
    waits_for: tuple[str, ...]
    asked_before_s: float | None
    queued_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """All stalls of one cause in a step."""

    cause: str
    count: int
    stall_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The lower bound of a step: the busiest resource, and its busiest track."""

    name: str  # "compute-bound", "read-bound", ...
    resource: str
    track: str
    share: float  # The share of the step in which the resource was busy.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step. `other_s` is time of the thread on no track: loss, norms, logging."""

    step: str
    start_ns: int
    length_s: float
    tracks: tuple[TrackUse, ...]
    stall_s: float
    other_s: float
    bound: Bound | None  # None when nothing was recorded.
    largest: tuple[Stall, ...]
    causes: tuple[Cause, ...]


def summarize(spans: Sequence[Span], *, num_stalls: int = 5) -> list[StepSummary]:
    """One summary per step of the trace, in order; one of the whole where no steps are marked."""
    steps = sorted((s for s in spans if s.track == Track.STEPS), key=lambda s: s.start_ns)
    if not steps and spans:
        end_ns = max(span.end_ns for span in spans)
        steps = [Span(Track.STEPS, "all", min(s.start_ns for s in spans), end_ns)]
    ended = sorted(spans, key=lambda span: span.end_ns)
    transfers = {span.transfer: span for span in ended if span.transfer is not None}
    ahead, around, found = deque(sorted(spans, key=lambda s: s.start_ns)), list[Span](), []
    for step in steps:
        while ahead and ahead[0].start_ns < step.end_ns:
            around.append(ahead.popleft())
        around = [span for span in around if span.end_ns > step.start_ns]
        # A clock that stood still leaves nothing to take shares of.
        if step.end_ns > step.start_ns:
            found.append(_summarize(step, around, transfers, num_stalls))
    return found


def _summarize(
    step: Span, spans: Sequence[Span], transfers: dict[int, Span], num_stalls: int
) -> StepSummary:
    window = step.start_ns, step.end_ns
    length_s = (step.end_ns - step.start_ns) / 1e9
    inside = [span for span in spans if span.end_ns > window[0] and span.start_ns < window[1]]
    busy = busy_by_track(inside, window)
    tracks = tuple(
        TrackUse(
            track=track,
            busy_s=total_s(intervals),
            share=total_s(intervals) / length_s,
            nbytes=sum(
                span.args["nbytes"]
                for span in inside
                if span.track == track and span.transfer is not None and span.start_ns >= window[0]
            ),
        )
        for track, intervals in busy.items()
    )
    waits = [s for s in inside if s.track == Track.STALLS and s.end_ns > s.start_ns]
    stalls = [_stall(span, window, length_s, transfers) for span in waits]
    on_thread = [interval for track in THREAD_TRACKS for interval in busy.get(track, [])]
    return StepSummary(
        step=step.name,
        start_ns=step.start_ns,
        length_s=length_s,
        tracks=tracks,
        stall_s=total_s(busy.get(Track.STALLS, [])),
        other_s=total_s(without([window], on_thread)),
        bound=_bound(busy, length_s),
        largest=tuple(sorted(stalls, key=lambda stall: -stall.stall_s)[:num_stalls]),
        causes=_causes(stalls),
    )


def busy_by_track(spans: Iterable[Span], window: Interval) -> dict[str, list[Interval]]:
    """The busy intervals of each track in the window, without tracks that only name intervals."""
    found: dict[str, list[Interval]] = {}
    for span in spans:
        if span.track not in (Track.STEPS, Track.PHASES):
            found.setdefault(str(span.track), []).append((busy_from_ns(span), span.end_ns))
    cut = {track: union(clipped(intervals, window)) for track, intervals in found.items()}
    return {track: cut[track] for track in sorted(cut, key=_place) if cut[track]}


def busy_from_ns(span: Span) -> int:
    """Returns when the span began to keep its track busy: a transfer, when it was issued."""
    return int(span.args["issued_ns"]) if span.transfer is not None else span.start_ns


def _place(track: str) -> tuple[int, str]:
    order = (*reversed(THREAD_TRACKS), *_COPIES)
    return (order.index(Track(track)) if track in order else len(order), track)


def _stall(span: Span, window: Interval, length_s: float, transfers: dict[int, Span]) -> Stall:
    waited = [transfers[number] for number in span.args.get("transfers", ()) if number in transfers]
    last = max(waited, key=lambda transfer: transfer.end_ns, default=None)
    ((start_ns, end_ns),) = clipped([(span.start_ns, span.end_ns)], window)
    asked_s = queued_s = None
    if last is not None:
        asked_s = (span.start_ns - last.start_ns) / 1e9
        queued_s = max(0, last.args["issued_ns"] - span.start_ns) / 1e9
    return Stall(
        cause=without_wrappers(span.name),
        start_s=(start_ns - window[0]) / 1e9,
        stall_s=(end_ns - start_ns) / 1e9,
        share=(end_ns - start_ns) / 1e9 / length_s,
        waits_for=tuple(map(without_wrappers, span.args.get("waits_for", ()))),
        asked_before_s=asked_s,
        queued_s=queued_s,
    )


def without_wrappers(name: str) -> str:
    """Returns the name of a unit as its model has it, without the modules that PEFT adds."""
    return name.replace("base_model.model.", "").replace(".base_layer", "")


def _causes(stalls: Iterable[Stall]) -> tuple[Cause, ...]:
    grouped: dict[str, list[Stall]] = {}
    for stall in stalls:
        grouped.setdefault(stall.cause, []).append(stall)
    causes = [
        Cause(
            cause=cause,
            count=len(group),
            stall_s=sum(stall.stall_s for stall in group),
            share=sum(stall.share for stall in group),
        )
        for cause, group in grouped.items()
    ]
    return tuple(sorted(causes, key=lambda cause: -cause.stall_s))


def _bound(busy: dict[str, list[Interval]], length_s: float) -> Bound | None:
    resources: dict[str, list[str]] = {}
    for track in busy:
        if track != Track.STALLS:  # A stall keeps no resource busy.
            resources.setdefault(_resource(track)[0], []).append(track)
    if not resources:
        return None
    together_s = {
        resource: total_s(interval for track in tracks for interval in busy[track])
        for resource, tracks in resources.items()
    }
    busiest = max(together_s, key=lambda resource: together_s[resource])
    track = max(resources[busiest], key=lambda track: total_s(busy[track]))
    return Bound(
        name=f"{_resource(track)[1]}-bound",
        resource=busiest,
        track=track,
        share=together_s[busiest] / length_s,
    )


def _resource(track: str) -> tuple[str, str]:
    """Returns the resource that a track keeps busy, and the word for a step that it binds."""
    if track in THREAD_TRACKS:
        return _THREAD, "update" if track == Track.UPDATES else track
    if track in _COPIES:
        return "copies", "copy"
    kind, _, path = track.partition(" ")
    return path, {str(Track.READS): "read", str(Track.WRITES): "write"}.get(kind, kind)
