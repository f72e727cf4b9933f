"""A forged table of linked state, whose digests are all right, is found, or changes no value."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint.run.format import TABLE_NAME
from infinity.errors import InfinityError
from tests.support.damaged import replace_file
from tests.support.exhaustive import sampled

from .harness import durable, run

KINDS = ("fp32", "bf16", "mixed", "frozen", "conv")


@pytest.fixture(scope="module", params=sampled(KINDS, ("bf16", "conv").__contains__))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, torch.Tensor]]:
    """A checkpoint whose state is linked; copies of it are forged. Its kind, and its values."""
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = directory / "checkpoints"
    with run(request.param, directory / "swap", checkpoint=durable(checkpoints, keep=1)) as each:
        each.steps(0, 1)
        return request.param, each.save(checkpoints), each.state()


def table_of(path: Path) -> Any:
    return json.loads((path / TABLE_NAME).read_bytes())


def put_table(path: Path, table: Any) -> None:
    """Writes a table, with its digests: a forger knows how to compute a SHA-256."""
    replace_file(path, TABLE_NAME, json.dumps(table, separators=(",", ":")).encode())


def faults(path: Path) -> list[str]:
    (found,) = infinity.checkpoint.inspect(path, verify=True)
    return list(found.faults)


def what_a_load_does(kind: str, path: Path, swap: Path, values: dict[str, torch.Tensor]) -> str:
    """ "refused" by an error of the tree, "right" or "wrong" values."""
    with run(kind, swap, seed=7) as each:
        try:
            each.load(path)
        except InfinityError:
            return "refused"
        state = each.state()
    return "right" if all(torch.equal(v, state[name]) for name, v in values.items()) else "wrong"


Place = tuple[Any, Any]


def leaves(value: Any) -> Iterator[Place]:
    """Every text and number of the table, and every list, by its container and key."""
    for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(child, (dict, list)):
            yield from leaves(child)


def replacements(value: Any, others: list[Any], drawn: random.Random) -> list[Any]:
    if isinstance(value, bool) or value is None:
        return [1]
    if isinstance(value, int):
        near = [value + n for n in (-4096, -256, -64, -4, -1, 1, 4, 64, 256, 4096)]
        return [0, 1, value // 2, 2 * value, 1 << 50, *near]
    if isinstance(value, str):
        return ["F32", "BF16", "I32", "weight", value + "x", *drawn.sample(others, 3)]
    if isinstance(value, dict):
        return [{}, []]
    return [value[::-1], value[:-1], [*value, 1], [0] * len(value), [1] * len(value)]


def test_no_value_of_the_table_can_be_forged_so_that_other_weights_are_loaded(
    saved: tuple[str, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    kind, path, values = saved
    drawn, count = random.Random(kind), {"found": 0, "refused": 0, "right": 0}
    whole = table_of(path)
    texts = sorted({c[k] for c, k in leaves(whole) if isinstance(c[k], str)})
    copy = tmp_path / path.name
    shutil.copytree(path, copy)
    assert not faults(copy) and what_a_load_does(kind, copy, tmp_path / "s", values) == "right"
    num_places = len(list(leaves(whole)))
    # Each field of a tensor of each piece, and of the rest a part.
    chosen = drawn.sample(range(num_places), min(num_places, 120))
    for number in chosen:
        table = json.loads(json.dumps(whole))
        container, key = list(leaves(table))[number]
        for value in drawn.sample(replacements(container[key], texts, drawn), 2):
            if value == container[key]:
                continue
            before, container[key] = container[key], value
            put_table(copy, table)
            if faults(copy):
                count["found"] += 1
            else:
                outcome = what_a_load_does(kind, copy, tmp_path / "swap", values)
                assert outcome != "wrong", (number, before, value, container)
                count[outcome] += 1
            container[key] = before
    assert count["found"] > count["refused"] + count["right"], count


def transposed(table: Any) -> Iterator[str]:
    """Gives every square tensor of all kinds the other order of its elements."""
    for piece in table["pieces"]:
        for row in piece["tensors"]:
            if len(row[2]) == 2 and row[2][0] == row[2][1]:
                row[3] = row[3][::-1]
                yield row[0]


def offsets(table: Any) -> Iterator[str]:
    """Moves the last tensor of every piece into the space behind it."""
    for piece in table["pieces"]:
        if piece["tensors"]:
            piece["tensors"][-1][4] += 4
            yield piece["tensors"][-1][0]


def exchanged(table: Any) -> Iterator[str]:
    """Exchanges the offsets of two tensors of equal size."""
    for piece in table["pieces"]:
        first: dict[tuple[int, ...], Any] = {}
        for row in piece["tensors"]:
            other = first.setdefault(tuple(row[2]), row)
            if other is not row:
                row[4], other[4] = other[4], row[4]
                yield row[0]
                break


@pytest.mark.parametrize("forge", [transposed, offsets, exchanged])
def test_a_table_that_is_forged_alike_in_all_places_is_not_loaded_in_silence(
    saved: tuple[str, Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    forge: Callable[[Any], Iterator[str]],
) -> None:
    kind, path, values = saved
    copy = tmp_path / path.name
    shutil.copytree(path, copy)
    table = table_of(copy)
    names = list(forge(table))
    put_table(copy, table)
    with caplog.at_level(logging.WARNING, "infinity"):
        is_found = bool(faults(copy))
        outcome = what_a_load_does(kind, copy, tmp_path / "swap", values)
    warned = [record for record in caplog.records if "order of elements" in record.message]
    assert is_found or outcome != "wrong" or warned, names


@pytest.mark.parametrize("other", sampled(["fp32", "conv"], ("conv").__eq__))
def test_another_order_of_elements_than_the_models_is_converted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with run(other, tmp_path / "swap", checkpoint=durable(checkpoints, keep=1)) as each:
        each.steps(0, 1)
        path, values = each.save(checkpoints), each.state()
    with caplog.at_level(logging.WARNING, "infinity"):
        assert what_a_load_does(other, path, tmp_path / "again", values) == "right"
    assert not [record for record in caplog.records if "order of elements" in record.message]
