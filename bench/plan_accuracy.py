"""How close is `infinity plan` to a run on this machine?

For each configuration: predict, run, predict again, so that a change of the machine's speed between
the two predictions is seen. A step is the median of those after the second, which is the first to
have an update in it. Writes bench/results/plan_accuracy.json. Needs the `hf` extra.

    python bench/plan_accuracy.py [DIRECTORY on the drive]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "plan_accuracy.json"


@dataclass(frozen=True)
class Case:
    name: str
    hidden: int
    layers: int
    host: str
    batch: int
    accumulation: int = 1
    dtype: str = "float32"
    steps: int = 6


CASES = (
    Case("small, moved by little compute", 512, 8, "64MiB", batch=1),
    Case("small, larger batch", 512, 8, "64MiB", batch=8),
    Case("two micro-batches", 512, 8, "64MiB", batch=2, accumulation=2),
    Case("wider, weights that fit the host", 1024, 6, "768MiB", batch=1),
)


def configuration(case: Case, directory: Path) -> dict[str, Any]:
    return {
        "schema": 1,
        "tiers": {
            "host": {"capacity": case.host},
            "nvme": [{"path": str(directory / "swap")}],
        },
        "placement": dict.fromkeys(("parameters", "master", "moments", "gradients"), "nvme"),
        "precision": {"compute": case.dtype},
        "model": {
            "config": {
                "model_type": "gpt2", "vocab_size": 256, "n_embd": case.hidden,
                "n_layer": case.layers, "n_head": 8, "n_positions": 128,
            }
        },
        "data": {"paths": ["python-stdlib"], "sequence_length": 128, "max_bytes": "1MB"},
        "train": {
            "steps": case.steps, "batch_size": case.batch, "accumulation": case.accumulation,
            "activation_checkpointing": True,
        },
        "output": {"directory": str(directory / "output"), "export": False},
    }  # fmt: skip


def call(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from infinity.cli import main; main()", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(case: Case, root: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        directory = Path(temporary)
        file = directory / "swap.json"
        file.write_text(json.dumps(configuration(case, directory)))
        before = call("plan", str(file))
        call("train", str(file))
        after = call("plan", str(file))
        lines = (directory / "output" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][2:]
    ran_s = statistics.median(step["elapsed_s"] for step in steps)
    predicted = [before["step_s"], after["step_s"]]
    return {
        "case": case.name,
        "num_params": before["model"]["num_params"],
        "step_s": ran_s,
        "steps_s": [step["elapsed_s"] for step in steps],
        "predicted_s": predicted,
        "predicted_to_ran": statistics.mean(predicted) / ran_s,
        "nvme_read_to_ran": before["moved_nbytes"]["nvme_read"] / steps[-1]["nvme_read_nbytes"],
        "nvme_write_to_ran": before["moved_nbytes"]["nvme_write"] / steps[-1]["nvme_write_nbytes"],
        "binding": before["binding"],
    }


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    found = []
    for case in CASES:
        found.append(compare(case, root))
        print(json.dumps(found[-1]), flush=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
