"""Updates that no step has decided write beside the homes of state on the host, which then rotate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.state.store import HostLocation, changing_kinds
from infinity.state.undecided import UndecidedState
from infinity.state.units import StateKind, Unit

Bytes = dict[tuple[int, StateKind], Tensor]


class Homes:
    """Units of one size on the host, and updates of them that write one number everywhere."""

    def __init__(self, engine: Any, *, is_over_ranks: bool) -> None:
        self.store, self.pool = engine.store, engine.pool
        self.left: list[tuple[int, StateKind]] = []
        self.undecided = UndecidedState(
            self.store, self.pool, None if is_over_ranks else self.leaves
        )
        self.units: list[Unit] = [unit for unit in self.store.units if unit.state_numel]
        for number, (unit, kind) in enumerate(self.places()):
            home = self.home(unit, kind)
            home.copy_((torch.arange(home.numel()) * (number + 3) % 251).to(torch.uint8))

    def leaves(self, unit: Unit, kind: StateKind) -> bool:
        self.left.append((unit.index, kind))
        return True

    def places(self) -> list[tuple[Unit, StateKind]]:
        return [(unit, kind) for unit in self.units for kind in changing_kinds(unit)]

    def home(self, unit: Unit, kind: StateKind) -> Tensor:
        found: Tensor = self.store.host_view(unit, kind)
        return found

    def state(self) -> Bytes:
        return {(unit.index, kind): self.home(unit, kind).clone() for unit, kind in self.places()}

    def ranges(self) -> set[Any]:
        locations = (self.store.location(*place) for place in self.places())
        return {at.block.range for at in locations if isinstance(at, HostLocation)}

    def update(self, unit: Unit, number: int, *, skipped: int = 0) -> None:
        """The update leaves `skipped` bytes at the start and the end of each kind as they are."""
        assert self.undecided.reserve(unit)
        self.undecided.begin(unit)
        into = self.undecided.into(unit)
        assert set(into) == set(changing_kinds(unit))
        for new in into.values():
            new.fill_(254)

        def written(kind: StateKind) -> Iterator[tuple[int, int]]:
            stop = into[kind].numel() - skipped
            yield skipped, stop // 2
            yield stop // 2, stop

        assert not self.undecided.is_filled(unit)
        self.undecided.fill(unit, written, self.home(unit, StateKind.PARAMETERS))
        assert self.undecided.is_filled(unit)
        for kind, new in into.items():
            for start, stop in written(kind):
                new[start:stop] = number

    def decide(self, unit: Unit) -> None:
        self.undecided.publish(unit)
        self.undecided.bring_home(unit)
        self.undecided.free(unit)

    def drop(self, unit: Unit) -> None:
        self.undecided.drop(unit)
        self.undecided.free(unit)


@pytest.fixture(params=[False, True], ids=["one_rank", "ranks"])
def homes(request: Any) -> Iterator[Homes]:
    model = nn.Sequential(*(nn.Linear(300, 400, bias=False) for _ in range(3))).to(torch.bfloat16)
    tiers = {"host": {"capacity": "32MiB"}, "device": {"kind": "cpu"}}
    model = infinity.offload(model, {"tiers": tiers, "precision": {"compute": "auto"}})
    yield Homes(infinity.engine_of(model), is_over_ranks=request.param)
    infinity.close(model)


def same(found: Bytes, wanted: Bytes) -> bool:
    return all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_until_the_decision_homes_have_the_old_bytes_and_then_the_new(homes: Homes) -> None:
    old, ranges = homes.state(), homes.ranges()
    unit, other = homes.units[:2]
    homes.update(unit, 7)
    homes.update(other, 9)
    assert same(homes.state(), old)
    assert homes.ranges() == ranges
    homes.drop(other)
    assert same(homes.state(), old), "to take an update back is to publish nothing"
    homes.decide(unit)
    for (index, kind), found in homes.state().items():
        if index != unit.index:
            assert torch.equal(found, old[index, kind])
        else:
            assert (found[: unit.trainable_nbytes] == 7).all()


def test_bytes_that_an_update_leaves_as_they_are_move_with_it(homes: Homes) -> None:
    old, unit = homes.state(), homes.units[1]
    homes.update(unit, 7, skipped=100)
    homes.decide(unit)
    for kind in changing_kinds(unit):
        found, before = homes.home(unit, kind), old[unit.index, kind]
        assert torch.equal(found[:100], before[:100])
        assert torch.equal(found[-100:], before[-100:])
        assert (found[100 : min(found.numel() - 100, unit.trainable_nbytes)] == 7).all()


def test_readers_beside_updates_never_find_bytes_that_no_step_has_decided(homes: Homes) -> None:
    unit, old = homes.units[0], homes.state()
    is_over, torn = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            torn.extend(
                kind
                for kind in changing_kinds(unit)
                if not torch.equal(homes.home(unit, kind), old[unit.index, kind])
            )

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for number in range(50):
            homes.update(unit, number)
            homes.drop(unit)
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert not torn


def test_a_few_blocks_more_than_homes_are_enough_for_any_number_of_updates(homes: Homes) -> None:
    free_nbytes = homes.pool.free_nbytes
    homes.update(homes.units[0], 1)
    taken_nbytes = free_nbytes - homes.pool.free_nbytes
    homes.decide(homes.units[0])
    homes.pool.spare.sums_to_come_nbytes = homes.pool.free_nbytes
    for number in range(12):
        unit = homes.units[number % 3]
        homes.update(unit, number)
        homes.decide(unit)
        assert not homes.undecided.has_memory(unit)
    assert free_nbytes - homes.pool.free_nbytes == taken_nbytes
    homes.update(homes.units[0], 1)
    assert not homes.undecided.reserve(homes.units[1]), "no memory is left for a second one"


def test_memory_goes_back_without_a_hole_among_the_homes(homes: Homes) -> None:
    ranges, holes = homes.ranges(), homes.pool.holes()
    for number in range(5):
        unit = homes.units[number % 3]
        homes.update(unit, number)
        homes.decide(unit)
    state = homes.state()
    while homes.undecided.give_back():
        pass
    assert same(homes.state(), state)
    if homes.undecided._leaves_home is not None:
        assert homes.pool.holes() == holes
        assert homes.ranges() == ranges
    assert sum(hole.nbytes for hole in homes.pool.holes()) == sum(hole.nbytes for hole in holes)


def test_a_home_that_is_in_use_stays_and_its_memory_goes_later(homes: Homes) -> None:
    if homes.undecided._leaves_home is None:
        return
    homes.update(homes.units[0], 1)
    homes.decide(homes.units[0])
    state, ranges = homes.state(), homes.ranges()
    homes.undecided._leaves_home = lambda unit, kind: False
    while homes.undecided.give_back():
        pass
    assert same(homes.state(), state)
    assert homes.ranges() == ranges
