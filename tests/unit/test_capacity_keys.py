"""Every CapacityError names a key of the configuration, so that a program can act on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity
from infinity.config import SwapConfig
from infinity.config.problems import known_keys
from infinity.state import placement

PACKAGE = Path(infinity.__file__).parent
# A key that is chosen by the tier, and the table that it is chosen from.
TABLES = {"_BUDGET_KEYS[last]": placement._BUDGET_KEYS}


def raised() -> Iterator[tuple[str, ast.expr]]:
    """The `key` argument of every CapacityError in the package, and where it stands."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "CapacityError(" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "CapacityError":
                keys = [word.value for word in node.keywords if word.arg == "key"]
                assert len(keys) == 1, f"{path}:{node.lineno}"
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", keys[0]


RAISED = dict(raised())
KEYS = {
    f"{table.replace('[]', '')}.{key}"
    for table, keys in known_keys(SwapConfig).items()
    for key in keys
}


@pytest.mark.parametrize("place", RAISED)
def test_capacity_error_names_a_configuration_key(place: str) -> None:
    key = RAISED[place]
    if ast.unparse(key) in TABLES:
        assert set(TABLES[ast.unparse(key)].values()) <= KEYS
        return
    assert isinstance(key, ast.Constant), f"{ast.unparse(key)} is not one key"
    assert key.value in KEYS


def test_the_search_finds_the_places_that_raise() -> None:
    assert len(RAISED) >= 15
