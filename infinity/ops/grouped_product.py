"""Whether a row of a grouped product has the same bits beside any other rows.

BLAS may choose another kernel, and so another order of a sum, for another number of rows. A kernel
of grouped products takes the columns in one order. No device is believed: a trial compares.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch.nn import functional

_log = logging.getLogger("infinity")
_COUNTS = ((1, 130), (259, 70), (5, 129))  # Rows of two groups in three parts.


@cache
def are_rows_apart(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_transposed: bool,
    is_trained: bool,
) -> bool:
    """Whether `functional.grouped_mm` and its backward give a row the same bits beside any others,
    by a trial; False on the CPU, whose products go by the number of rows.

    shape: (columns of the rows, columns of the product); each is padded to 16 bytes. is_transposed:
    the last two dimensions of the stack of matrices are swapped in memory. is_trained: each part of
    the rows has a group of its own, whose gradient depends on no other.
    """
    if device.type == "cpu":
        return False
    is_apart = try_rows(shape, dtype, device, is_transposed=is_transposed, is_trained=is_trained)
    if not is_apart:
        _log.warning(
            "micro-batches pass experts one by one: on %s a row of a grouped product of %s depends "
            "on the number of rows", device, shape,
        )  # fmt: skip
    return is_apart


def try_rows(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_transposed: bool,
    is_trained: bool,
) -> bool:
    """The trial: parts of rows alone, and together."""
    multiple = 16 // dtype.itemsize
    shape = -(-shape[0] // multiple) * multiple, -(-shape[1] // multiple) * multiple
    generator = torch.Generator(device).manual_seed(0)

    def some(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=device, generator=generator)

    stack = some(2, *(reversed(shape) if is_transposed else shape))
    rows = [[some(count, shape[0]) for count in counts] for counts in _COUNTS]
    gradients = [[some(count, shape[1]) for count in counts] for counts in _COUNTS]

    def results(parts: Sequence[int]) -> dict[tuple[int, int], list[torch.Tensor]]:
        places = [(group, part) for group in range(2) for part in parts]
        sizes = [_COUNTS[part][group] for group, part in places]
        ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
        leaves = [torch.cat([rows[part][group] for group, part in places]).requires_grad_()]
        matrices = stack
        if is_trained:
            matrices = stack.repeat_interleave(len(parts), 0).requires_grad_()
            leaves.append(matrices)
        else:
            ends = ends[len(parts) - 1 :: len(parts)].contiguous()
        turned = matrices.transpose(-2, -1) if is_transposed else matrices
        with torch.enable_grad():
            out = functional.grouped_mm(leaves[0], turned, offs=ends)
        of_out = torch.cat([gradients[part][group] for group, part in places])
        of_rows, *others = torch.autograd.grad([out], leaves, [of_out])
        found = zip(out.detach().split(sizes), of_rows.split(sizes), *others, strict=True)
        return dict(zip(places, map(list, found), strict=True))

    together = results(range(len(_COUNTS)))
    return all(
        torch.equal(found, other)
        for part in range(len(_COUNTS))
        for place, alone in results([part]).items()
        for found, other in zip(alone, together[place], strict=True)
    )
