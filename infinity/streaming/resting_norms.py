"""Norms of sums that rest on a device, measured on the host while the backward goes on.

The norm has the bits of plain PyTorch on the host wherever a gradient rests, and torch's own norm
on a device has others. So a complete sum is copied to spare host memory, and a thread of
`NormThreads` waits for the copy and measures what has come.

Note [Copies of a sum that changes]
  Nothing waits for a copy but its task. Who changes the sum ends the task first, as for a sum on
  the host (Note [Who reads a sum]), so what a copy brings of another content is never a norm. A sum
  that waits for memory is known by its stamp.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from infinity.state.units import STATE_ITEM_NBYTES, TensorSpec
from infinity.streaming.gradient_norms import CompleteSums
from infinity.streaming.gradient_sums import TensorGradient
from infinity.streaming.norm_tasks import NormTask
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tiers.host import Block
from infinity.tiers.pool import HostPool

_LABEL = "gradients that are measured"


@dataclass(frozen=True, slots=True)
class _Due:
    """A sum that has no copy yet. `stamp`: that of the content that is complete."""

    known: TensorGradient
    stamp: tuple[int, int]
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Measured:
    """A sum that has a copy. The block is in use until the copy and the task are over."""

    known: TensorGradient
    block: Block
    copy: Copy
    task: NormTask


class RestingNorms:
    """The sums that are to be measured, and those whose copies are. Under the engine's lock.

    `most_nbytes`: host memory of all copies; one sum may have more. Where memory is not free a sum
    has no copy, and its norm is not known before the step asks.
    """

    def __init__(
        self, device: DeviceAdapter, pool: HostPool, norms: CompleteSums, most_nbytes: int
    ) -> None:
        self._device = device
        self._pool = pool
        self._norms = norms
        self._most_nbytes = most_nbytes
        self._nbytes = 0  # Of all blocks.
        self._due: dict[TensorSpec, _Due] = {}  # Without a copy, in the order in which they came.
        self._measured: deque[_Measured] = deque()  # The oldest first.

    def note(self, spec: TensorSpec, known: TensorGradient, flat: torch.Tensor) -> None:
        """The norm of a sum is wanted. `flat`: fp32 (numel,) on the device, written by what the
        current stream has to do. Never waits."""
        if known.norm is None and known.task is None:
            self._due[spec] = _Due(known, known.stamp, flat)
            self.advance()

    def advance(self) -> None:
        """Frees the memory of copies that were measured, and copies as many sums as have memory.
        Never waits."""
        while self._measured and self._is_over(self._measured[0]):
            self._free_oldest()
        while self._due and self._start(next(iter(self._due))):
            pass

    def start(self, spec: TensorSpec) -> None:
        """Gives the sum a task, if it is due and memory can be had. Waits for others."""
        self.advance()
        while spec in self._due:
            if self._start(next(iter(self._due))):
                continue
            if not self._measured:
                del self._due[spec]  # There is no memory for it.
                return
            self._end_oldest()

    def reclaim(self) -> bool:
        """Frees the oldest block, when its sum is measured. False when there is none."""
        if not self._measured:
            return False
        self._end_oldest()
        return True

    def clear(self) -> None:
        """Forgets all sums; their tasks were ended. Who closes the device waits for the copies."""
        self._due.clear()
        self._measured.clear()

    def _start(self, spec: TensorSpec) -> bool:
        """Copies a sum that is due, and has it measured. False where memory is not free."""
        due = self._due[spec]
        if due.known.stamp != due.stamp:
            del self._due[spec]
            return True
        nbytes = spec.numel * STATE_ITEM_NBYTES
        if self._nbytes and self._nbytes + nbytes > self._most_nbytes:
            return False
        block = self._pool.try_allocate(nbytes, _LABEL)
        if block is None:
            return False
        del self._due[spec]
        on_host = self._pool.tensor(block)[:nbytes].view(torch.float32)
        copy = self._device.copy(due.flat, on_host)
        due.known.task = task = self._norms.start(on_host, spec, after=copy)
        self._measured.append(_Measured(due.known, block, copy, task))
        self._nbytes += block.nbytes
        return True

    def _is_over(self, measured: _Measured) -> bool:
        return measured.task.is_over() and measured.copy.done()

    def _end_oldest(self) -> None:
        """Raises what the task has raised; the block is free at the next call then."""
        oldest = self._measured[0]
        if oldest.known.task is oldest.task:
            oldest.known.finish_task()
        oldest.copy.wait()
        self._free_oldest()

    def _free_oldest(self) -> None:
        block = self._measured.popleft().block
        self._nbytes -= block.nbytes
        self._pool.free(block)
