"""A run that ends as if killed: started by test_adopted.py in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.checkpoint.harness import durable, run

ROOM = "9MiB"  # For the three generations of `bf16` and its gradients.


def section(directory: Path, **options: Any) -> dict[str, Any]:
    return durable(directory / "c", **{"durability": "step", "keep": 1, **options})


def two_drives(directory: Path, nbytes: str) -> dict[str, Any]:
    """The tiers of state on two paths, whose weights are measured where they are large enough."""
    paths = (directory / name for name in ("swap", "swap-2"))
    return {"nvme": [{"path": str(path), "capacity": nbytes} for path in paths]}


def train(
    directory: Path, kind: str, steps: int, placement: Any, tiers: dict[str, Any] | None = None
) -> None:
    """Leaves a checkpoint of step 2, commits of the others, and a step on its way; nothing is closed."""
    options: dict[str, Any] = {"checkpoint": section(directory), "tiers": tiers or {}}
    options |= {"nvme_nbytes": ROOM, "placement": placement}
    with run(kind, directory / "swap", **options) as each:
        for step in range(steps):
            each.step(step)
            _ = each.save(directory / "c", keep=1) if step == 1 else each.commit()
        each.step(steps)
        os._exit(0)
