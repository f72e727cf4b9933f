"""How long is a step with all state on NVMe, beside the same step wholly in memory?

    python bench/step.py --path /mnt/nvme0 --save bench/results/step.json

A GPT-2-like model in bfloat16 with activation checkpointing trains twice in one process, by turns:
once with everything on the host, once with parameters, masters and moments on NVMe through a host
budget (gradients where `--gradients` says). Same kernels, same recomputation, same allocator
settings, same batches; the losses must be equal to the last bit. Bytes are those the kernel counted
for the process (/proc/self/io), so a cache would show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import infinity
from infinity.training.allocator import keep_freed_memory

KINDS = ("parameters", "master", "moments")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="a directory on the drive")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--host", default="2GiB")
    parser.add_argument("--compute", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gradients", default="host", choices=["host", "nvme"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path)
    words = parser.parse_args()
    keep_freed_memory()
    console = Console()
    with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-step-") as scratch:
        sides = {where: Side(where, words, Path(scratch)) for where in ("host", "nvme")}
        found = [
            measure(sides, accumulation, words, console) for accumulation in words.accumulations
        ]
        for side in sides.values():
            side.engine.close()
    report(found, words, console)


class Side:
    """One of the two: a model, its optimizer, and a step of them."""

    def __init__(self, where: str, words: argparse.Namespace, scratch: Path) -> None:
        config = {
            "tiers": {
                "host": {"capacity": "auto" if where == "host" else words.host},
                "nvme": [{"path": str(scratch / where)}],
            },
            "placement": dict.fromkeys(KINDS, where)
            | {"gradients": words.gradients if where == "nvme" else "host"},
            "precision": {"compute": words.compute},
        }
        shape = GPT2Config(
            n_layer=words.layers, n_embd=words.width, n_head=words.width // 64,
            n_positions=words.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        with infinity.init(config):
            model = GPT2LMHeadModel(shape)
        self.model = infinity.offload(model, config, seed=0).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = infinity.AdamW(self.model, lr=1e-4, max_grad_norm=1.0)
        self.engine = infinity.engine_of(self.model)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, batches: list[torch.Tensor]) -> dict[str, float]:
        """One optimizer step; what it took and moved."""
        counters, io, start_s = self.engine.counters.snapshot(), process_io(), time.perf_counter()
        loss = 0.0
        for ids in batches:
            part = self.model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            part.backward()
            loss += part.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        elapsed_s = time.perf_counter() - start_s
        after, io_after = self.engine.counters.snapshot(), process_io()
        waits = {
            name: after.get(name, 0.0) - counters.get(name, 0.0)
            for name in ("read_wait_s", "write_wait_s", "update_s")
        }
        moved = {name: (io_after[name] - io[name]) / self.num_parameters for name in io}
        return {"seconds": elapsed_s, "loss": loss, **waits, **moved}


def process_io() -> dict[str, int]:
    """Bytes that this process has caused to be fetched from and sent to drives (proc(5))."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read_per_parameter": int(lines["read_bytes"]),
            "written_per_parameter": int(lines["write_bytes"])}  # fmt: skip


def measure(
    sides: dict[str, Side], accumulation: int, words: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Rounds of host and NVMe by turns, after one that is not counted."""
    source = torch.Generator().manual_seed(accumulation)
    batches = [
        torch.randint(50257, (1, words.sequence), generator=source) for _ in range(accumulation)
    ]
    with console.status(f"{accumulation} x {words.sequence} tokens"):
        rounds = [
            {where: side.step(batches) for where, side in sides.items()}
            for _ in range(words.rounds + 1)
        ]
    for each in rounds:
        assert each["host"]["loss"] == each["nvme"]["loss"], "placement changed the loss"
    rounds = rounds[1:]
    medians = {
        where: {
            name: statistics.median(each[where][name] for each in rounds)
            for name in rounds[0][where]
        }
        for where in sides
    }
    ratios = sorted(each["nvme"]["seconds"] / each["host"]["seconds"] for each in rounds)
    return {
        "tokens": accumulation * words.sequence,
        "accumulation": accumulation,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
        "medians": medians,
        "num_parameters": sides["nvme"].num_parameters,
    }


def report(found: list[dict[str, Any]], words: argparse.Namespace, console: Console) -> None:
    table = Table(
        "tokens", "in memory s", "NVMe s", "ratio", "low - high", "waits s", "read B/p",
        "written B/p", title=f"{found[0]['num_parameters']:,} parameters, {words.compute}, "
        f"host budget {words.host}, gradients on {words.gradients}",
    )  # fmt: skip
    for each in found:
        host, nvme = each["medians"]["host"], each["medians"]["nvme"]
        table.add_row(
            str(each["tokens"]),
            f"{host['seconds']:.2f}",
            f"{nvme['seconds']:.2f}",
            f"{each['ratio']:.2f}",
            f"{each['ratio_low']:.2f} - {each['ratio_high']:.2f}",
            f"{nvme['read_wait_s'] + nvme['write_wait_s']:.2f}",
            f"{nvme['read_per_parameter']:.1f}",
            f"{nvme['written_per_parameter']:.1f}",
        )
    console.print(table)
    if words.save is not None:
        settings = {name: str(value) for name, value in vars(words).items() if name != "save"}
        environment = {
            "cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__,
            "load_average": os.getloadavg(),
        }  # fmt: skip
        written = {"settings": settings, "environment": environment, "results": found}
        words.save.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
