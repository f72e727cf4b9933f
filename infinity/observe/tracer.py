"""The timeline of a run: spans on tracks, recorded while a trace is on.

Raw facts are recorded as they happen: a use of a hooked module, a stall, a transfer. The reader
(`infinity.observe.timeline`) derives the rest (the compute track, shares, the bound). A tracer that
is off costs one look at `is_on` per event.

All times are nanoseconds of CLOCK_MONOTONIC, the clock of the storage engine's own stamps.

Note [Transfers]
  No thread observes a transfer at the moment it completes. The tracer keeps the transfer itself and
  the time of its request; later it reads when the transfer was issued and completed
  (`Ticket.passages`), so the times are the storage thread's, not those of a later look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

_NOTHING = nullcontext()


class Track(StrEnum):
    """The tracks of spans. Tracks of drives are named after these and their path."""

    STEPS = "steps"
    PHASES = "phases"  # forward, backward, optimizer
    # the model's own code: at a hooked module, and not in one of the three below
    COMPUTE = "compute"
    MODULES = "modules"  # raw: from a hooked module's units being there to its end
    ENGINE = "engine"  # bringing in, letting go, deciding what to read next
    UPDATES = "updates"
    STALLS = "stalls"
    COPIES_IN = "copies in"  # host -> device
    COPIES_OUT = "copies out"
    READS = "reads"
    WRITES = "writes"


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of time on a track. With `transfer` it may overlap others of its track.

    A transfer's `start_ns` is the time of its request; `args["issued_ns"]` that of its first block.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)
    transfer: int | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """A gauge, from this moment to its next value."""

    name: str
    at_ns: int
    value: float


class Watched(Protocol):
    """A transfer that knows, once it is done, when it took place."""

    def done(self) -> bool:
        """Whether the transfer is over."""

    def passages(self) -> Iterable[tuple[int, int, int, int]]:
        """(file, nbytes, begun_ns, over_ns) of each part; empty until done()."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A transfer that was requested, and the tracks that will show it."""

    number: int
    watched: Watched
    tracks: Callable[[int], str]  # of a file
    name: str
    start_ns: int


class Tracer:
    """Records spans between `start` and `stop`. Any thread may add to it."""

    def __init__(self) -> None:
        self.is_on = False
        self._spans: list[Span] = []  # Appending is atomic.
        self._counts: list[Count] = []
        self._transfers: dict[int, _Transfer] = {}  # By id(); holding it keeps the id unique.
        # Track, name and start of the spans that have not ended.
        self._open: dict[Hashable, list[tuple[str, str, int]]] = {}
        self._lock = threading.Lock()  # Guards the two above.

    def start(self) -> None:
        """Begins a recording; an earlier one is forgotten."""
        self.forget()
        self.is_on = True

    def forget(self) -> None:
        """Drops everything recorded."""
        with self._lock:
            self._spans, self._counts, self._transfers, self._open = [], [], {}, {}

    def stop(self) -> None:
        """Ends the recording. Transfers that are in flight are recorded when they complete."""
        self.is_on = False

    @property
    def is_settled(self) -> bool:
        """Returns whether every recorded transfer is over."""
        with self._lock:
            return all(transfer.watched.done() for transfer in self._transfers.values())

    # -- Recording -------------------------------------------------------------------------------

    def span(self, track: str, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Records what `track` did between two times of CLOCK_MONOTONIC, if the tracer is on."""
        if self.is_on:
            self._spans.append(Span(track, name, start_ns, end_ns, args))

    def count(self, name: str, value: float) -> None:
        """Records the present value of a counter, if the tracer is on."""
        if self.is_on:
            self._counts.append(Count(name, time.monotonic_ns(), value))

    def during(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Records the block as a span, also when it raises."""
        return self._during(track, name, args) if self.is_on else _NOTHING

    @contextmanager
    def _during(self, track: str, name: str, args: dict[str, Any]) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.span(track, name, start_ns, time.monotonic_ns(), **args)

    def step(self, number: int) -> AbstractContextManager[None]:
        """The block is one optimizer step, by which a trace is summed up."""
        return self.during(Track.STEPS, f"step {number}", step=number)

    def begin(self, key: Hashable, track: str, name: str) -> None:
        """Starts a span that `end` ends by `key`; equal keys end last in, first out."""
        if self.is_on:
            with self._lock:
                self._open.setdefault(key, []).append((track, name, time.monotonic_ns()))

    def end(self, key: Hashable) -> None:
        """Ends a span. One that began before the recording is not known, and not recorded."""
        if self.is_on:
            with self._lock:
                begun = self._open.get(key)
                last = begun.pop() if begun else None
            if last is not None:
                self.span(*last, time.monotonic_ns())

    def watch(
        self, watched: Watched, tracks: Callable[[int], str], name: str, start_ns: int
    ) -> None:
        """Records a transfer that was requested at `start_ns`; `tracks` has the track of each of
        its files.
        """
        if self.is_on:
            with self._lock:
                number = len(self._transfers) + 1
                self._transfers[id(watched)] = _Transfer(number, watched, tracks, name, start_ns)

    def details_of(self, transfers: Iterable[object]) -> dict[str, Any]:
        """Returns the details of a stall: the transfers in `transfers` that are not done yet."""
        with self._lock:
            found = [self._transfers.get(id(transfer)) for transfer in transfers]
        waited = [
            recorded for recorded in found if recorded is not None and not recorded.watched.done()
        ]
        return {
            "waits_for": [recorded.name for recorded in waited],
            "transfers": [recorded.number for recorded in waited],
        }

    # -- Looking ---------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """Returns everything recorded, by start.

        A completed transfer yields a span per file that it touched; others are left out.
        """
        with self._lock:
            transfers = list(self._transfers.values())
        shown = [span for transfer in transfers for span in _spans_of(transfer)]
        return sorted([*self._spans, *shown], key=lambda span: (span.start_ns, -span.end_ns))

    def counts(self) -> list[Count]:
        """Returns the recorded values of counters, in order of time."""
        return list(self._counts)


def _spans_of(transfer: _Transfer) -> Iterator[Span]:
    for file, nbytes, issued_ns, completed_ns in transfer.watched.passages():
        # A device's clock is known to a microsecond only; no copy begins before its request.
        issued_ns = max(issued_ns, transfer.start_ns)
        yield Span(
            transfer.tracks(file),
            transfer.name,
            transfer.start_ns,
            max(completed_ns, issued_ns),
            {"nbytes": nbytes, "issued_ns": issued_ns},
            transfer.number,
        )
