"""Bytes that were written beside the current ones, before anybody knows whether they will count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infinity.storage.generations import GenerationRun
from infinity.storage.volume_layout import Extent


@dataclass(eq=False, slots=True)
class UndecidedContent:
    """Writes that no read sees until `Volume.publish`; without it nothing has changed.

    Each write goes to a generation that neither the current content nor a frozen one needs. One
    thread writes; another one may publish when that thread has queued its writes.
    """

    runs: list[tuple[int, GenerationRun]] = field(default_factory=list)  # By path, in order.
    checksums: list[tuple[Extent, bytes]] = field(default_factory=list)

    def add(
        self,
        parts: Sequence[tuple[Extent, int]],
        runs: Sequence[Sequence[GenerationRun]],
        digests: Sequence[bytes],
    ) -> None:
        """Records a write that is queued; see `Volume._write`."""
        for (extent, _), targets, checksums in zip(parts, runs, digests, strict=True):
            self.runs += [(extent.path_index, run) for run in targets]
            self.checksums.append((extent, checksums))
