"""`infinity plan --ranks` beside what ranks count: the bytes of a step, link by link."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import infinity
from infinity import SwapConfig
from infinity.plan.hardware import Device, Hardware, Host, Nvme
from infinity.plan.layout import PlannedModel
from infinity.plan.model import model_of_module
from infinity.plan.predict import forecast
from infinity.simulate.job import Batch
from infinity.state.partition import STAGES
from infinity.testing import SimulatedDevice
from tests.support.exhaustive import sampled

from .processes import run_ranks
from .work import NVME, Case, build, counted_in_a_step

LINKS = {
    "ranks_gathered_nbytes": ("sockets_received", "gather_received"),
    "ranks_reduced_nbytes": ("sockets_sent", "gather_sent"),
    "device_in_nbytes": ("h2d",),
    "device_out_nbytes": ("d2h",),
    "nvme_read_nbytes": ("nvme_read",),
    "nvme_write_nbytes": ("nvme_write",),
}
COUNT = 3


@dataclass(frozen=True)
class Run:
    """`window`: of the device's memory, where it has its own; None for a CPU."""

    case: Case
    window: str | None = None

    def table(self, swap: Path) -> dict[str, Any]:
        case = self.case
        found: dict[str, Any] = {
            "distributed": {"zero_stage": case.stage, "exchange": case.exchange},
            "tiers": {
                "host": {"capacity": case.capacity, "huge_pages": False},
                "device": {"kind": "cpu"},
            },
            "placement": dict.fromkeys(NVME, "host") | case.placement,
            "precision": {"compute": case.compute},
        }
        if self.window is not None:
            found["tiers"]["device"]["capacity"] = self.window
        if case.layer_major:
            found["schedule"] = {"micro_batch": 1}
        if "nvme" in case.placement.values():
            found["tiers"]["nvme"] = [{"path": str(swap), "capacity": "192MiB"}]
        return found


def _count(rank: int, runs: list[Run]) -> list[dict[str, float]]:
    """Of each run, what a step moves."""
    found = []
    for run in runs:
        case, swap = run.case, Path(tempfile.gettempdir(), "swap")  # Of this job alone.
        model = build(case)
        device = None if run.window is None else SimulatedDevice(7, delay_s=0.0)
        infinity.offload(model, run.table(swap), device=device)
        found.append(counted_in_a_step(model, rank, case, LINKS))
        infinity.engine_of(model).close()
        shutil.rmtree(swap, ignore_errors=True)
    return found


def _model(config: SwapConfig, case: Case) -> PlannedModel:
    text = SimpleNamespace(hidden_size=1, model_type="")
    text.get_text_config = lambda: text
    return replace(model_of_module(build(case), config, text), hf_config=None)


def _predicted(rank: int, run: Run) -> dict[str, float]:
    config, case = SwapConfig.load(run.table(Path("/nowhere"))), run.case
    memory = None if run.window is None else 1 << 40
    hardware = Hardware(
        name="this one", source="", host=Host(memory=1 << 40, update_gb_per_s=1, sum_gb_per_s=1),
        device=Device(count=COUNT, tflops=1, memory=memory, gather_gb_per_s=1),
        nvme=Nvme(capacity=1 << 40, read_gb_per_s=1, write_gb_per_s=1),
    )  # fmt: skip
    num = 1 if case.layer_major else case.accumulation
    batch = Batch(case.accumulation // num, 1, num, recomputes=False)
    step = forecast(config, _model(config, case), hardware, batch, num_ranks=COUNT, rank=rank).step
    return {
        name: sum(step.moved_nbytes.get(link, 0) for link in transport)
        for name, transport in LINKS.items()
    }


WIDE = Case(model="wide", capacity="192MiB")
AWAY = {"parameters": "nvme", "moments": "nvme"}
WEIGHTS = {"parameters": "device"}
RESIDENT = {"parameters": "device", "gradients": "device"}
TWO_BLOCKS, ALL_BLOCKS = "5MiB", "12MiB"  # Of three, beside what is small.
RUNS = [
    *(Run(replace(WIDE, stage=stage, accumulation=2, compute="bfloat16")) for stage in STAGES),
    Run(replace(WIDE, stage=2, exchange="one_sided", placement=AWAY), TWO_BLOCKS),
    Run(replace(WIDE, exchange="one_sided", placement=AWAY), ALL_BLOCKS),
    Run(replace(WIDE, exchange="collective", placement=AWAY), ALL_BLOCKS),
    Run(replace(WIDE, exchange="collective", accumulation=2, layer_major=True), ALL_BLOCKS),
    Run(replace(WIDE, stage=1, exchange="collective", placement=RESIDENT), "48MiB"),
    Run(replace(WIDE, stage=1, exchange="one_sided", placement=WEIGHTS), "48MiB"),
    Run(
        replace(WIDE, stage=2, exchange="one_sided", placement=WEIGHTS, compute="bfloat16"), "48MiB"
    ),
    Run(replace(WIDE, stage=2, exchange="collective", placement=WEIGHTS), "48MiB"),
]


@pytest.mark.parametrize("half", sampled(range(2), (0).__eq__))
def test_bytes_are_those_of_ranks(half: int) -> None:
    """Received, sent, and over the links of each rank. What is read of a drive depends on what is
    kept, as with one rank; here there is space."""
    runs = RUNS[half::2]
    counted = run_ranks(COUNT, _count, runs)
    for index, run in enumerate(runs):
        for rank in range(COUNT):
            found, predicted = counted[rank][index], _predicted(rank, run)
            for name in LINKS:
                assert predicted[name] == pytest.approx(found[name], rel=0.02), (run, rank, name)
