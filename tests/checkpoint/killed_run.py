"""Runs that end as if killed, one for every line on stdin: started by test_adopted.py.

The process imports torch once and forks a child for every run. A child leaves a checkpoint of step
2, commits of the others, and a step on its way; nothing is closed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.harness import durable, run

ROOM = "9MiB"  # For the three generations of `bf16` and its gradients.


def section(directory: Path, **options: Any) -> dict[str, Any]:
    return durable(directory / "c", **{"durability": "step", "keep": 1, **options})


def train(directory: Path, kind: str, steps: int, placement: Any) -> None:
    options = {"checkpoint": section(directory), "nvme_nbytes": ROOM, "placement": placement}
    with run(kind, directory / "swap", **options) as each:
        for step in range(steps):
            each.step(step)
            _ = each.save(directory / "c", keep=1) if step == 1 else each.commit()
        each.step(steps)
        os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            try:
                train(Path(job.pop("directory")), **job)
            finally:
                os._exit(1)  # Not reached when all is well.
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


if __name__ == "__main__":
    main()
