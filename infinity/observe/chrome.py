"""Traces as files: Chrome's trace event format, which Perfetto and chrome://tracing open. Pure.

  tracks of the training thread  complete events ("X"), a thread per track, named by metadata ("M")
  transfers                      nestable asynchronous events ("b", "e"), as many overlap: the outer
                                 pair from the request to its completion, named after the track; the
                                 inner one from the first block given to the drive, named after the
                                 bytes
  gauges                         counter events ("C")

`ts` and `dur` are microseconds from the first event, with three decimals: whole nanoseconds.
Source: "Trace Event Format", the Catapult project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.bounded import (
    MAX_INT,
    MalformedError,
    field,
    integer,
    list_of,
    read_json,
    table_of,
    text_of,
)
from infinity.errors import ConfigError, refusing
from infinity.observe.timeline import THREAD_TRACKS, laid_out
from infinity.observe.tracer import Count, Span, Track
from infinity.sizes import GIB

SCHEMA = "infinity-trace/1"
_PID = 1
_ORDER = (Track.STEPS, Track.PHASES, *reversed(THREAD_TRACKS), Track.COPIES_IN, Track.COPIES_OUT)
_TRANSFER_CATEGORY = "transfer"
_MAX_NBYTES = GIB
_LAST_US = 1e15  # Thirty years; doubles have whole nanoseconds up to about a tenth of it.
_KINDS_OF_TRACKS = frozenset(map(str, Track))


def to_document(spans: Sequence[Span], counts: Sequence[Count]) -> dict[str, Any]:
    """Makes the content of the file from the recording of a tracer."""
    shown = laid_out(spans)
    at_ns = [span.start_ns for span in shown] + [count.at_ns for count in counts]
    origin_ns = min(at_ns, default=0)
    # From top to bottom: tracks of the thread in their order, then those of drives.
    found = {str(span.track) for span in shown}
    first = [str(track) for track in _ORDER if track in found]
    tracks = [*first, *sorted(found - set(first))]
    threads = {track: number for number, track in enumerate(tracks, start=1)}
    events: list[dict[str, Any]] = []
    for number, span in enumerate(shown):
        if span.transfer is None:
            events.append(_complete(span, threads[span.track], origin_ns))
        else:
            events += _transfer(span, threads[span.track], origin_ns, f"{span.transfer}.{number}")
    for count in counts:
        at = {"ts": _us(count.at_ns - origin_ns), "pid": _PID, "tid": 0}
        events.append({"ph": "C", "name": count.name, **at, "args": {"value": count.value}})
    events.sort(key=lambda event: event["ts"])  # Stable: pairs stay nested.
    return {
        "traceEvents": [*_names(threads), *events],
        "displayTimeUnit": "ms",
        "otherData": {"schema": SCHEMA},
    }


def write(path: Path, spans: Sequence[Span], counts: Sequence[Count]) -> None:
    """The file, whole or not at all. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(to_document(spans, counts)), encoding="utf-8")
    os.replace(partial, path)


def read(path: Path) -> list[Span]:
    """The spans of a file that `write` made. Raises ConfigError for any other file."""
    remedy = "; 'infinity train FILE --trace OUT.json' writes one"
    with (
        refusing(f"cannot read the trace {str(path)!r}", OSError, remedy=remedy),
        refusing(f"{str(path)!r} is not a trace", MalformedError, remedy=remedy),
    ):
        document = read_json(path, max_nbytes=_MAX_NBYTES)
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise ConfigError(f"{str(path)!r} is not a trace of this version ({SCHEMA}){remedy}")
    what, remedy = f"{str(path)!r} is no whole trace", "; it was changed or cut off, trace again"
    with refusing(what, MalformedError, remedy=remedy):
        return from_document(document)


def from_document(document: dict[str, Any]) -> list[Span]:
    """Reads the spans of `to_document`, by start. Raises MalformedError for anything else."""
    tracks: dict[int, str] = {}
    spans: list[Span] = []
    pairs: dict[str, list[dict[str, Any]]] = {}
    for row in list_of(field(document, "traceEvents"), "traceEvents"):
        event = table_of(row, "an event")
        phase = event.get("ph")
        if phase == "M" and event.get("name") == "thread_name":
            named = table_of(event.get("args"), "the arguments of a thread's name")
            tracks[_thread(event)] = _track(named.get("name"))
        elif phase == "X":
            spans.append(_span(event, tracks))
        elif phase in ("b", "e"):
            pairs.setdefault(text_of(event.get("id"), "the id of a transfer"), []).append(event)
    spans += [_transfer_of(key, events) for key, events in pairs.items()]
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _span(event: dict[str, Any], tracks: dict[int, str]) -> Span:
    if _thread(event) not in tracks:
        raise MalformedError(f"thread {_thread(event)} has no name before its first event")
    start_ns = _time(event, "ts")
    args = dict(table_of(event.get("args", {}), "the arguments of an event"))
    if "transfers" in args:
        numbers = list_of(args["transfers"], "the transfers of a stall")
        args["transfers"] = [integer(entry, "a transfer's number") for entry in numbers]
    if "waits_for" in args:
        names = list_of(args["waits_for"], "what a stall waits for")
        args["waits_for"] = [text_of(cause, "what a stall waits for") for cause in names]
    name = text_of(event.get("name"), "the name of an event")
    end_ns = start_ns + _time(event, "dur")
    return Span(tracks[_thread(event)], name, start_ns, end_ns, args)


def _transfer_of(key: str, events: list[dict[str, Any]]) -> Span:
    if len(events) != 4:
        raise MalformedError(f"transfer {key!r} has {len(events)} events; expected 4")
    asked, issued, _, completed = events
    about = table_of(asked.get("args"), "the arguments of a transfer")
    number = integer(about.get("transfer"), "a transfer's number")
    nbytes = integer(about.get("nbytes"), "the bytes of a transfer")
    times = [_time(event, "ts") for event in (asked, issued, completed)]
    if times != sorted(times):
        raise MalformedError(f"transfer {key!r} ends before it begins")
    name = text_of(issued.get("name"), "the name of a transfer")
    args = {"nbytes": nbytes, "issued_ns": times[1]}
    return Span(_track(asked.get("name")), name, times[0], times[2], args, number)


def _thread(event: dict[str, Any]) -> int:
    return integer(event.get("tid"), "a thread's number", most=MAX_INT)


def _track(value: Any) -> str:
    """Reads the name of a track: one of `Track`, or one of a drive, such as "reads /mnt/swap"."""
    track = text_of(value, "the name of a track")
    if track not in _KINDS_OF_TRACKS and track.partition(" ")[0] not in _KINDS_OF_TRACKS:
        raise MalformedError(f"there is no track {track!r}")
    return track


def _time(event: dict[str, Any], key: str) -> int:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MalformedError(f"the {key!r} of an event is no number")
    if not 0 <= value <= _LAST_US:
        raise MalformedError(f"the {key!r} of an event is {value:.3g}; expected 0 to {_LAST_US:g}")
    return round(value * 1000)


def _names(threads: dict[str, int]) -> list[dict[str, Any]]:
    at = {"ph": "M", "ts": 0, "pid": _PID}
    named = [{**at, "tid": 0, "name": "process_name", "args": {"name": "infinity"}}]
    for track, number in threads.items():
        named.append({**at, "tid": number, "name": "thread_name", "args": {"name": track}})
        place = {"sort_index": number}
        named.append({**at, "tid": number, "name": "thread_sort_index", "args": place})
    return named


def _complete(span: Span, thread: int, origin_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": str(span.track),
        "ts": _us(span.start_ns - origin_ns),
        "dur": _us(span.end_ns - span.start_ns),
        "pid": _PID,
        "tid": thread,
        "args": dict(span.args),
    }


def _transfer(span: Span, thread: int, origin_ns: int, key: str) -> list[dict[str, Any]]:
    issued_ns = span.args["issued_ns"]
    args = {"transfer": span.transfer, "nbytes": span.args["nbytes"]}

    def event(phase: str, name: str, at_ns: int, **more: Any) -> dict[str, Any]:
        at = {"ts": _us(at_ns - origin_ns), "pid": _PID, "tid": thread}
        return {"ph": phase, "cat": _TRANSFER_CATEGORY, "id": key, "name": name, **at, **more}

    return [
        event("b", str(span.track), span.start_ns, args=args),
        event("b", span.name, issued_ns, args=args),
        event("e", span.name, span.end_ns),
        event("e", str(span.track), span.end_ns),
    ]


def _us(ns: int) -> float:
    return ns / 1000
