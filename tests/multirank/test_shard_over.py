"""Frozen weights divided over the ranks of a node: the bits of one rank, and no byte of the base
between nodes.

Four ranks are two nodes of two: processes of one machine whose boots differ, so that they share no
memory with ranks of the other node (tests/multirank/test_nodes.py has networks of their own).
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.checkpoint.run.directory import list_checkpoints, read_linked, read_manifest
from infinity.config.schema.engine import Distributed
from infinity.distributed.setup import divides_over_node
from infinity.errors import ConfigError
from tests.support.bits import assert_same
from tests.support.quantized import tiny_causal_lm, write_quantized

from .processes import run_ranks, seem_on_node
from .test_in_place import Case, model_over, step, trained
from .work import LR, NVME, offload_case, one_step, read_weights
from .work import Case as TrainingCase

BETWEEN_NODES = "ranks_gathered_between_nodes_nbytes"
PER_NODE = 2
COUNT = 2 * PER_NODE
LAYOUTS = {"bf16": "llama", "int4": "deepseek-v3"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bases")
    for layout, architecture in LAYOUTS.items():
        write_quantized(tiny_causal_lm(architecture), directory / layout, layout)
    return {layout: directory / layout for layout in LAYOUTS}


def _on_node(node: int) -> None:
    torch.set_num_threads(1)
    seem_on_node(node, address="127.0.0.1")


@dataclass
class Passed:
    """What a rank received, and the fetches of stored weights before there was space to decode
    them. One-sided, in bytes: of frozen and of trained weights, by whether the
    other rank is on its node. Between devices: the most bytes of a gather over all ranks, of one
    over a node, and of one with trained weights only."""

    frozen: dict[bool, int]
    trained: dict[bool, int]
    largest_of_all: int = 0
    largest_of_node: int = 0
    largest_trained: int = 0
    num_staged: float = 0
    between_nodes: float = 0  # As the engine counts: bytes of weights.


def _note(engine: Any) -> Passed:
    divided, transport = engine.ranks.partition, engine.ranks.transport
    passed, get = Passed({True: 0, False: 0}, {True: 0, False: 0}), transport.get

    def noted_get(rank: int, unit: int, kind: int, views: list[memoryview]) -> Any:
        is_frozen = not divided.full_units[unit].trainable_nbytes
        by_place = passed.frozen if is_frozen else passed.trained
        by_place[rank in divided.node] += sum(view.nbytes for view in views)
        return get(rank, unit, kind, views)

    transport.get = noted_get
    passed.between_nodes = -engine.counters.snapshot().get(BETWEEN_NODES, 0)
    for unit, shards in zip(divided.full_units, divided.shards, strict=True):
        if unit.trainable_nbytes:
            row = max(shard.unit.weight_nbytes for shard in shards)
            passed.largest_trained = max(passed.largest_trained, COUNT * row)
    collectives = engine.ranks._collectives
    for name in ("all", "node") if collectives is not None else ():
        operations = collectives.gathers if name == "all" else collectives.node_gathers
        _note_gathers(operations, passed, f"largest_of_{name}")
    return passed


def _note_gathers(operations: Any, passed: Passed, field: str) -> None:
    if operations is None:
        return
    gather = operations.all_gather

    def noted(target: Tensor, source: Tensor) -> None:
        setattr(passed, field, max(getattr(passed, field), target.numel()))
        gather(target, source)

    operations.all_gather = noted


def _train(rank: int, wanted: list[tuple[Path, Case]]) -> list[tuple[dict[str, Tensor], Passed]]:
    if rank >= 0:
        _on_node(rank // PER_NODE)
    found = []
    for base, case in wanted:
        model = model_over(base, case, Path(tempfile.gettempdir(), "swap"))
        engine = infinity.engine_of(model)
        with closing(engine):
            passed = _note(engine) if rank >= 0 else Passed({}, {})
            optimizer, seen = infinity.AdamW(model, lr=1e-2), {}
            for number in range(case.steps):
                seen |= step(model, optimizer, number, case)
            counted = engine.counters.snapshot()
            passed.num_staged = counted.get("fetches_staged", 0)
            passed.between_nodes += counted.get(BETWEEN_NODES, 0)
            found.append((seen | trained(model), passed))
    return found


# The stored bytes of a block come before the one in use has left its space.
TIGHT = "3088KiB"
COPIED = Case(frozen="copy", shard_over="node")
WAYS = [
    ("bf16", COPIED),
    ("bf16", replace(COPIED, exchange="collective", steps=4)),
    (
        "int4",
        Case(exchange="collective", shard_over="node", device_capacity=TIGHT, tile=0, steps=4),
    ),
]


def test_ranks_of_two_nodes_have_the_bits_of_one_rank_and_pass_no_frozen_weight_between_nodes(
    bases: dict[str, Path],
) -> None:
    """A base in the swap and a quantised one in its files, also ahead of space to decode it; from
    host to host and between devices. What is trained passes between nodes."""
    wanted = [(bases[layout], case) for layout, case in WAYS]
    alone = _train(-1, wanted)
    for runs in run_ranks(COUNT, _train, wanted):
        for (seen, passed), (reference, _), (_, case) in zip(runs, alone, wanted, strict=True):
            assert_same(reference, seen, is_ordered=False)
            assert passed.frozen[False] == 0, (case, passed)
            assert (passed.num_staged > 0) == (case.device_capacity == TIGHT), (case, passed)
            if case.exchange == "collective":
                assert 0 < passed.largest_of_all <= passed.largest_trained, (case, passed)
                assert passed.largest_of_node > passed.largest_trained, (case, passed)
            else:
                assert passed.frozen[True] > 0 < passed.trained[False], passed
                assert passed.between_nodes == passed.trained[False], passed


SAVED = TrainingCase(placement=NVME, compute="bfloat16", is_shared=True, steps=4, shard_over="node")


def _save(rank: int, directory: str) -> list[dict[str, Tensor]]:
    """Sets the frozen weights, trains, saves and trains on; loads and trains on again. Returns the
    weights of both ends."""
    _on_node(rank % 2)
    section = {"directory": f"{directory}/saved"}
    model = offload_case(SAVED, Path(directory, "swap"), checkpoint=section)
    with closing(infinity.engine_of(model)):
        with infinity.gather(model.frozen, modify=True), torch.no_grad():
            model.frozen.weight.mul_(0.5)
        optimizer, found = infinity.AdamW(model, lr=LR), []
        for number in (0, 1):
            one_step(model, optimizer, rank, SAVED, number)
        saved = infinity.checkpoint.save(f"{directory}/saved", model, optimizer)
        for _ in range(2):
            one_step(model, optimizer, rank, SAVED, 2)
            found.append(read_weights(model))
            infinity.checkpoint.load(saved, model, optimizer)
        return found


def _resume(
    rank: int, directory: str, saved: str, changes: dict[str, Any], target: str = ""
) -> dict[str, Tensor]:
    """Loads, saves at `target` if it is given, and trains on. Returns the weights."""
    _on_node(rank % 2)
    case = replace(SAVED, **changes)
    model = offload_case(case, Path(directory, "other"))
    with closing(infinity.engine_of(model)):
        optimizer = infinity.AdamW(model, lr=LR)
        infinity.checkpoint.load(f"{directory}/{saved}", model, optimizer)
        if target:
            infinity.checkpoint.save(f"{directory}/{target}", model, optimizer)
        one_step(model, optimizer, rank, case, 2)
        return read_weights(model)


def test_a_checkpoint_has_frozen_weights_of_nodes_once_and_resumes_with_other_ranks_and_divisions(
    tmp_path: Path,
) -> None:
    """Two nodes, whose ranks alternate, save. They go on over all ranks, and save again; with that,
    two nodes of one rank each go on, and two nodes of two."""
    ends = []
    for first, again in run_ranks(COUNT, _save, str(tmp_path)):
        ends += [first, again]
    [path] = list_checkpoints(tmp_path / "saved")
    rows = [
        row
        for linked in read_linked(path, read_manifest(path)).values()
        for kind in linked.kinds
        for row in kind.tensors
        if row.name == "frozen.weight"
    ]
    assert sum(row.numel for row in rows) == ends[0]["frozen.weight"].numel()
    ends += run_ranks(COUNT, _resume, str(tmp_path), "saved", {"shard_over": "all"}, "again")
    between_devices = {"exchange": "collective", "simulated": True}
    for count in (2, COUNT):
        ends += run_ranks(count, _resume, str(tmp_path), "again", between_devices)
    for end in ends:
        assert_same(ends[0], end, is_ordered=False)


def test_nodes_of_unequal_numbers_and_stages_that_keep_all_weights_are_refused() -> None:
    over_node = Distributed(shard_over="node")
    with pytest.raises(ConfigError, match="equally many ranks on each node, and there are 3, 1"):
        divides_over_node(over_node, [(0, 1, 2), (3,)])
    of_stage_2 = Distributed(shard_over="node", zero_stage=2)
    with pytest.raises(ConfigError, match="in stage 2 every rank keeps all weights"):
        divides_over_node(of_stage_2, [(0, 1), (2, 3)])
    assert divides_over_node(over_node, [(0, 1), (2, 3)])
    assert not divides_over_node(over_node, [(0, 1, 2, 3)]), "one node"
    assert not divides_over_node(Distributed(), [(0, 1), (2, 3)])
