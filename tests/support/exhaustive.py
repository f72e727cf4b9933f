"""Cases that `make test` leaves to `make exhaustive`.

Some claims are shown for products of many properties. `make test` takes enough cases to show each
property, and each pair of properties where pairs are what may fail; `make exhaustive` takes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
