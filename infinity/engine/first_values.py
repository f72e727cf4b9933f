"""First values: those of the model, those of files, and those that are initialised or computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from infinity.engine.engine import Engine
from infinity.errors import ConfigError, listed
from infinity.modules.autograd.param import OffloadedParam
from infinity.modules.reading.adapters import (
    adapter_modules,
    copied_parameters,
    derive,
    derived_parameters,
    rows_to_come,
    values_of_adapters,
)
from infinity.modules.reading.dtypes import models_in
from infinity.modules.reading.empty_weights import is_to_come
from infinity.modules.reading.load_plan import LoadPlan
from infinity.tiers.device import DeviceAdapter


def values_to_come(engine: Engine) -> list[tuple[OffloadedParam, torch.Tensor]]:
    """Returns the parameters, with their originals, whose values are those of files or of a seed.

    Some have values already: `infinity.init_empty_weights` builds small ones, which files replace.
    """
    kept = values_of_adapters(engine.model)
    return [
        (param, param.original)
        for param in engine.params
        if param.original is not None
        and is_to_come(param.original)
        and id(param.original) not in kept
    ]


def fill(engine: Engine, weights: LoadPlan | None, seed: int) -> None:
    """Fills the tiers: first values that are in memory, then values that are read or
    initialised."""
    names = {id(param.original): param.name for param in engine.params}
    wanted = {names[derived]: place for derived, place in derived_parameters(engine.model).items()}
    rows = rows_to_come(engine.model)
    replaced = values_to_come(engine)
    to_come = wanted.keys() | {param.name for param, _ in replaced}
    without = {param.name for param, original in replaced if original.is_meta}
    copies = [(names[id(copy)], names[id(own)]) for copy, own in copied_parameters(engine.model)]
    in_place = {spec.name for unit in engine.store.units if unit.stored for spec in unit.tensors}
    own_values = {
        tiled.handles[index].name_in_model: value
        for tiled in engine.tiled_params.values()
        for index, value in tiled.own.items()
    }
    in_place |= own_values.keys()  # `weights` need not read these, either.
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
    for name, value in own_values.items():
        engine.write_parameter(name, value())
    # A copy gets the value of its original, and draws no number: in memory it has drawn none.
    missing = to_come - wanted.keys() - {copy for copy, _ in copies}
    if missing if weights is not None else missing & without:
        _initialise(engine, missing, without, seed)
    engine.flush()
    engine.ranks.sync_first_weights()  # What follows reads values that other ranks have written.
    for copy, own in copies:
        if copy in to_come:
            engine.write_parameter(copy, engine.read_parameter(own))
    handles = {id(param.handle): param.name for param in engine.params}
    derive(
        {name: place for name, place in wanted.items() if name in to_come},
        rows,
        read=lambda tensor: engine.read_parameter(handles[id(tensor)]),
        write=engine.write_parameter,
    )
    engine.flush()


def _with_tiled(names: set[str], engine: Engine) -> set[str]:
    """Returns the names, and those of tiled parameters with all tiles among them."""
    tiled = {
        name
        for name in engine.tiled_params
        if all(tile in names for tile, _, _ in engine.tile_rows(name))
    }
    return names | tiled


def _initialise(engine: Engine, missing: set[str], without: set[str], seed: int) -> None:
    """Initialises the `missing` parameters by their modules' own rules. The parameters `without`
    any value must have a rule.

    Rules run on modules that `init_empty_weights` has built, not on modules attached later, which
    have values. The same seed gives the same values for every placement: operations and their order
    are the model's, only their memory differs.
    """
    names = {
        id(tensor): param.name
        for param in engine.params
        for tensor in (param.handle, param.compute)
    }
    adapters = {id(module) for module in adapter_modules(engine.model)}
    waiting = [param for param in engine.params if param.name in missing & without]
    before = {param.name: _changes_of(param) for param in waiting}
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        engine.handle_ops.initialising(engine.ranks.refuse_unknown),
        _marked(engine, missing),
    ):
        torch.manual_seed(seed)
        covered: set[int] = set()
        for model in models_in(engine.model):
            for module in model.modules():
                # A model built without memory claims to be initialised; adapters are.
                module._is_hf_initialized = id(module) in adapters
            model.initialize_weights()
            covered.update(id(child) for child in model.modules())
        for name, module in engine.model.named_modules():
            own = {names[id(p)] for p in module._parameters.values() if p is not None}
            if id(module) not in covered and own & missing:
                _reset(name, module, kept=own - missing, needs=own & without)
    left = sorted(param.name for param in waiting if _changes_of(param) == before[param.name])
    if left:
        raise ConfigError(
            f"{listed(left)} were built without memory, and no initialisation of "
            f"{type(engine.model).__name__} gives them values; give offload(weights=...), or build "
            "their modules outside infinity.init_empty_weights()"
        )


def _changes_of(param: OffloadedParam) -> tuple[int, int]:
    return param.compute._version, param.changes


def _reset(name: str, module: nn.Module, *, kept: set[str], needs: set[str]) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None and not kept:
        reset()
    elif needs and kept:
        raise ConfigError(
            f"{listed(sorted(needs))} have no value, and reset_parameters() of "
            f"{type(module).__name__} would also change {listed(sorted(kept))}; give "
            "offload(weights=...) all of them or none"
        )
    elif needs:
        raise ConfigError(
            f"{name or type(module).__name__} was built without memory and has no "
            "reset_parameters() to initialise it; give offload(weights=...), add the method, or "
            "build it outside infinity.init_empty_weights()"
        )


@contextmanager
def _marked(engine: Engine, names: set[str]) -> Iterator[None]:
    """Marks parameters that have values, so that transformers' initialisation skips them."""
    parameters = [
        (tensor, param.name) for param in engine.params for tensor in (param.handle, param.compute)
    ]
    for tensor, name in parameters:
        tensor._is_hf_initialized = name not in names  # type: ignore[union-attr]
    try:
        yield
    finally:
        for tensor, _ in parameters:
            del tensor._is_hf_initialized  # type: ignore[union-attr]


def move_buffers(model: nn.Module, device: DeviceAdapter) -> None:
    """Moves every buffer of the model to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch_device)
