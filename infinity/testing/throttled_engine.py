"""A storage engine with a configurable bandwidth per path, for tests of striping.

The paths of a test lie on one drive of unknown speed. The engine gives each path its own bandwidth
on a simulated clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from infinity.storage.protocol import Operation, Priority, Segment, StorageEngine, Ticket
from infinity.testing.wrapped_engine import WrappedEngine


class Clock:
    """Replaces the module `time`. Time advances only during a wait."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        """Returns the simulated time in seconds."""
        return self._now_s

    def wait_until(self, moment_s: float) -> None:
        """Advances the time to `moment_s`; a time in the past changes nothing."""
        self._now_s = max(self._now_s, moment_s)


class ThrottledEngine(WrappedEngine):
    """Wraps `engine`. `bytes_per_s` maps the start of a path to the bandwidth of the files below
    it, in seconds of `clock`; other files take no time.

    Each limit is one drive that serves its requests in the order of submission. A request is done
    when the wrapped engine is done and every drive that it touches has had the time for its share.
    For one thread.
    """

    def __init__(self, engine: StorageEngine, bytes_per_s: Mapping[str, float]) -> None:
        super().__init__(engine, "throttled")
        self.clock = Clock()
        self._limits = dict(bytes_per_s)
        self._limit_of: dict[int, str] = {}  # by file
        self._free_at_s: dict[str, float] = {}  # when each drive has served what it was given

    @override
    def open(self, path: str, *, direct: bool, read_only: bool = False) -> int:
        file = super().open(path, direct=direct, read_only=read_only)
        for start in self._limits:
            if path.startswith(start):
                self._limit_of[file] = start
        return file

    @override
    def submit(
        self, operation: Operation, segments: Sequence[Segment], priority: Priority
    ) -> Ticket:
        inner = self._engine.submit(operation, segments, priority)
        return _ThrottledTicket(inner, self._serve(segments), self.clock)

    @override
    def drain(self) -> None:
        self._engine.drain()
        self.clock.wait_until(max(self._free_at_s.values(), default=0.0))

    def _serve(self, segments: Sequence[Segment]) -> float:
        """Returns the time when the drives will have served these segments."""
        now_s = ready_s = self.clock.perf_counter()
        for segment in segments:
            limit = self._limit_of.get(segment.file)
            if limit is None:
                continue
            start_s = max(now_s, self._free_at_s.get(limit, 0.0))
            self._free_at_s[limit] = start_s + segment.nbytes / self._limits[limit]
            ready_s = max(ready_s, self._free_at_s[limit])
        return ready_s


class _ThrottledTicket:
    """Done when the wrapped ticket is done and the drives have had their time."""

    def __init__(self, inner: Ticket, ready_at_s: float, clock: Clock) -> None:
        self._inner = inner
        self._ready_at_s = ready_at_s
        self._clock = clock

    def done(self) -> bool:
        return self._clock.perf_counter() >= self._ready_at_s and self._inner.done()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def passages(self) -> Sequence[tuple[int, int, int, int]]:
        return self._inner.passages()

    def wait(self, timeout_s: float | None = None) -> None:
        self._inner.wait(timeout_s)
        self._clock.wait_until(self._ready_at_s)
