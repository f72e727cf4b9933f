"""Old bytes of state on the host while an update changes it: for readers, and to go back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.sizes import KIB
from infinity.state.store import changing_kinds
from infinity.state.undecided import UndecidedState
from infinity.state.units import Chunk, StateKind, Unit, chunk_unit

CHUNK_NBYTES = 8 * KIB


class Changing:
    """A unit on the host whose masters and moments an update changes, chunk by chunk."""

    def __init__(self, engine: Any) -> None:
        self.store, self.pool = engine.store, engine.pool
        self.undecided = UndecidedState(self.store, self.pool, serves_weights=True)
        [self.unit] = self.store.units
        self.kinds = [k for k in changing_kinds(self.unit) if k is not StateKind.PARAMETERS]
        for number, kind in enumerate(self.kinds):
            home = self.home(kind)
            home.copy_((torch.arange(home.numel()) * (number + 3) % 251).to(torch.uint8))
        self.old = {kind: self.home(kind).clone() for kind in self.kinds}

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        found = chunk_unit(self.unit, CHUNK_NBYTES)
        assert len(found) > 5
        return found

    def home(self, kind: StateKind) -> Tensor:
        found: Tensor = self.store.host_view(self.unit, kind)
        return found

    def change(self, chunk: Chunk) -> None:
        self.undecided.keep(chunk, torch.empty(0, dtype=torch.uint8))
        for kind in self.kinds:
            start = chunk.offset_nbytes(kind)
            self.home(kind)[start : start + chunk.nbytes(kind)].fill_(255)

    def read(self, kind: StateKind, start: int, nbytes: int) -> Tensor:
        sink = torch.full((nbytes,), 254, dtype=torch.uint8)
        self.undecided.read(self.unit, kind, start, sink)
        return sink


@pytest.fixture
def changing() -> Iterator[Changing]:
    model = nn.Linear(200, 100, bias=False).to(torch.bfloat16)
    tiers = {"host": {"capacity": "32MiB"}, "device": {"kind": "cpu"}}
    model = infinity.offload(model, {"tiers": tiers, "precision": {"compute": "auto"}})
    yield Changing(infinity.engine_of(model))
    infinity.close(model)


def test_a_reader_finds_the_old_bytes_at_every_moment(changing: Changing) -> None:
    assert changing.undecided.reserve(changing.unit)
    changing.undecided.begin(changing.unit)
    assert len(changing.old) == 3
    for chunk in changing.chunks:
        changing.change(chunk)
        for kind, old in changing.old.items():
            for start, nbytes in ((0, old.numel()), (1000, 12345), (old.numel() - 100, 4096)):
                found, wanted = changing.read(kind, start, nbytes), old[start : start + nbytes]
                assert torch.equal(found[: wanted.numel()], wanted)
                assert (found[wanted.numel() :] == 254).all(), "beyond the end nothing is read"
    changing.undecided.publish(changing.unit)
    for kind, old in changing.old.items():
        assert (changing.read(kind, 0, old.numel()) == 255).all(), "the new bytes count"


def test_readers_beside_the_update_never_find_new_bytes(changing: Changing) -> None:
    assert changing.undecided.reserve(changing.unit)
    changing.undecided.begin(changing.unit)
    is_over, torn = threading.Event(), []

    def read() -> None:
        while not is_over.is_set():
            torn.extend(
                kind
                for kind, old in changing.old.items()
                if not torch.equal(changing.read(kind, 0, old.numel()), old)
            )

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(50):
            for chunk in changing.chunks:
                changing.change(chunk)
            changing.undecided.drop(changing.unit)
            changing.undecided.begin(changing.unit)
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert not torn
    for kind, old in changing.old.items():
        assert torch.equal(changing.home(kind), old)


def test_new_weights_are_at_home_once_they_are_published(changing: Changing) -> None:
    unit: Unit = changing.unit
    free_nbytes, home = changing.pool.free_nbytes, changing.home(StateKind.PARAMETERS)
    old = home.clone()
    for is_published in (False, True):
        assert changing.undecided.reserve(unit)
        changing.undecided.begin(unit)
        new = changing.undecided.resting_weights(unit)
        assert new is not None
        assert torch.equal(new, old[: new.numel()])
        for chunk in changing.chunks:
            changing.change(chunk)
            new.fill_(7)
        assert torch.equal(home, old), "other ranks read the old weights"
        if is_published:
            changing.undecided.publish(unit)
            assert (home[: new.numel()] == 7).all()
        else:
            changing.undecided.drop(unit)
            assert torch.equal(home, old)
            for kind, before in changing.old.items():
                assert torch.equal(changing.home(kind), before)
        del new
        changing.undecided.free(unit)
        assert changing.pool.free_nbytes == free_nbytes
