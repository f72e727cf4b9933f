"""Reading and writing the fp32 master copy of single tensors, outside the optimizer's stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.state.store import StateStore
from infinity.state.units import STATE_ITEM_NBYTES, Piece, TensorSpec, Unit
from infinity.storage.engine import Priority
from infinity.tiers.pool import HostPool


class MasterWriter:
    """Masters of trainable tensors of units that have them. Called under the engine's lock."""

    def __init__(self, store: StateStore, pool: HostPool) -> None:
        self._store = store
        self._pool = pool

    def read(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """A copy: fp32, the parameter's shape, on the host."""
        with self._lent(unit, spec, keep=False) as flat:
            return flat.clone().as_strided(spec.facts.shape, spec.facts.stride)

    def write(self, unit: Unit, spec: TensorSpec, value: torch.Tensor) -> None:
        with self._lent(unit, spec, keep=True) as flat:
            flat.as_strided(spec.facts.shape, spec.facts.stride).copy_(value)

    def follow(self, unit: Unit, spec: TensorSpec, weights: torch.Tensor) -> None:
        """Takes over weights that were changed; where they still are the rounded master, it
        stays."""
        start = spec.weight_offset_nbytes
        narrow = weights[start : start + spec.weight_nbytes].view(spec.facts.dtype)
        with self._lent(unit, spec, keep=True) as flat:
            unchanged = flat.to(narrow.dtype) == narrow
            flat.copy_(torch.where(unchanged, flat, narrow.float()))

    @contextmanager
    def _lent(self, unit: Unit, spec: TensorSpec, *, keep: bool) -> Iterator[torch.Tensor]:
        """The tensor's master as flat fp32; what is changed goes back when `keep`."""
        start = spec.state_offset * STATE_ITEM_NBYTES
        stop = start + spec.numel * STATE_ITEM_NBYTES
        resting = self._store.resting(unit, Piece.MASTER)
        if resting is not None:
            yield resting[start:stop].view(torch.float32)
            return
        low, high = align_down(start, PAGE_NBYTES), align_up(stop, PAGE_NBYTES)
        if low == high:
            yield torch.empty(0)
            return
        block = self._pool.require(high - low, f"master of {spec.name}")
        try:
            place = {"offset_nbytes": low, "nbytes": high - low}
            read = self._store.read(unit, Piece.MASTER, block, priority=Priority.STATE, **place)
            read.wait()
            yield self._pool.tensor(block)[start - low : stop - low].view(torch.float32)
            if keep:
                self._store.write(unit, Piece.MASTER, block, **place).wait()
        finally:
            self._pool.free(block)
