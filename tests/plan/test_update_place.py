"""Who makes the update: what decides it, what does not, and that planner and engine ask alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import SwapConfig
from infinity.plan import Batch, forecast, load_hardware, scaled_gpt
from infinity.plan.model import model_of_shape
from infinity.simulate.order import Use
from infinity.simulate.spec import Rates, StepSpec
from infinity.simulate.step import predict
from infinity.simulate.update_device import LEAST_GAIN, choose, settled
from infinity.sizes import GIB
from infinity.state.units import moments_of
from infinity.tools.plan.advice import advise

from .test_step import ANOMALY, GB, job, unit

INF = float("inf")
gbps = st.integers(-2, 40).map(lambda tenths: 2 ** (tenths / 4) * 1e9)
machines = st.builds(
    lambda update, device, h2d, d2h, drives, flops: Rates(
        flops=flops, update=update, host=INF, device_update=device, h2d=h2d, d2h=d2h,
        nvme_read=drives, nvme_write=drives / 2, nvme_mixed=drives,
    ),
    gbps, gbps, gbps, gbps, st.one_of(gbps, st.just(INF)), st.sampled_from([1e12, 1e14, INF]),
)  # fmt: skip


def small_job(tier: str, **changes: Any) -> StepSpec:
    units = tuple(unit(index, tier=tier) for index in range(4))
    uses = tuple(Use((index,), 2.0 * GB / 10 * 4096) for index in range(4))
    return job(**{"units": units, "uses": uses} | changes)


jobs = st.builds(
    small_job,
    st.sampled_from(["host", "nvme"]),
    is_deferred=st.booleans(),
    device_cache_nbytes=st.sampled_from([0, GB, INF]),
)


@settings(max_examples=30, deadline=None)
@given(jobs, machines)
def test_the_device_is_chosen_where_it_wins_clearly_and_nowhere_else(
    job: StepSpec, rates: Rates
) -> None:
    here, there = (
        predict(replace(job, updates_on_device=each), rates).step_s for each in (False, True)
    )
    assert choose(job, rates).is_on_device is (LEAST_GAIN * there < here)
    # A machine faster in everything by a power of two is another clock, no other machine.
    doubled = Rates(
        **{name: 4 * getattr(rates, name) for name in Rates.__slots__ if name != "gather"}
    )
    assert choose(job, doubled).place == choose(job, rates).place


@settings(max_examples=30, deadline=None)
@given(jobs, machines)
def test_an_update_that_does_not_bound_the_step_stays_on_the_host(
    job: StepSpec, rates: Rates
) -> None:
    assert ANOMALY < LEAST_GAIN
    assert not choose(job, replace(rates, update=INF)).is_on_device
    # Whatever the processor does, there is no gain where drives, or the link, are as slow.
    drives = replace(rates, nvme_read=1e6, nvme_write=1e6, nvme_mixed=1e6)
    link = replace(rates, h2d=1e6, d2h=1e6)
    for slower in (link, drives) if job.units[0].weights == "nvme" else (link,):
        assert not choose(job, slower).is_on_device


def test_the_slowest_of_what_an_update_goes_through_decides() -> None:
    slow_host = Rates(flops=INF, update=5e9, host=INF, device_update=500e9, h2d=25e9, d2h=25e9)
    at_host, at_nvme = small_job("host"), small_job("nvme")
    assert choose(at_host, slow_host).is_on_device
    for binding in ({"update": 50e9}, {"h2d": 2e9}, {"d2h": 2e9}, {"device_update": 5e9}):
        assert not choose(at_host, replace(slow_host, **binding)).is_on_device, binding
    drives = {"nvme_read": 2e9, "nvme_write": 1e9, "nvme_mixed": 2e9}
    assert choose(at_nvme, slow_host).is_on_device  # As fast as they may be: not known.
    assert not choose(at_nvme, replace(slow_host, **drives)).is_on_device
    # Hidden behind a large batch, by updates that are deferred, and else not.
    large = replace(slow_host, flops=1e12)
    assert not choose(at_host, large).is_on_device
    uses = tuple(replace(use, forward_flops=0.0) for use in at_host.uses)
    unknown = choose(replace(at_host, uses=uses), large)
    assert unknown.is_on_device and "its computation not counted" in unknown.why


def test_configuration_alone_settles_some_update_devices() -> None:
    usual: dict[str, Any] = {"shares_host_memory": False, "update_nbytes": GIB}
    assert settled("auto", "float32", **usual) is None
    for place in ("host", "device"):
        found = settled(place, "float32", **usual)
        assert found is not None and found.place == place
    for moments, changed in (
        ("8bit", {}), ("float32", {"shares_host_memory": True}), ("float32", {"update_nbytes": 1}),
    ):  # fmt: skip
        found = settled("auto", moments, **usual | changed)
        assert found is not None and found.place == "host"


@pytest.mark.parametrize(
    ("host_gb_per_s", "device_gb_per_s", "place"),
    [(10.0, 600.0, "device"), (600.0, 600.0, "host"), (10.0, None, "host")],
)
def test_the_planner_predicts_what_would_be_chosen(
    host_gb_per_s: float, device_gb_per_s: float | None, place: str
) -> None:
    import torch

    machine = load_hardware("8xh200-4nvme")
    machine = machine.model_copy(
        update={
            "host": machine.host.model_copy(update={"update_gb_per_s": host_gb_per_s}),
            "device": machine.device.model_copy(
                update={"update_gb_per_s": device_gb_per_s, "count": 1}
            ),
        }
    )
    table: dict[str, Any] = {"tiers": {"host": {"capacity": "85%"}}}
    table["precision"] = {"compute": "bfloat16"}
    config = SwapConfig.load(table)
    moments = moments_of(config.optimizer, config.precision)
    model = model_of_shape(scaled_gpt(7 * 10**9), torch.bfloat16, moments)
    found, by_hand = (
        forecast(SwapConfig.load(table | more), model, machine, Batch(8192, 2048))
        for more in ({}, {"schedule": {"update_on": place}})
    )
    assert found.update_place.place == place and found.step == by_hand.step
    # The other one is among what is tried, where there is a figure of it, and does not help.
    tried = {each.change: each.ratio for each in advise(SwapConfig.load(table), model, found)}
    other = "host" if place == "device" else "device"
    name = f"updates on the {other} (schedule.update_on)"
    assert tried[name] < LEAST_GAIN if device_gb_per_s else name not in tried


def test_state_on_the_device_is_updated_there_without_a_transfer() -> None:
    """With the host's update all of it comes and what is changed returns."""
    resting = small_job("device", device_cache_nbytes=INF, takes_norms=False)
    params = 4 * GB // 10
    rates = Rates(flops=1e15, update=100e9, host=INF, device_update=800e9, h2d=50e9, d2h=50e9)
    here, there = (
        predict(replace(resting, updates_on_device=each), rates) for each in (False, True)
    )
    assert not any(there.moved_nbytes.get(link) for link in ("h2d", "d2h"))
    assert here.moved_nbytes["d2h"] == (14 + 2) * params
    assert here.moved_nbytes["h2d"] == (10 + 2) * params
    assert choose(resting, rates).is_on_device
