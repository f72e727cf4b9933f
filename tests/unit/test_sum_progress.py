"""When the sums of a shard are complete, if a step is like the last."""

from __future__ import annotations

from infinity.distributed.sums.ordered_sum import OrderedReduction
from infinity.distributed.sums.progress import SumProgress


def test_a_shard_is_complete_with_the_contributions_of_the_last_step_from_every_rank() -> None:
    reduction: OrderedReduction[int] = OrderedReduction(3, combine=int.__add__, drop=lambda _: None)
    progress = SumProgress({0: 7, 1: 7, 2: 8}, reduction.parts)

    def give(tensor: int, number: int, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        generation = reduction.generation(tensor)
        for rank in ranks:
            reduction.deliver(tensor, rank, generation, number, 1)
        list(reduction.take(all_are_there=False))

    def step() -> None:
        progress.begin_step()
        list(reduction.take(all_are_there=True))
        progress.begin_step()  # Once more, as after `clip_grad_norm_`.
        for tensor in range(3):
            reduction.forget(tensor)

    def complete() -> list[int]:
        return [shard for shard in (7, 8, 9) if progress.is_complete(shard)]

    give(0, 0), give(0, 1), give(1, 0, ranks=(2,))
    assert complete() == [], "no step was before"
    step()
    give(0, 0), give(1, 0)
    assert complete() == [], "one backward of two"
    give(0, 1, ranks=(0, 2))
    assert complete() == [], "rank 1 is behind"
    give(0, 1, ranks=(1,))
    assert complete() == [7]
    give(1, 1, ranks=(0,))
    assert complete() == [], "one more than expected"
    step()
    give(0, 0), give(0, 1), give(1, 0), give(1, 1)
    assert complete() == [7]
