"""What a run says of itself: counters always, a timeline while somebody traces."""

from infinity.observe.counters import Counters
from infinity.observe.tracer import Count, Span, Tracer, Track

__all__ = ["Count", "Counters", "Span", "Tracer", "Track"]
