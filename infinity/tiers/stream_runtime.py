"""The interface of a device's runtime: streams, events, copies.

`tiers/streams.py` says what waits for what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from infinity.tiers.device import ResizedRegion


class Event(Protocol):
    """The part of `torch.Event` that is used."""

    def record(self, stream: Any) -> None:
        """Puts the event behind the work issued on the stream so far."""

    def query(self) -> bool:
        """Whether the work before the event is over."""

    def synchronize(self) -> None:
        """Blocks until the work before the event is over."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this event to `later`; both are timed and over."""


class Stream(Protocol):
    """The part of `torch.Stream` that is used: hashable; two objects of one stream are equal."""

    def wait_event(self, event: Any) -> None:
        """Orders all later work of the stream after the event; returns at once."""


class Streams(Protocol):
    """The runtime of one device."""

    device: torch.device

    def new_stream(self, name: str) -> Stream:
        """Returns a stream of its own for transfers. `name`: for messages."""

    def new_event(self, *, is_timed: bool = False) -> Event:
        """Returns an event; with `is_timed` for `elapsed_time`."""

    def current(self) -> Stream:
        """The calling thread's."""

    def copy(self, stream: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Issues a copy between host and device on the stream; returns at once."""

    def run(
        self,
        stream: Any,
        work: Callable[[], None],
        used: Sequence[ResizedRegion],
        made: ResizedRegion | None = None,
    ) -> None:
        """Issues on the stream all that `work` issues, which works in the memory of `used` and
        fills that of `made`."""

    def empty_region(self, stream: Any, nbytes: int, name: str = "") -> ResizedRegion:
        """A region that takes its memory on the stream. `name`: of the unit, for messages."""

    def begin_thread(self) -> None:
        """Makes the device that of the calling thread."""

    def empty_cache(self) -> None:
        """Gives memory that the allocator keeps for one stream back, for all."""

    def synchronize(self) -> None:
        """Blocks until nothing is left to do, on any stream."""


def event_behind(streams: Streams, stream: Stream) -> Event:
    """Returns an event behind the work issued on the stream so far."""
    event = streams.new_event()
    event.record(stream)
    return event
