"""Reads and writes parameters by name, outside their modules.

A tiled parameter has a name of its own; its tiles have names, too. Each method takes both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.modules.autograd.grads import ParamGrads
from infinity.modules.autograd.param import ParamTable
from infinity.modules.autograd.uses import UnitUses
from infinity.modules.handles.edits import WeightEdits
from infinity.modules.handles.handle import Handle
from infinity.modules.handles.handle_tensor import is_value_of, plain_value, refuse_swap
from infinity.modules.handles.originals import Originals
from infinity.modules.handles.patches import refuse_swaps
from infinity.modules.interrupts import uninterrupted
from infinity.state.units import TensorSpec


class ParamAccess:
    """The parameters of one model by name. Takes the engine's lock.

    `setting` is the section in which all ranks set weights; `reset` releases what an interrupted
    pass has left in use.
    """

    def __init__(
        self,
        param_table: ParamTable,
        uses: UnitUses,
        edits: WeightEdits,
        grads: ParamGrads,
        lock: threading.RLock,
        *,
        setting: Callable[[Sequence[int]], AbstractContextManager[None]],
        reset: Callable[[], None],
    ) -> None:
        self._param_table = param_table
        self._uses = uses
        self._edits = edits
        self._grads = grads
        self._lock = lock
        self._setting = setting
        self._reset = reset

    def tile_rows(self, name: str) -> list[tuple[str, int, int]]:
        """Returns (name, first row, end) of every tile of a parameter; one entry if it is not
        tiled."""
        tiled = self._param_table.tiled.get(name)
        if tiled is None:
            shape = self.spec(name).facts.shape
            return [(name, 0, shape[0] if shape else 1)]
        names = [handle.name_in_model for handle in tiled.handles]
        return list(zip(names, tiled.starts, tiled.starts[1:], strict=False))

    def follow(self, originals: Originals) -> None:
        """Makes the user's own parameters the handles; see `Originals.follow`."""
        self._param_table.refresh(is_referenced=False)
        originals.follow(self._param_table.handle, self._param_table.replace_handle)
        self._param_table.refresh()
        params = self._param_table.params
        own = [tensor for param in params for tensor in (param.handle, param.compute)]
        refuse_swaps([*own, *(tiled.tensor for tiled in self._param_table.tiled.values())])

    def spec(self, name: str) -> TensorSpec:
        """Returns shape, stride, dtype and offset of an untiled parameter or of a tile."""
        return self._param_table.named(name).spec

    def read_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of the gradient summed so far (fp32, on the host), or None."""
        if name in self._param_table.tiled:
            parts = [self.read_gradient(tile) for tile, _, _ in self.tile_rows(name)]
            there = [part for part in parts if part is not None]
            return torch.cat(there) if len(there) == len(parts) else None
        return self._grads.read(self._param_table.named(name))

    def read(self, name: str, *, master: bool = False) -> torch.Tensor:
        """Returns a copy on the host: in the compute dtype, or (`master`) the fp32 master value."""
        if name in self._param_table.tiled:
            tiles = self.tile_rows(name)
            return torch.cat([self.read(tile, master=master) for tile, _, _ in tiles])
        param = self._param_table.named(name)
        with self._lock:
            with self._uses.using([param.unit.index]):
                copy = param.compute.detach().to("cpu", copy=True)
            is_wide = master and copy.is_floating_point()
            return self._edits.read_wide(param, copy) if is_wide else copy

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces the value of a parameter and its master. Any dtype; the shape of the
        parameter."""
        tensor = plain_value(tensor)
        tiled = self._param_table.tiled.get(name)
        shape = tuple(self.spec(name).facts.shape if tiled is None else tiled.tensor.shape)
        if tuple(tensor.shape) != shape:
            raise InfinityError(f"{name!r} has shape {shape}, got {tuple(tensor.shape)}")
        if tiled is not None:
            for tile, start, stop in self.tile_rows(name):
                self.write(tile, tensor[start:stop])
            return
        param = self._param_table.named(name)
        with uninterrupted(), self._lock, torch.no_grad(), self._setting([param.unit.index]):
            self._reset()
            self._edits.write_one(param, tensor)

    def take_loaded(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any
    ) -> None:
        """Writes the values of a `load_state_dict` call to their tiers, before the module sees
        them. The module then finds its own handles in the dict and copies nothing."""
        for attribute, tensor in module._parameters.items():
            value = state_dict.get(prefix + attribute)
            if not isinstance(tensor, Handle) or not isinstance(value, torch.Tensor):
                continue
            if torch.__future__.get_swap_module_params_on_conversion():
                refuse_swap(tensor)
            if value.shape == tensor.shape:
                if not is_value_of(value, tensor):
                    self.write(tensor.name_in_model, value)
                state_dict[prefix + attribute] = tensor
