"""The operations of a step: bytes, bounds, and what a faster link may and may not do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.simulate.cache import visits
from infinity.simulate.memory import sums_in_memory
from infinity.simulate.order import Use, moves
from infinity.simulate.spec import Rates, StepSpec, UnitLoad
from infinity.simulate.step import EARLY_SHARES, best_share, predict

GB = 10**9
RATES = Rates(flops=1e13, update=100e9, host=100e9, nvme_read=8e9, nvme_write=4e9, nvme_mixed=6e9,
              h2d=20e9, d2h=20e9)  # fmt: skip
# List scheduling has anomalies (see simulate); on these pipelines they stay below this.
ANOMALY = 1.03


def unit(index: int, params: int = GB // 10, tier: str = "nvme") -> UnitLoad:
    """A bf16 unit: residual of 2 bytes, fp32 moments and gradients."""
    away = tier != "host"
    return UnitLoad(
        f"u{index}", tier, 2 * params, 2 * params,
        {tier: 14 * params} if away else {}, {tier: 10 * params} if away else {},
        28 * params, tier, 4 * params, 2 * params,
    )  # fmt: skip


def job(num_units: int = 8, **changes: object) -> StepSpec:
    units = tuple(unit(index) for index in range(num_units))
    base = StepSpec(
        units=units,
        uses=tuple(Use((index,), 2.0 * GB / 10 * 4096) for index in range(num_units)),
        num_micro_batches=1,
        backward_ratio=3.0,
        weights_cache_nbytes=GB,
        device_cache_nbytes=GB,
        ring_nbytes=2 * GB,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


jobs = st.builds(
    job,
    st.integers(1, 10),
    num_micro_batches=st.integers(1, 3),
    weights_cache_nbytes=st.integers(2, 30).map(lambda tenths: tenths * GB / 10),
    device_cache_nbytes=st.one_of(st.none(), st.integers(2, 30).map(lambda n: n * GB / 10)),
    ring_nbytes=st.integers(1, 40).map(lambda tenths: tenths * GB / 10),
    reads_ahead=st.booleans(),
    is_deferred=st.booleans(),
    early_share=st.sampled_from(EARLY_SHARES),
)


def test_bytes_of_a_step_with_space_for_nothing() -> None:
    moved = predict(job(weights_cache_nbytes=0, device_cache_nbytes=0), RATES).moved_nbytes
    params = 8 * GB // 10
    # Weights twice, gradient, moments and residual once; all but the first written once. The last
    # unit's backward follows its forward, and the first's forward its backward, but nothing stays.
    assert moved["nvme_write"] == (2 + 4 + 8 + 2) * params
    assert moved["d2h"] == 4 * params  # The device has widened them.
    stays = 2 * (2 * GB // 10)  # The unit at either turn is still there, cache or not.
    assert moved["nvme_read"] in (18 * params - stays, 18 * params - stays // 2)


def test_bytes_where_all_weights_fit_the_cache() -> None:
    params = 8 * GB // 10
    one_sum = 4 * GB // 10
    # With more than two on their way take, gradients stay in memory, too: one, or all. Two that
    # are written are still there.
    for cache_nbytes, kept_nbytes, held_nbytes in (
        (2 * params + 4 * one_sum - 1, one_sum, 3 * one_sum),
        (10 * GB, 4 * params, 4 * params),
    ):
        found = job(weights_cache_nbytes=cache_nbytes, device_cache_nbytes=None)
        moved = predict(found, RATES).moved_nbytes
        assert moved == {
            "nvme_read": 14 * params - held_nbytes,
            "nvme_write": 16 * params - kept_nbytes,
        }


def test_state_that_rests_on_the_host_moves_nothing() -> None:
    units = tuple(unit(index, tier="host") for index in range(8))
    assert not predict(job(units=units, device_cache_nbytes=None), RATES).moved_nbytes


def test_norms_beside_a_device_overlap_with_compute_but_for_the_last_tensor() -> None:
    """Of units on the host; one thread measures the largest tensor of the last one."""
    large = replace(unit(0, tier="host"), largest_nbytes=4 * GB // 10)
    here = job(units=tuple(replace(large, name=f"u{index}") for index in range(8)))
    rates = replace(RATES, norm=4e9, norm_threads=8)
    without = predict(replace(here, takes_norms=False), rates)
    found = predict(here, rates)
    per_unit_s = 0.4 / 32
    assert "norms" not in without.busy_s
    assert found.busy_s["norms"] == pytest.approx(7 * per_unit_s + 0.4 / 4)
    assert found.step_s - without.step_s == pytest.approx(0.4 / 4, rel=0.01)


def test_norms_of_gradients_on_the_device_of_one_rank_are_of_copies_made_in_the_backward() -> None:
    resting = replace(unit(0, tier="host"), gradients="device")
    here = job(units=tuple(replace(resting, name=f"u{index}") for index in range(8)))
    fast = replace(RATES, norm=4e9, norm_threads=8)
    found, without = predict(here, fast), predict(replace(here, takes_norms=False), fast)
    assert found.moved_nbytes["d2h"] - without.moved_nbytes.get("d2h", 0) == 32 * GB // 10
    assert found.busy_s["norms"] == pytest.approx(8 * 0.4 / 32, rel=0.01)
    # The copy and the norms of the last unit come after its backward.
    assert found.step_s - without.step_s == pytest.approx(0.4 / 32 + 0.4 * GB / RATES.d2h, rel=0.01)


def test_updates_on_the_device_copy_all_state_in_and_what_changed_out() -> None:
    params = 8 * GB // 10
    units = tuple(unit(index, tier="host") for index in range(8))
    here = job(units=units, device_cache_nbytes=0)
    there = replace(here, updates_on_device=True)
    slow = replace(RATES, update=5e9, device_update=1e12)
    host, device = predict(here, slow), predict(there, slow)
    more = {link: device.moved_nbytes[link] - host.moved_nbytes[link] for link in ("h2d", "d2h")}
    # Gradients that the host updates with leave the device in bf16.
    assert more == {"h2d": 16 * params, "d2h": 14 * params}
    assert device.step_s < host.step_s and host.binding == "update"
    # A host faster than the link has nothing to gain.
    fast = replace(slow, update=200e9)
    assert predict(here, fast).step_s <= predict(there, fast).step_s


def test_stored_bytes_come_while_a_unit_computes_where_one_decoded_unit_fits() -> None:
    """The bytes of the next unit come once those of this one have space, and not before."""
    frozen = UnitLoad("u", "host", GB, 0, {}, {}, 0, "host", 0, 0, decoded_nbytes=4 * GB)
    plain = job(
        units=tuple(replace(frozen, name=f"u{index}") for index in range(8)),
        uses=tuple(Use((index,), 1e13, decoded_nbytes=4 * GB) for index in range(8)),
        device_cache_nbytes=4 * GB,
    )
    before, after = (predict(replace(plain, stages_ahead=ahead), RATES) for ahead in (False, True))
    assert before.moved_nbytes == after.moved_nbytes
    assert before.step_s >= 0.99 * (before.busy_s["compute"] + before.busy_s["h2d"])
    assert after.step_s <= 1.01 * after.busy_s["compute"]
    order = sorted(
        (start_s, finish_s, operation.track, operation.name)
        for operation, start_s, finish_s in zip(
            after.timeline.operations, after.timeline.start_s, after.timeline.finish_s, strict=True
        )
        if operation.track == "h2d" or ": decoding of " in operation.name
    )
    decoded_s = [finish_s for _, finish_s, track, _ in order if track == "compute"]
    begun_s = [start_s for start_s, _, track, _ in order if track == "h2d" and start_s > 0]
    assert len(begun_s) > 10 and all(start_s in decoded_s for start_s in begun_s)


def test_stored_bytes_of_a_use_take_the_place_of_those_that_were_copied() -> None:
    """Host memory has space for one of the two units of a use: reads and copies take turns."""
    frozen = UnitLoad("u", "checkpoint", GB, 0, {}, {}, 0, "host", 0, 0, decoded_nbytes=GB)
    plain = job(
        units=tuple(replace(frozen, name=f"u{index}") for index in range(8)),
        uses=tuple(Use((index, index + 1), 1.0, decoded_nbytes=2 * GB) for index in (0, 2, 4, 6)),
        device_cache_nbytes=2 * GB,
        weights_cache_nbytes=1.5 * GB,
    )
    found = predict(plain, replace(RATES, h2d=8e9))
    assert found.busy_s["nvme"] == pytest.approx(found.busy_s["h2d"], rel=0.01)
    assert found.step_s >= 0.99 * (found.busy_s["nvme"] + found.busy_s["h2d"])


@pytest.mark.parametrize(
    ("tier", "cache", "links"),
    [
        ("nvme", GB, ("nvme_write", "d2h", "nvme_read", "h2d")), ("host", GB, ("d2h", "h2d")),
        ("nvme", None, ("nvme_write", "nvme_read")), ("host", None, ()), ("device", GB, ()),
    ],
)  # fmt: skip
def test_inputs_that_wait_for_the_backward_go_and_return_once(
    tier: str, cache: int | None, links: tuple[str, ...]
) -> None:
    plain = job(device_cache_nbytes=cache, weights_cache_nbytes=10 * GB)
    uses = tuple(replace(use, saved_nbytes=GB // 8) for use in plain.uses)
    before = predict(plain, RATES)
    after = predict(replace(plain, uses=uses, saved_on=tier), RATES)
    more = {link: after.moved_nbytes[link] - n for link, n in before.moved_nbytes.items()}
    assert {link for link, nbytes in more.items() if nbytes} == set(links)
    assert all(nbytes in (0, GB) for nbytes in more.values())
    assert after.step_s >= before.step_s


def test_gradients_of_more_micro_batches_are_read_and_written_again() -> None:
    params = 8 * GB // 10
    one_sum = 4 * GB // 10
    for cache_nbytes, moved_nbytes in (
        (2 * params + 4 * one_sum - 1, 4 * params - one_sum),
        (10 * GB, 0),
    ):
        one, two = (
            predict(job(num_micro_batches=n, weights_cache_nbytes=cache_nbytes), RATES).moved_nbytes
            for n in (1, 2)
        )
        # Sums that stay in memory are neither written nor read, for the next micro-batch either.
        assert two["nvme_write"] - one["nvme_write"] == moved_nbytes
        assert two["nvme_read"] - one["nvme_read"] == moved_nbytes


def test_the_order_of_micro_batches_that_go_block_by_block() -> None:
    """Three of them, two at a time through blocks with two tiles. An embedding, two blocks, a head
    whose backward follows its forward."""
    uses = [Use((0,), 1.0), Use((7,), 1.0)]
    uses[1:1] = [Use((unit,), 1.0, block=(unit - 1) // 3) for unit in range(1, 7)]
    found = moves(uses, num_fibers=3, tile_micro_batches=2, backward_ratio=3.0)
    # `*`: while its block is held. `<`: backward, with gradients.
    said = [
        str(uses[move.use].units[0]) + "*" * bool(move.held) + "<" * move.has_gradients
        for move in found
    ]
    assert " ".join(said) == (
        "0 0 0 1 2* 3* 2* 3* 4 5* 6* 5* 6* 7 7< 7 7< 7 7< "
        "4< 5* 6* 6*< 5*< 4< 5* 6* 6*< 5*< 1< 2* 3* 3*< 2*< 1< 2* 3* 3*< 2*< 0< 0< 0<"
    )
    assert sum(m.forwards for m in found if not m.is_backward) == pytest.approx(len(uses))
    assert sum(m.forwards for m in found if m.is_backward) == pytest.approx(3 * len(uses))


@pytest.mark.parametrize(
    ("keeps_experts", "expected"),
    [
        # One tile of a linear layer, then two tiles of experts.
        (True, "1 2* 3* 4* 1< 4*< 3*< 2* 2*< 1< 2* 2*<"),
        (False, "1 2* 3* 4* 1< 3* 4* 4*< 3*< 2* 2*< 1< 2* 2*<"),
    ],
)
def test_the_order_of_tiles_of_experts_which_serve_all_micro_batches(
    keeps_experts: bool, expected: str
) -> None:
    uses = [Use((unit,), 1.0, block=0, is_experts=unit > 2) for unit in range(1, 5)]
    found = moves(
        uses, num_fibers=3, tile_micro_batches=2, backward_ratio=3.0, keeps_experts=keeps_experts
    )
    said = [
        str(uses[move.use].units[0]) + "*" * bool(move.held) + "<" * move.has_gradients
        for move in found
    ]
    assert " ".join(said) == expected
    assert sum(m.forwards for m in found if not m.is_backward) == pytest.approx(4)
    # Without kept outputs the forward of experts is repeated twice.
    expected_flops = 12 if keeps_experts else 14
    assert sum(m.forwards for m in found if m.is_backward) == pytest.approx(expected_flops)


def test_a_tied_unit_has_one_gradient_and_one_update() -> None:
    tied = job(2, uses=(Use((0,), 1e9), Use((1,), 1e9), Use((0,), 1e9)))
    moved = predict(replace(tied, weights_cache_nbytes=10 * GB), RATES).moved_nbytes
    assert moved["nvme_write"] == 12 * 2 * GB // 10


@settings(max_examples=60)
@given(jobs)
def test_bytes_are_conserved(given_job: StepSpec) -> None:
    step = predict(given_job, RATES)
    drawn: Counter[str] = Counter()
    for operation in step.timeline.operations:
        drawn[operation.traffic] += operation.nbytes
    assert {name: nbytes for name, nbytes in drawn.items() if name} == dict(step.moved_nbytes)
    # Whatever is updated is written once, and the sums that do not stay once a micro-batch.
    num_leaving = len(given_job.units) - len(sums_in_memory(given_job).kept)
    params = len(given_job.units) * GB // 10
    accumulated = 4 * num_leaving * (GB // 10) * given_job.num_micro_batches
    assert step.moved_nbytes["nvme_write"] == 12 * params + accumulated


@settings(max_examples=60)
@given(jobs)
def test_a_step_takes_at_least_as_long_as_any_track_is_busy(given_job: StepSpec) -> None:
    step = predict(given_job, RATES)
    # Some of it was fetched in the step before. With few units that are large, writes that wait make
    # every fifth step longer, or so, and another one is shown.
    share = 0.97 if len(given_job.units) > 3 else 0.9
    for track, busy_s in step.busy_s.items():
        assert step.step_s >= busy_s * share, track


@settings(max_examples=60)
@given(jobs, st.sampled_from(["flops", "update", "host", "nvme", "h2d", "d2h"]))
def test_faster_is_not_slower(given_job: StepSpec, what: str) -> None:
    names = ("nvme_read", "nvme_write", "nvme_mixed") if what == "nvme" else (what,)
    faster = replace(RATES, **{name: 2 * getattr(RATES, name) for name in names})
    assert predict(given_job, faster).step_s <= predict(given_job, RATES).step_s * ANOMALY


def test_a_link_that_does_not_bind_changes_little() -> None:
    base = predict(job(), RATES)
    assert base.binding == "nvme"
    other = predict(job(), replace(RATES, h2d=40e9, d2h=40e9))
    assert other.step_s == pytest.approx(base.step_s, rel=0.05)
    binding = predict(job(), replace(RATES, nvme_read=16e9, nvme_write=8e9, nvme_mixed=12e9))
    assert binding.step_s < 0.75 * base.step_s


def test_deferred_updates_hide_behind_the_forward() -> None:
    # Compute of a forward as long as the traffic of the updates.
    uses = tuple(Use((index,), 8e12) for index in range(8))
    deferred = predict(job(uses=uses, is_deferred=True), RATES)
    at_step = predict(job(uses=uses, is_deferred=False), RATES)
    assert deferred.step_s < 0.9 * at_step.step_s


def balanced_job(weights_cache_nbytes: int) -> tuple[StepSpec, Rates]:
    """A job whose gradients are on the host, and rates at which its compute takes as long as its
    bytes."""
    units = tuple(
        replace(
            unit(index),
            state_read_nbytes={"nvme": GB}, state_write_nbytes={"nvme": GB}, gradients="host",
        )
        for index in range(24)
    )  # fmt: skip
    found = job(
        num_units=24, units=units, weights_cache_nbytes=weights_cache_nbytes,
        device_cache_nbytes=None,
    )  # fmt: skip
    busy_s = predict(found, RATES).busy_s
    return found, replace(RATES, flops=RATES.flops * busy_s["compute"] / busy_s["nvme"])


def test_deferred_updates_hide_behind_both_passes_in_memory_that_is_free() -> None:
    """State waits there: for its write, and for the next forward."""
    ratios = []
    for cache_nbytes in (5 * GB, 10 * GB, 20 * GB, 40 * GB, 80 * GB):
        found, rates = balanced_job(cache_nbytes)
        deferred = predict(found, rates)
        ratios.append(deferred.step_s / max(deferred.busy_s.values()))
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1.4 and ratios[-1] < 1.05


def test_updates_in_both_passes_hide_behind_both() -> None:
    """Where compute and bytes take equally long: the forward has a quarter of the compute."""
    balanced, rates = balanced_job(weights_cache_nbytes=5 * GB)  # All weights, and no more.
    _, both = best_share(balanced, rates)
    deferred = predict(balanced, rates)
    assert both.moved_nbytes == deferred.moved_nbytes
    bound_s = max(both.busy_s.values())
    assert deferred.step_s > 1.4 * bound_s
    assert both.step_s < 1.25 * bound_s


@pytest.mark.parametrize(
    ("rates", "seconds"),
    [
        (Rates(1, 1, 1, nvme_read=4, nvme_write=2, nvme_mixed=3), 2 * 8 / 3 + 4 / 4),
        (Rates(1, 1, 1, nvme_read=4, nvme_write=4, nvme_mixed=8), 12 / 4),  # Full duplex.
        (Rates(1, 1, 1, nvme_read=4, nvme_write=2, nvme_mixed=1), 12 / 4 + 8 / 2),  # In turns.
    ],
)
def test_time_of_the_drives(rates: Rates, seconds: float) -> None:
    assert rates.nvme_s(12, 8) == pytest.approx(seconds)


def test_visits_keep_what_is_used_soonest() -> None:
    # Of four units two fit. Either turn finds two there: those used around it.
    found = visits((0, 1, 2, 3, 3, 2, 1, 0), (1,) * 4, 2, num_passes=2)
    hits = [visit.is_hit for visit in found[8:]]
    assert hits == [True, True, False, False, True, True, False, False]


def test_visits_of_a_stale_pass_miss_once() -> None:
    found = visits((0, 1, 1, 0), (1, 1), 2, num_passes=3, stale=(1,), changing=frozenset({0}))
    assert [visit.is_hit for visit in found[4:8]] == [False, True, True, True]
    assert all(visit.is_hit for visit in found[8:])
