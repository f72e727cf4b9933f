"""On a CUDA device: the bits of plain PyTorch on the same device, on every placement.

Forward and backward run the same CUDA kernels on both sides, made deterministic (see conftest), so
losses and gradients are compared bit for bit with a plain model on the device.

The engine applies clipping and the update on the host, where the state is. Torch's fused AdamW for
CUDA is another kernel, with another rounding; so the reference trains on the device and updates on
the host: `HostUpdatedSide` copies gradients to a CPU twin of the model, clips and steps that one
with the fused CPU AdamW, and copies the weights back. That is the arithmetic the engine promises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.harness import Plan, Record, Side, assert_same_run, held_units, run
from parity.zoo import ZOO, Entry
from torch import Tensor, nn

import infinity
from tests.support import models
from tests.support.offloading import offloaded, swap_config

pytestmark = pytest.mark.timeout(300)

CUDA = "cuda"
# Deterministic CUDA kernels exist for everything in these.
NAMES = [
    "gpt2", "gpt2-dropout", "llama-tied", "qwen3", "gemma3_text", "t5", "bart", "mixtral", "deepseek_v3",
    "mamba2", "zamba2", "bert", "albert", "perceiver", "vit", "convnext", "llava", "whisper", "lora",
    "dora", "lora-experts", "TinyDecoder", "ReturnsParameter", "InPlace", "Attention", "Checkpointed",
    "Frozen", "Conditional", "Layouts",
]  # fmt: skip


class HostUpdatedSide(Side):
    """A plain model on the device whose optimizer steps a twin on the host."""

    def __init__(self, model: nn.Module, twin: nn.Module) -> None:
        super().__init__(model.to(CUDA), is_plain=True)
        self.twin = twin

    def adamw(self, groups: Any = None, **options: Any) -> Any:
        return super().adamw(self.twin.parameters(), **options)

    def update(self, max_norm: float | None = None) -> Tensor | None:
        pairs = list(zip(self.model.parameters(), self.twin.parameters(), strict=True))
        for ours, theirs in pairs:
            theirs.grad = None if ours.grad is None else ours.grad.cpu()
        norm = None
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.twin.parameters(), max_norm)
        self.optimizer.step()
        with torch.no_grad():
            for ours, theirs in pairs:
                ours.copy_(theirs)
                ours.grad = None
        return norm


def reference(entry: Entry, plan: Plan) -> Record:
    return run(entry, HostUpdatedSide(entry.build(0), entry.build(0)), plan, device=CUDA)


def cuda_config(directory: Path, **options: Any) -> dict[str, Any]:
    config = swap_config(directory, **options)
    config["tiers"]["device"] = {"kind": "cuda", "capacity": "64MiB"}
    return config


@pytest.mark.parametrize("name", NAMES)
def test_trains_like_plain_pytorch(name: str, swap_directory: Path) -> None:
    entry = ZOO[name]
    plan = Plan(steps=2, max_norm=0.5, generate=True)
    expected = reference(entry, plan)
    config = cuda_config(swap_directory, placement="nvme")
    with offloaded(entry.build(0), config) as model:
        assert next(model.parameters()).device.type == CUDA
        assert_same_run(expected, run(entry, Side(model), plan, device=CUDA))


def _decoder(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return models.TinyDecoder(width=256, layers=6, heads=4, vocab=512).train()


PLACEMENTS: dict[str, Any] = {
    "device": "device",
    "host": "host",
    "nvme": "nvme",
    "parameters-on-device": {"parameters": ["device"], "moments": ["nvme"]},
    "split": {"parameters": ["host", "nvme"], "moments": ["host", "nvme"], "gradients": ["nvme"]},
    "gradients-on-device": {"parameters": ["nvme"], "gradients": ["device"], "moments": ["host"]},
}


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "demand"])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_every_placement_has_the_same_bits(
    where: str, prefetch: bool, swap_directory: Path
) -> None:
    """Twenty steps with accumulation, clipping and a schedule, in a device window of three
    units."""
    entry = replace(ZOO["TinyDecoder"], build=_decoder, batch=models.TinyDecoder(vocab=512).inputs)
    plan = Plan(steps=20, accumulation=2, max_norm=1.0, scheduled=True)
    # Layers whose state does not fit beside all that rests would be tiled, and rounded otherwise.
    config = cuda_config(
        swap_directory, placement=PLACEMENTS[where], host_nbytes="192MiB", prefetch=prefetch,
        schedule={"tile": 0},
    )  # fmt: skip
    config["tiers"]["device"]["capacity"] = "256MiB"
    if "device" not in str(PLACEMENTS[where]):
        unit_nbytes = sum(p.numel() * 4 for p in _decoder(0).blocks[0].parameters())
        config["tiers"]["device"]["capacity"] = 3 * unit_nbytes + (1 << 20)
    with offloaded(entry.build(0), config) as model:
        record = run(entry, Side(model), plan, device=CUDA)
    assert_same_run(_long_reference(entry, plan), record)


_KEPT: dict[int, Record] = {}


def _long_reference(entry: Entry, plan: Plan) -> Record:
    if not _KEPT:
        _KEPT[0] = reference(entry, plan)
    return _KEPT[0]


@contextmanager
def allocated_above(limit_nbytes: int) -> Iterator[None]:
    """Checks that the caching allocator never had more than `limit_nbytes` more than at the
    start."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - start
    assert peak <= limit_nbytes, f"{peak} bytes at the peak, allowed {limit_nbytes}"


def test_device_memory_stays_in_the_window(swap_directory: Path) -> None:
    """Weights on the device never exceed the window; gradients leave unit by unit.

    Allowed: the window, two units' gradients (fp32, one being made and one being copied out), the
    activations of 2 x 12 tokens (40 kept tensors per block of (24, width) fp32), and cuBLAS's
    workspaces (32 MiB each, one of this thread and one of autograd's).
    """
    width, layers = 512, 12
    torch.manual_seed(0)
    model = models.TinyDecoder(width=width, layers=layers, heads=8, vocab=512).train()
    unit_nbytes = sum(p.numel() * 4 for p in model.blocks[0].parameters())
    window_nbytes = 3 * unit_nbytes
    config = cuda_config(swap_directory, placement="nvme", host_nbytes="256MiB")
    config["tiers"]["nvme"][0]["capacity"] = "4GiB"
    config["tiers"]["device"]["capacity"] = window_nbytes
    activations_nbytes = 40 * layers * 24 * width * 4
    with (
        offloaded(model, config) as model,
        allocated_above(window_nbytes + 2 * unit_nbytes + activations_nbytes + 2 * (32 << 20)),
    ):
        optimizer = infinity.AdamW(model, lr=1e-3, max_grad_norm=1.0)
        for step in range(3):
            batch = {key: value.cuda() for key, value in model.inputs(step).items()}
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not held_units(model)


def test_state_on_the_host_moves_with_early_updates(swap_directory: Path) -> None:
    """Homes rotate while gradients come; the bits are those of updates after the decision."""
    found = {}
    for updates in ("deferred", "both_passes"):
        config = cuda_config(
            swap_directory, placement="host", host_nbytes="256MiB", compute="auto", updates=updates
        )
        with offloaded(_decoder(0).to(torch.bfloat16), config) as model:
            engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=1e-2)
            turns = engine.updater._turns
            for number in range(8):
                source = torch.Generator().manual_seed(number)
                ids = torch.randint(512, (2, 32), generator=source).to(CUDA)
                model(ids).float().square().mean().backward()
                deadline_s = time.monotonic() + 60
                while turns._to_make and time.monotonic() < deadline_s:
                    with engine._lock:
                        engine.updater.advance()
                    time.sleep(0.001)  # The worker updates beside the device.
                optimizer.step()
                optimizer.zero_grad()
            kept = engine.counters.snapshot().get("early_updates_kept", 0)
            assert bool(kept) == (updates == "both_passes")
            assert bool(turns._undecided._away) == bool(kept), "no home has moved"
            found[updates] = {
                name: engine.read_parameter(name).clone() for name, _ in model.named_parameters()
            }
    for name, weight in found["deferred"].items():
        assert torch.equal(weight, found["both_passes"][name]), name
