"""Every ordering of the stream device is needed, and the simulated device tells when it is missing.

A small training run goes through all of it: a window of two blocks, gradients and activations that
leave the device, updates that change the weights on the host. With one ordering taken away the run
must fail: by the check of the order, or by its bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.engine.activations import Activations
from infinity.engine.gradients import Gradients, _tail, widen
from infinity.errors import UnsupportedError
from infinity.schedule.executor import Executor
from infinity.testing.models import Mlp
from infinity.testing.simulated_device import SimulatedDevice, SimulatedStream
from infinity.tiers.cuda import pin, unpin
from infinity.tiers.device import FINISHED
from infinity.tiers.streams import StreamCopy, StreamDevice, StreamRegion

from .harness import offloaded, swap_config

WIDTH, LAYERS = 32, 9
BLOCK_NBYTES = 20 << 10  # In whole pages.
WINDOW_NBYTES = 2 * BLOCK_NBYTES + (4 << 10)  # And the head.
HOST_NBYTES = 256 << 10


def train(
    directory: Path | None, device: Any, turn: Callable[[], None] = lambda: None, **schedule: Any
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
    torch.manual_seed(0)
    with offloaded(Mlp(WIDTH, LAYERS), config, device=device) as model:
        optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=0.5)

        def loss_of(seed: int) -> torch.Tensor:
            return model(**model.inputs(seed)).square().mean()

        found = []
        for step in range(2):
            turn()
            if step == 0:
                found += infinity.accumulate(model, loss_of, [0])
                turn()
                found.append(loss_of(1))
                found[-1].backward()
            else:
                found += infinity.accumulate(model, loss_of, [3, 4, 5])
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


def detach_at_once(device: StreamDevice, region: StreamRegion) -> None:
    region.uses.clear()
    region.memory.drop_memory()


def end_use_before(device: StreamDevice, region: Any) -> None:
    """Notes the use as it was when the region was attached."""
    if isinstance(region, StreamRegion):
        event = device._streams.new_event()
        event.record(device._in)
        region.uses[device._streams.current()] = event


def order_without_wait(copy: StreamCopy) -> None:
    copy._keep = None


def let_go_at_once(copy: StreamCopy, *args: Any, keep: Any, **kwargs: Any) -> None:
    _INIT(copy, *args, keep=None, **kwargs)


def only_computing_waits(stream: SimulatedStream, event: Any) -> None:
    if stream._worker is None:
        _WAIT_EVENT(stream, event)


def end_without_wait(gradients: Gradients) -> None:
    gradients._leaving.clear()


def return_at_once(activations: Activations, parked: Any) -> None:
    parked.copying = FINISHED
    _START_RETURN(activations, parked)


_INIT = StreamCopy.__init__
_WAIT_EVENT = SimulatedStream.wait_event
_START_RETURN = Activations._start_return

MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "the-use-s-end-is-not-noted": (StreamDevice, "end_use", no_wait),
    "the-use-s-end-is-noted-too-early": (StreamDevice, "end_use", end_use_before),
    "room-is-given-up-at-once": (StreamDevice, "detach", detach_at_once),
    "transfers-wait-for-nobody": (SimulatedStream, "wait_event", only_computing_waits),
    "computation-does-not-wait": (StreamCopy, "order", order_without_wait),
    "memory-is-not-kept": (StreamCopy, "__init__", let_go_at_once),
    "blocks-are-freed-at-once": (Executor, "_finish_copy", no_wait),
    "gradients-are-read-at-once": (Gradients, "_end_copies", end_without_wait),
    "activations-are-read-at-once": (Activations, "_start_return", return_at_once),
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


def test_the_device_updates_with_the_same_bits(
    expected: list[torch.Tensor], swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.engine.update_on_device.SLICE_NUMEL", 512)
    device = SimulatedDevice(1, delay_s=1e-4)
    assert same(expected, train(swap_directory, device, update_on="device"))


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_ordering_that_is_missing_is_told(
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [1, 2, 1023, 1025, 100_003])
def test_gradients_are_widened_in_their_place(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel).to(dtype)
    place = torch.full((numel,), float("nan"))
    _tail(place, dtype).copy_(values)
    widen(place, dtype)
    assert torch.equal(place, values.float())


class Runtime:
    """The functions of `torch.cuda.cudart()` that pinning uses."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append((address, nbytes, flags))
        return self.code

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
    with pytest.raises(UnsupportedError, match=r"8192 bytes.*code 712.*ulimit"):
        pin(Pages, bad, here)
    unpin(Pages, bad)
    assert "code 712" in caplog.text
