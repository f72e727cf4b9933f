"""Devices whose memory is the host's: budgets of both come from one pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity.config import SwapConfig
from infinity.errors import CapacityError, ConfigError
from infinity.plan.hardware import load_hardware
from infinity.sizes import GIB, MIB
from infinity.testing import SimulatedDevice
from infinity.tiers.open_device import choose_device
from infinity.tools.doctor.accelerator import check_cuda, left_to_host
from infinity.tools.plan.draft import describe_machine, sizes_here
from tests.support.commands import run_command

POOL = 100 * GIB
PARTS = [
    # device, host: what the file names. Then GiB that each has of 100 GiB, less a tenth.
    ("auto", "auto", 45, 45),
    ("80%", "75%", 45, 45),
    ("auto", "60GiB", 30, 60),
    ("20GiB", "auto", 20, 70),
    ("20GiB", "50%", 20, 70),
    ("30GiB", "50GiB", 40, 50),
    ("auto", "90GiB", 0, 90),
]


def config_of(device: str, host: str) -> SwapConfig:
    tiers = {"device": {"capacity": device}, "host": {"capacity": host}}
    return SwapConfig.load({"tiers": tiers})


@pytest.mark.parametrize(("device", "host", "of_device", "of_host"), PARTS)
def test_device_and_host_never_have_more_than_the_pool(
    device: str, host: str, of_device: int, of_host: int
) -> None:
    tiers = config_of(device, host).tiers
    assert tiers.parts_of_pool(POOL) == (of_device * GIB, of_host * GIB)
    window = tiers.device.budget_nbytes(of_device * GIB)
    assert window + tiers.host.budget_nbytes(of_host * GIB) <= POOL - POOL // 10


@pytest.mark.parametrize(("device", "host"), [("50GiB", "50GiB"), ("auto", "91GiB")])
def test_sizes_that_do_not_fit_the_pool_together_are_refused(device: str, host: str) -> None:
    with pytest.raises(CapacityError, match=r"both share.*90.0 GiB available"):
        config_of(device, host).tiers.parts_of_pool(POOL)


def integrated_gpu(monkeypatch: pytest.MonkeyPatch, free_nbytes: int, **properties: Any) -> None:
    said = SimpleNamespace(name="GB10", **properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: said)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_nbytes, free_nbytes))


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"is_integrated": 1}, (POOL * 9 // 40, POOL * 9 // 20)),
        ({"is_integrated": 0}, (4 * GIB, POOL)),
        ({}, (4 * GIB, POOL)),  # A torch that does not say.
    ],
)
def test_cudas_own_figure_counts_for_a_device_with_memory_of_its_own_only(
    properties: dict[str, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    integrated_gpu(monkeypatch, 8 * GIB, **properties)
    tiers = config_of("auto", "auto").tiers
    assert choose_device(tiers.device, None).sizes(tiers, POOL) == expected


def test_the_sizes_of_this_machine_are_of_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    integrated_gpu(monkeypatch, 8 * GIB, is_integrated=1)
    found = sizes_here(config_of("auto", "auto"))
    assert found.device.integrated and not found.shares_host_memory
    assert left_to_host(config_of("auto", "auto"), POOL) == 45 * GIB


def test_a_run_divides_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.engine.lay_out.available_host_nbytes", lambda: 64 * MIB)
    device = SimulatedDevice(0, delay_s=0.0)
    device.is_integrated = True
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    table = {"tiers": {"host": {"capacity": "50%"}}, "schedule": {"update_chunk": "64KiB"}}
    infinity.offload(model, SwapConfig.load(table), device=device)
    try:
        said = infinity.describe(model)
        assert said.host_capacity_nbytes == pytest.approx(64 * MIB * 0.9 / 4, abs=8192)
    finally:
        infinity.close(model)


def test_doctor_says_that_memory_is_shared() -> None:
    gpu = SimpleNamespace(name="GB10", total_memory=119 * GIB, is_integrated=1)
    assert check_cuda("auto", [gpu], built_for="13.0").found.endswith(
        "119.0 GiB shared with the host"
    )


def test_a_plan_of_a_dgx_spark_divides_its_memory(tmp_path: Path) -> None:
    spark = load_hardware("dgx-spark")
    assert "for host and device" in describe_machine(spark)
    parts = spark.with_parts(config_of("auto", "auto").tiers)
    assert parts.host.memory + (parts.device.memory or 0) == spark.host.memory * 9 // 10
    words = ("plan", "--model", "qwen3-8b", "--lora", "8", "--hardware", "dgx-spark")
    assert run_command(*words).exit_code == 0
    refused = run_command(*words, "--set", "tiers.host.capacity=118GiB")
    assert refused.exit_code != 0 and "both share" in refused.stderr


def test_an_integrated_device_names_its_memory(tmp_path: Path) -> None:
    file = tmp_path / "spark.toml"
    shipped = Path(infinity.__file__).parent / "plan" / "hardware" / "dgx-spark.toml"
    file.write_text(shipped.read_text().replace('[device]\nmemory = "128GB"', "[device]"))
    with pytest.raises(ConfigError, match=r"integrated needs device\.memory"):
        load_hardware(str(file))
