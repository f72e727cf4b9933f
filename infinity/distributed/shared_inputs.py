"""Layer inputs that all ranks of a model-parallel group have in common: each rank saves a part.

If several ranks compute a layer together (tensor parallelism), each of them has its whole input.
Here each rank saves 1/M of the elements, on any tier, and the group gathers the parts when the
backward needs them: M times less memory for one all-gather within the group (Rajbhandari et al.,
"ZeRO", 2020, section 6.1, P_a).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from infinity.distributed.group import RankTopology
from infinity.distributed.wire.failures import await_result, naming_lost_ranks
from infinity.errors import InfinityError
from infinity.streaming.inputs.activations import ActivationStore, SavedInput


@dataclass(eq=False, slots=True)
class SharedSavedInput:
    """One tensor that is saved in parts. Written by `SharedActivationStore` alone."""

    part: SavedInput
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    uses: int = 1
    full: torch.Tensor | None = None


class SharedActivationStore:
    """`ActivationStore` over a process group. Its ranks save and restore the same tensors in one
    order: they run one model on one batch.
    """

    def __init__(self, parts: ActivationStore, group: RankTopology) -> None:
        self._parts = parts
        self._group = group.process_group
        self._links = group.links
        self._rank, self._count = group.rank, group.count
        self._known = WeakTensorKeyDictionary()
        # The tensors of the first accumulation are compared; later ones take the same path.
        self._is_compared = False

    def save(self, tensor: torch.Tensor) -> SharedSavedInput:
        """Saves this rank's part of the tensor. See `ActivationStore.save`.

        Raises InfinityError if the tensors of the ranks differ.
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
        local = flat[part_nbytes * self._rank : part_nbytes * (self._rank + 1)]
        part = flat.new_zeros(part_nbytes)  # A view would keep the whole tensor in memory.
        part[: local.numel()] = local
        saved = SharedSavedInput(
            self._parts.save(part), tensor.shape, values.stride(), tensor.dtype
        )
        self._known[tensor] = saved
        return saved

    def _compare(self, flat: torch.Tensor) -> None:
        remote = self._links.all_gather_objects("layer inputs", (flat.numel(), int(flat.sum())))
        for rank, other in enumerate(remote):
            if other != remote[0]:
                raise InfinityError(
                    f"rank {rank} of model_parallel_group has another layer input than rank 0; "
                    "expected ranks that run one model on one batch, each with the whole input. "
                    "Leave the group out where each rank has a part of it already"
                )

    def fetch(self, saved: SharedSavedInput) -> None:
        """Starts to fetch this rank's part."""
        self._parts.fetch(saved.part)

    def restore(self, saved: SharedSavedInput) -> torch.Tensor:
        """Returns the whole tensor. See `ActivationStore.restore`."""
        if saved.full is None:
            part = self._parts.restore(saved.part)
            full = part.new_empty(part.numel() * self._count)
            self._gather(full, part)
            nbytes = saved.shape.numel() * saved.dtype.itemsize
            flat = full[:nbytes].view(saved.dtype)
            saved.full = flat.as_strided(saved.shape, saved.stride)
        tensor = saved.full
        saved.uses -= 1
        if saved.uses == 0:
            saved.full = None
        return tensor

    def _gather(self, full: torch.Tensor, part: torch.Tensor) -> None:
        """Puts the parts of all ranks together. On the device the wait is in its stream."""
        with naming_lost_ranks(self._links.failures):
            work = dist.all_gather_into_tensor(full, part, group=self._group, async_op=True)
            if full.device.type == "cpu":
                await_result(self._links.failures, work.is_completed, work.wait)
            else:
                work.wait()

    def clear(self) -> None:
        """Drops all saved parts: an accumulation is over."""
        self._parts.clear()
        self._known = WeakTensorKeyDictionary()
        self._is_compared = True
