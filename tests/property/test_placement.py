"""Placing pieces on tiers: against the rule of the docstring, followed one piece at a time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import CapacityError
from infinity.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES
from infinity.state.placement import (
    STATE_PIECES,
    Placement,
    berth_nbytes,
    least_chunk_nbytes,
    place,
    plan_berths,
    resting_nbytes,
    smallest_working_nbytes,
)
from infinity.state.units import STATE_GRANULE, STATE_ITEM_NBYTES, Piece, Unit, chunk_unit
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
) -> dict[tuple[int, Piece], str]:
    """The rule by hand: kinds that may not go to NVMe first, then by traffic; a piece goes to the
    first tier of its list that has room. Units with state come before those without."""
    units = [u for u in units if u.state_numel] + [u for u in units if not u.state_numel]
    fixed = [kind for kind in KINDS if "nvme" not in preferences[kind]]
    others = [kind for kind in KINDS if "nvme" in preferences[kind]]
    found: dict[tuple[int, Piece], str] = {}
    for kind in fixed + others:
        for piece in Piece:
            if piece.kind != kind:
                continue
            for unit in units:
                nbytes = unit.nbytes(piece)
                if nbytes == 0:
                    continue
                nbytes = rounded_nbytes(nbytes)
                for tier in preferences[kind]:
                    if budget[tier] >= nbytes:
                        budget[tier] -= nbytes
                        found[unit.index, piece] = tier
                        break
                else:
                    raise NoRoom(kind)
    return found


def placed(
    units: list[Unit], preferences: dict[str, tuple[str, ...]], host: int, device: int | None
) -> Placement:
    return place(units, preferences, host_nbytes=host, device_nbytes=device)


@given(units=units(), preferences=preferences, host=budgets, device=st.none() | budgets)
@settings(max_examples=300)
def test_each_piece_lies_on_the_first_tier_of_its_list_with_room(
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
        assert f"placement.{kind}" in error.value.key and f"tiers.{last}" in error.value.key
        return
    found = placed(units, preferences, host, device)
    assert dict(found.tiers) == expected
    for tier in TIERS:
        here = sum(
            resting_nbytes(units[index], piece)
            for (index, piece), where in found.tiers.items()
            if where == tier
        )
        assert here == found.placed_nbytes[tier] <= budget[tier]
    for unit in units:
        for piece in Piece:
            has_bytes = unit.nbytes(piece) > 0
            assert ((unit.index, piece) in found.tiers) == has_bytes
            if has_bytes:
                assert found.tier(unit, piece) in preferences[piece.kind]


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
    together = placed(units, preferences, host, device)
    for (index, piece), tier in alone.tiers.items():
        if "nvme" not in preferences[piece.kind]:
            assert together.tiers[index, piece] == tier


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
        weights = resting_nbytes(unit, Piece.PARAMETERS) if "parameters" in streamed else 0
        gradients = resting_nbytes(unit, Piece.GRADIENTS) if "gradients" in streamed else 0
        assert needed >= weights + 2 * gradients
        if unit.state_numel:
            travelling = [piece for piece in STATE_PIECES if piece.kind in streamed]
            granule_nbytes = least_chunk_nbytes(units)
            chunk_nbytes, berths = plan_berths(
                needed - weights,
                chunk,
                unit_nbytes=max(unit.state_numel for unit in units) * STATE_ITEM_NBYTES,
                travelling_nbytes=sum(berth_nbytes(units, travelling, granule_nbytes).values()),
                granule_nbytes=granule_nbytes,
            )
            assert berths >= 1
            each = berth_nbytes(units, travelling, chunk_nbytes)
            assert weights + berths * sum(each.values()) <= needed
            assert all(
                chunk.nbytes(piece) <= each[piece]
                for chunk in chunk_unit(unit, chunk_nbytes)
                for piece in travelling
            )


@given(
    free=st.integers(0, 1 << 34),
    configured=st.integers(1, 1 << 19).map(lambda n: n * GRANULE_NBYTES),
    unit=st.integers(0, 1 << 30).map(lambda n: n * STATE_ITEM_NBYTES),
    pieces=st.integers(1, 4),
)
@settings(max_examples=300)
def test_berths_fit_what_is_free_and_are_whole_granules(
    free: int, configured: int, unit: int, pieces: int
) -> None:
    chunk_nbytes, berths = plan_berths(
        free, configured, unit_nbytes=unit, travelling_nbytes=pieces * GRANULE_NBYTES
    )
    assert chunk_nbytes % GRANULE_NBYTES == 0
    assert 0 < chunk_nbytes <= configured and berths >= 1
    assert chunk_nbytes < max(unit, 1) + GRANULE_NBYTES, "a chunk is at most a unit"
    if berths > 1:
        assert pieces * berths * chunk_nbytes <= free
    if berths > 3:
        assert pieces * berths * chunk_nbytes <= free // 2, "the other half is for weights"
        assert berths * chunk_nbytes <= 2 * (unit + configured), "more than two units never help"
    whole = min(configured, max(unit, 1))
    if free >= 4 * pieces * (unit + whole) + HUGE_PAGE_NBYTES:
        assert berths * chunk_nbytes >= unit, "there is room for two units"
