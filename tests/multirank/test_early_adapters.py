"""Updates outside the step over ranks, of adapters over a frozen base in its files: after the step
first, and in the backward as soon as steps are alike: but for the first layer, which a backward that
takes one micro-batch leaves at its end. The bits are those of updates inside the step.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

import infinity
from tests.support.bits import assert_same
from tests.support.exhaustive import sampled
from tests.support.quantized import tiny_causal_lm, write_quantized

from .early_run import RankUpdates, counted_updates
from .processes import run_ranks
from .test_in_place import BASES, Case, model_over, step, trained

FIRST_EARLY = 3
ON_DRIVES = Case(adapters="nvme", steps=4)
BESIDE = Case(is_simulated=True, steps=4)
TILED = replace(BESIDE, exchange="collective", tile="64KiB")
CASES = {
    "plain": ("bf16", ON_DRIVES),
    "quantised": ("nf4", BESIDE),
    "tiles": ("int4", TILED),
    "layer-major tiles": ("int4", replace(TILED, layer_major=True)),
}
JOBS = [["plain", "layer-major tiles"], ["quantised", "tiles"]]  # Each in processes of its own.


class Outside(NamedTuple):
    """A rank's losses and adapters. `num_deferred`: shards that were updated after a step; `units`:
    those that have adapters; `kept`, `undone`: early updates of each step."""

    seen: dict[str, Tensor]
    num_deferred: int
    units: int
    kept: list[float]
    undone: list[float]
    is_tiled: bool


def _train(rank: int, wanted: list[tuple[Path, Case]]) -> list[Outside]:
    updated = counted_updates()
    return [_train_one(base, case, updated) for base, case in wanted]


def _train_one(base: Path, case: Case, updated: list[int]) -> Outside:
    before = updated[0]
    with tempfile.TemporaryDirectory() as directory:
        model = model_over(base, case, Path(directory, "swap"))
        engine = infinity.engine_of(model)
        with closing(engine):
            early, optimizer = RankUpdates(engine), infinity.AdamW(model, lr=1e-2)
            shards = engine.store.partition.local  # type: ignore[attr-defined]
            seen: dict[str, Tensor] = {}
            counts = [(0.0, 0.0)]
            for number in range(case.steps):
                if number == FIRST_EARLY:
                    optimizer.register_step_pre_hook(lambda *_: early.await_early())
                if number >= FIRST_EARLY and early.shards is not None:
                    early.plan_all()
                seen |= step(model, optimizer, number, case)
                counts.append(early.counts())
            kept, undone = (
                [after - last for last, after in itertools.pairwise(of_kind)]
                for of_kind in zip(*counts, strict=True)
            )
            seen |= trained(model)
            units = sum(bool(shard.unit.state_numel) for shard in shards)
            is_tiled = any("experts" in name for name in engine.tiled_params)
    return Outside(seen, updated[0] - before, units, kept, undone, is_tiled)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("bases")
    names = {name for name, _ in CASES.values()}
    for name in names:
        architecture, layout = BASES[name]
        write_quantized(tiny_causal_lm(architecture), directory / name, layout)
    return {name: directory / name for name in names}


@pytest.mark.parametrize("names", sampled(JOBS, JOBS[0].__eq__), ids="-".join)
def test_adapters_over_a_frozen_base_are_updated_in_the_backward_with_the_bits_of_the_step(
    bases: dict[str, Path], names: list[str]
) -> None:
    cases = [
        (bases[name], replace(case, updates=updates))
        for name, case in map(CASES.__getitem__, names)
        for updates in ("both_passes", "at_step")
    ]
    for runs in run_ranks(2, _train, cases):
        for name, early, at_step in zip(names, runs[::2], runs[1::2], strict=True):
            assert_same(at_step.seen, early.seen, is_ordered=False)
            assert at_step.num_deferred == 0 and not any(at_step.kept), name
            assert early.num_deferred >= early.units > 0, name  # Those of the first step.
            num_steps, is_layer_major = CASES[name][1].steps, CASES[name][1].layer_major
            assert early.num_deferred + sum(early.kept) == early.units * num_steps, name
            num_early = early.units - (not is_layer_major)
            assert early.kept[FIRST_EARLY:] == [num_early] * (num_steps - FIRST_EARLY), name
            assert not any(early.undone), name
            assert early.is_tiled == ("tiles" in name), name
