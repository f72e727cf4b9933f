"""State that rests on the device and is updated there stays there, and has the bits of the host's
update."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.observe import Counters
from infinity.ops.rules import AdamWSettings
from infinity.ops.span import StateSpan
from infinity.storage.arena import Arena
from infinity.streaming.updates import chunk_update
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tiers.host import HostPool
from tests.support.models import Mlp
from tests.support.offloading import offloaded, swap_config

WIDTH, LAYERS = 32, 2


def train(
    directory: Path,
    dtype: torch.dtype,
    tiers: dict[str, str],
    update_on: str,
    updates: str = "at_step",
    delay_s: float = 1e-4,
) -> tuple[list[torch.Tensor], int, int]:
    """Returns the state after three steps, and the bytes that steps 2 and 3 bring to the device and
    back from it."""
    config: dict[str, Any] = swap_config(
        directory, placement={"parameters": "host", **tiers}, device_nbytes="4MiB",
        host_nbytes="4MiB", updates=updates, update_chunk="8KiB", compute="auto",
    )  # fmt: skip
    config["schedule"]["update_on"] = update_on
    torch.manual_seed(0)
    model = Mlp(WIDTH, LAYERS).to(dtype)
    with offloaded(model, config, device=SimulatedDevice(2, delay_s=delay_s)) as model:
        optimizer = infinity.AdamW(model, lr=1e-2, max_grad_norm=0.5)
        engine = infinity.engine_of(model)
        for step in range(3):
            if step == 1:
                before = dict(engine.counters.snapshot())
            inputs = {name: value.to(dtype) for name, value in model.inputs(step).items()}
            model(**inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = dict(engine.counters.snapshot())
        found = [engine.read_parameter(name) for name in engine.parameter_names()]
        found += [state[name] for state in optimizer.state.values() for name in sorted(state)]
    moved = [
        int(after.get(name, 0) - before.get(name, 0))
        for name in ("device_in_nbytes", "device_out_nbytes")
    ]
    return [torch.as_tensor(each).detach().clone() for each in found], *moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_on_the_device_is_updated_there_with_the_host_s_bits(
    dtype: torch.dtype, swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.streaming.updates.chunk_update.SLICE_NUMEL", 768)
    there = dict.fromkeys(("master", "moments"), "device")
    expected, *_ = train(swap_directory, dtype, {}, "host")
    found, in_nbytes, out_nbytes = train(swap_directory, dtype, there, "device")
    assert all(map(torch.equal, expected, found))
    _, staged_in_nbytes, staged_out_nbytes = train(swap_directory, dtype, there, "host")
    numel = sum(parameter.numel() for parameter in Mlp(WIDTH, LAYERS).parameters())
    moments_nbytes = 2 * 2 * 4 * numel  # Two steps. They go through host memory for the host.
    assert staged_in_nbytes + staged_out_nbytes >= 2 * moments_nbytes
    assert in_nbytes < staged_in_nbytes and out_nbytes < staged_out_nbytes - moments_nbytes // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_on_the_device_stay_there_while_it_updates_them(
    dtype: torch.dtype, swap_directory: Path
) -> None:
    everything = dict.fromkeys(("parameters", "master", "moments", "gradients"), "device")
    expected, *_ = train(swap_directory, dtype, {}, "host")
    found, in_nbytes, out_nbytes = train(swap_directory, dtype, everything, "device")
    assert all(map(torch.equal, expected, found))
    # Gradients are copied to be measured, in both steps; nothing else leaves.
    numel = sum(parameter.numel() for parameter in Mlp(WIDTH, LAYERS).parameters())
    assert (in_nbytes, out_nbytes) == (0, 2 * 4 * numel)


def test_a_rule_whose_bits_the_device_would_not_give_is_updated_by_the_host(
    swap_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = dict.fromkeys(("master", "moments", "gradients"), "device")
    expected, *_ = train(swap_directory, torch.bfloat16, {}, "host")
    found, *_ = train(swap_directory, torch.bfloat16, everything, "device")
    assert all(map(torch.equal, expected, found))
    monkeypatch.setattr(
        "infinity.streaming.updates.chunk_update.can_update_on_device",
        lambda spans, settings: False,
    )
    monkeypatch.setattr(
        "infinity.streaming.updates.chunk_update.update_on_device", None
    )  # Not called.
    found, *_ = train(swap_directory, torch.bfloat16, everything, "device")
    assert all(map(torch.equal, expected, found))


def test_a_read_of_state_on_the_device_comes_after_the_write_of_its_last_update(
    swap_directory: Path,
) -> None:
    tiers = {"master": "nvme", "moments": "device", "gradients": "nvme"}
    expected, *_ = train(swap_directory, torch.float32, {}, "host")
    # The forward updates a unit, and its state is read ahead for the backward: on another stream.
    found, *_ = train(swap_directory, torch.float32, tiers, "host", "auto", delay_s=0.03)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("fails", [False, True])
def test_no_copy_of_host_memory_is_under_way_after_an_update_on_the_device(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0, step=1)
    monkeypatch.setattr(chunk_update, "SLICE_NUMEL", 512)

    def run_out(*unused: Any) -> None:
        raise torch.OutOfMemoryError

    if fails:
        monkeypatch.setattr(chunk_update, "update_span_", run_out)
    device, counters = SimulatedDevice(1, delay_s=0.01), Counters()
    with Arena(1 << 20, huge_pages=False) as arena:
        host = HostPool(arena, counters)
        device.open(host, counters)
        block = host.allocate(4096, "gradients")
        assert block is not None
        gradient = host.tensor(block).view(torch.float32).fill_(1.0)
        weight, *moments = (torch.zeros(1024) for _ in range(3))
        with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
            span = StateSpan(weight, gradient, tuple(moments), None)
            chunk_update.update_on_device(device, [span], settings, 1.0)
        assert fails or bool((weight != 0).all())
        host.free(block)  # The simulated device refuses it under a copy.
        device.close()
