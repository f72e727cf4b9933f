"""Layer inputs that all ranks of a model-parallel group have alike: each rank parks a part.

Where a layer is computed by several ranks together (tensor parallelism) each of them has the whole
input of it. Here each keeps 1/M of the elements, on whatever tier, and the parts are put together
when the backward needs them: M times less memory for one all-gather within the group (Rajbhandari
et al., "ZeRO", 2020, section 6.1, P_a).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from infinity.engine.activations import Activations, Parked
from infinity.errors import InfinityError


@dataclass(eq=False, slots=True)
class SharedParked:
    """One tensor that waits in parts. Written by `SharedActivations` alone."""

    part: Parked
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    uses: int = 1
    whole: torch.Tensor | None = None


class SharedActivations:
    """`Activations` over a process group. Its ranks park the same tensors in the same order, and
    take them in the same order: they run one model on one batch."""

    def __init__(self, parts: Activations, group: Any) -> None:
        self._parts = parts
        self._group = group
        self._rank, self._count = dist.get_rank(group), dist.get_world_size(group)
        self._known = WeakTensorKeyDictionary()
        # Of the first accumulation each tensor is compared; later ones go the same ways.
        self._is_compared = False

    def park(self, tensor: torch.Tensor) -> SharedParked:
        """Keeps this rank's part of the tensor. See `Activations.park`.

        Raises InfinityError where the ranks do not have the same tensor.
        """
        parked: SharedParked | None = self._known.get(tensor)
        if parked is not None and parked.uses:
            parked.uses += 1
            return parked
        values = tensor.detach()
        if not torch.ops.aten.is_non_overlapping_and_dense(values):
            values = values.contiguous()
        flat = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
        if not self._is_compared:
            self._compare(flat)
        part_nbytes = -(-flat.numel() // self._count)
        mine = flat[part_nbytes * self._rank : part_nbytes * (self._rank + 1)]
        part = flat.new_zeros(part_nbytes)  # A view would keep the whole in memory.
        part[: mine.numel()] = mine
        parked = SharedParked(self._parts.park(part), tensor.shape, values.stride(), tensor.dtype)
        self._known[tensor] = parked
        return parked

    def _compare(self, flat: torch.Tensor) -> None:
        mine = torch.stack([torch.tensor(flat.numel(), device=flat.device), flat.sum()])
        theirs = [torch.empty_like(mine) for _ in range(self._count)]
        dist.all_gather(theirs, mine, group=self._group)
        for rank, other in enumerate(theirs):
            if not torch.equal(other, theirs[0]):
                raise InfinityError(
                    f"rank {rank} of model_parallel_group has another layer input than rank 0; "
                    "expected ranks that run one model on one batch, each with the whole input. "
                    "Leave the group out where each rank has a part of it already"
                )

    def fetch(self, parked: SharedParked) -> None:
        """Starts bringing this rank's part back."""
        self._parts.fetch(parked.part)

    def take(self, parked: SharedParked) -> torch.Tensor:
        """The whole tensor. See `Activations.take`."""
        if parked.whole is None:
            part = self._parts.take(parked.part)
            whole = part.new_empty(part.numel() * self._count)
            dist.all_gather_into_tensor(whole, part, group=self._group)
            nbytes = parked.shape.numel() * parked.dtype.itemsize
            flat = whole[:nbytes].view(parked.dtype)
            parked.whole = flat.as_strided(parked.shape, parked.stride)
        tensor = parked.whole
        parked.uses -= 1
        if parked.uses == 0:
            parked.whole = None
        return tensor

    def clear(self) -> None:
        """Forgets everything; an accumulation is over."""
        self._parts.clear()
        self._known = WeakTensorKeyDictionary()
        self._is_compared = True
