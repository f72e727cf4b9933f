"""Which model trains on which machine: the shipped models on the shipped machines.

Each cell is the plan of the file that `infinity new` would write, on as many ranks as the machine
has devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.errors import CapacityError, InfinityError
from infinity.plan.files import shipped_in
from infinity.plan.frozen_base import stored_of_shape
from infinity.plan.hardware import Hardware
from infinity.plan.model import load_shape, model_for
from infinity.plan.predict import Forecast
from infinity.tools.plan.draft import Draft, Wish, draft, fit
from infinity.tools.plan.report import count, decimal
from infinity.tools.training.settle import settle

_LENGTH, _SEQUENCES = 2048, 16
_NOTE = (
    "A step has 16 sequences of 2,048 tokens on each device. Predicted, with the machines as their "
    "files describe them (infinity plan --list)."
)
_BINDING = {
    "compute": "compute", "nvme": "drives", "h2d": "link", "d2h": "link", "update": "updates",
    "norms": "updates",
}  # fmt: skip
_TIERS = {"host": "memory", "nvme": "drives", "device": "device"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A model on a machine. `rank` is that of the adapter, None for all weights. If it does not
    fit, `reason` says what is too small, and rates are None."""

    model: str
    machine: str
    rank: int | None
    tokens_per_s: float | None = None
    step_s: float | None = None
    tokens_per_step: int | None = None
    binding: str | None = None
    reason: str = ""

    @property
    def text(self) -> str:
        """The cell as a reader sees it."""
        if self.tokens_per_s is None:
            return f"no: {self.reason.partition(':')[0]}"
        form = ",.0f" if self.tokens_per_s >= 10 else ".2g"
        return f"{self.tokens_per_s:{form}} {_BINDING.get(self.binding or '', 'exchange')}"


def published_models() -> list[str]:
    """Returns the names of the shipped models that can be downloaded, the smallest first."""
    shapes = {name: load_shape(name) for name in shipped_in("models")}
    found = [name for name, shape in shapes.items() if shape.hub]
    return sorted(found, key=lambda name: shapes[name].num_params)


def plan_shipped(name: str, hardware: Hardware, rank: int | None) -> tuple[Wish, Draft, Forecast]:
    """Returns what `infinity new` decides for a shipped model without data, on a rank for each
    device. Raises InfinityError if it fits in no way; a forecast names obstacles."""
    count, shape = hardware.device.count, load_shape(name)
    wish = Wish(
        model=Path(shape.hub or name), max_positions=None, rank=rank, experts=False, data=None,
        data_paths=(Path("chat.jsonl"),), swap=(Path("swap"),), output=Path(f"{name}-output"),
        length=_LENGTH, sequences=_SEQUENCES * count, num_ranks=count, is_here=False,
    )  # fmt: skip
    first = settle(draft(wish, hardware, spills=False).config)
    return wish, *fit(wish, model_for(first, shape, dtype=torch.bfloat16), hardware)


def plan_cell(name: str, machine: str, hardware: Hardware, rank: int | None) -> Cell:
    """Plans one model on one machine."""
    try:
        _, _, said = plan_shipped(name, hardware, rank)
    except InfinityError as error:
        tier = _TIERS.get(error.tier, error.tier) if isinstance(error, CapacityError) else "plan"
        return Cell(name, machine, rank, reason=f"{tier}: {error}")
    return cell_of(name, machine, rank, said)


def cell_of(name: str, machine: str, rank: int | None, said: Forecast) -> Cell:
    """Returns the cell of a forecast."""
    if said.obstacles:
        return Cell(name, machine, rank, reason=f"batch: {said.obstacles[0]}")
    tokens = said.num_ranks * said.batch.tokens_per_step
    return Cell(name, machine, rank, said.tokens_per_s, said.step.step_s, tokens, said.step.binding)


def to_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Returns the table of cells of one way of training, its head first."""
    found = {(cell.model, cell.machine): cell for cell in cells}
    is_adapter = any(cell.rank is not None for cell in cells)
    machines = list(dict.fromkeys(machine for _, machine in found))
    rows = [["model", "size", *machines]]
    for name in dict.fromkeys(model for model, _ in found):
        shape = load_shape(name)
        size = count(shape.num_params)
        if is_adapter:
            size += f", {decimal(stored_of_shape(shape).nbytes)}"
        rows.append([name, size, *(found[name, machine].text for machine in machines)])
    return rows


def to_text(cells: Sequence[Cell]) -> str:
    """Returns the table in aligned columns."""
    rows = to_rows(cells)
    columns = zip(*rows, strict=True)
    sides = ["<", "<", *">" * (len(rows[0]) - 2)]
    forms = [f"{side}{max(map(len, column))}" for side, column in zip(sides, columns, strict=True)]
    return "\n".join("  ".join(map(format, row, forms)).rstrip() for row in rows)


def to_markdown(cells: Sequence[Cell]) -> str:
    """Returns the table in Markdown."""
    rows = to_rows(cells)
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    rule = f"| --- | --- |{' ---: |' * (len(rows[0]) - 2)}"
    return "\n".join([head, rule, *body])


def page_of(cells: Sequence[Cell], rank: int | None, *, is_markdown: bool) -> str:
    """Returns the table with its headline and a note on the step. `rank`: of the adapter."""
    how = "All weights, in bfloat16" if rank is None else f"LoRA of rank {rank} over the checkpoint"
    title, table = f"{how}: tokens/s, and what binds", to_text(cells)
    if is_markdown:
        title, table = f"## {title}", to_markdown(cells)
    return f"{title}\n\n{table}\n\n{_NOTE}"
