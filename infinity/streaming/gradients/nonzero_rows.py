"""The rows of a gradient that are not all zero, found on the device where the gradient rests.

The gradient of an embedding has a row for every token of the vocabulary, and a batch looks up few
of them. Only these rows have to leave the device to be measured.

Note [Same bits]
  torch's 2-norm on the host adds the squares of contiguous elements in order, each lane of a vector
  register for itself, and then the lanes. A square of zero changes no sum. Without rows of zeros
  the other elements stay in their lanes if a row is a multiple of the lanes. `_LANES` is a multiple
  of the lanes of every processor that torch has kernels for.

Source: binary_kernel_reduce_lastdim and norm_two_reduce_step in ATen/native/cpu of PyTorch 2.13.
"""

from __future__ import annotations

from typing import Final

import torch

from infinity.sizes import MIB
from infinity.state.units import STATE_ITEM_NBYTES, TensorSpec
from infinity.tiers.device import Copy, DeviceAdapter

_LANES: Final = 64
_LEAST_NBYTES: Final = 64 * MIB  # A search takes less time than the norm of so much.
_LEAST_RATIO: Final = 8  # Of all rows over those that are picked: these take device memory.
COUNT_NBYTES: Final = 8


def may_have_rows_of_zeros(spec: TensorSpec) -> bool:
    """Whether it is worth a search, and rows of zeros may be left out of the norm."""
    shape = spec.facts.shape
    is_table = len(shape) == 2 and tuple(spec.facts.stride) == (shape[1], 1)
    return is_table and shape[1] % _LANES == 0 and spec.numel * STATE_ITEM_NBYTES >= _LEAST_NBYTES


def most_picked_nbytes(spec: TensorSpec) -> int:
    """The most bytes that `RowSearch.pick` returns: an eighth of all."""
    return max(spec.numel // _LEAST_RATIO * STATE_ITEM_NBYTES, COUNT_NBYTES)


class RowSearch:
    """A search that the current stream has been given. Never waits.

    `flat`: fp32 (numel,) on the device, written by what the current stream has to do. `on_host`:
    uint8, at least COUNT_NBYTES bytes of host memory, the search's until `count` is over.
    """

    def __init__(
        self, device: DeviceAdapter, flat: torch.Tensor, spec: TensorSpec, on_host: torch.Tensor
    ) -> None:
        self._rows = flat.view(spec.facts.shape)
        is_other = self._rows.any(dim=1)
        # Those that are not all zero first, in their order. The stable sort needs no count.
        self.order = is_other.to(torch.uint8).argsort(descending=True, stable=True)
        self._on_host = on_host[:COUNT_NBYTES].view(torch.int64)
        self.count: Copy = device.copy(is_other.sum().view(1), self._on_host)

    def pick(self) -> torch.Tensor | None:
        """Returns the rows that are not all zero, fp32 (rows, columns), on the device; None if
        these are more than an eighth of all. Waits for `count`.

        At least one row is returned. `order` must live until the current stream has made them.
        """
        self.count.wait()
        num_rows = int(self._on_host)
        if _LEAST_RATIO * max(num_rows, 1) > len(self._rows):
            return None
        return self._rows.index_select(0, self.order[: max(num_rows, 1)])
