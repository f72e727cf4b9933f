"""Placing state kinds on tiers: against the rule of the docstring, followed one state kind at a
time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import CapacityError
from infinity.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES
from infinity.state.placement import (
    STATE_KINDS,
    StatePlacement,
    least_chunk_nbytes,
    place,
    plan_staging_slots,
    resting_nbytes,
    smallest_working_nbytes,
    staging_nbytes,
)
from infinity.state.units import (
    STATE_GRANULE,
    STATE_ITEM_NBYTES,
    StateKind,
    TensorFacts,
    Unit,
    chunk_unit,
    layout_unit,
)
from infinity.tiers.ranges import rounded_nbytes

from .strategies import units

GRANULE_NBYTES = STATE_GRANULE * STATE_ITEM_NBYTES
KINDS = ("parameters", "gradients", "master", "moments")  # From what travels most to what least.
TIERS = ("device", "host", "nvme")

orders = st.permutations(TIERS).flatmap(
    lambda tiers: st.integers(1, len(tiers)).map(lambda count: tuple(tiers[:count]))
)
preferences = st.fixed_dictionaries(dict.fromkeys(KINDS, orders))
budgets = st.integers(0, 60).map(lambda pages: pages * PAGE_NBYTES)


class NoRoom(Exception):
    pass


def followed(
    units: list[Unit], preferences: dict[str, tuple[str, ...]], budget: dict[str, float]
) -> dict[tuple[int, StateKind], str]:
    """The rule by hand: kinds that may not go to NVMe first, then by traffic; a state kind goes to
    the first tier of its list with space. Units without state come after all state of the
    others."""
    trained = [unit for unit in units if unit.state_numel]
    frozen = [unit for unit in units if not unit.state_numel]
    fixed = [kind for kind in KINDS if "nvme" not in preferences[kind]]
    others = [kind for kind in KINDS if "nvme" in preferences[kind]]
    turns = [(kind, group) for kinds in (fixed, others) for group in (trained, frozen) for kind in kinds]  # fmt: skip
    found: dict[tuple[int, StateKind], str] = {}
    for kind, group in turns:
        for state_kind in StateKind:
            if state_kind.kind != kind:
                continue
            for unit in group:
                nbytes = unit.nbytes(state_kind)
                if nbytes == 0:
                    continue
                nbytes = rounded_nbytes(nbytes)
                for tier in preferences[kind]:
                    if budget[tier] >= nbytes:
                        budget[tier] -= nbytes
                        found[unit.index, state_kind] = tier
                        break
                else:
                    raise NoRoom(kind)
    return found


def placed(
    units: list[Unit], preferences: dict[str, tuple[str, ...]], host: int, device: int | None
) -> StatePlacement:
    return place(units, preferences, host_nbytes=host, device_nbytes=device)


def unit_of(index: int, *, is_trainable: bool) -> Unit:
    facts = TensorFacts("weight", (4096,), (1,), torch.bfloat16, is_trainable)
    return layout_unit(index, f"u{index}", [facts])


def test_state_of_trained_units_takes_the_host_before_frozen_weights_do() -> None:
    frozen, trained = unit_of(0, is_trainable=False), unit_of(1, is_trainable=True)
    order = dict.fromkeys(KINDS, ("host", "nvme"))
    kinds = (StateKind.PARAMETERS, *STATE_KINDS)
    room = sum(resting_nbytes(trained, kind) for kind in kinds)
    found = placed([frozen, trained], order, room, None)
    assert {found.tiers[1, kind] for kind in kinds if trained.nbytes(kind)} == {"host"}
    assert found.tiers[0, StateKind.PARAMETERS] == "nvme"


@given(units=units(), preferences=preferences, host=budgets, device=st.none() | budgets)
@settings(max_examples=300)
def test_every_state_kind_lies_on_the_first_tier_of_its_list_with_space(
    units: list[Unit], preferences: dict[str, Any], host: int, device: int | None
) -> None:
    infinite = float("inf")
    budget = {"host": host, "nvme": infinite, "device": infinite if device is None else device}
    try:
        expected = followed(units, preferences, dict(budget))
    except NoRoom as refused:
        (kind,) = refused.args
        with pytest.raises(CapacityError) as error:
            placed(units, preferences, host, device)
        last = preferences[kind][-1]
        assert error.value.tier == last
        assert error.value.available_nbytes < error.value.needed_nbytes
        assert error.value.key == f"tiers.{last}.capacity"
        assert f"placement.{kind}" in str(error.value) and f"tiers.{last}" in str(error.value)
        return
    found = placed(units, preferences, host, device)
    assert dict(found.tiers) == expected
    for tier in TIERS:
        here = sum(
            resting_nbytes(units[index], state_kind)
            for (index, state_kind), where in found.tiers.items()
            if where == tier
        )
        assert here == found.placed_nbytes[tier] <= budget[tier]
    for unit in units:
        for state_kind in StateKind:
            has_bytes = unit.nbytes(state_kind) > 0
            assert ((unit.index, state_kind) in found.tiers) == has_bytes
            if has_bytes:
                assert found.tier(unit, state_kind) in preferences[state_kind.kind]


@given(units=units(), preferences=preferences, host=budgets, device=st.none() | budgets)
@settings(max_examples=200)
def test_kinds_that_can_go_to_nvme_never_starve_the_others(
    units: list[Unit], preferences: dict[str, Any], host: int, device: int | None
) -> None:
    """What the others may do makes no difference to a kind that has no NVMe in its list."""
    only_nvme = {
        kind: order if "nvme" not in order else ("nvme",) for kind, order in preferences.items()
    }
    try:
        alone = placed(units, only_nvme, host, device)
    except CapacityError:
        with pytest.raises(CapacityError):
            placed(units, preferences, host, device)
        return
    collective_section = placed(units, preferences, host, device)
    for (index, state_kind), tier in alone.tiers.items():
        if "nvme" not in preferences[state_kind.kind]:
            assert collective_section.tiers[index, state_kind] == tier


@given(
    units=units(),
    preferences=st.fixed_dictionaries(
        dict.fromkeys(KINDS, orders.filter(lambda order: "nvme" in order))
    ),
    host=budgets,
)
@settings(max_examples=100)
def test_with_nvme_in_every_list_nothing_is_refused(
    units: list[Unit], preferences: dict[str, Any], host: int
) -> None:
    placed(units, preferences, host, 0)


@given(
    units=units(),
    preferences=preferences,
    held=st.integers(0, 1 << 20),
    chunk=st.integers(1, 32).map(lambda granules: granules * GRANULE_NBYTES),
)
@settings(max_examples=150)
def test_working_memory_holds_what_it_must(
    units: list[Unit], preferences: dict[str, Any], held: int, chunk: int
) -> None:
    """Enough for the weights in use with, in turn, the gradients of a unit or a chunk of its
    state."""
    needed = smallest_working_nbytes(units, preferences, held_nbytes=held, chunk_nbytes=chunk)
    streamed = {kind for kind in KINDS if set(preferences[kind]) != {"host"}}
    for unit in units:
        weights = resting_nbytes(unit, StateKind.PARAMETERS) if "parameters" in streamed else 0
        gradients = resting_nbytes(unit, StateKind.GRADIENTS) if "gradients" in streamed else 0
        assert needed >= weights + 2 * gradients
        if unit.state_numel:
            travelling = [state_kind for state_kind in STATE_KINDS if state_kind.kind in streamed]
            granule_nbytes = least_chunk_nbytes(units)
            chunk_nbytes, staging_slots = plan_staging_slots(
                needed - weights,
                chunk,
                units_nbytes=[unit.state_numel * STATE_ITEM_NBYTES for unit in units],
                travelling_nbytes=sum(staging_nbytes(units, travelling, granule_nbytes).values()),
                granule_nbytes=granule_nbytes,
            )
            assert staging_slots >= 1
            each = staging_nbytes(units, travelling, chunk_nbytes)
            assert weights + staging_slots * sum(each.values()) <= needed
            assert all(
                chunk.nbytes(state_kind) <= each[state_kind]
                for chunk in chunk_unit(unit, chunk_nbytes)
                for state_kind in travelling
            )


@given(
    free=st.integers(0, 1 << 34),
    configured=st.integers(1, 1 << 19).map(lambda n: n * GRANULE_NBYTES),
    unit=st.integers(0, 1 << 30).map(lambda n: n * STATE_ITEM_NBYTES),
    kinds=st.integers(1, 4),
)
@settings(max_examples=300)
def test_staging_slots_fit_what_is_free_and_are_whole_granules(
    free: int, configured: int, unit: int, kinds: int
) -> None:
    chunk_nbytes, staging_slots = plan_staging_slots(
        free, configured, units_nbytes=[unit], travelling_nbytes=kinds * GRANULE_NBYTES
    )
    assert chunk_nbytes % GRANULE_NBYTES == 0
    assert 0 < chunk_nbytes <= configured and staging_slots >= 1
    assert chunk_nbytes < max(unit, 1) + GRANULE_NBYTES, "a chunk is at most a unit"
    if staging_slots > 1:
        assert kinds * staging_slots * chunk_nbytes <= free
    if staging_slots > 3:
        assert kinds * staging_slots * chunk_nbytes <= free // 2, "the other half is for weights"
        assert staging_slots * chunk_nbytes <= 2 * (unit + configured), (
            "more than two units never help"
        )
    whole = min(configured, max(unit, 1))
    if free >= 4 * kinds * (unit + whole) + HUGE_PAGE_NBYTES:
        assert staging_slots * chunk_nbytes >= unit, "there is room for two units"


@given(
    free=st.integers(0, 1 << 34),
    units=st.lists(st.integers(1, 1 << 28), min_size=1, max_size=5),
    kinds=st.integers(1, 4),
)
@settings(max_examples=200)
def test_units_have_no_more_chunks_than_in_chunks_of_the_size_before(
    free: int, units: list[int], kinds: int
) -> None:
    """Sizes of units change the size of a chunk by an eighth at the most, for fewer chunks."""
    sizes = [numel * STATE_ITEM_NBYTES for numel in units]
    travelling_nbytes = kinds * GRANULE_NBYTES
    alone, _ = plan_staging_slots(
        free, 16 << 20, units_nbytes=[max(sizes)], travelling_nbytes=travelling_nbytes
    )
    together, slots = plan_staging_slots(
        free, 16 << 20, units_nbytes=sizes, travelling_nbytes=travelling_nbytes
    )
    assert together <= 16 << 20 and together <= alone + alone // 8
    assert alone <= together + together // 8
    assert slots == 1 or slots * together * kinds <= free


def test_a_unit_that_is_a_little_larger_than_a_chunk_has_one() -> None:
    """Twelve blocks of 13.5 MiB beside an embedding of 74, for whose sake chunks would have 13.3."""
    mib = 1 << 20
    sizes = [int(13.5 * mib)] * 12 + [74 * mib] * 2
    chunk_nbytes, slots = plan_staging_slots(
        1 << 31, 16 * mib, units_nbytes=sizes, travelling_nbytes=2 * GRANULE_NBYTES
    )
    assert 13.5 * mib <= chunk_nbytes <= 15 * mib and slots >= 10
