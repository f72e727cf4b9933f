"""Divides a model into hooked modules and units.

A *hooked module* is a module whose forward and backward need weights: a child of an outermost block
list, or any other module that owns parameters. A *unit* is a set of parameters that the same hooked
modules need, so the parameters that move together are used together. The weights of a block are one
unit. A weight tied between embedding and head is another, and so is a block that several layers
share. Frozen and trainable parameters are separate units: an adapter is read, updated and saved
without its base model, and without other adapters that are trained. A tile of an operator that is
too large for one unit (`modules/tiling/split.py`) is a hooked module, also inside a block.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from infinity.errors import UnsupportedError
from infinity.modules.reading.adapters import adapter_of, names_of_adapters
from infinity.modules.reading.empty_weights import without_class
from infinity.modules.tiling.layers import Tiled
from infinity.state.nesting import Nesting

UnitRule = Literal["auto"] | Sequence[str]

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(eq=False, slots=True)
class Registration:
    """One place where a parameter is registered."""

    module: nn.Module
    attribute: str


@dataclass(eq=False, slots=True)
class FoundParam:
    """A parameter, the places where it is registered, and the hooked modules that use it."""

    name: str
    parameter: nn.Parameter
    registrations: list[Registration] = field(default_factory=list)
    hooked_modules: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class HookedModule:
    """A module that needs units while it runs."""

    name: str
    module: nn.Module
    is_block: bool  # One of a list of equal modules, or named as a block by the user.
    units: list[int] = field(default_factory=list)  # In their order; `ModelLayout` fills it.


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The hooked modules of a model, and its parameters grouped into units, in model order.
    `chains`: see `Nesting`."""

    root: nn.Module
    hooked_modules: list[HookedModule]
    units: list[tuple[str, list[FoundParam]]]
    chains: list[tuple[int, ...]]

    def __post_init__(self) -> None:
        for hooked in self.hooked_modules:
            hooked.units.clear()
        for index, (_, members) in enumerate(self.units):
            for number in members[0].hooked_modules:
                self.hooked_modules[number].units.append(index)

    @property
    def nesting(self) -> Nesting:
        """The units that modules need inside one another."""
        blocks = {i for i, hooked in enumerate(self.hooked_modules) if hooked.is_block}
        return Nesting(self.chains, [hooked.units for hooked in self.hooked_modules], blocks)


def discover_units(
    model: nn.Module,
    rule: UnitRule = "auto",
    *,
    stored: Container[int] = frozenset(),
    adapters: Container[int] = frozenset(),
) -> ModelLayout:
    """Finds hooked modules and units.

    rule: "auto" takes the children of block lists as blocks. A list of class names or name patterns
    (fnmatch) names the block modules instead.
    stored: ids of the parameters that rest in a checkpoint. They share no unit with others
    adapters: ids of parameters of adapters. A frozen one shares no unit with the base, so that
    saving it reads nothing of the base
    """
    is_block = _block_test(model, rule)
    walk = _Walk([], {}, {}, set(), [])
    _visit(model, "", None, (), is_block, walk)
    hooked_modules, found = walk.hooked_modules, walk.found
    groups: dict[tuple[tuple[int, ...], str], list[FoundParam]] = {}
    names = names_of_adapters(model)
    for param in found.values():
        kind = "frozen"
        if param.parameter.requires_grad:
            adapter = adapter_of(param.name, names) if len(names) > 1 else ""
            kind = f"trained {adapter}".strip()
        elif id(param.parameter) in stored:
            kind = "stored"
        elif id(param.parameter) in adapters:
            kind = "frozen adapter"
        groups.setdefault((tuple(param.hooked_modules), kind), []).append(param)
    units = []
    kinds = [*dict.fromkeys(kind for _, kind in groups if kind not in _FROZEN), *_FROZEN]
    for (used_by, kind), members in groups.items():
        name = _unit_name(members, hooked_modules)
        # Names of units are unique, because a commit finds a unit by its name.
        is_second = any((used_by, other) in groups for other in kinds[: kinds.index(kind)])
        units.append((f"{name} ({kind})" if is_second else name, members))
    return ModelLayout(model, hooked_modules, units, walk.chains)


# Parameters of different kinds share no unit. The first that a module has, trained ones before
# these, gives its unit the name of the module.
_FROZEN = ("frozen", "stored", "frozen adapter")


def _block_test(model: nn.Module, rule: UnitRule) -> Callable[[str, nn.Module], bool]:
    if rule == "auto":
        blocks = {id(module) for module in _blocks(model)}
        return lambda name, module: id(module) in blocks
    patterns = list(rule)
    return lambda name, module: any(
        type(module).__name__ == pattern or fnmatchcase(name, pattern) for pattern in patterns
    )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the callable children of the outermost module lists. Walks through lists of lists;
    tiles are no blocks.

    The lists of a PEFT layer are none: an adapter outside of the blocks, such as that of a head, is
    one of two paths from the same input, whose gradients are summed before that input.
    """
    if isinstance(module, Tiled):
        return
    is_adapter = "_disable_adapters" in module.__dict__
    if isinstance(module, _LISTS):
        for child in module.children():
            if isinstance(child, _LISTS):
                yield from _blocks(child)
            else:
                yield child
        return
    for child in module.children():
        if not (is_adapter and isinstance(child, _LISTS)):
            yield from _blocks(child)


@dataclass(frozen=True, slots=True)
class _Walk:
    """Everything that `_visit` has found so far. `places` has, by the id of a module, its index
    among `hooked_modules`; `found` is by the id of a parameter, `seen` has ids of modules."""

    hooked_modules: list[HookedModule]
    places: dict[int, int]
    found: dict[int, FoundParam]
    seen: set[int]
    chains: list[tuple[int, ...]]


def _visit(
    module: nn.Module,
    name: str,
    block: int | None,
    chain: tuple[int, ...],
    is_block: Callable[[str, nn.Module], bool],
    walk: _Walk,
) -> None:
    """Walks depth-first in registration order. `block` is the hooked module of the surrounding
    block, `chain` has all hooked modules around this one."""
    own = {key: value for key, value in module._parameters.items() if value is not None}
    hooked = block
    if hooked is None:
        starts_block = is_block(name, module) and any(True for _ in module.parameters())
        if starts_block or own:
            hooked = walk.places.setdefault(id(module), len(walk.hooked_modules))
            if hooked == len(walk.hooked_modules):
                walk.hooked_modules.append(
                    HookedModule(name or type(module).__name__, module, starts_block)
                )
            chain = (*chain, hooked)
            walk.chains.append(chain)
            if starts_block:
                block = hooked
    for attribute, parameter in own.items():
        full_name = f"{name}.{attribute}" if name else attribute
        param = walk.found.setdefault(id(parameter), FoundParam(full_name, parameter))
        if id(module) not in walk.seen:
            param.registrations.append(Registration(module, attribute))
        assert hooked is not None
        if hooked not in param.hooked_modules:
            param.hooked_modules.append(hooked)
    walk.seen.add(id(module))
    if isinstance(module, Tiled):
        block, is_block = None, lambda *_: False
    for child_name, child in module.named_children():
        # `named_children` yields a module once per parent that registers it. That is intended: the
        # places may belong to different blocks.
        full_name = f"{name}.{child_name}" if name else child_name
        _visit(child, full_name, block, chain, is_block, walk)


def _unit_name(members: list[FoundParam], hooked_modules: list[HookedModule]) -> str:
    first = members[0]
    if len(first.hooked_modules) == 1:
        return hooked_modules[first.hooked_modules[0]].name
    return first.name


def storage_strides(
    found: FoundParam, dtype: torch.dtype, device_type: str | None
) -> tuple[int, ...]:
    """Returns the strides that a parameter keeps on its tier: those that it has in plain PyTorch,
    converted to `dtype` on `device_type` (None: on its own).

    Raises UnsupportedError for a parameter with gaps or overlaps. A tier has neither, and kernels
    round otherwise where strides differ.
    """
    parameter = without_class(found.parameter)
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.stride())
    is_converted = dtype is not parameter.dtype or device_type not in (None, parameter.device.type)
    if parameter.is_meta or is_converted:
        return tuple(torch.empty_like(parameter, device="meta").stride())
    raise UnsupportedError(
        f"expected a parameter that fills its memory, got {found.name!r} with shape "
        f"{tuple(parameter.shape)} and strides {parameter.stride()}, a view with gaps or overlaps; "
        "give it its own memory before infinity.offload: "
        "nn.Parameter(weight.detach().contiguous(), requires_grad=weight.requires_grad)"
    )
