"""Facts shared by all sections of the benchmark: directories, sizes, rounds, and the arena."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from infinity.config.schema.engine import Io
from infinity.sizes import GIB, MIB
from infinity.storage.arena import Arena
from infinity.storage.native_engine import RingFlags, depth_range
from infinity.storage.open import open_configured
from infinity.storage.protocol import StorageEngine
from infinity.tools.bench.fio import CANDIDATES, FioSettings
from infinity.tools.bench.measure import ContenderGroup, Result, run_group


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of work.

    nbytes: of a timed transfer of the headline figures
    sweep_nbytes: of a cell of a sweep
    """

    nbytes: int = GIB
    sweep_nbytes: int = 128 * MIB
    rounds: int = 7
    sweep_rounds: int = 3
    search_rounds: int = 2
    depths: tuple[int, ...] = (1, 2, 4)
    extents_nbytes: tuple[int, ...] = (
        64 << 10, 512 << 10, 4 * MIB, 32 * MIB, 256 * MIB, 1 * GIB,
    )  # fmt: skip
    num_latencies: int = 64
    fio_candidates: tuple[FioSettings, ...] = CANDIDATES


QUICK = Effort(
    nbytes=256 * MIB,
    sweep_nbytes=64 * MIB,
    rounds=3,
    sweep_rounds=1,
    search_rounds=1,
    depths=(1, 4),
    extents_nbytes=(64 << 10, 1 * MIB, 16 * MIB),
    num_latencies=16,
    fio_candidates=CANDIDATES[2:6],
)


@dataclass(frozen=True, slots=True)
class Lab:
    """The bench's tools. `arena` holds `effort.nbytes` at least; `io` is the configured engine.

    `on_step` receives the name of each step, for a progress line.
    """

    arena: Arena
    directories: tuple[Path, ...]
    io: Io
    effort: Effort
    with_fio: bool
    weights: tuple[float, ...] = ()
    huge_pages: bool = True
    on_step: Callable[[str], object] = field(default=lambda _: None)

    @property
    def start_depth(self) -> int:
        """Blocks that the configured engine has in flight on a drive at first."""
        return depth_range(self.io.queue_depth, self.io.block_size).start

    def engine(
        self,
        *,
        block_nbytes: int | None = None,
        depth: int | None = None,
        num_rings: int | None = None,
        ring_flags: RingFlags | None = None,
    ) -> StorageEngine:
        """The configured engine, or one with other settings."""
        return open_configured(
            self.io,
            self.arena,
            block_nbytes=block_nbytes,
            queue_depth=depth,
            num_rings=num_rings,
            ring_flags=ring_flags,
        )

    def measure(self, group: ContenderGroup, rounds: int, *, warm_ups: int = 1) -> Result:
        """Runs the group in interleaved rounds after `warm_ups` that do not count."""
        what = f"{group.section}: {group.case}"
        return run_group(
            group,
            rounds=rounds,
            warm_ups=warm_ups,
            on_round=lambda index: self.on_step(
                f"{what}, " + (f"round {index + 1} of {rounds}" if index >= 0 else "warm-up")
            ),
        )
