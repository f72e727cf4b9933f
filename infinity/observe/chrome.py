"""Traces as files: Chrome's trace event format, which Perfetto and chrome://tracing open. Pure.

  lanes of the training thread   complete events ("X"), a thread per lane, named by metadata ("M")
  transfers                      nestable asynchronous events ("b", "e"), as many overlap: the outer
                                 pair from the request to its completion, named after the lane; the
                                 inner one from the first block given to the drive, named after the
                                 bytes
  gauges                         counter events ("C")

`ts` and `dur` are microseconds from the first event, with three decimals: whole nanoseconds.
Source: "Trace Event Format", the Catapult project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.observe.timeline import THREAD_LANES, laid_out
from infinity.observe.tracer import Count, Lane, Span

SCHEMA = "infinity-trace/1"
_PID = 1
_ORDER = (Lane.STEPS, Lane.PHASES, *reversed(THREAD_LANES), Lane.COPIES_IN, Lane.COPIES_OUT)
_TRANSFER_CATEGORY = "transfer"


def to_document(spans: Sequence[Span], counts: Sequence[Count]) -> dict[str, Any]:
    """What the file holds, from what a tracer recorded."""
    shown = laid_out(spans)
    at_ns = [span.start_ns for span in shown] + [count.at_ns for count in counts]
    origin_ns = min(at_ns, default=0)
    threads = {lane: number for number, lane in enumerate(_lanes(shown), start=1)}
    events: list[dict[str, Any]] = []
    for number, span in enumerate(shown):
        if span.transfer is None:
            events.append(_complete(span, threads[span.lane], origin_ns))
        else:
            events += _transfer(span, threads[span.lane], origin_ns, f"{span.transfer}.{number}")
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
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not a trace: {error}") from None
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise ConfigError(
            f"{str(path)!r} is not a trace of this version ({SCHEMA}); expected a file made by "
            "'infinity train --trace'"
        )
    return from_document(document)


def from_document(document: dict[str, Any]) -> list[Span]:
    """What `to_document` showed: the spans, by start."""
    lanes: dict[int, str] = {}
    spans: list[Span] = []
    pairs: dict[str, list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            lanes[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            start_ns = _ns(event["ts"])
            end_ns = start_ns + _ns(event["dur"])
            lane = lanes[event["tid"]]
            spans.append(Span(lane, event["name"], start_ns, end_ns, event.get("args", {})))
        elif event["ph"] in "be":
            pairs.setdefault(event["id"], []).append(event)
    for asked, issued, _, completed in pairs.values():
        args = {"nbytes": asked["args"]["nbytes"], "issued_ns": _ns(issued["ts"])}
        number = asked["args"]["transfer"]
        start_ns, end_ns = _ns(asked["ts"]), _ns(completed["ts"])
        spans.append(Span(asked["name"], issued["name"], start_ns, end_ns, args, number))
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _lanes(spans: Iterable[Span]) -> list[str]:
    """Lanes from top to bottom: the thread's own in their order, then the drives'."""
    found = {str(span.lane) for span in spans}
    first = [str(lane) for lane in _ORDER if lane in found]
    return first + sorted(found - set(first))


def _names(threads: dict[str, int]) -> list[dict[str, Any]]:
    at = {"ph": "M", "ts": 0, "pid": _PID}
    named = [{**at, "tid": 0, "name": "process_name", "args": {"name": "infinity"}}]
    for lane, number in threads.items():
        named.append({**at, "tid": number, "name": "thread_name", "args": {"name": lane}})
        place = {"sort_index": number}
        named.append({**at, "tid": number, "name": "thread_sort_index", "args": place})
    return named


def _complete(span: Span, thread: int, origin_ns: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": str(span.lane),
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
        event("b", str(span.lane), span.start_ns, args=args),
        event("b", span.name, issued_ns, args=args),
        event("e", span.name, span.end_ns),
        event("e", str(span.lane), span.end_ns),
    ]


def _us(ns: int) -> float:
    return ns / 1000


def _ns(us: float) -> int:
    return round(us * 1000)
