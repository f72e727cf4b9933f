"""Proof that a repeated forward gives what the first forward gave.

A block that is no function of its arguments (it reads something that has changed since) would give
wrong gradients in silence. The outputs of both forwards are therefore reduced to checksums on the
device. They are compared once, at the end of the backward, so no forward waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from infinity.errors import UnsupportedError

Checksums: TypeAlias = list[torch.Tensor | None]

_NUM_YOUNG = 8
_NUM_COLUMNS = 512
_FAR = 0x9E3779B97F4A7C15 - (1 << 64)  # Odd, and far from any weight of a row.


class Proof:
    """Compares the forwards of windows, calls of `forward_backward`: of all micro-batches in the
    first windows, later of one, which changes from window to window. An engine has one."""

    def __init__(self) -> None:
        self.written: set[str] = set()  # Names of buffers that blocks have written.
        self._num_windows = 0  # That have ended.
        self._num_micro_batches = 1
        self._pairs: list[tuple[str, Checksums, Checksums]] = []

    @property
    def is_young(self) -> bool:
        """Whether the first windows run, in which everything is compared."""
        return self._num_windows < _NUM_YOUNG

    @property
    def is_alone(self) -> bool:
        """Whether the window has one micro-batch, so that nothing can mix."""
        return self._num_micro_batches == 1

    def begin(self, num_micro_batches: int) -> None:
        """Begins a window."""
        self._num_micro_batches = num_micro_batches
        self._pairs.clear()

    def is_compared(self, micro_batch: int) -> bool:
        """Whether the outputs of the micro-batch with this number are compared."""
        return self.is_young or micro_batch == self._num_windows % self._num_micro_batches

    def compare(self, block: str, first: Checksums, outputs: Sequence[Any]) -> None:
        """Notes the outputs of a repeated forward, and the checksums of those of the first one."""
        self._pairs.append((block, first, checksums(outputs)))

    def end(self) -> None:
        """Raises UnsupportedError for the first block whose forwards differ. Waits for the
        device."""
        self._num_windows += 1
        pairs, self._pairs = self._pairs, []
        for block, first, repeated in pairs:
            if [s is None for s in first] != [s is None for s in repeated]:
                raise _differs(f"{block} gave other outputs")
        found = [
            (f"{block} gave another tensor as its output {index}", s, t)
            for block, first, repeated in pairs
            for index, (s, t) in enumerate(zip(first, repeated, strict=True))
            if s is not None and t is not None
        ]
        if not found:
            return
        sums = torch.stack([s for _, s, _ in found]), torch.stack([t for _, _, t in found])
        differing = torch.ne(*sums).nonzero()
        if len(differing):
            raise _differs(found[int(differing[0])][0])


def checksums(outputs: Sequence[Any]) -> Checksums:
    """Returns the checksums of outputs; None for an output that is no tensor."""
    return [_checksum(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in outputs]


def _differs(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} when its forward was repeated for the backward, so these gradients "
        "are wrong: it reads something that has changed since (an object outside of its modules, "
        "an argument that was changed later, an operation that is not deterministic). Call "
        "zero_grad(), and accumulate micro-batches by several backward() calls instead"
    )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sum of the bits that depends on the place of each. int64, on its device.

    Eight bytes are a word, and words stand in rows. A word counts by its row and by its column, so
    no product of the size of the tensor is made.
    """
    values = tensor.detach()
    if values.layout != torch.strided or values.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=values.device)
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    if values.storage_offset() * values.dtype.itemsize % 8:
        values = values.clone()  # Words begin at multiples of their size.
    flat = values.view(torch.uint8)
    num_rows, num_left = divmod(len(flat), 8 * _NUM_COLUMNS)
    left = flat[len(flat) - num_left :].to(torch.int64)
    words = flat[: len(flat) - num_left].view(torch.int64).view(num_rows, _NUM_COLUMNS)
    weights = torch.arange(3, 2 * max(num_rows, 8 * _NUM_COLUMNS) + 3, 2, device=values.device)
    by_row, by_column = words.sum(1) * weights[:num_rows], words.sum(0) * weights[:_NUM_COLUMNS]
    return by_row.sum() + _FAR * by_column.sum() + (left * weights[:num_left]).sum()
