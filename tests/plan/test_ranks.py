"""What each of several ranks moves: parts that make a whole, and what follows for a machine."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from infinity import SwapConfig
from infinity.plan import Forecast, forecast, load_hardware, scaled_gpt
from infinity.plan.model import model_of_shape
from infinity.simulate.job import Batch, load_of, rank_loads
from infinity.simulate.spec import NOT_SHARDED, Rates, UnitLoad
from infinity.simulate.step import EARLY_SHARES, best_share, predict
from infinity.state.partition import STAGES, partition
from infinity.state.placement import StatePlacement
from infinity.state.units import StateKind, Unit
from infinity.tools.cli import app
from infinity.tools.plan.advice import _changes
from infinity.tools.plan.report import idle_of_compute
from tests.property.strategies import units
from tests.support.commands import plan_in_numbers

BATCH = Batch(8, 1)


def placed(laid_out: list[Unit], tier: str) -> StatePlacement:
    return StatePlacement({(unit.index, kind): tier for unit in laid_out for kind in StateKind}, {})


def loads_of_ranks(
    laid_out: list[Unit], count: int, stage: int, tier: str, *, is_collective: bool
) -> list[list[UnitLoad]]:
    """By rank and unit."""
    found = []
    for rank in range(count):
        divided = partition(laid_out, rank=rank, count=count, stage=stage)
        where = placed(list(divided.units), tier)
        found.append(list(rank_loads(divided, where, BATCH, is_collective=is_collective)))
    return found


@given(
    laid_out=units(),
    count=st.integers(1, 5),
    stage=st.sampled_from(STAGES),
    tier=st.sampled_from(["host", "nvme", "device"]),
    is_collective=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_all_ranks_read_and_write_the_bytes_of_one_and_receive_what_others_send(
    laid_out: list[Unit], count: int, stage: int, tier: str, is_collective: bool
) -> None:
    ranks = loads_of_ranks(laid_out, count, stage, tier, is_collective=is_collective)
    for unit, loads in zip(laid_out, zip(*ranks, strict=True), strict=True):
        alone = load_of(unit, placed(laid_out, tier), is_summed=False)
        assert sum(load.gradient_nbytes for load in loads) == alone.gradient_nbytes
        for name in ("state_read_nbytes", "state_write_nbytes"):
            moved = [sum(getattr(load, name).values()) for load in loads]
            assert sum(moved) == sum(getattr(alone, name).values())
        of_ranks = [load.sharded for load in loads if load.sharded is not NOT_SHARDED]
        assert len(of_ranks) == count
        weights = unit.weight_nbytes if stage == 3 else unit.trainable_nbytes
        gradients = sum(spec.weight_nbytes for spec in unit.trainable())
        assert sum(each.received_nbytes for each in of_ranks) == (count - 1) * weights
        assert sum(each.sent_nbytes for each in of_ranks) == (count - 1) * gradients
        assert sum(each.served_nbytes for each in of_ranks) == sum(
            e.received_nbytes for e in of_ranks
        )
        if count == 1:
            [load] = loads
            same = {name: getattr(alone, name) for name in ("leaving_nbytes", "largest_nbytes")}
            assert replace(load, sharded=NOT_SHARDED, **same) == alone


@given(laid_out=units(), is_collective=st.booleans())
@settings(max_examples=40, deadline=None)
def test_frozen_weights_of_a_node_pass_no_network_and_each_node_reads_all_of_them(
    laid_out: list[Unit], is_collective: bool
) -> None:
    """Trained units are loads as of a division over all ranks."""
    nodes, loads = [(0, 1), (2, 3)], []
    for rank in range(4):
        of_rank = []
        for over_node in (True, False):
            divided = partition(
                laid_out, rank=rank, count=4, stage=3, nodes=nodes, over_node=over_node
            )
            where, among = placed(list(divided.units), "nvme"), {"num_nodes": len(nodes)}
            of_rank.append(list(rank_loads(
                divided, where, BATCH, is_collective=is_collective, **among
            )))  # fmt: skip
        loads.append(of_rank)
    for unit in laid_out:
        of_node, of_all = ([of_rank[way][unit.index] for of_rank in loads] for way in (0, 1))
        if unit.trainable_nbytes:
            assert of_node == of_all
            continue
        assert not any(load.sharded.network_received_nbytes for load in of_node)
        assert sum(load.sharded.received_nbytes for load in of_node) == 2 * unit.weight_nbytes
        for ranks in nodes:
            assert sum(of_node[rank].weight_nbytes for rank in ranks) >= unit.weight_nbytes


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


MODEL = ("--params", "1B", "--hardware", "8xh200-8nvme")


@pytest.mark.parametrize("exchange", ["one_sided", "collective"])
def test_a_rank_reads_and_writes_its_shard(exchange: str) -> None:
    """Of state on NVMe a node writes as much whatever the number of its ranks."""
    kinds = ("parameters", "master", "moments", "gradients")
    table = {
        "tiers": {"host": {"capacity": "50%"}, "nvme": [{"path": "/nowhere"}]},
        "placement": dict.fromkeys(kinds, "nvme"),
        "precision": {"compute": "bfloat16"},
        "distributed": {"exchange": exchange},
    }
    model = model_of_shape(scaled_gpt(10**9), torch.bfloat16)
    node, weights_nbytes, written = load_hardware("8xh200-8nvme"), 2 * model.num_params, []
    for count in (2, 8):
        found = forecast(SwapConfig.load(table), model, node, Batch(4096, 2048), num_ranks=count)
        moved, ranks = found.step.moved_nbytes, found.ranks
        assert ranks is not None and ranks.is_collective == (exchange == "collective")
        assert all(of is not None and taken <= of for taken, of in ranks.taken_nbytes.values())
        assert found.tokens_per_s == pytest.approx(count * 4096 / found.step.step_s)
        wanted = weights_nbytes / count if ranks.is_collective else weights_nbytes
        assert moved["h2d"] == pytest.approx(wanted, rel=0.01), "once: the device has room"
        track = "gather" if ranks.is_collective else "sockets"
        for link in (f"{track}_received", f"{track}_sent"):
            assert moved[link] == pytest.approx(weights_nbytes * (count - 1) / count, rel=0.01)
        written.append(count * moved["nvme_write"])
    assert written[0] == pytest.approx(written[1], rel=0.001)


def test_the_plan_of_ranks_names_their_number_stage_and_links() -> None:
    said = plan(*MODEL, "--ranks", "2", "--set", "distributed.exchange=one_sided")
    for word in (
        "2 ranks, stage 3", "a rank takes", "tokens/s of all ranks", "between hosts of ranks",
        "an estimate", "2 of the machine's 8 devices are used",
    ):  # fmt: skip
        assert word in said
    assert "1 of the machine's 8 devices is used" in plan(*MODEL, "--ranks", "1")
    found = plan_in_numbers(*MODEL, "--ranks", "8", "--set", "distributed.zero_stage=2")["ranks"]
    assert (found["count"], found["stage"], found["is_collective"]) == (8, 2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "8", "--nodes", "2", "--hardware", "dgx-2"], "no host.network_gb_per_s"),
        (["--ranks", "9"], "has 8 devices, and each rank needs one"),
        (["--ranks", "8", "--set", "distributed.budgets=rank"], "change tiers.host.capacity"),
        (["--ranks", "8", "--set", "tiers.device.capacity=100MB", "--set", "schedule.tile=0"],
         "do not fit one device"),
    ],
)  # fmt: skip
def test_plan_refuses_settings_that_ranks_cannot_have(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", *MODEL, *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def _forecast_of_ranks(**changes: Any) -> Forecast:
    kinds = ("parameters", "master", "moments", "gradients")
    table: dict[str, Any] = {
        "tiers": {"host": {"capacity": changes.pop("host", "50%")}, "nvme": [{"path": "/nowhere"}]},
        "placement": dict.fromkeys(kinds, changes.pop("tier", "nvme"))
        | changes.pop("placement", {}),
        "precision": {"compute": "bfloat16"},
        "schedule": changes.pop("schedule", {}),
        "distributed": changes.pop("distributed", {}),
    }
    model = model_of_shape(scaled_gpt(10**9), torch.bfloat16)
    node = load_hardware("8xh200-8nvme")
    batch = Batch(16384, 2048)
    return forecast(SwapConfig.load(table), model, node, batch, **changes)


def test_updates_after_the_step_overlap_with_the_forward_in_stage_3() -> None:
    after, inside = (
        _forecast_of_ranks(
            num_ranks=8, tier="host", schedule={"updates": updates, "update_on": "host"}
        ).step
        for updates in ("deferred", "at_step")
    )
    forward_s = inside.busy_s["compute"] / 4
    assert after.step_s < inside.step_s - 0.8 * min(forward_s, inside.busy_s["update"])
    assert after.moved_nbytes == inside.moved_nbytes


@pytest.mark.parametrize(
    ("host", "gradients", "least", "most"),
    [("50%", "host", -1.02, -0.98), ("2GiB", "nvme", 0.05, 1.0)],
)
def test_an_updated_shard_on_nvme_is_read_again_where_memory_does_not_keep_it(
    host: str, gradients: str, least: float, most: float
) -> None:
    """An update inside the step reads each shard once, and the weight cache has it then."""
    after, inside = (
        _forecast_of_ranks(
            num_ranks=8, host=host, placement={"gradients": gradients},
            schedule={"updates": updates, "update_on": "host"},
        ).step
        for updates in ("deferred", "at_step")
    )  # fmt: skip
    read, again = (step.moved_nbytes["nvme_read"] for step in (inside, after))
    shard_nbytes = 2 * model_of_shape(scaled_gpt(10**9), torch.bfloat16).num_params / 8
    assert least * shard_nbytes <= again - read <= most * shard_nbytes
    written, others = (step.moved_nbytes["nvme_write"] for step in (inside, after))
    assert others == written if gradients == "host" else others <= written
    assert after.step_s < inside.step_s


def test_sums_of_shards_that_have_memory_are_neither_written_nor_read() -> None:
    """Updates inside the step write and read all of them."""
    moved = {
        (gradients, updates): _forecast_of_ranks(
            num_ranks=8, placement={"gradients": gradients},
            schedule={"updates": updates, "update_on": "host"},
        ).step.moved_nbytes
        for gradients in ("host", "nvme")
        for updates in ("deferred", "at_step")
    }  # fmt: skip
    numel = model_of_shape(scaled_gpt(10**9), torch.bfloat16).num_params / 8
    for link in ("nvme_read", "nvme_write"):
        assert moved["nvme", "deferred"][link] == moved["host", "deferred"][link]
        more_nbytes = moved["nvme", "at_step"][link] - moved["host", "at_step"][link]
        assert more_nbytes == pytest.approx(4 * numel, rel=0.02)


def test_shards_on_the_host_are_updated_in_the_backward_beside_a_device() -> None:
    """Where compute takes twice as long as the updates: the forward has a quarter of it."""
    settings = {"updates": "deferred", "update_on": "host"}
    job = _forecast_of_ranks(num_ranks=8, tier="host", schedule=settings).job
    rates = Rates(flops=1e13, update=1e10, host=inf)
    busy_s = predict(job, rates).busy_s
    rates = replace(rates, flops=rates.flops * busy_s["compute"] / (2 * busy_s["update"]))
    deferred = predict(job, rates)
    _, both = best_share(job, rates)
    assert both.step_s < 0.92 * deferred.step_s
    assert both.moved_nbytes == deferred.moved_nbytes
    # The copies home of new weights are updates' work.
    shares = [replace(job, early_share=share) for share in EARLY_SHARES]
    busy = [predict(share, rates).busy_s["update"] for share in shares]
    assert busy == sorted(busy) and 1.1 * busy[0] < busy[-1] < 1.2 * busy[0]
    for share in shares:
        without_memory = predict(replace(share, weights_cache_nbytes=0), rates)
        assert without_memory.step_s == pytest.approx(deferred.step_s)
        where_the_host_computes = replace(share, device_cache_nbytes=None)
        assert (
            predict(where_the_host_computes, rates)
            == predict(replace(where_the_host_computes, early_share=0.0), rates)
        )  # fmt: skip


@pytest.mark.parametrize(
    ("tiers", "stage", "num_spares", "is_early"),
    [
        ({}, 3, 0, True),
        ({"moments": "nvme"}, 3, 1, True),
        (dict.fromkeys(("parameters", "moments"), "nvme"), 3, 1, True),
        ({"moments": "nvme"}, 2, 0, False),
        ({}, 2, 0, False),
    ],
)
def test_ranks_keep_a_generation_where_shards_on_nvme_are_updated_in_the_backward(
    tiers: dict[str, str], stage: int, num_spares: int, is_early: bool
) -> None:
    found = _forecast_of_ranks(
        num_ranks=8, tier="host", placement=tiers, distributed={"zero_stage": stage},
        schedule={"updates": "both_passes", "update_on": "host"},
    )  # fmt: skip
    assert (found.num_spares, found.job.early_share > 0) == (num_spares, is_early)


def test_updates_of_ranks_that_keep_all_weights_are_in_the_step() -> None:
    assert _forecast_of_ranks(num_ranks=8).job.defers
    assert not _forecast_of_ranks(num_ranks=8, distributed={"zero_stage": 2}).job.defers
    assert not _forecast_of_ranks(num_ranks=8, schedule={"update_on": "device"}).job.defers


def test_a_device_holds_the_buffers_of_rounds_that_it_has_space_for() -> None:
    """Here a round is the largest unit: less than the 256 MiB that an H200 has space for."""
    taken = [
        found.ranks.taken_nbytes["device"][0]
        for exchange in ("one_sided", "collective")
        if (found := _forecast_of_ranks(num_ranks=8, distributed={"exchange": exchange})).ranks
    ]
    model = model_of_shape(scaled_gpt(10**9), torch.bfloat16)
    largest_nbytes = max(unit.weight_nbytes for unit in model.units)
    assert taken[1] - taken[0] == pytest.approx((2 + 8 + 2 * 8) * largest_nbytes / 8, rel=0.01)


@pytest.mark.parametrize("exchange", ["one_sided", "collective"])
def test_a_rank_of_several_nodes_exchanges_over_the_network(exchange: str) -> None:
    """A border of nodes is passed by the parts of the others: once for all ranks of a node by an
    all-gather, once for each rank else."""
    found = _forecast_of_ranks(num_ranks=4, num_nodes=2, distributed={"exchange": exchange})
    moved, ranks = found.step.moved_nbytes, found.ranks
    assert ranks is not None and (ranks.count, ranks.per_node) == (8, 4)
    assert found.tokens_per_s == pytest.approx(8 * 16384 / found.step.step_s)
    track = "gather" if exchange == "collective" else "sockets"
    of_all = {verb: moved[f"{track}_{verb}"] * 8 / 7 for verb in ("received", "sent")}
    once = 4 if exchange == "collective" else 1
    assert moved["network_received"] == pytest.approx(of_all["received"] / 2 / once, rel=0.01)
    assert moved["network_sent"] == pytest.approx(of_all["sent"] / 2, rel=0.01)
    alone = _forecast_of_ranks(num_ranks=8, distributed={"exchange": exchange})
    assert moved["nvme_write"] == pytest.approx(alone.step.moved_nbytes["nvme_write"], rel=0.001)
    assert not any(name.startswith("network") for name in alone.step.moved_nbytes)


def test_a_slow_network_binds_the_step_of_several_nodes_and_is_the_cause_of_idle_time() -> None:
    slow = load_hardware("8xh200-8nvme")
    host = slow.host.model_copy(update={"network_gb_per_s": 2.0})
    slow = slow.model_copy(update={"host": host})
    model = model_of_shape(scaled_gpt(10**9), torch.bfloat16)
    config = SwapConfig.load({"precision": {"compute": "bfloat16"}})
    found = forecast(config, model, slow, Batch(4096, 2048), num_ranks=8, num_nodes=2)
    assert found.step.binding == "network"
    (cause, _), *_ = idle_of_compute(found)
    assert cause.startswith("between nodes")


def test_weights_of_a_node_are_advice_for_several_nodes_that_do_not_have_them() -> None:
    def changes(num_nodes: int, **distributed: Any) -> list[SwapConfig]:
        base = _forecast_of_ranks(num_ranks=2, num_nodes=num_nodes, distributed=distributed)
        found = _changes(SwapConfig(distributed=distributed), base)
        return [config for change, (config, *_) in found if "shard_over" in change]

    [config] = changes(2)
    assert config.distributed.shard_over == "node"
    assert not changes(1) and not changes(2, shard_over="node") and not changes(2, zero_stage=2)


def test_the_plan_of_nodes_names_them_and_their_network() -> None:
    said = plan(*MODEL, "--ranks", "8", "--nodes", "2")
    for word in ("2 nodes of", "16 ranks on 2 nodes", "network 40 GB/s a rank", "compute waits"):
        assert word in said
    found = plan_in_numbers(*MODEL, "--ranks", "8", "--nodes", "2")
    assert (found["ranks"]["count"], found["ranks"]["num_nodes"]) == (16, 2)
    idle_s = sum(found["idle_s"].values())
    assert idle_s + found["busy_s"]["compute"] == pytest.approx(found["step_s"], rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_ranks_on_the_device_is_updated_there(stage: int) -> None:
    """What ranks exchange aside, nothing leaves the device or comes to it."""
    step = _forecast_of_ranks(
        num_ranks=8, tier="device", distributed={"zero_stage": stage},
        schedule={"update_on": "device"},
    ).step  # fmt: skip
    update_nbytes = 2 * model_of_shape(scaled_gpt(10**9), torch.bfloat16).num_params / 8
    for link in ("h2d", "d2h"):
        assert step.moved_nbytes.get(link, 0) < update_nbytes / 100
