"""Weights are decoded while the stored bytes of the next unit come to the device.

Two memories for stored bytes take turns, and decoding has a stream of its own. Over a simulated
device each ordering between them is shown to be needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

import infinity
from infinity.observe import Counters
from infinity.sizes import PAGE_NBYTES
from infinity.storage.arena import Arena
from infinity.testing.simulated_device import (
    SimulatedDevice,
    SimulatedStreams,
    UnorderedAccess,
)
from infinity.tiers.device import Decoding
from infinity.tiers.host import HostPool
from infinity.tiers.streams import StreamDevice, _Staging
from tests.support.bits import assert_same

from .in_place import STEPS, Base, at_least, batches, config_of, loss_of, over, train

SPACE_NBYTES = 2 << 20  # Beside the least: two decoded blocks more, and the second memory.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base("deepseek-int4", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def config(base: Base, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A device with space for the next decoded unit, and not for all of them."""
    directory = tmp_path_factory.mktemp("swap")
    tight = {"tiers": {"device": {"capacity": "least"}}, "schedule": {"tile": 0}}
    found = at_least(base, config_of(directory, **tight), True)
    found["tiers"]["device"]["capacity"] += SPACE_NBYTES
    return found


def evaluate(base: Base, config: dict[str, Any], device: SimulatedDevice) -> list[torch.Tensor]:
    with over(base, config, device=device) as (model, _), torch.no_grad():
        return [loss_of(model, batches(step, 1)[0]) for step in range(STEPS)]


def test_the_memories_take_turns_and_no_bit_changes(
    base: Base, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, taken = StreamDevice.attach_decoded, []

    def noted(device: StreamDevice, region: Any, block: Any, decoding: Decoding) -> Any:
        if block is not None:
            taken.append(decoding.memory)
        return attach(device, region, block, decoding)

    monkeypatch.setattr(StreamDevice, "attach_decoded", noted)
    with over(base, config, device=SimulatedDevice(3)) as (model, _):
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    assert_same(base.expected, seen, is_ordered=False)
    assert len(taken) > 4 and all(one != other for one, other in pairwise(taken))


@contextmanager
def opened(device: SimulatedDevice) -> Iterator[Callable[..., Any]]:
    """Yields a function that decodes a page of a number into a new region, behind `before()`."""
    with Arena(4 * PAGE_NBYTES) as arena:
        counters = Counters()
        host = HostPool(arena, counters)
        device.open(host, counters)
        device.prepare_decoding(PAGE_NBYTES, 2)

        def decoded(number: int, before: Callable[[], Any]) -> Any:
            block, region = host.allocate(PAGE_NBYTES, "stored"), device.reserve(PAGE_NBYTES)
            assert block is not None
            host.tensor(block).fill_(number)

            def fill(stored: torch.Tensor) -> None:
                before()
                region.content.copy_(stored)

            decoding = Decoding(PAGE_NBYTES, number % 2, fill)
            return region, device.attach_decoded(region, block, decoding)

        yield decoded
        device.close()


def test_stored_bytes_of_the_next_unit_come_while_one_is_decoded() -> None:
    """A decoding does not end before the copy has ended that was asked for after it."""
    copied, device = threading.Event(), SimulatedDevice(3, delay_s=0.0)

    def after_the_copy() -> None:
        assert copied.wait(60), "a copy waits for the decoding before it"

    with opened(device) as decoded:
        found = [
            (1, *decoded(1, after_the_copy)),
            (2, *decoded(2, lambda: None)),
        ]
        device.streams.transfer[0].submit(copied.set)
        for number, region, copy in found:
            copy.order()
            assert region.content.eq(number).all()


@pytest.mark.parametrize("is_noted", [True, False])
def test_weights_that_nobody_used_are_given_up_behind_their_decoding(
    is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_noted:
        monkeypatch.setattr(StreamDevice, "note_use", lambda *args: None)
    device = SimulatedDevice(3)
    with opened(device) as decoded:
        region, _ = decoded(1, lambda: None)
        with nullcontext() if is_noted else pytest.raises(UnorderedAccess):
            device.detach(region)


def test_a_decoding_that_fails_halfway_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the first weights may be under way when the next cannot be launched."""
    real = SimulatedStreams.run

    def failing(streams: SimulatedStreams, *arguments: Any, **options: Any) -> None:
        real(streams, *arguments, **options)
        raise RuntimeError("the second weight")

    monkeypatch.setattr(SimulatedStreams, "run", failing)
    device = SimulatedDevice(3)
    with opened(device) as decoded, pytest.raises(RuntimeError, match="the second weight"):
        decoded(1, lambda: None)


@contextmanager
def lend_at_once(staging: Any, *streams: Any) -> Iterator[Any]:
    yield staging._memory


def decode_at_once(device: StreamDevice, *arguments: Any) -> Any:
    *before, _ = arguments
    return DECODE(device, *before, device.decoder)  # It waits for itself alone.


DECODE = StreamDevice.decode
MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "stored-bytes-come-over-those-that-are-decoded": (_Staging, "using", lend_at_once),
    "stored-bytes-are-decoded-before-they-have-come": (StreamDevice, "decode", decode_at_once),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_ordering_is_detected(
    name: str, base: Base, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, instead = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, instead)
    with pytest.raises(AssertionError):
        evaluate(base, config, SimulatedDevice(3))
