"""What tracing costs: one event of each kind, while it is off and while it is on.

    python bench/trace_overhead.py

Prints nanoseconds of CPU per event, off and on, beside an empty `with` block. `timed` and `gauge`
cost most of what is shown without a tracer, too: they add to counters. A step has a few tens of
events per unit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

from infinity.observe import Counters, Track

_REPEATS = 7
_EVENTS = 20_000


def per_event_ns(event: Callable[[], None]) -> float:
    """Median over rounds of the CPU time of one event."""
    rounds = []
    for _ in range(_REPEATS):
        start_ns = time.process_time_ns()
        for _ in range(_EVENTS):
            event()
        rounds.append((time.process_time_ns() - start_ns) / _EVENTS)
    return statistics.median(rounds)


def main() -> None:
    counters = Counters()
    tracer = counters.tracer
    nothing = nullcontext()

    def empty() -> None:
        with nothing:
            pass

    def during() -> None:
        with tracer.during(Track.ENGINE, "enter"):
            pass

    def module_call() -> None:
        tracer.begin((1,), Track.MODULES, "block")
        tracer.end((1,))

    def timed() -> None:
        with counters.timed("read_wait_s", "block needs its parameters"):
            pass

    def gauge() -> None:
        counters.set("host_in_use_nbytes", 1.0)

    print(f"{'':<24}{'off':>9}{'on':>10}   ns per event")
    print(f"{'empty with block':<24}{per_event_ns(empty):9.0f}")
    for event in (during, module_call, timed, gauge):
        off_ns = per_event_ns(event)
        tracer.start()
        on_ns = per_event_ns(event)
        tracer.stop()
        tracer.forget()
        print(f"{event.__name__:<24}{off_ns:9.0f}{on_ns:10.0f}")


if __name__ == "__main__":
    main()
