"""A unit that two streams use at the same time, and a queue of kernels that is full.

The model computes two chains beside each other, each on a stream of its own, over weights of the
same blocks. The chains meet in the loss only: in the backward nothing but the engine orders the
second stream after the copies of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.modules.autograd.uses import UnitUses
from infinity.storage.protocol import Priority
from infinity.testing.simulated_device import (
    SimulatedDevice,
    SimulatedStream,
    SimulatedStreams,
    UnorderedAccess,
)
from infinity.tiers.streams import StreamCopy, StreamDevice
from tests.support.offloading import offloaded, swap_config

WIDTH, BLOCKS = 16, 6
BLOCK_NBYTES = 8 << 10


class _Product(torch.autograd.Function):
    """x @ weight.t() as kernels of one stream, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, index: int, x: Tensor, weight: Tensor) -> Tensor:
        ctx.pair, ctx.index = pair, index
        ctx.save_for_backward(x, weight)
        with pair.on(index):
            pair.kernel(weight)
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.pair.kernel(weight)
        return None, None, gradient @ weight, gradient.t() @ x


class Pair:
    """The two streams of computation; without streams nothing is checked."""

    def __init__(self, streams: SimulatedStreams | None) -> None:
        self.streams = streams
        self.both: list[SimulatedStream] = []
        if streams is not None:
            self.both = [streams.computing, streams.new_computing("side")]

    def on(self, index: int) -> Any:
        assert self.streams is not None or not self.both
        return _nothing() if self.streams is None else self.streams.computing_on(self.both[index])

    def kernel(self, weight: Tensor) -> None:
        if self.streams is not None:
            self.streams.kernel(weight)

    def wait(self, index: int) -> None:
        """Makes the stream `index` wait for the other one."""
        if self.both:
            self.both[index].wait_stream(self.both[1 - index])

    def product(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        """As the autograd engine does with a stream of a device, the node's hooks and its backward
        find the stream of its forward."""
        answer: Tensor = _Product.apply(self, index, x, weight)  # type: ignore[no-untyped-call]
        if self.streams is not None and answer.grad_fn is not None:
            local, stream = self.streams._local, self.both[index]
            answer.register_hook(lambda gradient: setattr(local, "stream", stream))
        return answer


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class Block(nn.Module):
    """Two products and one more, so that each chain has an inner node and an exit in the graph, and
    a gradient of one stream is the next to leave when one of the other stream is let go of."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(5))

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        left, right = both
        self.pair.wait(1)
        for index in range(2):
            left = self.pair.product(0, left, self.weights[2 * index])
            right = self.pair.product(1, right, self.weights[2 * index + 1])
        left = self.pair.product(0, left, self.weights[4])
        self.pair.wait(0)
        return left, right


class TwoChains(nn.Module):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(pair) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        both = x, x + 1
        for block in self.blocks:
            both = block(both)
        return (both[0] * both[1]).mean()


def train(directory: Path, device: SimulatedDevice | None, *, blocks: float = 2.0) -> list[Tensor]:
    """Losses and last weights of three steps with a window of so many blocks."""
    config = swap_config(
        directory, placement="host", device_nbytes=int(blocks * BLOCK_NBYTES),
        host_nbytes="1MiB", update_chunk="8KiB",
    )  # fmt: skip
    streams = None if device is None else device.streams
    torch.manual_seed(0)
    with offloaded(TwoChains(Pair(streams)), config, device=device) as model:
        optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=0.5)
        found = []
        for step in range(3):
            loss = model(torch.full((3, WIDTH), 0.1 * step + 0.1))
            loss.backward()
            if streams is not None:
                streams._local.stream = None
            found.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        engine = infinity.engine_of(model)
        return [*found, *map(engine.read_parameter, engine.parameter_names())]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    return train(tmp_path_factory.mktemp("plain"), None)


@pytest.mark.parametrize("seed", range(3))
def test_a_unit_on_two_streams_is_ordered_on_both(
    seed: int, expected: list[Tensor], swap_directory: Path
) -> None:
    found = train(swap_directory, SimulatedDevice(seed, delay_s=1e-3))
    assert all(map(torch.equal, expected, found))


def _order_of_one(copy: StreamCopy) -> None:
    """As `order`, but the stream that the memory goes back to does not wait."""
    copy._streams.current().wait_event(copy._event)
    copy._keep = None


def _nobody(*arguments: Any, **options: Any) -> None:
    return None


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "the second stream does not wait for the copy": (
        UnitUses, "join", _nobody, "side|compute",
    ),
    "the end of the use is noted on one stream": (
        StreamDevice, "begin_use", _nobody, "space of a region|still in use",
    ),
    "the stream that owns a gradient does not wait": (
        StreamCopy, "order", _order_of_one, "goes back to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_order_of_the_second_stream_is_needed(
    name: str, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, instead, message = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, instead)
    monkeypatch.setattr(StreamCopy, "done", lambda copy: False)
    with pytest.raises(UnorderedAccess, match=message):
        train(swap_directory, SimulatedDevice(1, delay_s=1e-3))


@pytest.mark.parametrize("queue_limit", [1, 2, 3])
def test_a_full_queue_of_kernels_stops_the_host_and_nothing_else(
    queue_limit: int, expected: list[Tensor], swap_directory: Path
) -> None:
    device = SimulatedDevice(2, delay_s=1e-3, queue_limit=queue_limit)
    found = train(swap_directory, device)
    assert all(map(torch.equal, expected, found))
    assert max(len(stream._queued) for stream in device.streams.transfer) <= queue_limit


def test_a_use_on_another_stream_follows_an_update_on_the_device(swap_directory: Path) -> None:
    """Weights that rest on the device are changed in the order of the stream that is current."""
    device = SimulatedDevice(3)
    config = swap_config(swap_directory, placement="device", device_nbytes=1 << 20)
    with offloaded(TwoChains(Pair(None)), config, device=device) as model:
        streams, cache = device.streams, infinity.engine_of(model).weight_cache
        side = streams.new_computing("side")
        with infinity.engine_of(model)._lock:
            with streams.computing_on(side):
                cache.check_out(0, read=True, stays_on_device=True)
                side.submit(lambda: None)  # The update.
                cache.check_in(0, dirty_nbytes=64)
            moment = side.seen["side"]
            cache.acquire(0, Priority.FORWARD)
            assert streams.computing.seen.get("side", 0) >= moment
            cache.release(0)
