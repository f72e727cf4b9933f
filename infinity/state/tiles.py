"""Divides a parameter that is too large into tiles: rows, limits, and the search for a limit.

Pure. The engine cuts modules by it, the planner shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from infinity.errors import CapacityError
from infinity.sizes import KIB, align_up
from infinity.state.budgets import Budgets
from infinity.state.units import TensorFacts, Unit

T = TypeVar("T")

# Tiles start at multiples of these many rows: vector kernels then treat an element of the result,
# and of a bias's gradient, as they do in the whole (tests/parity/test_tiling.py).
ROW_ALIGNMENT = 64
# Below this, reads are dear and modules are many.
SMALLEST_TILE_NBYTES = 64 * KIB

_ATTRIBUTES = r"(?:weight|bias|(?:gate_up|gate|up|down)_proj(?:_bias)?)"
_TILE = re.compile(rf"(?:^|(?<=\.))tiles\.(\d+)\.(?={_ATTRIBUTES}(?:\.|$))")


def is_cut_by_name(attribute: str) -> bool:
    """Whether a tile of a module's parameter is known by its name."""
    return re.fullmatch(_ATTRIBUTES, attribute) is not None


def name_of_tiled(name: str) -> str:
    """The name of a parameter, or of state of it, without the tile: "head.tiles.3.weight" is part
    of "head.weight". A name without tiles is its own."""
    return _TILE.sub("", name)


def number_of_tile(name: str) -> int:
    """The number of the tile in a name; 0 where there is none."""
    found = _TILE.search(name)
    return 0 if found is None else int(found[1])


def cut_rows(
    num_rows: int, row_nbytes: int, limit_nbytes: int, alignment: int = ROW_ALIGNMENT
) -> tuple[int, ...]:
    """Returns the first rows of tiles of at most `limit_nbytes`, and the end.

    There are as few tiles as possible, of equal sizes but for the last. A tile has at least
    `alignment` rows, or all.

    Worked example: 1000 rows of 1 KiB and a limit of 300 KiB allow 256 rows, so there are 4 tiles
    of 256 (250 in whole alignments): (0, 256, 512, 768, 1000).
    """
    most_rows = limit_nbytes // max(row_nbytes, 1) // alignment * alignment
    most_rows = max(most_rows, alignment)
    count = max(-(-num_rows // most_rows), 1)
    step = align_up(max(-(-num_rows // count), 1), alignment)
    return (*range(0, num_rows, step), num_rows)


@dataclass(frozen=True, slots=True)
class CutRows:
    """Parameters that are cut at the same rows. `row_nbytes`: of a row of all of them, and of what
    is cut along."""

    num_rows: int
    nbytes: int
    row_nbytes: int
    alignment: int = ROW_ALIGNMENT

    def starts(self, limit_nbytes: int) -> tuple[int, ...]:
        """As of `cut_rows`; empty where the parameters stay whole."""
        found = cut_rows(self.num_rows, self.row_nbytes, limit_nbytes, self.alignment)
        return found if self.nbytes > limit_nbytes and len(found) > 2 else ()


def limits(largest_nbytes: int) -> Iterator[int]:
    """Yields limits to try for a model whose largest parameter that can be split has so many
    bytes."""
    limit_nbytes = -(-largest_nbytes // 2)
    while limit_nbytes >= SMALLEST_TILE_NBYTES:
        yield limit_nbytes
        limit_nbytes //= 2


def is_expert_stack(facts: TensorFacts) -> bool:
    """Whether a tensor has a row per routed expert, by the usual name of their module."""
    return len(facts.shape) > 2 and "experts" in facts.name.split(".")


def is_enough(budgets: Budgets, units: Sequence[Unit], *, is_untiled: bool) -> bool:
    """Whether no smaller tiles are needed: the next unit has space while one computes; or nothing
    is divided (`is_untiled`), and a device with memory of its own decodes no experts."""
    if budgets.has_space_ahead(max(unit.weight_nbytes for unit in units)):
        return True
    facts = (tensor.facts for unit in units for tensor in unit.tensors)
    decodes_experts = budgets.largest_decoded_nbytes > 0 and any(map(is_expert_stack, facts))
    return is_untiled and not decodes_experts


def fit(
    tile: Literal["auto"] | int | None,
    attempt: Callable[[int | None], T],
    is_enough: Callable[[T, bool], bool],
    largest_nbytes: int,
) -> T:
    """Returns the result of `attempt(limit_nbytes)` for the limit that `[schedule] tile` requests.

    `attempt` raises CapacityError if the model does not fit; None requests no tiles. "auto" takes
    tiles if the model does not fit without, or if that is not enough (see `is_enough`; its flag is
    true without tiles): the largest tiles that are enough, or else the largest that fit. If none
    fit, raises the CapacityError of the division that needs the least host memory; of those that
    fit the host, device memory.
    """
    if tile != "auto":
        return attempt(tile)
    refused: list[CapacityError] = []
    fitting: list[int | None] = []
    for limit_nbytes in (None, *limits(largest_nbytes)):
        try:
            found = attempt(limit_nbytes)
        except CapacityError as error:
            refused.append(error)
            continue
        if is_enough(found, limit_nbytes is None):
            return found
        fitting.append(limit_nbytes)
    if not fitting:
        raise min(refused, key=lambda error: (error.tier == "host", error.needed_nbytes))
    return attempt(fitting[0])
