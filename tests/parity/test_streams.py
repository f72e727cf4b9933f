"""Every ordering of the stream device is needed, and the simulated device detects when one is
missing.

A small training run goes through all of it: a window of two blocks, gradients and activations that
leave the device, updates that change the weights on the host. With one ordering taken away the run
must fail: by the check of the order, or by its bits.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity.engine.update_rates import time_products, time_updates
from infinity.errors import DeviceError, UnsupportedError
from infinity.observe import Counters
from infinity.simulate.spec import Rates
from infinity.storage.arena import Arena
from infinity.storage.protocol import Priority
from infinity.streaming.gradients import leaving
from infinity.streaming.gradients.leaving import LeavingGradients
from infinity.streaming.inputs.activations import ActivationStore, InputMemory
from infinity.streaming.updates.chunk_update import update_on_device
from infinity.streaming.weights.access_order import AccessOrder
from infinity.streaming.weights.moves import WeightMoves
from infinity.streaming.weights.read_ahead import ReadAhead
from infinity.streaming.weights.state import WeightProvider, WeightState
from infinity.testing.simulated_device import SimulatedDevice, SimulatedStream
from infinity.tiers.cuda import CudaDevice, pin, unpin
from infinity.tiers.device import FINISHED, ResizedRegion
from infinity.tiers.host import HostPool
from infinity.tiers.streams import StreamCopy, StreamDevice, Streams, _DeviceClock
from tests.support.models import Mlp
from tests.support.offloading import offloaded, swap_config

WIDTH, LAYERS = 32, 9
BLOCK_NBYTES = 20 << 10  # In whole pages.
WINDOW_NBYTES = 2 * BLOCK_NBYTES + (4 << 10)  # And the head.
HOST_NBYTES = 256 << 10
BATCH = {
    "data": {"paths": ["python-stdlib"], "sequence_length": 32},
    "train": {"steps": 1, "batch_size": 4},
}


def train(
    directory: Path | None,
    device: Any,
    turn: Callable[[], None] = lambda: None,
    more: dict[str, Any] | None = None,
    **schedule: Any,
) -> list[torch.Tensor]:
    """Losses and last weights of two steps, by both ways of accumulation."""
    # Room on the host for most of the weights: some have to go while they are copied.
    placement = {"parameters": "nvme", "gradients": "nvme", "moments": "nvme"}
    config = swap_config(
        directory, placement=placement, device_nbytes=WINDOW_NBYTES,
        host_nbytes=HOST_NBYTES, updates="at_step", update_chunk="8KiB",
    )  # fmt: skip
    config["placement"]["activations"] = "host"
    config["schedule"] |= schedule
    config |= more or {}
    torch.manual_seed(0)
    with offloaded(Mlp(WIDTH, LAYERS), config, device=device) as model:
        optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=0.5)

        def loss_of(seed: int) -> torch.Tensor:
            return model(**model.inputs(seed)).square().mean()

        found = []
        for step in range(2):
            turn()
            if step == 0:
                found += infinity.forward_backward(model, loss_of, [0])
                turn()
                found.append(loss_of(1))
                found[-1].backward()
            else:
                found += infinity.forward_backward(model, loss_of, [3, 4, 5])
            optimizer.step()
            optimizer.zero_grad()
        for block in model.blocks:
            with infinity.gather(block, modify=True):  # Comes back from the device.
                for parameter in block.parameters():
                    parameter.data.mul_(0.5)
        engine = infinity.engine_of(model)
        found += [engine.read_parameter(name) for name in engine.parameter_names()]
        return [each.detach().clone() for each in found]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    return train(tmp_path_factory.mktemp("plain"), None)


def no_wait(*args: Any, **kwargs: Any) -> None:
    return None


def detach_at_once(device: StreamDevice, region: ResizedRegion) -> None:
    region.uses.clear()
    region.drop_memory()


def end_use_before(device: StreamDevice, region: Any) -> None:
    """Records the use as it was when the region was attached."""
    if isinstance(region, ResizedRegion):
        event = device.streams.new_event()
        event.record(device._in)
        region.uses[device.streams.current()] = event


def order_without_wait(copy: StreamCopy) -> None:
    copy._keep = None


def let_go_at_once(copy: StreamCopy, *args: Any, keep: Any, **kwargs: Any) -> None:
    _INIT(copy, *args, keep=None, **kwargs)


def only_computing_waits(stream: SimulatedStream, event: Any) -> None:
    if stream._worker is None:
        _WAIT_EVENT(stream, event)


def end_without_wait(leaving: LeavingGradients) -> None:
    leaving.clear()


def return_at_once(activations: ActivationStore, saved: Any) -> None:
    saved.copying = FINISHED
    _START_RETURN(activations, saved)


_INIT = StreamCopy.__init__
_WAIT_EVENT = SimulatedStream.wait_event
_START_RETURN = ActivationStore._start_return

MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "the-use-s-end-is-not-noted": (StreamDevice, "end_use", no_wait),
    "the-use-s-end-is-noted-too-early": (StreamDevice, "end_use", end_use_before),
    "room-is-given-up-at-once": (StreamDevice, "detach", detach_at_once),
    "transfers-wait-for-nobody": (SimulatedStream, "wait_event", only_computing_waits),
    "computation-does-not-wait": (StreamCopy, "order", order_without_wait),
    "memory-is-not-kept": (StreamCopy, "__init__", let_go_at_once),
    "blocks-are-freed-at-once": (WeightMoves, "finish_copy", no_wait),
    "gradients-are-read-at-once": (LeavingGradients, "end_all", end_without_wait),
    "activations-are-read-at-once": (ActivationStore, "_start_return", return_at_once),
}  # fmt: skip


def same(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


def test_nothing_is_missing(expected: list[torch.Tensor], swap_directory: Path) -> None:
    """And a window that is full does not keep the next unit from coming while this one computes."""
    device = SimulatedDevice(1, delay_s=1e-3)
    assert same(expected, train(swap_directory, device))
    assert BLOCK_NBYTES < device.attached_high_water_nbytes <= WINDOW_NBYTES


def test_the_stream_that_computes_may_be_another_each_time(
    expected: list[torch.Tensor], swap_directory: Path
) -> None:
    """The user has made it wait for the one before, as PyTorch asks, and no more is asked."""
    device = SimulatedDevice(1, delay_s=1e-3)
    streams = device.streams
    others = itertools.cycle(
        [SimulatedStream(streams, "side", has_worker=False), streams.computing]
    )

    def turn() -> None:
        event = streams.new_event()
        event.record(streams.computing)
        streams.computing = next(others)
        streams.computing.wait_event(event)

    assert same(expected, train(swap_directory, device, turn))


@pytest.mark.parametrize(
    ("host_rate", "flops", "place"),
    [(1e12, None, "host"), (1e3, None, "device"), (1e3, 1e3, "host")],
    ids=["a-fast-host", "a-slow-host", "beside-a-long-forward"],
)
def test_whoever_is_found_faster_updates_with_the_same_bits(
    host_rate: float,
    flops: float | None,
    place: str,
    expected: list[torch.Tensor],
    swap_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever was timed before leaves nothing behind that training could see."""
    monkeypatch.setattr("infinity.streaming.updates.chunk_update.SLICE_NUMEL", 512)
    monkeypatch.setattr("infinity.simulate.update_device.LEAST_UPDATE_NBYTES", 0)
    timed: list[Rates] = []

    def injected(*arguments: Any, **options: Any) -> Rates:
        rates = time_updates(*arguments, **options)
        assert rates is not None
        timed.append(rates)
        return replace(rates, update=host_rate)

    def products(*arguments: Any) -> float:
        assert time_products(*arguments) == 2 * 1024**3
        assert flops is not None  # The batch is known.
        return flops

    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("infinity.engine.update_rates.time", clock)
    monkeypatch.setattr("infinity.engine.update_rates.time_updates", injected)
    monkeypatch.setattr("infinity.engine.update_rates.time_products", products)
    updated_there: list[bool] = []

    def update_there(*arguments: Any) -> None:
        updated_there.append(True)
        update_on_device(*arguments)

    monkeypatch.setattr("infinity.streaming.updates.chunk_update.update_on_device", update_there)
    device = SimulatedDevice(1, delay_s=1e-4)
    with caplog.at_level(logging.INFO, "infinity"):
        batch = {} if flops is None else BATCH
        assert same(expected, train(swap_directory, device, more=batch, update_on="auto"))
    told = [record.getMessage() for record in caplog.records if "updates on" in record.message]
    assert len(told) == 1 and told[0].startswith(f"updates on the {place}: a step takes ")
    # The clock goes on by a second at every look: one turn of each was counted. A slice of it is
    # what a chunk brings there, of 16 bytes an element, of which 28 are read or written.
    [rates] = timed
    assert rates.device_update == 28 * 512 and rates.h2d == rates.d2h == 16 * 512
    assert rates.update == 28 * (8 << 10) // 4
    assert rates.nvme_mixed == float("inf")  # Not in the file.
    assert bool(updated_there) is (place == "device")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_ordering_is_detected(
    name: str, expected: list[torch.Tensor], swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, instead = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, instead)
    # Nothing is found out by a look that happens to come late enough.
    monkeypatch.setattr(StreamCopy, "done", lambda copy: False)
    try:
        actual = train(swap_directory, SimulatedDevice(1, delay_s=1e-3))
    except Exception:
        return
    assert not same(expected, actual), f"nobody saw that {name}"


# -- Smaller things --------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [7, 1000])
def test_gradients_that_leave_the_device_in_parts_have_the_same_bits(
    numel: int, expected: list[torch.Tensor], swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "_WIDENED_NUMEL", numel)
    assert same(expected, train(swap_directory, SimulatedDevice(1)))


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_unit_without_memory_gets_that_of_idle_ones_or_is_copied_in_its_next_use(
    is_full: bool, number: int, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is followed by a smaller window; a device that stays full makes the pass fail."""
    device, count = SimulatedDevice(1), itertools.count(1)
    copy, refused = device.streams.copy, [number]

    def failing(stream: SimulatedStream, source: torch.Tensor, target: torch.Tensor) -> None:
        is_refused = target.data_ptr() in device.streams._regions and next(count) in refused
        if is_refused:
            if is_full:
                refused.append(refused[-1] + 1)
            raise torch.OutOfMemoryError("simulated")
        copy(stream, source, target)

    monkeypatch.setattr(device.streams, "copy", failing)
    torch.manual_seed(0)
    plain = Mlp(WIDTH, LAYERS)
    torch.manual_seed(0)
    config = swap_config(swap_directory, device_nbytes=WINDOW_NBYTES)
    with offloaded(Mlp(WIDTH, LAYERS), config, device=device) as model, torch.no_grad():
        inputs = model.inputs(0)
        if is_full:
            with pytest.raises(torch.OutOfMemoryError, match="simulated"):
                model(**inputs)
            refused.clear()
            assert 0 < infinity.shrink(model) < WINDOW_NBYTES
        assert torch.equal(model(**inputs), plain(**inputs))
        units = infinity.engine_of(model).weight_cache.weights
        assert device.attached == sum(weights.region.is_attached for weights in units)
        assert device.attached_high_water_nbytes <= WINDOW_NBYTES
        assert device.streams.num_emptied > 0 or number > 1
    assert next(count) > number


def test_an_arrival_ahead_that_finds_no_memory_waits_for_its_use() -> None:
    """All-gathers of other ranks are of the same log: an error here would end the job."""
    order, asked = AccessOrder({1: 0}), []
    for _ in range(2):
        order.begin()
        order.visit(0)
    order.begin()
    of_unit = SimpleNamespace(unit=SimpleNamespace(index=0), state=WeightState.ABSENT)
    feeder = SimpleNamespace(unit=SimpleNamespace(index=1), state=WeightState.READY)
    of_unit.undecided, of_unit.rests_on_host = None, False

    def fill_ahead(*arguments: Any) -> bool:
        asked.append(arguments)
        raise torch.OutOfMemoryError("simulated")

    moves: Any = SimpleNamespace(
        weights=[of_unit, feeder], nbytes=[4, 4], lost=set(), feeder_of=lambda _: feeder,
        is_on_device=lambda _: False, decoding=SimpleNamespace(staged=None), order=order,
        source=WeightProvider(), device=SimpleNamespace(shares_host_memory=False),
    )  # fmt: skip
    space: Any = SimpleNamespace(fill_ahead=fill_ahead)
    ahead = ReadAhead(moves, space, InputMemory(0, 8), 8)
    for count in (1, 2):
        ahead.fetch(Priority.FORWARD)
        assert asked == [(of_unit, feeder)] * count


class Runtime:
    """The functions of `torch.cuda.cudart()` that pinning uses."""

    def __init__(self, code: int, *, bad: int = 0) -> None:
        """`bad`: the address that is refused with code 2."""
        self.code, self.bad, self.calls = code, bad, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, nbytes, flags))
        return 2 if address == self.bad else self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(address)
        return self.code


def test_what_the_runtime_answers_to_pinning_is_looked_at(caplog: Any) -> None:
    class Pages:
        address, capacity_nbytes = 4096, 8192

    good, bad = Runtime(0), Runtime(712)
    here = torch.device("cpu")
    pin(Pages, good, here)
    unpin(Pages, good)
    assert good.calls == [(4096, 8192, 1), 4096] and not caplog.records
    with pytest.raises(
        UnsupportedError, match=r"8.0 KiB.*code 712.*lower tiers.host.capacity, and"
    ):
        pin(Pages, bad, here)
    assert bad.calls == [(4096, 8192, 1)]
    unpin(Pages, bad)
    assert "code 712" in caplog.text


def test_the_arena_is_pinned_in_pieces_all_of_them_or_none(caplog: Any) -> None:
    class Pages:
        address, capacity_nbytes = 1 << 30, 5 * 4096

    here, registered_nbytes = torch.device("cpu"), 2 * 4096
    starts = [Pages.address + offset for offset in (0, 8192, 16384)]
    whole = [(starts[0], 8192, 1), (starts[1], 8192, 1), (starts[2], 4096, 1)]
    good, third_is_bad = Runtime(0), Runtime(0, bad=starts[2])
    with caplog.at_level("INFO", logger="infinity"):
        pin(Pages, good, here, registered_nbytes=registered_nbytes)
    assert [record.args[0] for record in caplog.records] == ["8.0 KiB", "16.0 KiB", "20.0 KiB"]
    unpin(Pages, good, registered_nbytes=registered_nbytes)
    assert good.calls == [*whole, *starts]
    refusal = r"4.0 KiB.* after 16.0 KiB of 20.0 KiB.*code 2.* to 16.0 KiB or less, .*a drive"
    with pytest.raises(UnsupportedError, match=refusal):
        pin(Pages, third_is_bad, here, registered_nbytes=registered_nbytes)
    assert third_is_bad.calls == [*whole, *starts[:2]]


def test_a_long_trace_times_each_copy_by_a_young_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with Arena(1 << 20) as arena:
        counters = Counters()
        device = SimulatedDevice(0)
        device.open(HostPool(arena, counters), counters)
        counters.tracer.start()
        there, begun_ns = torch.zeros(4096), time.monotonic_ns()
        # A clock may be late by what it took to make.
        make_clock, late_ns = _DeviceClock.__init__, 0

        def timed(clock: _DeviceClock, streams: Streams) -> None:
            nonlocal late_ns
            before_ns = time.monotonic_ns()
            make_clock(clock, streams)
            late_ns = max(late_ns, time.monotonic_ns() - before_ns)

        monkeypatch.setattr(_DeviceClock, "__init__", timed)

        def copied() -> StreamCopy:
            block = device.host.allocate(there.nbytes, "a copy")
            assert block is not None
            copy = device.copy(device.host.tensor(block).view(torch.float32), there)
            assert isinstance(copy, StreamCopy)
            copy.wait()
            return copy

        copies = [copied(), copied()]
        monkeypatch.setattr("infinity.tiers.streams._CLOCK_NS", 0)
        copies += [copied(), copied()]
        clocks = [copy._begun[0] for copy in copies if copy._begun is not None]
        assert len(set(map(id, clocks))) == 3, "two copies share the first clock"
        for copy in copies:
            [(_, nbytes, start_ns, end_ns)] = copy.passages()
            assert nbytes == there.nbytes
            assert begun_ns <= start_ns <= end_ns <= time.monotonic_ns() + late_ns
        device.close()


def test_streams_of_transfers_on_cuda_go_before_those_that_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def new_stream(device: torch.device, *, priority: int) -> object:
        made.append(priority)
        return object()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(0))
    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    with Arena(1 << 20) as arena:
        device = CudaDevice(HostPool(arena, Counters()), Counters())
        device.streams.new_stream("side")
        unpin(arena, Runtime(0))
    assert made == [-1] * 4


def test_a_device_that_has_failed_gives_the_arena_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)

    def fail(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, *, priority: object())
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with Arena(1 << 20) as arena:
        device = CudaDevice(HostPool(arena, Counters()), Counters())
        with pytest.raises(DeviceError, match="cuda.*illegal memory access.*left last.*none"):
            device.close()
        assert runtime.calls == [(arena.address, 1 << 20, 1), arena.address]
