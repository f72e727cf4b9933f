"""Every use of a unit ends, whatever goes wrong around it, and the next step has the same bits."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import CapacityError, UnsupportedError
from infinity.streaming.updates.masters import Masters
from infinity.streaming.weights.cache import WeightCache
from infinity.testing.simulated_device import SimulatedDevice, SimulatedStream
from tests.support.bits import assert_same
from tests.support.two_sides import loss_of, make, offloaded, plain_run, same_bits, steps

from .in_place import Base, batches, config_of, over, train
from .in_place import loss_of as loss_of_batch


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base("kimi-int4", tmp_path_factory.mktemp("base"))


def interrupt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the second unit from now on is acquired."""
    acquire, count = WeightCache.acquire, itertools.count(1)

    def interrupted(cache: WeightCache, *arguments: Any, **options: Any) -> bool:
        if next(count) == 2:
            signal.raise_signal(signal.SIGINT)
        return acquire(cache, *arguments, **options)

    monkeypatch.setattr(WeightCache, "acquire", interrupted)


def look_at_all(model: Any) -> None:
    with infinity.gather(model):
        pass


def in_layers(model: Any) -> None:
    infinity.forward_backward(model, lambda b: loss_of_batch(model, b), batches(0, 2))


@pytest.mark.parametrize("use", [look_at_all, in_layers])
@pytest.mark.parametrize("tile", [0, "64KiB"])
def test_an_interrupt_while_weights_are_fetched_leaves_no_use(
    base: Base,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Any], None],
    tile: int | str,
) -> None:
    """Of modules, of blocks in layer-major order, and of tiles of experts."""
    config = config_of(tmp_path, schedule={"tile": tile})
    with over(base, config, device=SimulatedDevice(3)) as (model, _):
        engine = infinity.engine_of(model)
        with monkeypatch.context() as patch:
            interrupt_once(patch)
            with pytest.raises(KeyboardInterrupt):
                use(model)
        engine.reset()
        assert engine.weight_cache.in_use() == []
        for parameter in model.parameters():
            parameter.grad = None
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    if tile == 0:
        assert_same(base.expected, seen, is_ordered=False)


def test_a_refused_change_of_the_base_leaves_no_use(base: Base, tmp_path: Path) -> None:
    with over(base, config_of(tmp_path), device=SimulatedDevice(3)) as (model, _):
        engine = infinity.engine_of(model)
        frozen = next(p for p in model.parameters() if not p.requires_grad and p.ndim == 2)
        with (
            pytest.raises(UnsupportedError),
            infinity.gather(model, modify=True),
            torch.no_grad(),
        ):
            frozen.mul_(2)
        assert engine.weight_cache.in_use() == []
        seen = train(model, infinity.AdamW(model, lr=1e-2))
    assert_same(base.expected, seen, is_ordered=False)


def test_a_master_that_has_no_memory_leaves_weights_that_can_be_used(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = {"compute": "bfloat16"}
    run = offloaded(swap_directory, model=make().bfloat16(), precision=precision)
    steps(run, 1)
    model = run.model
    engine = infinity.engine_of(model)

    def fail(*arguments: Any) -> None:
        raise CapacityError(
            "host", needed_nbytes=1, available_nbytes=0, key="tiers.host.capacity", detail="masters"
        )

    with monkeypatch.context() as patch:
        patch.setattr(Masters, "follow", fail)
        with (
            pytest.raises(CapacityError),
            infinity.gather(model, modify=True),
            torch.no_grad(),
        ):
            for parameter in model.parameters():
                parameter.mul_(2)
    assert engine.weight_cache.in_use() == []
    loss_of(model, 3)  # The weights can be used.
    with torch.no_grad(), infinity.gather(model, modify=True):
        for parameter in model.parameters():
            parameter.fill_(-77.0)  # No weight has this value by chance.
    for name in engine.parameter_names():
        assert (engine.read_parameter(name) == -77.0).all()
        assert (engine.read_parameter(name, master=True) == -77.0).all()
    infinity.close(model)


def test_weights_that_have_no_device_memory_ahead_come_when_they_are_used(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that was filled in the first step may not fit beside the activations of the next."""
    device, in_use = SimulatedDevice(1), WeightCache.in_use
    tiers = {"device": {"capacity": "512KiB"}}
    run = offloaded(swap_directory, device=device, tiers=tiers)
    model = run.model
    seen = steps(run, 2)
    copy, refused = device.streams.copy, []
    engine = infinity.engine_of(model)

    def failing(stream: SimulatedStream, source: torch.Tensor, target: torch.Tensor) -> None:
        region = device.streams._regions.get(target.data_ptr())
        if region is not None and stream is device._in and in_use(engine.weight_cache):
            refused.append(target)
            raise torch.OutOfMemoryError("simulated")
        copy(stream, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(device.streams, "copy", failing)
        loss = loss_of(model, 2)
    loss.backward()
    seen.append(loss.detach().clone())
    run.step()
    seen += steps(run, 1, start=3)
    expected = plain_run(lambda run: steps(run, 4))
    actual = [*seen, *run.values().values()]
    infinity.close(model)
    assert refused and same_bits(expected, actual)
