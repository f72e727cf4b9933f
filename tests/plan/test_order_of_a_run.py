"""The simulated step issues the transfers of a real step, in the order of the real step.

A run moves several units at a time, so transfers of different kinds interleave by the speed of the
drive. The order of the transfers of one kind depends on the engine's decisions alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
from infinity.config import SwapConfig
from infinity.observe.tracer import Track
from infinity.plan import Batch, forecast
from infinity.plan.model import model_of_module
from infinity.simulate.log import NVME, READ, WRITE
from infinity.simulate.step import predict
from tests.support.exhaustive import in_turn, sampled
from tests.support.machines import ANY_MACHINE

SHAPE = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=4,
)  # fmt: skip
LENGTH, NUM_STEPS = 16, 6
KINDS = ("parameters", "master", "moments", "gradients")

Order = dict[tuple[str, str], list[str]]  # (link, kind) -> units, each once in a row.


@dataclass(frozen=True)
class Case:
    host: str
    updates: str
    num_micro_batches: int = 1
    early_share: float | None = None
    placement: dict[str, str] = field(default_factory=dict)

    def table(self, directory: Path) -> dict[str, Any]:
        return {
            "tiers": {
                "host": {"capacity": self.host},
                "nvme": [{"path": str(directory / "swap"), "capacity": "1GiB"}],
            },
            "placement": dict.fromkeys(KINDS, "nvme") | self.placement,
            "schedule": {"updates": self.updates, "micro_batch": 1},
        }


CASES = {
    "little memory": Case("10MiB", "deferred"),
    "all weights kept": Case("32MiB", "deferred"),
    "micro-batches in little memory": Case("10MiB", "deferred", 3),
    "micro-batches": Case("32MiB", "deferred", 3),
    "at the step": Case("32MiB", "at_step"),
    "both passes": Case("32MiB", "both_passes", early_share=0.5),
    "gradients on the host": Case("32MiB", "deferred", placement={"gradients": "host"}),
    "weights on the host": Case("32MiB", "deferred", placement={"parameters": "host"}),
}


class _SlowBackward(torch.autograd.Function):
    """The identity. Its backward leaves a noisy drive the time to read state for early updates."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return gradient


class SlowActivation(nn.SiLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_SlowBackward.apply(x))


def build(*, is_slow: bool = False) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32)
    if is_slow:
        for layer in model.model.layers:
            layer.mlp.act_fn = SlowActivation()
    return model


def order_of(transfers: Iterable[tuple[str, str]]) -> Order:
    """The units of each kind of transfer. `transfers`: (link, "kind of unit")."""
    order: Order = defaultdict(list)
    for link, name in transfers:
        kind, _, unit = name.partition(" of ")
        units = order[link, _KINDS.get(kind, kind)]
        if units[-1:] != [unit]:
            units.append(unit)
    return dict(order)


# The words of the trace and of the simulated step.
_KINDS = {"exp_avg": "state", "exp_avg_sq": "state", "weights": "parameters"}


def goes_round(ran: Sequence[str], simulated: Sequence[str]) -> bool:
    """Whether two steps of a run go round by round through the order of the simulated step. A step
    reads ahead for the next one, as far as the drive gets, so the first round begins anywhere."""
    rounds = [*simulated] * 4
    starts = range(len(simulated))
    return len(ran) >= len(simulated) and any(
        rounds[start : start + len(ran)] == list(ran) for start in starts
    )


def order_of_a_run(case: Case, table: dict[str, Any]) -> Order:
    model = infinity.offload(build(is_slow=case.early_share is not None), table)
    engine = infinity.engine_of(model)
    optimizer = infinity.AdamW(model, lr=1e-3)
    batches = list(torch.randint(256, (case.num_micro_batches, 1, LENGTH)))
    for step in range(NUM_STEPS):
        if case.early_share is not None:
            policy = engine.updater._turns.policy
            policy.share = case.early_share
        if step == NUM_STEPS - 2:
            engine._tracer.start()
        infinity.forward_backward(
            model, lambda x: model(input_ids=x, labels=x, use_cache=False).loss, batches
        )
        optimizer.step()
        optimizer.zero_grad()
    engine._tracer.stop()
    engine.close()  # Every transfer is over.
    spans = [span for span in engine._tracer.spans() if span.transfer is not None]
    return order_of(
        ("read" if span.track.startswith(Track.READS) else "write", span.name)
        for span in sorted(spans, key=lambda span: span.start_ns)
    )


def simulated_order(case: Case, table: dict[str, Any]) -> Order:
    settings = SwapConfig.load(table)
    batch = Batch(case.num_micro_batches * LENGTH, LENGTH)
    found = forecast(settings, model_of_module(build(), settings, SHAPE), ANY_MACHINE, batch)
    job = found.job
    if case.early_share is not None:
        job = replace(job, early_share=case.early_share)
    step = predict(job, ANY_MACHINE.rates())
    transfers = [each for each in step.timeline.operations if each.track == NVME]
    order = order_of(
        ("read" if each.traffic == READ else "write", each.name.partition(": ")[2])
        for each in transfers
    )
    for units in order.values():
        if len(units) > 1 and units[0] == units[-1]:
            units.pop()  # The next step goes on with it.
    return order


@pytest.mark.parametrize(
    "name",
    sampled(CASES, {"little memory", "micro-batches", "at the step", "both passes",
                    "weights on the host"}.__contains__),
)  # fmt: skip
def test_transfers_of_a_kind_have_the_order_of_the_run(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    table = case.table(tmp_path)
    simulated = simulated_order(case, table)
    # What a busy drive has not brought in time for an early update is read in the forward.
    for _ in range(1 if case.early_share is None else 3):
        others = kinds_in_another_order(order_of_a_run(case, table), dict(simulated), case)
        if not others:
            return
    raise AssertionError(others)


def kinds_in_another_order(ran: Order, simulated: Order, case: Case) -> list[Any]:
    """Returns the kinds of transfers whose order in a run is not that of the simulated step."""
    if case.placement.get("gradients") != "host":
        # With updates the gradients are read as a part of the state.
        ran.pop(("read", "gradients"), None)
        simulated.pop(("read", "gradients"), None)
    assert simulated.keys() == ran.keys()
    return [kind for kind, units in ran.items() if not goes_round(units, simulated[kind])]


@pytest.mark.parametrize(("num_micro_batches", "host"), in_turn([1, 3], ["32MiB", "10MiB"]))
def test_bytes_of_gradients_are_those_of_the_run(
    tmp_path: Path, host: str, num_micro_batches: int
) -> None:
    """Gradients that rest on NVMe and are in memory still are written, and not read."""
    case = Case(host, "deferred", num_micro_batches)
    table = case.table(tmp_path)
    model = infinity.offload(build(), table)
    engine, optimizer = infinity.engine_of(model), infinity.AdamW(model, lr=1e-3)
    before: dict[str, float] = {}
    steps = 4
    for step in range(2 * steps):
        if step == steps:
            before = engine.counters.snapshot()
        infinity.forward_backward(
            model, lambda x: model(input_ids=x, labels=x, use_cache=False).loss,
            list(torch.randint(256, (num_micro_batches, 1, LENGTH))),
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    after = engine.counters.snapshot()
    engine.close()
    settings, batch = SwapConfig.load(table), Batch(num_micro_batches * LENGTH, LENGTH)
    found = forecast(settings, model_of_module(build(), settings, SHAPE), ANY_MACHINE, batch)
    moved = predict(found.job, ANY_MACHINE.rates()).moved_nbytes
    for link in (READ, WRITE):
        ran = (after[f"{link}_nbytes"] - before[f"{link}_nbytes"]) / steps
        # Reads ahead of the steps at both ends are not equally many: a unit more or less. Gradients
        # that are read would be a sixth of the bytes.
        assert moved[link] == pytest.approx(ran, rel=0.04), link
