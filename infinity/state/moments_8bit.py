"""The layout of a moment of eight bits per element: docs/formats/moments_8bit.md.

Such a moment is a row of granules. A granule is the codes of up to GRANULE_NUMEL elements, then
their scales, each padded to a page. The scales of a whole granule fill a page exactly, so
nothing is wasted but in the last granule of a unit. A run of granules is one sequential extent of
whole pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from infinity.ops.dynamic_8bit import BLOCK_NUMEL, State8Bit, num_scales
from infinity.sizes import PAGE_NBYTES, align_up

SCALE_NBYTES = 4
GRANULE_NUMEL = PAGE_NBYTES // SCALE_NBYTES * BLOCK_NUMEL
_GRANULE_NBYTES = GRANULE_NUMEL + PAGE_NBYTES


def kind_nbytes(numel: int) -> int:
    """Bytes of the array's first `numel` elements; when more follow, of whole granules.

    Worked example: 262,144 codes and 1,024 scales are 65 pages; 2,048 codes and 8 scales are 2.
    """
    num_granules, rest = divmod(numel, GRANULE_NUMEL)
    nbytes = num_granules * _GRANULE_NBYTES
    if rest:
        nbytes += align_up(rest, PAGE_NBYTES)
        nbytes += align_up(num_scales(rest) * SCALE_NBYTES, PAGE_NBYTES)
    return nbytes


@dataclass(frozen=True, slots=True)
class CodeRun:
    """`numel` elements from `start` on, which lie in one granule: their codes are in one row, and
    so are the scales of their blocks. Offsets are bytes in the array."""

    start: int
    numel: int
    codes_offset_nbytes: int
    scales_offset_nbytes: int


def runs_within(numel: int, start: int, stop: int) -> Iterator[CodeRun]:
    """Elements [start, stop) of an array of `numel`, granule by granule. `start` is a multiple of
    BLOCK_NUMEL."""
    assert start % BLOCK_NUMEL == 0
    while start < stop:
        index, first = divmod(start, GRANULE_NUMEL)
        granule_numel = min(GRANULE_NUMEL, numel - index * GRANULE_NUMEL)
        last = min(stop - index * GRANULE_NUMEL, granule_numel)
        codes_nbytes = index * _GRANULE_NBYTES
        scales_nbytes = codes_nbytes + align_up(granule_numel, PAGE_NBYTES)
        scales_nbytes += SCALE_NBYTES * (first // BLOCK_NUMEL)
        yield CodeRun(start, last - first, codes_nbytes + first, scales_nbytes)
        start += last - first


def states_within(
    memory: torch.Tensor, numel: int, start: int, stop: int
) -> Iterator[tuple[int, State8Bit]]:
    """Elements [start, stop) of `numel` that lie in `memory`: (first element, state) by granule.

    `memory` is uint8 of `kind_nbytes(numel)` and starts where a granule does; `start` is a
    multiple of BLOCK_NUMEL. The states share it.
    """
    for run in runs_within(numel, start, stop):
        codes = memory[run.codes_offset_nbytes :][: run.numel]
        scales = memory[run.scales_offset_nbytes :][: SCALE_NBYTES * num_scales(run.numel)]
        yield run.start, State8Bit(codes, scales.view(torch.float32))
