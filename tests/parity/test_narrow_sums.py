"""Gradients that stay in bf16 on the host give the bits that they give in fp32.

Beside a simulated device, with early updates. The reference is the same engine with the device
widening every gradient, which other tests hold to plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.streaming.gradients.leaving import NarrowSums
from infinity.streaming.gradients.sums import UnitGradients
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import assert_same

WIDTH, BLOCKS, STEPS = 64, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return x + self.down(torch.relu(self.up(y)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index in self.skipped else block(x)
        return x


@dataclass
class Run:
    """A model in training, and what was seen of it."""

    model: Model
    optimizer: Any
    seen: dict[str, torch.Tensor] = field(default_factory=dict)

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        dtype = self.model.blocks[0].up.weight.dtype
        inputs = torch.randn(8, WIDTH, generator=generator).to(dtype)
        loss = self.model(inputs).float().square().mean()
        self.see("loss", loss)
        loss.backward()

    def see(self, name: str, value: torch.Tensor) -> None:
        self.seen[f"{name} {len(self.seen)}"] = value.detach().clone()

    def look(self, name: str = "blocks.1.up.weight") -> None:
        gradient = self.model.get_parameter(name).grad
        self.see(name, torch.zeros(()) if gradient is None else gradient)

    def step(self, **options: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(**options)


Body = Callable[[Run, int], None]


def plain(run: Run, number: int) -> None:
    run.backward(number)
    run.step()


def clipped(run: Run, number: int) -> None:
    run.optimizer.max_grad_norm = 1e-3
    plain(run, number)
    run.see("norm", run.optimizer.grad_norm)


def clipped_at_times(run: Run, number: int) -> None:
    """Early updates are taken back, and norms are needed that were not expected."""
    run.optimizer.max_grad_norm = (None, 1e3, 1e-3)[number % 3]
    plain(run, number)


def looked_at(run: Run, number: int) -> None:
    run.backward(number)
    run.look()
    run.look("blocks.3.norm.bias")
    run.optimizer.max_grad_norm = 1e-3 if number > 4 else None
    run.optimizer.step()
    run.look()  # Times the clip factor.
    run.optimizer.zero_grad()


def twice(run: Run, number: int) -> None:
    """A second backward where one was expected, and the other way round."""
    run.backward(number)
    if number in (3, 4, 6):
        run.backward(number + 100)
    run.step()


def filled_with_zeros(run: Run, number: int) -> None:
    run.backward(number)
    run.step(set_to_none=number % 3 != 1)


def replaced(run: Run, number: int) -> None:
    run.backward(number)
    if number > 2:
        parameter = run.model.get_parameter("blocks.2.down.weight")
        parameter.grad = parameter.grad * 2
    run.look("blocks.2.down.weight")
    run.look("blocks.2.up.weight")
    run.step()


def partly(run: Run, number: int) -> None:
    run.model.skipped = {number % BLOCKS} if number % 2 else set()
    plain(run, number)


def without_a_step(run: Run, number: int) -> None:
    run.backward(number)
    if number == 4:
        run.optimizer.zero_grad()
        run.backward(number + 100)
    run.step()


BODIES: tuple[Body, ...] = (
    plain, clipped, clipped_at_times, looked_at, twice, filled_with_zeros, replaced, partly,
    without_a_step,
)  # fmt: skip


def trained(
    body: Body,
    directory: Path,
    *,
    is_narrow: bool,
    make: Callable[[], Model] = Model,
    **changes: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Returns what was seen, weights and moments, and the counters."""
    config: dict[str, Any] = {
        "tiers": {
            "host": {"capacity": "16MiB", "huge_pages": False},
            "device": {"capacity": "512KiB"},
            "nvme": [{"path": str(directory)}],
        },
        "placement": dict.fromkeys(("parameters", "master", "moments", "gradients"), "host"),
        "precision": {"compute": "bfloat16"},
        "schedule": {"updates": "both_passes", "update_on": "host", "update_chunk": "64KiB"},
    }
    for section, keys in changes.items():
        config[section] = config.get(section, {}) | keys
    torch.manual_seed(3)
    model = make()
    infinity.offload(model, config, device=SimulatedDevice(5, delay_s=2e-4))
    engine = infinity.engine_of(model)
    engine.gradients.narrow.is_on &= is_narrow
    run = Run(model, infinity.AdamW(model, lr=1e-2))
    try:
        for number in range(STEPS):
            body(run, number)
        for name, parameter in model.named_parameters():
            run.seen[name] = engine.read_parameter(name)
            for kind in ("exp_avg", "exp_avg_sq"):
                run.seen[f"{kind} of {name}"] = run.optimizer.state[parameter][kind].clone()
        return run.seen, engine.counters.snapshot()
    finally:
        engine.close()


@pytest.fixture
def narrow_units(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The units whose sums were narrow, once for each time that it was decided."""
    units: list[int] = []
    decide = NarrowSums._set

    def noted(narrow: NarrowSums, sums: UnitGradients, is_narrow: bool) -> None:
        decide(narrow, sums, is_narrow)
        units.extend([sums.unit.index] * is_narrow)

    monkeypatch.setattr(NarrowSums, "_set", noted)
    return units


@cache
def wide_of(body: Body, moments: str = "float32") -> dict[str, torch.Tensor]:
    """What is seen where all sums are wide: neither places nor the time of updates change it."""
    with TemporaryDirectory() as directory:
        options = {"precision": {"moments": moments}}
        return trained(body, Path(directory), is_narrow=False, **options)[0]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_no_bit_changes(body: Body, tmp_path: Path, narrow_units: list[int]) -> None:
    wide = wide_of(body)
    narrow_units.clear()
    narrow, counters = trained(body, tmp_path, is_narrow=True)
    assert_same(wide, narrow)
    assert len(narrow_units) >= 2 * BLOCKS, "sums of one gradient stay in bf16"
    # Where every step is clipped none is updated early.
    early = [counters.get(f"early_updates_{each}", 0) for each in ("kept", "undone")]
    assert any(early) or body is clipped


def test_half_of_the_bytes_cross_the_link(tmp_path: Path) -> None:
    found = [
        trained(plain, tmp_path, is_narrow=is_narrow)[1]["device_out_nbytes"]
        for is_narrow in (False, True)
    ]
    # The first step does not know yet that each parameter gets one gradient.
    assert found[1] == pytest.approx(found[0] * (1 + (STEPS - 1) / 2) / STEPS, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": {"moments": "nvme"}},
        {"placement": {"parameters": "nvme", "master": "nvme"}},
        {"precision": {"moments": "8bit"}},
        {"schedule": {"updates": "deferred"}},
        {"schedule": {"updates": "at_step"}},
    ],
    ids=lambda changes: "-".join(str(v) for keys in changes.values() for v in keys.values()),
)
def test_wherever_state_rests_and_whenever_it_is_updated(
    changes: dict[str, Any], tmp_path: Path, narrow_units: list[int]
) -> None:
    for body in (clipped_at_times, twice):
        wide = wide_of(body, changes.get("precision", {}).get("moments", "float32"))
        narrow_units.clear()
        assert_same(wide, trained(body, tmp_path, is_narrow=True, **changes)[0])
        assert narrow_units


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": {"gradients": "nvme"}},
        {"schedule": {"update_on": "device"}},
        {"precision": {"compute": "float32"}},
    ],
    ids=["gradients-on-nvme", "updates-on-the-device", "fp32"],
)
def test_others_are_widened_as_ever(
    changes: dict[str, Any], tmp_path: Path, narrow_units: list[int]
) -> None:
    trained(plain, tmp_path, is_narrow=True, **changes)
    assert not narrow_units


def test_a_unit_of_two_dtypes_is_widened_as_ever(tmp_path: Path, narrow_units: list[int]) -> None:
    def mixed() -> Model:
        model = Model().bfloat16()
        for block in model.blocks:
            block.norm.float()
        return model

    trained(plain, tmp_path, is_narrow=True, make=mixed, precision={"compute": "auto"})
    assert not narrow_units


def test_sums_that_are_not_widened_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail."""
    wide, end = wide_of(twice), UnitGradients.end_narrow

    def forget(sums: UnitGradients, **unused: bool) -> None:
        end(sums, widens=False)

    monkeypatch.setattr(UnitGradients, "end_narrow", forget)
    narrow, _ = trained(twice, tmp_path, is_narrow=True)
    with pytest.raises(AssertionError):
        assert_same(wide, narrow)
