"""What reads ahead look at, and whose blocks they take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.streaming.weights import space
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.space import WeightSpace
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.quantized import tiny_causal_lm, write_quantized

from .in_place import Base, at_least, config_of, loss_of, over

IDS = torch.arange(24).view(2, 12)


class Counted:
    """Calls of a function, which goes on as before."""

    def __init__(self, target: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results: list[Any] = []
        function = getattr(target, name)

        def called(*values: Any, **named: Any) -> Any:
            self.results.append(function(*values, **named))
            return self.results[-1]

        monkeypatch.setattr(target, name, called)


def base_of(directory: Path, num_layers: int) -> Base:
    sizes = {"num_hidden_layers": num_layers, "hidden_size": 64, "intermediate_size": 192}
    write_quantized(tiny_causal_lm("llama", **sizes), directory, "nf4")
    return Base.at(directory)


def steps_over(
    base: Base, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, int]:
    """Counts of a step in the steady state."""
    with monkeypatch.context() as patch, over(base, config) as (model, engine):
        scans = Counted(space, "choose_neighbours", patch)
        asked = Counted(WeightSpace, "find_block", patch)
        optimizer = infinity.AdamW(model, lr=1e-2)
        for number in range(3):
            if number == 2:
                scans.results.clear()
                asked.results.clear()
                before = engine.counters.snapshot()["shard_read_nbytes"]
            infinity.forward_backward(model, partial(loss_of, model), [IDS])
            optimizer.step()
            optimizer.zero_grad()
        return {
            "scans": len(scans.results),
            "reads": len([block for block in asked.results if block is not None]),
            "refused": len([block for block in asked.results if block is None]),
            "nbytes": int(engine.counters.snapshot()["shard_read_nbytes"] - before),
        }


def test_a_refused_read_ahead_looks_at_all_blocks_once_for_each_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(tmp_path / "base", 32)
    config = at_least(
        base,
        config_of(
            tmp_path,
            tiers={"host": {"capacity": "least"}},
            placement=dict.fromkeys(("master", "moments", "gradients", "activations"), "host"),
        ),
        simulated=False,
    )
    config["tiers"]["host"]["capacity"] += base.nbytes * 7 // 10
    now = steps_over(base, config, monkeypatch)
    monkeypatch.setattr(WeightSpace, "_is_refused", lambda *unused: False)
    each_time = steps_over(base, config, monkeypatch)
    assert all(now[name] == each_time[name] for name in ("nbytes", "reads", "refused"))
    assert each_time["scans"] == each_time["reads"] + each_time["refused"]
    assert now["scans"] <= 2 * now["reads"] + 8 < each_time["scans"]


def sweeps_over(
    base: Base, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[bool], int, int]:
    """Of a sweep in the steady state: of each block that goes, whether its layer is not in use; the
    bytes that are read; and those of the largest block."""
    ended: list[bool] = []
    evict = WeightMoves.evict

    def noted(moves: WeightMoves, weights: Any) -> None:
        now = moves.order.unit_at(moves.order.now - 1)
        ended.append(weights.unit.name.split()[0] != moves.weights[now].unit.name.split()[0])
        evict(moves, weights)

    with over(base, config, device=SimulatedDevice(3)) as (model, engine), torch.no_grad():
        for _ in range(3):
            model(input_ids=IDS)
        before = engine.counters.snapshot()["shard_read_nbytes"]
        with monkeypatch.context() as patch:
            patch.setattr(WeightMoves, "evict", noted)
            model(input_ids=IDS)
        nbytes = engine.counters.snapshot()["shard_read_nbytes"] - before
        largest = max(unit.stored.nbytes for unit in engine.store.units if unit.stored)
    return ended, int(nbytes), largest


def test_reads_ahead_in_sweeps_without_a_backward_wait_for_no_copy_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave the blocks of the layer in use, at the cost of one block that is kept."""
    base = base_of(tmp_path / "base", 24)
    tiers = {"host": {"capacity": "least"}, "device": {"capacity": "640KiB"}}
    config = at_least(base, config_of(tmp_path, tiers=tiers), simulated=True)
    config["tiers"]["host"]["capacity"] += base.nbytes * 7 // 10
    ended, nbytes, largest = sweeps_over(base, config, monkeypatch)
    monkeypatch.setattr(WeightSpace, "_others", lambda _, chosen, *unused: chosen)
    by_one_block, least, _ = sweeps_over(base, config, monkeypatch)
    assert len(ended) > 8 and all(ended) and not all(by_one_block)
    assert nbytes <= least + 2 * largest
