"""Norms of sums that rest on a device, measured on the host while the backward goes on.

The norm has the bits of plain PyTorch on the host wherever a gradient rests, and torch's own norm
on a device has others. So a complete sum is copied to spare host memory, and a thread of
`CompleteSums` waits for the copy and measures what has come. Of an embedding's gradient, which is
large and often the last one, only the rows that are not all zero leave the device: it has a row for
every token of the vocabulary, and a batch looks up few of them.

Note [Same bits]
  torch's 2-norm on the host adds the squares of contiguous elements in order, each lane of a vector
  register for itself, and then the lanes. A square of zero changes no sum. Without rows of zeros
  the other elements stay in their lanes if a row is a multiple of the lanes. `_LANES` is a multiple
  of the lanes of every processor that torch has kernels for. (Source:
  binary_kernel_reduce_lastdim and norm_two_reduce_step in ATen/native/cpu of PyTorch 2.13.)

Note [Copies of a sum that changes]
  Nothing waits for a copy but its task. Code that changes the sum ends the task first, as for a
  sum on the host (tensors.py, Note [Who reads a sum]), so what a copy brings of another content is
  never a norm. A sum that waits for memory is known by its stamp.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from infinity.sizes import MIB
from infinity.state.units import STATE_ITEM_NBYTES, TensorSpec
from infinity.streaming.gradients.tensors import CompleteSums, NormTask, TensorGradient
from infinity.tiers.device import Copy, DeviceAdapter
from infinity.tiers.host import Block, HostPool

_LABEL = "gradients that are measured"
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


@dataclass(frozen=True, slots=True)
class _Due:
    """A sum that has no copy yet. `stamp`: that of the content that is complete. `stream`: the one
    that has written it; None for a device without streams."""

    known: TensorGradient
    stamp: tuple[int, int]
    flat: torch.Tensor
    stream: Hashable | None
    is_dense: bool = False  # It is copied whole.


@dataclass(frozen=True, slots=True)
class _Searched:
    """A sum whose rows of zeros are being found. The block is for the other rows."""

    due: _Due
    block: Block
    search: RowSearch


@dataclass(frozen=True, slots=True)
class _Measured:
    """A sum that has a copy. The block is in use until the copy and the task are over, `order` is
    what the rows of the copy are picked by."""

    known: TensorGradient
    block: Block
    copy: Copy
    task: NormTask
    order: torch.Tensor | None = None


class RestingNorms:
    """The sums that are to be measured, and those that are searched or measured. Under the engine's
    lock.

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
        self._searched: dict[TensorSpec, _Searched] = {}
        self._measured: deque[_Measured] = deque()  # The oldest first.

    def note(self, spec: TensorSpec, known: TensorGradient, flat: torch.Tensor) -> None:
        """The norm of a sum is wanted. `flat`: fp32 (numel,) on the device, written by what the
        current stream has to do. Never waits."""
        if known.norm is None and known.task is None:
            stream = self._device.current_stream()
            if self._stamp(spec) != known.stamp:
                self._due[spec] = _Due(known, known.stamp, flat, stream)
            elif spec in self._due:  # The step asks: its stream follows those of the backward.
                self._due[spec] = replace(self._due[spec], stream=stream)
        self.advance()

    def advance(self) -> None:
        """Frees the memory of copies that were measured, and copies as many sums as have memory and
        were written by the current stream, because a copy follows that one. Never waits."""
        while self._measured and self._is_over(self._measured[0]):
            self._free_oldest()
        for spec, searched in list(self._searched.items()):
            if searched.search.count.done():
                self._end_search(spec)
        stream = self._device.current_stream()
        while self._due:
            first, due = next(iter(self._due.items()))
            is_elsewhere = due.known.stamp == due.stamp and due.stream != stream
            if is_elsewhere or not self._start(first):
                return

    def start(self, spec: TensorSpec) -> None:
        """Gives the sum a task, if it is due and memory can be had. Waits for others. The backward
        has ended: the current stream follows all of its streams."""
        self.advance()
        while spec in self._due or spec in self._searched:
            if spec in self._searched:
                self._end_search(spec)
            elif self._start(next(iter(self._due))):
                continue
            elif self._measured:
                self._end_oldest()
            elif self._searched:
                self._end_search(next(iter(self._searched)))
            else:
                del self._due[spec]  # There is no memory for it.

    def reclaim(self) -> bool:
        """Frees the oldest block, when its sum is measured; else one of a sum that has no task,
        which the step measures. False when there is none."""
        if self._measured:
            self._end_oldest()
        elif self._searched:
            _, searched = self._searched.popitem()
            searched.search.count.wait()
            self._free(searched.block)
        else:
            return False
        return True

    def clear(self) -> None:
        """Forgets all sums; their tasks were ended. Closing the device waits for the copies."""
        self._due.clear()
        self._searched.clear()
        self._measured.clear()

    def _stamp(self, spec: TensorSpec) -> tuple[int, int] | None:
        """That of the sum's content that is due, or else searched."""
        if spec in self._due:
            return self._due[spec].stamp
        return self._searched[spec].due.stamp if spec in self._searched else None

    def _start(self, spec: TensorSpec) -> bool:
        """Searches or copies a sum that is due, and has a copy measured. False where memory is not
        free, or another content of the sum is still searched."""
        due = self._due[spec]
        if due.known.stamp != due.stamp:
            del self._due[spec]
            return True
        if spec in self._searched:
            return False
        is_searched = not due.is_dense and may_have_rows_of_zeros(spec)
        all_nbytes = spec.numel * STATE_ITEM_NBYTES
        block = self._allocate(most_picked_nbytes(spec) if is_searched else all_nbytes)
        if block is None:
            return False
        del self._due[spec]
        with self._freed_after_error(block):
            if not is_searched:
                self._measure(spec, due, block, due.flat)
                return True
            with contextlib.suppress(torch.OutOfMemoryError):
                search = RowSearch(self._device, due.flat, spec, self._pool.tensor(block))
                self._searched[spec] = _Searched(due, block, search)
                return True
        self._leave_search_out(spec, due, block)
        return True

    def _end_search(self, spec: TensorSpec) -> None:
        """Copies the rows that are not all zero. Waits for their number."""
        searched = self._searched.pop(spec)
        due, block, search = searched.due, searched.block, searched.search
        search.count.wait()
        if due.known.stamp != due.stamp:
            self._free(block)
            return
        with self._freed_after_error(block):
            rows = None
            with contextlib.suppress(torch.OutOfMemoryError):
                rows = search.pick()
            if rows is not None:
                self._measure(spec, due, block, rows.flatten(), search.order)
                return
        self._leave_search_out(spec, due, block)

    def _leave_search_out(self, spec: TensorSpec, due: _Due, block: Block) -> None:
        """The sum is due without a search: many of its rows are not zero, or the device has no
        memory to search. Frees the block of the search."""
        self._free(block)
        self._due = {spec: replace(due, is_dense=True), **self._due}

    @contextmanager
    def _freed_after_error(self, block: Block) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._free(block)
            raise

    def _measure(
        self,
        spec: TensorSpec,
        due: _Due,
        block: Block,
        elements: torch.Tensor,
        order: torch.Tensor | None = None,
    ) -> None:
        nbytes = elements.numel() * STATE_ITEM_NBYTES
        on_host = self._pool.tensor(block)[:nbytes].view(torch.float32)
        copy = self._device.copy(elements, on_host)
        try:
            task = self._norms.start(spec, due.known, on_host, after=copy)
        except BaseException:
            copy.wait()  # The block is its own until then.
            raise
        self._measured.append(_Measured(due.known, block, copy, task, order))

    def _allocate(self, nbytes: int) -> Block | None:
        if self._nbytes and self._nbytes + nbytes > self._most_nbytes:
            return None
        block = self._pool.try_allocate(nbytes, _LABEL)
        self._nbytes += 0 if block is None else block.nbytes
        return block

    def _free(self, block: Block) -> None:
        self._nbytes -= block.nbytes
        self._pool.free(block)

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
        self._free(self._measured.popleft().block)
