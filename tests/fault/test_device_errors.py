"""A device that fails, as CUDA does after a kernel has used memory that is gone: the error names the
units whose weights left last, and closing gives everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import DeviceError
from infinity.observe import Counters
from infinity.storage.arena import Arena
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.state import Weights
from infinity.testing.simulated_device import (
    SimulatedDevice,
    SimulatedEvent,
    SimulatedStream,
    SimulatedStreams,
)
from infinity.tiers.host import Block, HostPool
from tests.support.models import Mlp
from tests.support.offloading import swap_config

WIDTH, LAYERS = 32, 9
WINDOW_NBYTES = 3 * 20 << 10  # Two blocks and the head.
CALLS = [
    (SimulatedStreams, "copy"),
    (SimulatedStreams, "new_event"),
    (SimulatedStreams, "synchronize"),
    (SimulatedStream, "wait_event"),
    (SimulatedEvent, "record"),
    (SimulatedEvent, "query"),
    (SimulatedEvent, "synchronize"),
]


class Fault:
    """Calls of simulated devices fail while `is_there`."""

    is_there = False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **names: Any) -> Any:
            if self.is_there:
                raise torch.AcceleratorError(
                    "CUDA error: an illegal memory access was encountered\nmore lines of advice"
                )
            return call(*arguments, **names)

        return failing


@pytest.fixture
def fault() -> Iterator[Fault]:
    """A fault of every call of the runtime."""
    fault = Fault()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, fault.wrap(getattr(owner, name)))
        yield fault


def test_an_error_of_the_device_names_the_units_that_left_last(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    left: list[str] = []
    detach = WeightMoves.detach

    def noting(moves: WeightMoves, weights: Weights) -> None:
        detach(moves, weights)
        left.append(weights.unit.name)

    monkeypatch.setattr(WeightMoves, "detach", noting)
    device = SimulatedDevice(1)
    config = swap_config(swap_directory, device_nbytes=WINDOW_NBYTES)
    model = infinity.offload(Mlp(WIDTH, LAYERS), config, device=device)
    with torch.no_grad():
        model(**model.inputs(0))
        expected = tuple(dict.fromkeys(reversed(left[-5:])))
        assert len(expected) > 1
        fault.is_there = True
        with pytest.raises(DeviceError, match="simulated.*illegal memory access") as caught:
            model(**model.inputs(0))
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)
    assert caught.value.released == expected
    message = str(caught.value)
    assert ", ".join(map(repr, expected)) in message and "INFINITY_POISON=1" in message
    assert "more lines" not in message

    with pytest.raises(DeviceError) as caught:
        infinity.close(model)
    assert caught.value.released == expected, "what leaves while closing is not to blame"
    assert device.is_closed
    assert list(swap_directory.iterdir()) == []


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "attach": lambda here: here.device.attach(here.absent, here.block),
    "end_use": lambda here: here.device.end_use(here.there),
    "bring_back": lambda here: here.device.bring_back(here.there, here.block),
    "detach": lambda here: here.device.detach(here.there),
    "copy": lambda here: here.device.copy(here.on_host, torch.zeros(4096, dtype=torch.uint8)),
    "synchronize": lambda here: here.device.synchronize(),
    "done": lambda here: here.arrival.done(),
    "order": lambda here: here.arrival.order(),
    "wait": lambda here: here.arrival.wait(),
}


class Regions:
    """A region that has been attached, one that has not, and the block for both."""

    def __init__(self, arena: Arena) -> None:
        self.device = SimulatedDevice(1)
        host = HostPool(arena, Counters())
        self.device.open(host, Counters())
        block = host.allocate(4096, "a block")
        assert block is not None
        self.block: Block = block
        self.on_host = host.tensor(block)
        self.absent, self.there = (self.device.reserve(4096, name) for name in ("a", "b"))
        self.arrival = self.device.attach(self.there, block)
        self.arrival.order()
        self.device.end_use(self.there)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_of_the_adapter_tells_the_error_of_the_device(
    name: str, fault: Fault
) -> None:
    with Arena(1 << 20) as arena:
        here = Regions(arena)
        fault.is_there = True
        with pytest.raises(DeviceError) as caught:
            OPERATIONS[name](here)
        assert isinstance(caught.value.__cause__, torch.AcceleratorError)
        assert not here.absent.is_attached
        fault.is_there = False
        here.device.close()
