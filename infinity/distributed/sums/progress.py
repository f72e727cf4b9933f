"""How far the sums over ranks are, and what ranks tell each other of them as they enter a step."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from infinity.errors import RankError
from infinity.state.units import TensorSpec

Parts = Callable[[int], tuple[int, int]]
Numbers = numpy.ndarray[Any, Any]
_NBYTES = struct.Struct("<Q")  # Of the roots.
_BY_TENSOR = numpy.dtype(
    [("present", "?"), ("generations", "<i8"), ("counts", "<i4"), ("summed", "<i4")]
)


@dataclass(frozen=True, slots=True)
class GradientReport:
    """A rank's report of its gradients to all ranks as it enters a step. Each array is by tensor.

    present: bool, tensors to which the rank has contributed
    generations: int64, see `OrderedReduction.forget`
    counts: int32, the rank's contributions since the last step
    summed: int32, contributions of every rank in the sums of which the rank tells the roots; else 0
    roots: of these sums, see `NormsOfRanks.take`
    decision: see `Collectives.decision`
    """

    present: Numbers
    generations: Numbers
    counts: Numbers
    summed: Numbers
    roots: bytes | memoryview
    decision: bytes

    def encode(self) -> bytes:
        """Returns the report as bytes for `decode`."""
        by_tensor = numpy.empty(len(self.present), _BY_TENSOR)
        for name in _BY_TENSOR.names or ():
            by_tensor[name] = getattr(self, name)
        head = _NBYTES.pack(len(self.roots))
        return b"".join([head, by_tensor.tobytes(), self.roots, self.decision])

    @staticmethod
    def decode(content: bytes, count: int) -> GradientReport:
        """Returns the report of a rank on `count` tensors: the inverse of `encode`."""
        by_tensor = numpy.frombuffer(content, _BY_TENSOR, count, offset=_NBYTES.size)
        at = _NBYTES.size + by_tensor.nbytes
        end = at + _NBYTES.unpack_from(content)[0]
        present, generations, counts, summed = (by_tensor[name] for name in _BY_TENSOR.names or ())
        roots = memoryview(content)[at:end]
        return GradientReport(present, generations, counts, summed, roots, content[end:])


def refuse_other_generation(specs: Sequence[TensorSpec], reports: Sequence[GradientReport]) -> None:
    """Raises RankError unless all ranks have cleared each gradient equally often."""
    for rank, report in enumerate(reports):
        differing = numpy.flatnonzero(report.generations != reports[0].generations)
        if differing.size:
            name = specs[differing[0]].name
            raise RankError(
                rank,
                f"rank {rank} has cleared the gradient of {name!r} another number of times than "
                "rank 0; call zero_grad() on all ranks alike",
            )


class Contributions:
    """The contributions of ranks to each tensor. A tensor is named by its number.

    Training thread. `specs`: all tensors, by number.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = list(specs)
        self.number = {spec: number for number, spec in enumerate(self.specs)}
        self._counts: defaultdict[int, int] = defaultdict(int)  # Of this rank, since the last step.
        self._num_entered = numpy.zeros(len(self.specs), numpy.int64)  # Steps with a gradient.
        self._of_rank: set[int] = set()  # With a gradient of this rank since the last step.
        self._of_all: set[int] = set()  # With a gradient of some rank, at the last step.

    def next(self, tensor: int) -> int:
        """Returns how often this rank has contributed since the last step, or `forget`; it does so
        once more."""
        self._counts[tensor] += 1
        return self._counts[tensor] - 1

    def note(self, spec: TensorSpec) -> None:
        """This rank has a gradient of the tensor."""
        self._of_rank.add(self.number[spec])

    def has(self, tensor: int | None) -> bool:
        """Whether the tensor has a gradient, of any rank."""
        return tensor in self._of_all or tensor in self._of_rank

    def num_entered(self, tensor: int) -> int:
        """Returns the number of steps that the tensor has had a gradient in."""
        return int(self._num_entered[tensor])

    def of_all(self) -> list[int]:
        """Returns the tensors that had a gradient of some rank at the last step, in order."""
        return sorted(self._of_all)

    def report(self) -> tuple[Numbers, Numbers]:
        """Returns `present` and `counts` of a GradientReport."""
        present, counts = numpy.zeros(len(self.specs), numpy.bool_), self._counts
        present[list(self._of_rank)] = True
        return present, numpy.array([counts[t] for t in range(len(self.specs))], numpy.int32)

    def begin_step(self, present: Numbers) -> None:
        """All ranks enter a step. present: bool, by tensor: of any rank."""
        self._of_all.update(numpy.flatnonzero(present).tolist())
        self._num_entered += present
        self._of_rank.clear()
        self._counts.clear()

    def forget(self, tensor: int, *, stays: bool) -> None:
        """Drops what this rank has contributed; with `stays` the tensor has a gradient still."""
        self._counts.pop(tensor, None)
        if not stays:
            self._of_rank.discard(tensor)
            self._of_all.discard(tensor)


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
