"""Collective operations between devices of one process: what a backend does, without a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


def _no_event() -> None:
    return None


def cuda_event() -> Any:
    """What the current stream has to do until now."""
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass
class Loopback:
    """Meeting point of `count` ranks, each of which issues from a thread of its own.

    `event`: where operations are only issued, something that the streams of others wait for.
    """

    count: int
    event: Callable[[], Any] = _no_event
    _sources: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.count, timeout=120)

    def rank(self, rank: int) -> LoopbackRank:
        return LoopbackRank(self, rank)

    def exchange(self, rank: int, source: torch.Tensor, take: Callable[[int, Any], None]) -> None:
        """`take` gets every rank's source, and may read it until it returns."""
        self._sources[rank] = source, self.event()
        self._barrier.wait()
        for other in range(self.count):
            theirs, there = self._sources[other]
            if there is not None:
                torch.cuda.current_stream().wait_event(there)
            take(other, theirs)
        self._sources[rank] = source, self.event()
        self._barrier.wait()
        for _, taken in self._sources.values():
            if taken is not None:
                torch.cuda.current_stream().wait_event(taken)
        self._barrier.wait()


@dataclass(frozen=True)
class LoopbackRank:
    """See `tiers.exchange.Operations`."""

    loopback: Loopback
    rank: int

    def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> None:
        rows = target.view(self.loopback.count, -1)
        self.loopback.exchange(self.rank, source, lambda rank, theirs: rows[rank].copy_(theirs))

    def all_to_all(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def take(rank: int, theirs: Any) -> None:
            target[rank].copy_(theirs[self.rank])

        self.loopback.exchange(self.rank, source, take)
