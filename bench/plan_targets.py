"""How far predicted steps are from the least time that compute and links need, and what idles.

    python bench/plan_targets.py --save bench/results/plan_targets.json --page docs/PLAN.md

Nothing is measured: each row is a plan (`infinity plan`) of a shipped model on a shipped machine.
`ratio` is the step over max(C, B, N): busy seconds of the model's computation, of the drives, and
of what ranks exchange (between devices, hosts or nodes). Idle shares of compute are by cause.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infinity.config import SwapConfig
from infinity.plan import Batch, Forecast, forecast, load_hardware
from infinity.plan.model import load_shape, model_for
from infinity.simulate.log import COMPUTE
from infinity.tools.plan.gantt import kind_of
from infinity.tools.plan.report import idle_of_compute
from infinity.tools.training.settle import settle

KINDS = ("parameters", "master", "moments", "gradients")
EXCHANGES = ("gather", "sockets", "network")
SEQUENCE = 2048
START, END = "<!-- plan_targets -->", "<!-- plan_targets end -->"
_LEAST_IDLE = 0.03  # Of the step; rarer causes are left out of the table.


@dataclass(frozen=True)
class Case:
    """A plan. `tier`: where all state rests. `target`: the ratio that is wanted, 0 for none.
    `tokens` are of a step and a rank; `micro_batch` sequences pass a block together."""

    model: str
    machine: str
    tokens: int
    tier: str
    target: float = 0.0
    ranks: int = 1
    nodes: int = 1
    micro_batch: int | None = None
    lora: int | None = None
    experts: bool = False

    def table(self) -> dict[str, Any]:
        kinds = dict.fromkeys(KINDS, self.tier)
        found: dict[str, Any] = {
            "tiers": {
                "host": {"capacity": "85%"},
                # Beside the weights a device keeps inputs of blocks that do not leave it.
                "device": {"capacity": "95%" if self.tier == "device" or self.lora else "50%"},
                "nvme": [{"path": "/mnt/nvme"}],
            },
            "placement": kinds,
            "precision": {"compute": "bfloat16"},
            "schedule": {},
        }
        if self.micro_batch is not None:
            found["schedule"]["micro_batch"] = self.micro_batch
            found["placement"]["activations"] = ["host", "nvme"]
        if self.lora is not None:
            found["adapter"] = {"rank": self.lora, "experts": self.experts}
            found["placement"] = {kind: ["host", "nvme"] for kind in KINDS}
            found["placement"]["activations"] = ["host", "nvme"]
        return found

    def plan(self) -> Forecast:
        config = settle(SwapConfig.load(self.table()))

        model = model_for(config, load_shape(self.model))
        return forecast(
            config, model, load_hardware(self.machine), Batch(self.tokens, SEQUENCE),
            num_ranks=self.ranks, num_nodes=self.nodes,
        )  # fmt: skip


CASES = (
    Case("llama-3-8b", "1xh200-4nvme", 8 << 10, "host", 2.0),
    Case("llama-3-8b", "1xh200-4nvme", 64 << 10, "host", 1.05),
    Case("llama-3-8b", "1xh200-4nvme", 8 << 10, "device", 1.25),
    *(
        Case(model, "1xh200-4nvme", tokens, "nvme", 1.1, micro_batch=8)
        for model in ("llama-3-70b", "llama-3-405b")
        for tokens in (32 << 10, 128 << 10, 512 << 10)
    ),
    *(
        Case("llama-3-70b", machine, tokens, "nvme", 1.1, ranks=8, micro_batch=8, nodes=nodes)
        for machine in ("8xh100-8nvme", "8xh200-8nvme")
        for nodes, tokens in ((1, 16 << 10), (1, 64 << 10), (1, 256 << 10), (2, 64 << 10))
    ),
    *(
        Case("llama-3-70b", "8xh100-8nvme", tokens, "host", 1.1, ranks=8, micro_batch=4)
        for tokens in (8 << 10, 16 << 10)
    ),
    *(
        Case(
            "kimi-k2-int4", machine, tokens, "host", 1.1, ranks=8, nodes=nodes,
            micro_batch=long if tokens > 32 << 10 else 8, lora=16,
        )
        for machine, long in (("8xh100-8nvme", 2), ("8xh200-8nvme", 4))
        for nodes, tokens in ((1, 32 << 10), (1, 128 << 10), (2, 32 << 10))
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A case and its plan. Seconds are of a step of one rank. `reason`: why there is no plan."""

    case: dict[str, Any]
    step_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)  # Share of the step, by cause.
    ratio: float = 0.0
    updates: str = ""
    reason: str = ""


def row_of(case: Case) -> Row:
    try:
        found = case.plan()
    except Exception as error:
        return Row(asdict(case), reason=f"{type(error).__name__}: {error}")
    if found.obstacles:
        return Row(asdict(case), reason="; ".join(found.obstacles))
    step = found.step
    busy_s = dict(step.busy_s) | {"model": _model_s(found)}
    return Row(
        asdict(case),
        step.step_s,
        busy_s,
        {cause: idle_s / step.step_s for cause, idle_s in idle_of_compute(found)},
        step.step_s / bound_s(busy_s),
        f"{found.update_place.place}, early {found.job.early_share:.0%}",
    )


def bound_s(busy_s: Any) -> float:
    """Returns max(C, B, N): no schedule can be faster."""
    return max(busy_s.get(track, 0.0) for track in ("model", "nvme", *EXCHANGES))


def _model_s(found: Forecast) -> float:
    """Returns what the device computes, without updates and decoding."""
    return sum(
        operation.duration_s
        for operation in found.step.timeline.operations
        if operation.track == COMPUTE
        and kind_of(operation.name) != "state"
        and ": decoding of " not in operation.name
    )


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of rows as `asdict` gives them."""
    lines = [
        "| model, state | machine | tokens a rank | C | B | N | step | ratio | wanted | "
        "idle of compute |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(row))} |" for row in rows)])


def _cells(row: dict[str, Any]) -> Iterator[str]:
    case, busy_s = row["case"], row["busy_s"]
    way = f"LoRA of rank {case['lora']}" if case["lora"] else case["tier"]
    nodes = f"{case['nodes']} nodes of " if case["nodes"] > 1 else ""
    yield f"{case['model']}, {way}"
    yield f"{nodes}{case['machine']}"
    yield f"{case['tokens'] >> 10} K"
    if row["reason"]:
        yield from ["", "", "", "", "", f"{case['target']:.2f}", row["reason"]]
        return
    for seconds in (
        busy_s.get("model", 0.0),
        busy_s.get("nvme", 0.0),
        max(busy_s.get(track, 0.0) for track in EXCHANGES),
        row["step_s"],
    ):
        yield f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    yield f"{row['ratio']:.2f}"
    yield f"{case['target']:.2f}"
    causes = [f"{share:.0%} {cause}" for cause, share in row["idle"].items() if share > _LEAST_IDLE]
    yield ", ".join(causes) or "none"


def with_table(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """Returns the page with the table between its marks. Raises ValueError without them."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n\n{to_markdown(rows)}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="JSON with all figures")
    parser.add_argument("--page", type=Path, help="a page with marks, whose table is replaced")
    parser.add_argument("--only", help="a part of the name of a model or machine")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if arguments.only and arguments.only not in f"{case.model} {case.machine} {case.tier}":
            continue
        row = asdict(row_of(case))
        rows.append(row)
        print(" | ".join(_cells(row)), "|", row["updates"], flush=True)
    if arguments.save is not None:
        arguments.save.write_text(
            json.dumps({"command": " ".join(["python", *sys.argv]), "rows": rows}, indent=1) + "\n"
        )
    if arguments.page is not None:
        arguments.page.write_text(with_table(arguments.page.read_text(), rows))


if __name__ == "__main__":
    main()
