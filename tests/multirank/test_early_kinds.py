"""Updates outside the step over ranks, of tiles, of layer-major order, of moments of eight bits.

Every unit is updated after the step first, and in the backward as soon as steps are alike: but for
the first unit of the model, which a backward that takes one micro-batch leaves at its end. The bits are
those of updates inside the step.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.exhaustive import sampled

from .early_run import EarlyRun, EarlyStep, counted_updates
from .processes import run_ranks
from .work import NVME, Case, Run, assert_same_run, train

FIRST_EARLY = 3  # Ranks between devices have a log, the others expect what comes.
ON_DRIVES = Case(3, NVME, steps=5, compute="bfloat16", capacity="192MiB")
LAYER_MAJOR = replace(ON_DRIVES, layer_major=True, accumulation=2)
TILES = replace(ON_DRIVES, model="wide", tile=256 << 10)  # Three of each linear layer.
EIGHT_BITS = replace(ON_DRIVES, model="wide", moments="8bit")  # Wide: a block has several granules.
HOST_MOMENTS = NVME | {"moments": "host"}
EARLY = [
    LAYER_MAJOR,
    replace(LAYER_MAJOR, placement={}, simulated=True, exchange="collective"),
    TILES,
    replace(TILES, placement={}, simulated=True, layer_major=True, accumulation=2),
    replace(EIGHT_BITS, placement={}, simulated=True),
    replace(EIGHT_BITS, placement=HOST_MOMENTS),
    EIGHT_BITS,
]
CLIPPED = replace(EIGHT_BITS, max_norm=1e-3)


class Outside(NamedTuple):
    """A rank's run with updates outside the step. `num_deferred`: shards that were updated after a
    step; `units`: those that can be early; `wanted`: the run with updates inside the step."""

    run: Run
    steps: list[EarlyStep]
    num_deferred: int
    units: set[int]
    num_tiled: int
    wanted: Run


def _train(rank: int, cases: list[Case]) -> list[Outside]:
    updated, found = counted_updates(), []
    for case in cases:
        before = updated[0]
        early = EarlyRun(rank, replace(case, updates="both_passes"), Path(tempfile.gettempdir()))
        shards = early.engine.store.partition.local  # type: ignore[attr-defined]
        units = {index for index, shard in enumerate(shards) if shard.unit.state_numel}
        num_tiled = len(early.engine.tiled_params)
        run, steps = early.train(first=FIRST_EARLY)
        num_deferred = updated[0] - before
        wanted = train(rank, replace(case, updates="at_step"))
        assert updated[0] - before == num_deferred, "updates are in the step"
        found.append(Outside(run, steps, num_deferred, units, num_tiled, wanted))
    return found


# Each kind with one of its places; `make exhaustive` has the other places, and three ranks.
JOBS = {"2": [EARLY[1], EARLY[2], EARLY[5], CLIPPED], "2-rest": [*EARLY[:1], *EARLY[3:5], EARLY[6]],
        "3": [EARLY[1]]}  # fmt: skip


@pytest.mark.parametrize("job", sampled(JOBS, "2".__eq__))
def test_every_unit_is_updated_in_the_backward_with_the_bits_of_updates_in_the_step(
    job: str,
) -> None:
    count, cases = int(job[0]), JOBS[job]
    for rank, outside in enumerate(run_ranks(count, _train, cases)):
        for case, found in zip(cases, outside, strict=True):
            what = f"rank {rank} of {count}, {case}"
            early = found.units - (set() if case.layer_major else {min(found.units)})
            assert_same_run(found.run, found.wanted, what)
            assert bool(found.num_tiled) == (case.tile is not None), what
            num_updates = found.num_deferred + found.run.counters["early_updates_kept"]
            assert num_updates == case.steps * len(found.units), what
            assert found.num_deferred >= len(found.units), what  # Those of the first step.
            for step in found.steps:
                assert step.units == early, what
                kept, undone = (0, len(early))[:: 1 if case is CLIPPED else -1]
                assert (step.num_kept, step.num_undone) == (kept, undone), what
