"""Cases that `make test` leaves to `make exhaustive`.

Some claims are shown for products of many properties. `make test` takes enough cases to show each
property, and each pair of properties where pairs are what may fail; `make exhaustive` takes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sampled(cases: Iterable[T], is_kept: Callable[[T], bool]) -> list[Any]:
    """Returns parameters of a test. Those that are not kept have the mark `exhaustive`. A case that
    is a tuple is one argument per element."""

    def values(case: T) -> tuple[Any, ...]:
        return case if isinstance(case, tuple) else (case,)

    return [
        pytest.param(*values(case), marks=() if is_kept(case) else pytest.mark.exhaustive)
        for case in cases
    ]


def in_turn(names: Iterable[str], ways: Sequence[Any]) -> list[Any]:
    """Returns each name with each way. A name is kept with one way: the ways come in turn."""
    chosen = {name: ways[index % len(ways)] for index, name in enumerate(names)}
    return sampled(product(chosen, ways), lambda case: chosen[case[0]] == case[1])
