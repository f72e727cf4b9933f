"""Devices of several ranks exchange the right bytes, and each of their orderings is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from infinity.distributed.collective.exchange import Buffers, DeviceExchange, PlacedRange
from infinity.observe import Counters
from infinity.ops.mean import mean_of
from infinity.storage.arena import Arena
from infinity.testing.simulated_device import SimulatedDevice, SimulatedEvent, SimulatedStream
from infinity.tiers.host import HostPool
from infinity.tiers.streams import StreamCopy, StreamDevice, _Staging
from tests.support.exhaustive import covering, sampled
from tests.support.loopback import Loopback, LoopbackRank

from . import exchanges


def simulated(host: Any, counters: Any) -> SimulatedDevice:
    device = SimulatedDevice(3, delay_s=1e-3)
    device.open(host, counters)
    return device


PROPERTIES = {
    "count": [2, 3, 4],
    "on_device": [False, True],
    "round_nbytes": [5_000, exchanges.ROUND_NBYTES, 1 << 20],
}
PAIRS = [tuple(case.values()) for case in covering(PROPERTIES)]


@pytest.mark.parametrize(
    tuple(PROPERTIES), sampled(product(*PROPERTIES.values()), PAIRS.__contains__)
)
def test_weights_and_sums_have_the_same_bits_in_rounds_of_every_size(
    count: int, on_device: bool, round_nbytes: int
) -> None:
    exchanges.run(simulated, Loopback(count), on_device=on_device, round_nbytes=round_nbytes)


def held(device: Any, compute: Callable[[], None]) -> tuple[SimulatedEvent, Callable[[], None]]:
    """Computes in a stream of its own that waits for a call, for a minute."""
    gate = threading.Event()
    stream = SimulatedStream(device.streams, "held", has_worker=True)

    def work() -> None:
        gate.wait(60)
        compute()

    stream.submit(work)
    event = device.streams.new_event()
    event.record(stream)
    return event, gate.set


@pytest.mark.parametrize("count", [2, 3])
def test_gathers_overtake_a_sum_whose_gradients_are_not_there_yet(count: int) -> None:
    exchanges.run(simulated, Loopback(count), on_device=False, late_gradients=held)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_unit_of_equal_parts_and_one_round_is_gathered_where_it_is_used(
    count: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_nbytes, targets, sources = exchanges.WHOLE_NBYTES, [], set()
    all_gather = LoopbackRank.all_gather

    def noted(rank: LoopbackRank, target: torch.Tensor, source: torch.Tensor) -> None:
        targets.append((target.storage_offset(), target.untyped_storage().nbytes()))
        sources.add((rank.rank, source.data_ptr()))
        all_gather(rank, target, source)

    monkeypatch.setattr(LoopbackRank, "all_gather", noted)
    part_nbytes = whole_nbytes // count
    rows = [PlacedRange(rank, 0, rank * part_nbytes, part_nbytes) for rank in range(count)]
    run = partial(exchanges.run, simulated, Loopback(count), on_device=on_device, stretches=rows)
    run(round_nbytes=whole_nbytes)
    assert set(targets) == {(0, whole_nbytes)}, "gathered in a buffer, which is larger"
    assert len(sources) == 2 * count, "the next unit's part waits until the last one was sent"
    targets.clear()
    run(round_nbytes=whole_nbytes // 2)
    assert (0, whole_nbytes) not in targets, "a round of a part of each row is no row"


def test_a_trial_has_each_kind_of_operation_in_the_groups_that_need_it() -> None:
    """Of the least and of the most bytes of a rank: 512, and those of a round."""
    issued: list[tuple[str, str, int]] = []

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> None:
            issued.append((self.name, "all_gather", source.nbytes))

        def all_to_all(self, target: torch.Tensor, source: torch.Tensor) -> None:
            issued.append((self.name, "all_to_all", source[0].nbytes))

    counters = Counters()
    with Arena(1 << 22) as arena:
        device = simulated(HostPool(arena, counters), counters)
        exchange = DeviceExchange(
            device,
            Group("all"),
            Group("sums"),
            Buffers(4, 4096, 8192, 2048, 2, 8192),
            Group("node"),
        )
        for copy in exchange.try_all():
            copy.wait()
        device.close()
    gathers = [
        (of, "all_gather", n) for of, most in (("all", 1024), ("node", 2048)) for n in (512, most)
    ]
    assert [found for found in issued if found[0] != "sums"] == gathers
    assert [found for found in issued if found[0] == "sums"] == [
        ("sums", "all_to_all", 4), ("sums", "all_gather", 512),
        ("sums", "all_to_all", 1024), ("sums", "all_gather", 512),
    ]  # fmt: skip


def test_a_mean_is_summed_by_the_tree_of_the_reduce_buffer() -> None:
    rows = [torch.randn(1000) for _ in range(4)]
    parts = [row * 0.25 for row in rows]
    wanted = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert torch.equal(mean_of(rows), wanted)
    third = torch.tensor(1.0 / 3)
    parts = [row * third for row in rows[:3]]
    assert torch.equal(mean_of(rows[:3]), (parts[0] + parts[1]) + parts[2])


def no_wait(*args: Any, **kwargs: Any) -> None:
    return None


def order_without_wait(copy: StreamCopy) -> None:
    copy._keep = None


@contextmanager
def lend_at_once(staging: Any, *streams: Any) -> Iterator[Any]:
    yield staging._memory


def sum_at_once(exchange: DeviceExchange, *args: Any, **kwargs: Any) -> StreamCopy:
    kwargs["ready"] = []
    return SUM(exchange, *args, **kwargs)


SUM = DeviceExchange.sum
MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a-part-comes-into-a-buffer-that-is-still-sent": (StreamDevice, "inward_waits", no_wait),
    "a-part-is-sent-before-it-has-come": (StreamCopy, "order_stream", no_wait),
    "the-exchange-is-not-noted-as-a-use": (StreamDevice, "note_use", no_wait),
    "stored-bytes-are-decoded-before-they-have-come": (_Staging, "using", lend_at_once),
    "computation-does-not-wait": (StreamCopy, "order", order_without_wait),
    "a-sum-does-not-wait-for-gradients": (DeviceExchange, "sum", sum_at_once),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_ordering_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, instead = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, instead)
    with pytest.raises(AssertionError):
        late = held if owner is DeviceExchange else None
        exchanges.run(simulated, Loopback(2), on_device=False, late_gradients=late)
