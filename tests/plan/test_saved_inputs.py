"""Layer inputs between a forward and its backward: where a run keeps them, and what a plan says.

The device has memory of its own, so that inputs leave it for the host, and for NVMe where the host
has no more for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.config import SwapConfig
from infinity.plan import Batch, Forecast, forecast
from infinity.plan.model import model_of_module
from infinity.sizes import MIB
from infinity.testing.simulated_device import SimulatedDevice
from tests.support.bits import differences
from tests.support.exhaustive import sampled
from tests.support.machines import ANY_MACHINE
from tests.support.offloading import offloaded

SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=10,
    num_attention_heads=4, num_key_value_heads=4,
)  # fmt: skip
LENGTH, COUNT, NUM_STEPS = 512, 3, 2
WEIGHTS_NBYTES, INPUTS_NBYTES = 8.39 * MIB, 7.5 * MIB
RESTING_NBYTES = 3 * WEIGHTS_NBYTES  # Moments and gradients.
MACHINE = ANY_MACHINE.model_copy(
    update={
        "device": ANY_MACHINE.device.model_copy(
            update={"memory": 16 << 30, "h2d_gb_per_s": 20.0, "d2h_gb_per_s": 20.0}
        )
    }
)


def build() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32)


def table_of(directory: Path, working_nbytes: float, activations: Any) -> dict[str, Any]:
    """Weights on NVMe, all other state on the host, and so much host memory beside it."""
    return {
        "tiers": {
            "device": {"kind": "cpu", "capacity": "4MiB"},
            "host": {"capacity": int(RESTING_NBYTES + working_nbytes), "huge_pages": False},
            "nvme": [{"path": str(directory / "swap"), "capacity": "1GiB"}],
        },
        "placement": dict.fromkeys(("moments", "gradients"), "host")
        | {"parameters": "nvme", "activations": activations},
        "schedule": {"micro_batch": 1, "update_on": "host", "update_chunk": "64KiB"},
    }


def plan(table: dict[str, Any]) -> Forecast:
    settings = SwapConfig.load(table)
    batch = Batch(COUNT * LENGTH, LENGTH)
    return forecast(settings, model_of_module(build(), settings, SHAPE), MACHINE, batch)


def run(table: dict[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Bytes of drives a step, and the weights at the end."""
    device = SimulatedDevice(seed=1, delay_s=0.0)
    with offloaded(build(), table, device=device) as model:
        engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=1e-3)
        source, before = torch.Generator().manual_seed(0), {}
        for step in range(2 * NUM_STEPS):
            if step == NUM_STEPS:
                before = engine.counters.snapshot()
            batches = list(torch.randint(256, (COUNT, 1, LENGTH), generator=source))
            infinity.forward_backward(
                model, lambda x: model(input_ids=x, labels=x, use_cache=False).loss, batches
            )
            optimizer.step()
            optimizer.zero_grad()
        after = engine.counters.snapshot()
        moved = {
            name: (after.get(name, 0) - before.get(name, 0)) / NUM_STEPS
            for name in ("nvme_read_nbytes", "nvme_write_nbytes")
        }
        weights = {}
        for name, handle in model.named_parameters():
            with infinity.gather(handle):
                weights[name] = model.get_parameter(name).detach().clone().cpu()
        return moved, weights


@pytest.fixture(scope="module")
def weights_without_saving(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run(table_of(tmp_path_factory.mktemp("device"), 64 * MIB, "device"))[1]


@pytest.mark.parametrize(
    ("working_nbytes", "on_host_nbytes"),
    sampled([(6 * MIB, 2 * MIB), (12 * MIB, 7.5 * MIB)], lambda case: case[0] == 12 * MIB),
    ids=["little", "inputs and some weights"],
)
def test_the_host_takes_inputs_before_weights_that_are_only_kept(
    tmp_path: Path,
    weights_without_saving: dict[str, torch.Tensor],
    working_nbytes: float,
    on_host_nbytes: float,
) -> None:
    """In place of 8 MiB of weights as far as there is no space for both: weights that are not kept
    are only read. With "little" memory most inputs go to the drive."""
    table = table_of(tmp_path, working_nbytes, ["host", "nvme"])
    found = plan(table)
    moved, weights = run(table)

    assert not differences(weights_without_saving, weights)
    assert found.saved["host"] == pytest.approx(on_host_nbytes, abs=MIB / 2)
    away_nbytes = INPUTS_NBYTES - found.saved["host"]
    # The last weights of a step are under way when it is over, and those of the one before were.
    assert moved["nvme_write_nbytes"] >= 0.9 * WEIGHTS_NBYTES
    assert moved["nvme_write_nbytes"] <= 1.1 * WEIGHTS_NBYTES + 1.02 * away_nbytes
    planned = found.step.moved_nbytes
    assert planned["nvme_write"] == pytest.approx(WEIGHTS_NBYTES + away_nbytes, rel=0.01)
    # Units of 0.8 MiB: what is read ahead makes a difference of some of them.
    assert abs(moved["nvme_read_nbytes"] - planned.get("nvme_read", 0)) <= 5 * MIB


def test_inputs_of_one_tier_rest_there(tmp_path: Path) -> None:
    on_host, on_nvme = (plan(table_of(tmp_path, 30 * MIB, tier)).saved for tier in ("host", "nvme"))
    assert on_host == {"host": INPUTS_NBYTES}
    assert on_nvme == {"nvme": INPUTS_NBYTES}
    assert plan(table_of(tmp_path, 30 * MIB, "device")).saved == {}


def test_where_the_device_is_the_host_inputs_stay(tmp_path: Path) -> None:
    table = table_of(tmp_path, 6 * MIB, ["host", "nvme"])
    settings = SwapConfig.load(table)
    machine = replace_device(memory=None)
    batch = Batch(COUNT * LENGTH, LENGTH)
    found = forecast(settings, model_of_module(build(), settings, SHAPE), machine, batch)
    assert found.saved == {"host": INPUTS_NBYTES}
    plain = forecast(
        SwapConfig.load(table_of(tmp_path, 6 * MIB, "device")),
        model_of_module(build(), settings, SHAPE), machine, batch,
    )  # fmt: skip
    assert found.step.moved_nbytes == plain.step.moved_nbytes


@pytest.mark.parametrize(
    ("length", "count", "fits"), [(1 << 20, 1, True), (1 << 23, 1, False), (1 << 10, 1024, True)]
)
def test_one_block_of_a_micro_batch_has_to_fit_the_device(
    length: int, count: int, fits: bool, tmp_path: Path
) -> None:
    """A token has 1,664 values there: 3.5 or 28 GB of 16 GiB, for any number of micro-batches."""
    settings = SwapConfig.load(table_of(tmp_path, 6 * MIB, "nvme"))
    model = model_of_module(build(), settings, SHAPE)
    said = forecast(settings, model, MACHINE, Batch(count * length, length)).obstacles
    assert any("activations of one block" in text for text in said) is not fits


def replace_device(**changes: Any) -> Any:
    return MACHINE.model_copy(update={"device": MACHINE.device.model_copy(update=changes)})


def test_a_plan_keeps_inputs_in_memory_that_weights_leave_free(tmp_path: Path) -> None:
    """As the engine does where chunks of updates are so large that no weights give way."""
    table = table_of(tmp_path, 30 * MIB, ["host", "nvme"])
    table["schedule"]["update_chunk"] = "16MiB"
    found = plan(table)
    assert found.job.inputs_nbytes == 0
    assert found.saved["host"] == INPUTS_NBYTES


def test_an_automatic_budget_has_space_for_inputs(tmp_path: Path) -> None:
    """As much as the machine has: a budget for state alone would send them to the drive."""
    tables = {tier: table_of(tmp_path, 0, [tier, "nvme"]) for tier in ("host", "device")}
    for table in tables.values():
        table["tiers"]["host"]["capacity"] = "auto"
    found = plan(tables["host"])
    assert found.saved == {"host": INPUTS_NBYTES}
    assert found.job.inputs_nbytes is not None and found.job.inputs_nbytes > 100 * INPUTS_NBYTES
    assert plan(tables["device"]).host_nbytes < found.host_nbytes / 4
