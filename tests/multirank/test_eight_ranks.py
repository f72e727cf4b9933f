"""Eight ranks: the tree of sums has three levels, and no rank owns a part of every unit."""

from __future__ import annotations

from .processes import run_ranks
from .test_deferred import train_and_count
from .work import NVME, Case, assert_same_run, expected

COUNT = 8
NUM_TRAINABLE_UNITS = 4  # Of `Blocks`.
ROOMY = "384MiB"  # Of the machine. In less each rank updates inside the step.
SHARDED = Case(3, NVME, compute="bfloat16", updates="deferred", skips=True, capacity=ROOMY)
REPLICATED = Case(1, NVME, skips=True, lazy_ranks=(2, 3, 6), capacity=ROOMY)


def test_eight_ranks_have_the_bits_of_plain_torch() -> None:
    """The ranks skip different blocks. In the last step of stage 1, two ranks that are neighbours
    in the tree have no batch, and one rank beside a rank that has one."""
    cases = [SHARDED, REPLICATED]
    of_case = [expected(case, COUNT) for case in cases]
    for rank, runs in enumerate(run_ranks(COUNT, train_and_count, cases)):
        for case, wanted, (found, _) in zip(cases, of_case, runs, strict=True):
            assert_same_run(found, wanted[rank], f"rank {rank}, {case}")
        num_updates, num_in_stage_1 = (num_updates for _, num_updates in runs)
        assert 0 < num_updates < NUM_TRAINABLE_UNITS * SHARDED.steps, rank
        assert num_in_stage_1 == 0, "stage 1 updates inside the step"
