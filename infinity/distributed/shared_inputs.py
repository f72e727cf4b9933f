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

from infinity.errors import InfinityError
from infinity.streaming.activations import ActivationStore, SavedInput


@dataclass(eq=False, slots=True)
class SharedSavedInput:
    """One tensor that waits in parts. Written by `SharedActivationStore` alone."""

    part: SavedInput
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    uses: int = 1
    whole: torch.Tensor | None = None


class SharedActivationStore:
    """`ActivationStore` over a process group. Its ranks park the same tensors in the same order,
    and take them in the same order: they run one model on one batch."""

    def __init__(self, parts: ActivationStore, group: Any) -> None:
        self._parts = parts
        self._group = group
        self._rank, self._count = dist.get_rank(group), dist.get_world_size(group)
        self._known = WeakTensorKeyDictionary()
        # Of the first accumulation each tensor is compared; later ones go the same ways.
        self._is_compared = False

    def save(self, tensor: torch.Tensor) -> SharedSavedInput:
        """Keeps this rank's part of the tensor. See `ActivationStore.save`.

        Raises InfinityError where the ranks do not have the same tensor.
        """
        saved: SharedSavedInput | None = self._known.get(tensor)
        if saved is not None and saved.uses:
            saved.uses += 1
            return saved
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
        saved = SharedSavedInput(
            self._parts.save(part), tensor.shape, values.stride(), tensor.dtype
        )
        self._known[tensor] = saved
        return saved

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

    def fetch(self, saved: SharedSavedInput) -> None:
        """Starts bringing this rank's part back."""
        self._parts.fetch(saved.part)

    def restore(self, saved: SharedSavedInput) -> torch.Tensor:
        """The whole tensor. See `ActivationStore.take`."""
        if saved.whole is None:
            part = self._parts.restore(saved.part)
            whole = part.new_empty(part.numel() * self._count)
            dist.all_gather_into_tensor(whole, part, group=self._group)
            nbytes = saved.shape.numel() * saved.dtype.itemsize
            flat = whole[:nbytes].view(saved.dtype)
            saved.whole = flat.as_strided(saved.shape, saved.stride)
        tensor = saved.whole
        saved.uses -= 1
        if saved.uses == 0:
            saved.whole = None
        return tensor

    def clear(self) -> None:
        """Forgets everything; an accumulation is over."""
        self._parts.clear()
        self._known = WeakTensorKeyDictionary()
        self._is_compared = True
