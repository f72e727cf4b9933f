"""The fp32 value behind a narrower parameter, tensor by tensor, outside the optimizer's stream.

Beside bf16 it is kept as a residual, beside fp16 as the full value (`Unit.master_dtype`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from typing_extensions import override

from infinity.ops.exact import join, split
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.state.store import StateStore, await_end
from infinity.state.units import StateKind, TensorSpec, Unit
from infinity.storage.protocol import Priority, Transfer
from infinity.tiers.host import HostPool

# Splitting makes a few temporaries of the elements it works on.
_SPLIT_NUMEL = 1 << 22


class MasterWeights(Protocol):
    """Reads and writes masters of the model's tensors.

    Local: `Masters`. Over ranks: `distributed.step.DistributedMasters`. Called under the engine's
    lock. `narrow`: the tensor's weight on the host, flat, in memory order and in its own dtype.
    """

    def has(self, unit: Unit, spec: TensorSpec) -> bool:
        """Whether the update starts from more than the weight.

        With fp32 masters it starts from them for every tensor of the unit, fp32 tensors included.
        """

    def read(self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the fp32 value: flat, on the host."""

    def write(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Sets the value to a flat host tensor of any float dtype; `narrow` gets its rounding."""

    def follow(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        """Takes over a changed weight. Elements that equal those of `before` keep their value.

        before: the weight before the change; without it every element of a split master has changed
        """


class Masters(MasterWeights):
    """Masters of tensors whose state this process owns."""

    def __init__(self, store: StateStore, pool: HostPool) -> None:
        self._store = store
        self._pool = pool

    @override
    def has(self, unit: Unit, spec: TensorSpec) -> bool:
        if unit.master_dtype is None or spec.state_offset < 0:
            return False
        return unit.has_full_master or spec.facts.dtype is not torch.float32

    @override
    def read(self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor) -> torch.Tensor:
        with self._lent(unit, spec, keep=False) as flat:
            return join(narrow, flat) if unit.has_residual else flat.clone()

    @override
    def write(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, value: torch.Tensor
    ) -> None:
        with self._lent(unit, spec, keep=True) as flat:
            for start in range(0, spec.numel, _SPLIT_NUMEL):
                part = slice(start, start + _SPLIT_NUMEL)
                wide = value[part].to(torch.float32)
                if unit.has_residual:
                    narrow[part], flat[part] = split(wide)
                else:
                    narrow[part] = flat[part] = wide

    @override
    def follow(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        with self._lent(unit, spec, keep=True) as flat:
            if not unit.has_residual:
                unchanged = flat.to(narrow.dtype) == narrow
                flat.copy_(torch.where(unchanged, flat, narrow.float()))
            elif before is None:
                flat.zero_()
            else:
                flat.masked_fill_(narrow.view(torch.int16) != before.view(torch.int16), 0)

    @contextmanager
    def _lent(self, unit: Unit, spec: TensorSpec, *, keep: bool) -> Iterator[torch.Tensor]:
        """Lends the tensor's part of the master, flat. With `keep` changes are stored."""
        assert unit.master_dtype is not None
        start = unit.nbytes(StateKind.MASTER, spec.state_offset)
        stop = start + unit.nbytes(StateKind.MASTER, spec.numel)
        host_view = self._store.host_view(unit, StateKind.MASTER)
        if host_view is not None:
            yield host_view[start:stop].view(unit.master_dtype)
            return
        low, high = align_down(start, PAGE_NBYTES), align_up(stop, PAGE_NBYTES)
        if low == high:
            yield torch.empty(0, dtype=unit.master_dtype, device="cpu")
            return
        block = self._pool.require(high - low, f"master of {spec.name}")
        transfer: Transfer | None = None
        try:
            kind, nbytes = StateKind.MASTER, high - low
            transfer = self._store.read(
                unit, kind, block, priority=Priority.STATE, offset_nbytes=low, nbytes=nbytes
            )
            transfer.wait()
            yield self._pool.tensor(block)[start - low : stop - low].view(unit.master_dtype)
            if keep:
                transfer = self._store.write(unit, kind, block, offset_nbytes=low, nbytes=nbytes)
                transfer.wait()
        finally:
            await_end(transfer)
            self._pool.free(block)
