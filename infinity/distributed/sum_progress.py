"""The contributions of ranks to sums, compared with those of the last step and of other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from infinity.errors import RankError
from infinity.state.units import TensorSpec

Parts = Callable[[int], tuple[int, int]]
Generations = tuple[int, numpy.ndarray[Any, Any]]  # A rank, and its generation of each tensor.


class SumProgress:
    """Compares the contributions to each tensor that this rank owns a part of with the last step's.

    `of_shard`: the shard of each such tensor, by unit index. `parts`: see `OrderedReduction.parts`.
    A sum that lacks the contribution of a rank is not complete before all ranks enter the step.
    Training thread.
    """

    def __init__(self, of_shard: Mapping[int, int], parts: Parts) -> None:
        self._tensors: defaultdict[int, list[int]] = defaultdict(list)  # By shard.
        for tensor, shard in of_shard.items():
            self._tensors[shard].append(tensor)
        self._parts = parts
        self._expected: dict[int, int] = {}  # By tensor.

    def begin_step(self) -> None:
        """All contributions of the step have come, and are not counted anew yet."""
        made = {t: self._parts(t)[1] for of_shard in self._tensors.values() for t in of_shard}
        if any(made.values()):  # Else ranks enter the step once more.
            self._expected = made

    def is_complete(self, shard: int) -> bool:
        """Whether as many contributions are in the sums of a shard as in the last step, of every
        rank, and no further one has come."""
        tensors = self._tensors[shard]
        return any(self._expected.get(tensor) for tensor in tensors) and all(
            self._is_like_last(tensor) for tensor in tensors
        )

    def is_sum_complete(self, tensor: int) -> bool:
        """As `is_complete`, for one tensor; False for one without contributions."""
        return bool(self._expected.get(tensor)) and self._is_like_last(tensor)

    def _is_like_last(self, tensor: int) -> bool:
        count = self._expected.get(tensor, 0)
        return self._parts(tensor) == (count, count)


def refuse_other_generation(
    specs: Sequence[TensorSpec], local: Generations, remote: Generations
) -> None:
    """Raises RankError unless two ranks have cleared each gradient equally often."""
    (own, ours), (rank, theirs) = local, remote
    differing = numpy.flatnonzero(ours != theirs)
    if differing.size:
        name = specs[differing[0]].name
        raise RankError(
            rank,
            f"rank {rank} has cleared the gradient of {name!r} another number of times than "
            f"rank {own}; call zero_grad() on all ranks alike",
        )
