"""Observation of a run: counters always, a timeline while a trace is on."""

from infinity.observe.counters import Counters
from infinity.observe.tracer import Count, Span, Tracer, Track

__all__ = ["Count", "Counters", "Span", "Tracer", "Track"]
