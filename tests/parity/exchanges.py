"""A few units gathered and summed between devices of one process, on any stream device."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from infinity.distributed.collective.exchange import Buffers, DeviceExchange, PlacedRange
from infinity.observe import Counters
from infinity.ops.mean import mean_of
from infinity.storage.arena import Arena
from infinity.tiers.device import Decoding, ResizedRegion
from infinity.tiers.host import HostPool
from infinity.tiers.streams import Event, StreamDevice
from tests.support.loopback import Loopback

WHOLE_NBYTES = 40_000
ROUND_NBYTES = 12_288  # So a unit takes several rounds.


def stretches_of(count: int) -> list[PlacedRange]:
    """Parts of unlike sizes, the first rank's in two stretches, in another order than the ranks."""
    bounds = [0, 7_000, *(7_000 + 33_000 * r // count for r in range(1, count)), WHOLE_NBYTES]
    found = [PlacedRange(0, 0, 0, 5_000), PlacedRange(0, 5_000, 5_000, bounds[1] - 5_000)]
    places = list(itertools.pairwise(bounds[1:]))
    for rank, (low, high) in enumerate(reversed(places)):
        first = bounds[1] if rank == 0 else 0
        found.append(PlacedRange(rank, first, low, high - low))
    return found


def part_of(whole: torch.Tensor, rank: int, stretches: Sequence[PlacedRange]) -> torch.Tensor:
    return torch.cat([whole[s.place : s.place + s.nbytes] for s in stretches if s.rank == rank])


# Issues work on the device that waits for a call. Returns the event behind the work, and the call.
LateWork = Callable[[StreamDevice, Callable[[], None]], tuple[Event, Callable[[], None]]]


@contextlib.contextmanager
def _late_sum(
    exchange: DeviceExchange,
    device: StreamDevice,
    rank: int,
    of_all: Sequence[Sequence[torch.Tensor]],
    late: LateWork | None,
) -> Iterator[None]:
    """A sum is issued before the block, and its gradients are computed after the block."""
    if late is None:
        yield
        return
    given = [torch.zeros_like(each) for each in of_all[rank]]

    def compute() -> None:
        for target, each in zip(given, of_all[rank], strict=True):
            target.copy_(each)

    event, let_compute = late(device, compute)
    mean, owner = torch.empty(given[rank].numel()), exchange.current()
    summed = exchange.sum([[each] for each in given], mean, ready=[event], owner=owner)
    yield
    assert not summed.done(), "weights came after gradients that were to come later"
    let_compute()
    summed.order()
    wanted = mean_of([theirs[rank] for theirs in of_all])
    assert torch.equal(mean, wanted), "a sum did not wait for its gradients"


def run(
    make: Callable[[HostPool, Counters], StreamDevice],
    loopback: Loopback,
    *,
    on_device: bool,
    late_gradients: LateWork | None = None,
    stretches: Sequence[PlacedRange] = (),
    round_nbytes: int = ROUND_NBYTES,
) -> None:
    """Three units, one after the other through space for one, and gradients of two dtypes; raises
    AssertionError for a byte that is wrong. `on_device`: a rank's part rests there.

    late_gradients: computes those of a first sum, which come when all units have been gathered
    """
    count, errors = loopback.count, []
    loopback_of_sums = Loopback(count, loopback.event)
    source = torch.Generator().manual_seed(0)
    tiled_params = [
        torch.randint(0, 256, (WHOLE_NBYTES,), generator=source).to(torch.uint8) for _ in range(3)
    ]
    stretches = stretches or stretches_of(count)
    gradients = {  # By dtype and rank: what each gives, by the rank it is for.
        dtype: [
            [torch.randn(3_000 + 100 * to, generator=source).to(dtype) for to in range(count)]
            for _ in range(count)
        ]
        for dtype in (torch.float32, torch.bfloat16)
    }

    def of_rank(rank: int) -> None:
        arena = Arena(256 << 10)
        host = HostPool(arena, Counters())
        device = make(host, Counters())
        try:
            exchange = DeviceExchange(
                device,
                loopback.rank(rank),
                loopback_of_sums.rank(rank),
                Buffers(count, round_nbytes, WHOLE_NBYTES, WHOLE_NBYTES),
            )
            with _late_sum(exchange, device, rank, gradients[torch.float32], late_gradients):
                _put_together(exchange, device, host, rank)
            _decode_later(exchange, device, host, rank, tiled_params, stretches)
            _sum(exchange, device, rank)
            device.synchronize()
        except BaseException as error:
            errors.append(error)
            loopback._barrier.abort()
            loopback_of_sums._barrier.abort()
        finally:
            with contextlib.suppress(Exception):  # It says once more what went wrong.
                device.close()
            arena.close()

    def _put_together(
        exchange: DeviceExchange, device: StreamDevice, host: HostPool, rank: int
    ) -> None:
        region = device.reserve(WHOLE_NBYTES)
        for whole in tiled_params:
            mine = part_of(whole, rank, stretches)
            block = host.allocate(mine.numel(), "shard")
            assert block is not None
            on_host = host.tensor(block, nbytes=mine.numel())
            on_host.copy_(mine)
            exchange.take(region)
            host_view = device.allocate(mine.numel()).copy_(mine) if on_device else on_host
            for event in exchange.ready():
                event.synchronize()
            arrival, departure = exchange.gather(region, host_view, stretches)
            departure.wait()
            host.free(block)
            arrival.order()
            assert isinstance(region, ResizedRegion)
            found = region.content.clone()
            device.end_use(region)
            device.detach(region)
            assert torch.equal(found.cpu(), whole), "weights came otherwise"
            if on_device:
                kept = device.allocate(WHOLE_NBYTES)
                ready = exchange.ready()
                exchange.gather_in_place(kept, host_view, stretches, ready).order()
                assert torch.equal(kept.cpu(), whole), "weights were refreshed otherwise"

    def _sum(exchange: DeviceExchange, device: StreamDevice, rank: int) -> None:
        for dtype, given in gradients.items():
            mine = [each.to(device.torch_device) for each in given[rank]]
            halves = [[*each.split(1_700)] for each in mine]
            mean = torch.empty(mine[rank].numel(), device=device.torch_device)
            ready, owner = exchange.ready(), exchange.current()
            exchange.sum(halves, mean, ready=ready, owner=owner).order()
            wanted = mean_of([theirs[rank] for theirs in given])
            assert torch.equal(mean.cpu(), wanted), f"{dtype}: sums differ"

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )


def _decode_later(
    exchange: DeviceExchange,
    device: StreamDevice,
    host: HostPool,
    rank: int,
    units: Sequence[torch.Tensor],
    stretches: Sequence[PlacedRange],
) -> None:
    """Stored bytes come while the unit before has the only region: from all ranks, the second
    ones from this rank's host."""
    region = device.reserve(WHOLE_NBYTES)
    assert isinstance(region, ResizedRegion)
    device.prepare_decoding(WHOLE_NBYTES, 2)

    def decode(stored: torch.Tensor) -> None:
        region.content.copy_(stored.bitwise_not())

    for number, whole in enumerate(units):
        mine = whole if number == 1 else part_of(whole, rank, stretches)
        block = host.allocate(mine.numel(), "stored")
        assert block is not None
        on_host = host.tensor(block, nbytes=mine.numel())
        on_host.copy_(mine)
        if number == 1:
            departure = device.stage(block, number % 2)
        else:
            coming = Decoding(WHOLE_NBYTES, number % 2, decode)
            _, departure = exchange.gather(None, on_host, stretches, coming)
        if region.is_attached:
            device.end_use(region)
            device.detach(region)
        decoding = Decoding(WHOLE_NBYTES, number % 2, decode)
        device.attach_decoded(region, None, decoding).order()
        found = region.content.bitwise_not()
        departure.wait()
        host.free(block)
        assert torch.equal(found.cpu(), whole), "weights were decoded otherwise"
