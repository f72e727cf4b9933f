"""Cases that `make test` leaves to `make exhaustive`.

Some claims are shown for products of many properties. `make test` takes enough cases to show each
property, and each pair of properties where pairs are what may fail; `make exhaustive` takes all.
Of a product of decorators and parametrized fixtures the cases are chosen here, of a list in its test.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
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


def first_of_each(cases: Sequence[T], kind: Callable[[T], Hashable]) -> list[Any]:
    """Returns the cases; the first one of each kind is kept."""
    kept = {kind(case): case for case in reversed(cases)}
    return sampled(cases, lambda case: kept[kind(case)] is case)


def in_turn(names: Iterable[str], ways: Sequence[Any]) -> list[Any]:
    """Returns each name with each way. A name is kept with one way: the ways come in turn."""
    chosen = {name: ways[index % len(ways)] for index, name in enumerate(names)}
    return sampled(product(chosen, ways), lambda case: chosen[case[0]] == case[1])


def covering(properties: Mapping[str, Sequence[Any]], strength: int = 2) -> list[dict[str, Any]]:
    """Returns few cases in which any values of any `strength` properties occur together.

    Greedy: a case starts with a combination that is missing, and takes for each further property the
    value that adds most missing ones (Cohen, Dalal, Fredman and Patton, "The AETG System", 1997).
    """
    groups = list(combinations(properties, strength))
    missing = {  # A dictionary has an order, which makes the cases the same ones every time.
        tuple(zip(group, values, strict=True)): None
        for group in groups
        for values in product(*(properties[name] for name in group))
    }

    def found_in(case: Mapping[str, Any]) -> list[tuple[tuple[str, Any], ...]]:
        whole = (group for group in groups if case.keys() >= set(group))
        keys = (tuple((name, case[name]) for name in group) for group in whole)
        return [key for key in keys if key in missing]

    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name, values in properties.items():
            if name not in case:
                at = len(cases) % len(values)  # Between equals the values take turns.
                tried = [case | {name: value} for value in (*values[at:], *values[:at])]
                case = max(tried, key=lambda each: len(found_in(each)))
        for key in found_in(case):
            del missing[key]
        cases.append({name: case[name] for name in properties})
    return cases


def thin(items: Iterable[pytest.Item]) -> None:
    """Marks what `make test` leaves out of the products of decorators and of parametrized fixtures: of
    two, it takes cases with all values of both; of more, cases with all pairs of values."""
    cases = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("exhaustive"):
            cases[item.parent, item.nodeid.partition("[")[0]].append(item)
    for ways in cases.values():
        found = [_factors(item) for item in ways]
        count = len(found[0])
        if count < 2:
            continue
        kinds = [set(combinations(factors, 1 if count == 2 else 2)) for factors in found]
        missing = set().union(*kinds)
        kept = set()
        while missing:
            kept.add(best := max(range(len(ways)), key=lambda at: len(kinds[at] & missing)))
            missing -= kinds[best]
        for at, item in enumerate(ways):
            if at not in kept:
                item.add_marker("exhaustive")


def _factors(item: Any) -> list[Hashable]:
    """The values of a case by the decorator or the fixture that they are from."""
    values = dict(item.callspec.params)
    found: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = re.split(r"[, ]+", names) if isinstance(names, str) else names
        found.append(tuple((name, id(values.pop(name))) for name in names if name in values))
    return found + [(name, id(value)) for name, value in values.items()]
