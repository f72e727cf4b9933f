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
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """Returns a sum of the bits that depends on the order of rows. int64, on its device."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.layout != torch.strided or values.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=values.device)
    rows = values.reshape(-1, values.shape[-1] if values.dim() else 1).contiguous()
    size, start = rows.dtype.itemsize, rows.storage_offset()
    if rows.shape[-1] * size % 8 == 0 and start * size % 8 == 0:
        sums = rows.view(torch.int64).sum(-1)  # Without a cast: a tenth of the time.
    else:
        sums = rows.view(_INTEGERS[size]).sum(-1, dtype=torch.int64)
    weights = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return (sums * weights).sum()
