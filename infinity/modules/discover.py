"""How a model falls apart into sites and units.

A *site* is a module whose forward and backward need weights: a child of an outermost block list, or
any other module that owns parameters itself. A *unit* is a set of parameters that are needed by the
same sites, so that what moves together is used together: a block's own weights are one unit, a
weight tied between embedding and head is another, and so is a block that several layers share.
Frozen and trainable parameters are units of their own: an adapter is read, updated and saved
without the base that it adapts.
A tile of an operator too large for one unit (`modules/tiling/split.py`) is a site of its own, also
inside a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from infinity.modules.tiling.layers import Tiled

UnitRule = Literal["auto"] | Sequence[str]

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(eq=False, slots=True)
class Alias:
    """One place where a parameter is registered."""

    module: nn.Module
    attribute: str


@dataclass(eq=False, slots=True)
class FoundParam:
    """A parameter, every place it is registered at, and the sites that use it."""

    name: str
    parameter: nn.Parameter
    aliases: list[Alias] = field(default_factory=list)
    hooked_modules: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class FoundModule:
    """A module, and its name in the model."""

    name: str
    module: nn.Module
    is_block: bool  # One of a list of repeated ones, or named so by the user.


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Sites of a model, and its parameters grouped into units (lists of Found, in model order)."""

    root: nn.Module
    hooked_modules: list[FoundModule]
    units: list[tuple[str, list[FoundParam]]]

    def module_units(self) -> list[list[int]]:
        """For every site, the indexes of the units it needs, in unit order."""
        needed: list[list[int]] = [[] for _ in self.hooked_modules]
        for index, (_, members) in enumerate(self.units):
            for hooked in members[0].hooked_modules:
                needed[hooked].append(index)
        return needed

    def held_nbytes(self, nbytes_of_unit: Sequence[int]) -> int:
        """The most weight bytes that sites nested in each other hold at once."""
        needed = self.module_units()
        index_of = {id(hooked.module): index for index, hooked in enumerate(self.hooked_modules)}

        def most(module: nn.Module, in_use: frozenset[int]) -> int:
            index = index_of.get(id(module))
            if index is not None:
                in_use = in_use | frozenset(needed[index])
            here = sum(nbytes_of_unit[unit] for unit in in_use)
            return max([here, *(most(child, in_use) for child in module.children())])

        return most(self.root, frozenset())

    def units_by_block(self) -> tuple[list[int], list[set[int]]]:
        """Units that are used outside of blocks, or by several, and those of each block alone, with
        the tiles in it."""
        needed = self.module_units()
        index_of = {id(hooked.module): index for index, hooked in enumerate(self.hooked_modules)}
        outside: set[int] = set()
        blocks: dict[int, set[int]] = {}

        def walk(module: nn.Module, into: set[int]) -> None:
            index = index_of.get(id(module))
            if index is not None:
                if into is outside and self.hooked_modules[index].is_block:
                    into = blocks.setdefault(id(module), set())
                into.update(needed[index])
            for child in module.children():
                walk(child, into)

        walk(self.root, outside)
        uses = Counter(unit for block in blocks.values() for unit in block)
        outside |= {unit for unit, count in uses.items() if count > 1}
        return sorted(outside), [block - outside for block in blocks.values()]


def discover_units(model: nn.Module, rule: UnitRule = "auto") -> ModelLayout:
    """Finds sites and units. `rule` "auto" takes block lists; a list of class names or of name
    patterns (fnmatch) names the block modules instead."""
    is_block = _block_test(model, rule)
    hooked_modules: list[FoundModule] = []
    found: dict[int, FoundParam] = {}
    _visit(model, "", None, is_block, hooked_modules, found, set())
    groups: dict[tuple[tuple[int, ...], bool], list[FoundParam]] = {}
    for each in found.values():
        key = tuple(each.hooked_modules), each.parameter.requires_grad
        groups.setdefault(key, []).append(each)
    units = []
    for (used_by, is_trained), members in groups.items():
        name = _unit_name(members, hooked_modules)
        # Each unit has a name of its own: what a commit keeps is found by it.
        is_second = not is_trained and (used_by, True) in groups
        units.append((f"{name} (frozen)" if is_second else name, members))
    return ModelLayout(model, hooked_modules, units)


def _block_test(model: nn.Module, rule: UnitRule) -> Callable[[str, nn.Module], bool]:
    if rule == "auto":
        blocks = {id(module) for module in _blocks(model)}
        return lambda name, module: id(module) in blocks
    patterns = list(rule)
    return lambda name, module: any(
        type(module).__name__ == pattern or fnmatchcase(name, pattern) for pattern in patterns
    )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Callable children of the outermost module lists. Lists of lists are walked through, tiles
    are no blocks."""
    if isinstance(module, Tiled):
        return
    if isinstance(module, _LISTS):
        for child in module.children():
            if isinstance(child, _LISTS):
                yield from _blocks(child)
            else:
                yield child
        return
    for child in module.children():
        yield from _blocks(child)


def _visit(
    module: nn.Module,
    name: str,
    block: int | None,
    is_block: Callable[[str, nn.Module], bool],
    hooked_modules: list[FoundModule],
    found: dict[int, FoundParam],
    seen: set[int],
) -> None:
    """Depth-first in registration order. `block` is the site of the block this module is in."""
    hooked = block
    if hooked is None:
        starts_block = is_block(name, module) and any(True for _ in module.parameters())
        if starts_block or (
            module._parameters
            and any(parameter is not None for parameter in module._parameters.values())
        ):
            hooked = next(
                (i for i, s in enumerate(hooked_modules) if s.module is module), len(hooked_modules)
            )
            if hooked == len(hooked_modules):
                hooked_modules.append(
                    FoundModule(name or type(module).__name__, module, starts_block)
                )
            if starts_block:
                block = hooked
    for attribute, parameter in module._parameters.items():
        if parameter is None:
            continue
        full_name = f"{name}.{attribute}" if name else attribute
        each = found.setdefault(id(parameter), FoundParam(full_name, parameter))
        if id(module) not in seen:
            each.aliases.append(Alias(module, attribute))
        assert hooked is not None
        if hooked not in each.hooked_modules:
            each.hooked_modules.append(hooked)
    seen.add(id(module))
    if isinstance(module, Tiled):
        block, is_block = None, _never
    for child_name, child in module.named_children():
        # `named_children` gives a module that is registered twice once per parent, which is what is
        # wanted: each of its places may belong to another block.
        full_name = f"{name}.{child_name}" if name else child_name
        _visit(child, full_name, block, is_block, hooked_modules, found, seen)


def _never(name: str, module: nn.Module) -> bool:
    return False


def _unit_name(members: list[FoundParam], hooked_modules: list[FoundModule]) -> str:
    first = members[0]
    if len(first.hooked_modules) == 1:
        return hooked_modules[first.hooked_modules[0]].name
    return first.name


def storage_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides a parameter keeps on its tier: its own when it fills its memory without gaps or
    overlaps (then autograd lays its gradient out the same way), else contiguous ones."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())
