"""First values: those of the model, those of files, and those that are initialised or computed."""

from __future__ import annotations

import torch
from torch import nn

from infinity.engine.adapters import (
    copied_parameters,
    derive,
    derived_parameters,
    values_of_adapters,
)
from infinity.engine.engine import Engine
from infinity.engine.load_plan import LoadPlan
from infinity.engine.meta_init import initialise
from infinity.modules.awaited import is_to_come
from infinity.tiers.device import DeviceAdapter


def fill(engine: Engine, weights: LoadPlan | None, seed: int) -> None:
    """Fills the tiers: first values that are in memory, then values that are read or
    initialised."""
    names = {id(param.original): param.name for param in engine.params}
    wanted = {names[derived]: place for derived, place in derived_parameters(engine.model).items()}
    kept, without, to_come = values_of_adapters(engine.model), set[str](), set(wanted)
    for param in engine.params:
        original = param.original
        if original is not None and is_to_come(original) and id(original) not in kept:
            to_come.add(param.name)
            if original.is_meta:
                without.add(param.name)
    copies = [(names[id(copy)], names[id(own)]) for copy, own in copied_parameters(engine.model)]
    in_place = {spec.name for unit in engine.store.units if unit.stored for spec in unit.tensors}
    to_come -= in_place
    without -= in_place
    for unit in engine.store.units:
        if unit.stored is None:
            engine.fill(unit)
    engine.install()
    if weights is not None:

        def write(name: str, tensor: torch.Tensor) -> None:
            engine.write_parameter(name, tensor)
            written = {tile for tile, _, _ in engine.tile_rows(name)}
            to_come.difference_update(written)
            without.difference_update(written)

        weights.load(write, engine.tile_rows, _with_tiled(in_place, engine))
    if (without if weights is None else to_come) - wanted.keys():
        initialise(engine, to_come - wanted.keys(), without, seed)
    for copy, own in copies:
        if copy in to_come:
            engine.write_parameter(copy, engine.read_parameter(own))
    derive(engine, {name: place for name, place in wanted.items() if name in to_come})
    engine.flush()


def _with_tiled(names: set[str], engine: Engine) -> set[str]:
    """Returns the names, and those of tiled parameters with all tiles among them."""
    tiled = {
        name
        for name in engine.tiled_params
        if all(tile in names for tile, _, _ in engine.tile_rows(name))
    }
    return names | tiled


def move_buffers(model: nn.Module, device: DeviceAdapter) -> None:
    """Moves every buffer of the model to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch_device)
