"""What only a CUDA device can show: pinning, no wait of the host, memory, streams, compiled blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import exchanges
from torch import Tensor, nn

import infinity
from tests.support.models import TinyDecoder
from tests.support.offloading import offloaded, swap_config, units_in_use

pytestmark = pytest.mark.timeout(300)

WIDTH, LAYERS = 512, 10


def decoder(layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    return TinyDecoder(width=WIDTH, layers=layers, heads=8, vocab=512, length=512).train()


def block_nbytes() -> int:
    return sum(p.numel() * 4 for p in decoder().blocks[0].parameters())


def config(directory: Path, *, blocks: float = 3, **options: Any) -> dict[str, Any]:
    """A device window of so many blocks."""
    options.setdefault("placement", "host")
    options.setdefault("host_nbytes", "768MiB")
    table = swap_config(directory, **options)
    table["tiers"]["nvme"][0]["capacity"] = "4GiB"
    table["tiers"]["device"] = {"kind": "cuda", "capacity": int(blocks * block_nbytes())}
    return table


def batch(seed: int, length: int = 64, rows: int = 4) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (rows, length), generator=source).cuda()
    return {"ids": ids, "labels": ids}


def step(model: Any, optimizer: Any, inputs: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_the_arena_is_pinned_while_the_engine_lives(swap_directory: Path) -> None:
    with offloaded(decoder(), config(swap_directory)) as model:
        engine = infinity.engine_of(model)
        host = engine.device.host  # type: ignore[attr-defined]
        assert host._bytes[:4096].is_pinned() and host._bytes[-4096:].is_pinned()
        assert torch.cuda.get_sync_debug_mode() == 0
    # A second engine may have the same addresses: the first one has given them back.
    with offloaded(decoder(), config(swap_directory)) as model:
        step(model, infinity.AdamW(model, lr=1e-3), batch(0))


@contextmanager
def synchronizing_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_forward_and_no_backward_waits_for_the_device(swap_directory: Path) -> None:
    """The device is kept asleep: the host issues the whole forward, and the backward down to the
    first block, in the meantime. Waits for events, which PyTorch's debug mode does not see, would
    show here."""
    with offloaded(decoder(4), config(swap_directory, updates="at_step")) as model:
        optimizer = infinity.AdamW(model, lr=1e-3)
        inputs = batch(0)
        for _ in range(3):
            step(model, optimizer, inputs)
        torch.cuda.synchronize()
        awake = torch.cuda.Event()
        was_asleep: list[bool] = []
        # Cycles: about a second. After about 1,024 launches the driver itself stops the host, so
        # the model is a small one.
        torch.cuda._sleep(2_000_000_000)
        awake.record()

        def ask(*unused: Any) -> None:
            was_asleep.append(not awake.query())

        def ask_in_the_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(ask)

        hook = model.tokens.register_forward_hook(ask_in_the_backward)
        with synchronizing_is_an_error():
            loss = model(**inputs)
            ask()
            loss.backward()
        hook.remove()
        optimizer.step()
        assert was_asleep == [True, True], "the host waited for the device"


def test_copies_of_weights_run_beside_the_computation(swap_directory: Path) -> None:
    """By the device's own clock: in a window of three blocks, most of the time in which weights are
    copied the computation runs as well, so a step takes less than the sum of both."""
    with offloaded(decoder(), config(swap_directory)) as model:
        optimizer = infinity.AdamW(model, lr=1e-3)
        inputs = batch(0, length=512, rows=8)
        for _ in range(3):
            step(model, optimizer, inputs)
        in_nbytes = infinity.engine_of(model).counters.snapshot()["device_in_nbytes"]
        issued_ms = _forward_ms(model, inputs)
        moved = infinity.engine_of(model).counters.snapshot()["device_in_nbytes"] - in_nbytes
    assert moved > 3 * LAYERS * block_nbytes() / 2, "the window held everything"
    computed_ms = _forward_ms(decoder().cuda(), inputs)
    copied_ms = moved / 5 / _bytes_per_ms()
    assert issued_ms < 0.9 * (computed_ms + copied_ms)


def _forward_ms(model: Any, inputs: dict[str, Tensor]) -> float:
    """The fastest of five, by the device's clock. It sleeps first, so that all is issued by the
    time it begins and the host's own time does not count."""
    times = []
    for _ in range(5):
        begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        begun.record()
        with torch.no_grad():
            model(**inputs)
        over.record()
        over.synchronize()
        times.append(begun.elapsed_time(over))
    return min(times)


def _bytes_per_ms() -> float:
    host = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = host.cuda()
    begun, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    there.copy_(host, non_blocking=True)
    over.record()
    over.synchronize()
    return host.numel() / begun.elapsed_time(over)


def test_another_stream_than_the_default_one(swap_directory: Path) -> None:
    """Steps on two streams in alternation, each behind the other as PyTorch asks: the same
    losses."""

    def losses(*, by_turns: bool) -> list[float]:
        with offloaded(decoder(), config(swap_directory, blocks=2.5)) as model:
            optimizer = infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0)
            side = torch.cuda.Stream()
            found = []
            for number in range(6):
                stream = side if by_turns and number % 2 else torch.cuda.default_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    found.append(step(model, optimizer, batch(number)))
                torch.cuda.current_stream().wait_stream(stream)
            return [loss.item() for loss in found]

    assert losses(by_turns=True) == losses(by_turns=False)


class BesideEachOther(nn.Module):
    """Two chains of linear layers, one of them on a stream of its own; they meet in the loss."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Chains() for _ in range(blocks))

    def forward(self, x: Tensor, side: torch.cuda.Stream | None) -> Tensor:
        there = side or torch.cuda.current_stream()
        there.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(there):
            other = x + 1  # The allocator may give its memory only to what runs there.
        both = x, other
        for unit in self.units:
            both = unit(*both, side)
        return (both[0] * both[1]).mean()


class _Chains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self, left: Tensor, right: Tensor, side: torch.cuda.Stream | None
    ) -> tuple[Tensor, Tensor]:
        here = torch.cuda.current_stream()
        there = side or here
        there.wait_stream(here)
        for first, second in zip(self.layers[:2], self.layers[2:], strict=True):
            left = first(left).relu()
            with torch.cuda.stream(there):
                right = second(right).relu()
        here.wait_stream(there)
        return left, right


def test_a_block_on_two_streams_trains_as_on_one(swap_directory: Path) -> None:
    def losses(*, beside: bool) -> list[float]:
        torch.manual_seed(0)
        table = config(swap_directory)
        table["tiers"]["device"]["capacity"] = int(2.5 * 4 * 4 * WIDTH * (WIDTH + 1))
        with offloaded(BesideEachOther(), table) as trained:
            optimizer = infinity.AdamW(trained, lr=1e-3)
            side = torch.cuda.Stream() if beside else None
            found = []
            for number in range(6):
                source = torch.Generator().manual_seed(number)
                loss = trained(torch.randn(256, WIDTH, generator=source).cuda(), side)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
            return [loss.item() for loss in found]

    assert losses(beside=True) == losses(beside=False)


def test_reserved_memory_does_not_grow_with_changing_shapes(swap_directory: Path) -> None:
    num_shapes = 17
    torch.cuda.empty_cache()  # What tests before this one have left would hide a growth.
    with offloaded(decoder(), config(swap_directory)) as model:
        optimizer = infinity.AdamW(model, lr=1e-3)
        reserved_nbytes = []
        for number in range(5 * num_shapes):
            step(model, optimizer, batch(number, length=16 + 11 * (number % num_shapes)))
            if number % num_shapes == num_shapes - 1:
                torch.cuda.synchronize()
                reserved_nbytes.append(torch.cuda.memory_reserved())
        # After every shape was there twice, nothing of a shape is left over.
        assert reserved_nbytes[-1] <= reserved_nbytes[1], reserved_nbytes


def test_updates_have_the_same_bits_wherever_they_are_made(swap_directory: Path) -> None:
    found, why = {}, {}
    for place in ("host", "device", "auto", "in place"):
        options: dict[str, Any] = {"schedule": {"update_on": place}}
        if place == "in place":  # State rests on the device, and is updated there.
            options = {"schedule": {"update_on": "device"}, "blocks": 100}
            options["placement"] = dict.fromkeys(("master", "moments", "gradients"), "device")
        with offloaded(decoder(), config(swap_directory, **options)) as model:
            engine = infinity.engine_of(model)
            why[place] = engine.update_device.why
            optimizer = infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0)
            for number in range(3):
                step(model, optimizer, batch(number))
            found[place] = [engine.read_parameter(name) for name in engine.parameter_names()]
    for place in ("device", "auto", "in place"):
        assert all(map(torch.equal, found["host"], found[place])), place
    assert why["auto"].startswith("a step takes "), "nothing was timed"


@pytest.mark.parametrize("gradients", ["host", "nvme"])
def test_gradients_leave_unit_by_unit(gradients: str, swap_directory: Path) -> None:
    """Not all of them wait on the device for the end of the backward: beside the window there are
    those that are made, and one unit's that leave."""
    placement = {"parameters": "host", "moments": "host", "gradients": gradients}
    with offloaded(decoder(), config(swap_directory, placement=placement)) as model:
        optimizer = infinity.AdamW(model, lr=1e-3)
        for number in range(2):
            step(model, optimizer, batch(number))
        torch.cuda.synchronize()
        loss = model(**batch(2))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss.backward()
        torch.cuda.synchronize()
        grown_nbytes = torch.cuda.max_memory_allocated() - before
        assert grown_nbytes < LAYERS * block_nbytes() / 2


def test_micro_batches_are_summed_on_the_device(swap_directory: Path) -> None:
    """Four micro-batches through each block: its gradients leave the device once."""
    left_nbytes = []
    for count in (1, 4):
        with offloaded(decoder(), config(swap_directory)) as model:
            infinity.forward_backward(model, lambda seed: model(**batch(seed)), range(count))
            counters = infinity.engine_of(model).counters.snapshot()
            left_nbytes.append(counters["device_out_nbytes"])
    blocks_nbytes = LAYERS * block_nbytes()
    assert left_nbytes[1] - left_nbytes[0] < blocks_nbytes / 2


def test_micro_batches_wait_for_each_other_at_tiles(swap_directory: Path) -> None:
    """In half a block's window: backwards wait for each other, each in a thread of its own."""
    found = []
    for tile_micro_batches in (1, 4):
        schedule = {"tile": "1MiB", "tile_micro_batches": tile_micro_batches}
        with offloaded(decoder(), config(swap_directory, blocks=0.5, schedule=schedule)) as model:
            infinity.forward_backward(model, lambda seed: model(**batch(seed)), range(4))
            engine = infinity.engine_of(model)
            gradients = {name: engine.read_gradient(name) for name in engine.parameter_names()}
            found.append((engine.counters.snapshot()["device_in_nbytes"], gradients))
    (alone_nbytes, expected), (together_nbytes, gradients) = found
    assert together_nbytes < alone_nbytes / 2
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_compiled_blocks(swap_directory: Path) -> None:
    """`torch.compile` per block trains, and agrees to rounding with blocks that are not."""

    def losses(*, compiled: bool) -> list[float]:
        with offloaded(decoder(), config(swap_directory)) as model:
            if compiled:
                for block in model.blocks:
                    block.compile()
            optimizer = infinity.AdamW(model, lr=1e-3)
            return [step(model, optimizer, batch(number)).item() for number in range(4)]

    assert losses(compiled=True) == pytest.approx(losses(compiled=False), rel=1e-3)


_SANITIZED = """
import sys, torch, torch.cuda._sanitizer as sanitizer
sanitizer.enable_cuda_sanitizer()
import infinity
from tests.support.models import TinyDecoder
model = TinyDecoder(width=128, layers=6, heads=4, vocab=256).train()
block = sum(p.numel() * 4 for p in model.blocks[0].parameters())
model = infinity.offload(model, {
    "tiers": {"device": {"kind": "cuda", "capacity": 3 * block},
              "host": {"capacity": "128MiB"}},
    "placement": {kind: ["host"] for kind in ("parameters", "master", "moments", "gradients")},
})
optimizer = infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0)
for seed in range(3):
    batch = {key: value.cuda() for key, value in model.inputs(seed).items()}
    model(**batch).backward()
    optimizer.step()
    optimizer.zero_grad()
infinity.engine_of(model).close()
print("no race")
"""


def test_pytorch_s_own_race_detector_finds_none() -> None:
    """Source: torch.cuda._sanitizer, which looks at every kernel and every event."""
    ran = subprocess.run(
        [sys.executable, "-c", _SANITIZED], capture_output=True, text=True, env=os.environ
    )
    assert ran.returncode == 0 and "no race" in ran.stdout, ran.stderr[-4000:]
    assert "CSAN" not in ran.stderr, ran.stderr[-4000:]


def test_two_engines_share_the_device(swap_directory: Path) -> None:
    """Each with an arena, streams and a window of its own."""
    for name in ("a", "b"):
        (swap_directory / name).mkdir(parents=True)
    with (
        offloaded(decoder(), config(swap_directory / "a")) as one,
        offloaded(decoder(), config(swap_directory / "b")) as other,
    ):
        pairs = [(model, infinity.AdamW(model, lr=1e-3)) for model in (one, other)]
        for number in range(2):
            assert len({step(m, o, batch(number)).item() for m, o in pairs}) == 1


def test_an_exception_in_the_backward_releases_every_unit(swap_directory: Path) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError

    with offloaded(decoder(), config(swap_directory)) as model:
        block: nn.Module = model.blocks[1]
        hook = block.register_forward_hook(lambda module, args, output: Fails.apply(output))
        with pytest.raises(ZeroDivisionError):
            model(**batch(0)).backward()
        hook.remove()
        assert not units_in_use(infinity.engine_of(model))
        step(model, infinity.AdamW(model, lr=1e-3), batch(0))


@pytest.mark.parametrize("on_device", [False, True])
def test_devices_of_several_ranks_exchange(on_device: bool) -> None:
    """Their streams on one device, and no backend: what is asked of CUDA's own order."""

    def make(host: Any, counters: Any) -> Any:
        from infinity.tiers.cuda import CudaDevice

        return CudaDevice(host, counters)

    from tests.support.loopback import Loopback, cuda_event

    exchanges.run(make, Loopback(2, cuda_event), on_device=on_device)
