"""Where do the inputs of blocks wait, and what does that take, from 2 K to 64 K tokens a step?

    python bench/activations.py --path /mnt/nvme0 --save bench/results/activations.json --plot a.png

A GPT-like model goes layer by layer through micro-batches of one size
(`infinity.forward_backward`), on the simulated device, whose memory is apart from the host's. Every
case is a process of its own:

* *device*: what the process takes beside the arena, by its largest resident size, above what it
  takes for one micro-batch;
* *host*: the most that was lent of the arena, above the same;
* *predicted*: tokens x width x 4 bytes x blocks, the figure of `infinity plan`.

Losses are the same to the last bit wherever activations wait. Sizes, no times.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import arguments, print_table, save
from torch import nn

import infinity
from infinity.sizes import MIB
from infinity.testing.simulated_device import SimulatedDevice
from infinity.tools.pictures.timeline import find_pyplot

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.models import TinyDecoder

WIDTH, LAYERS, SEQUENCE, VOCABULARY = 128, 6, 256, 64
MICRO_BATCH_TOKENS = 1024
PLACES = ("device", "host", "nvme")


def main() -> None:
    parser = arguments(__doc__, plot=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768, 65536])
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.case is not None:
        print(json.dumps(run(words.case[0], int(words.case[1]), words.path)))
        return
    found: dict[str, dict[int, dict[str, Any]]] = {where: {} for where in PLACES}
    for where in PLACES:
        least = case(where, MICRO_BATCH_TOKENS, words.path)
        for tokens in words.tokens:
            each = case(where, tokens, words.path)
            for name in ("device_nbytes", "host_nbytes"):
                each[name] -= least[name]
            found[where][tokens] = each
    for tokens in words.tokens:
        assert len({found[where][tokens]["loss"] for where in PLACES}) == 1, "a bit has changed"
    report(found, words)


def case(where: str, tokens: int, path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--path", str(path), "--case", where, str(tokens)]
    # Every micro-batch has a thread, and glibc would keep what each of them has freed.
    with_one_heap = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=with_one_heap)
    answer: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return answer


def predicted_nbytes(tokens: int) -> int:
    return tokens * WIDTH * 4 * LAYERS


def run(where: str, tokens: int, path: Path) -> dict[str, Any]:
    """One step; in a process of its own."""
    host_nbytes = 64 * MIB + predicted_nbytes(tokens)
    with tempfile.TemporaryDirectory(dir=path, prefix="infinity-activations-") as scratch:
        kinds = ("parameters", "master", "moments", "gradients")
        config = {
            "tiers": {
                "host": {"capacity": host_nbytes if where == "host" else 64 * MIB},
                "nvme": [{"path": scratch}],
            },
            "placement": dict.fromkeys(kinds, "host") | {"activations": where},
        }
        torch.manual_seed(0)
        model: nn.Module = TinyDecoder(
            width=WIDTH, layers=LAYERS, heads=4, vocab=VOCABULARY, length=SEQUENCE
        )
        device = SimulatedDevice(1, delay_s=1e-5)
        model = infinity.offload(model.train(), config, device=device)
        source = torch.Generator().manual_seed(1)
        ids = torch.randint(VOCABULARY, (tokens // SEQUENCE, SEQUENCE), generator=source)
        micro_batches = list(ids.split(MICRO_BATCH_TOKENS // SEQUENCE))
        losses = infinity.forward_backward(
            model, lambda each: model(ids=each, labels=each) / len(micro_batches), micro_batches
        )
        engine = infinity.engine_of(model)
        arena_nbytes = engine.pool._host.capacity_nbytes
        answer = {
            "loss": sum(map(float, losses)),
            "device_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            - arena_nbytes,
            "host_nbytes": device.host.high_water_nbytes,
            "out_nbytes": engine.counters.snapshot().get("activation_out_nbytes", 0),
        }
        engine.close()
    return answer


def report(found: dict[str, dict[int, dict[str, Any]]], words: argparse.Namespace) -> None:
    def waiting(tokens: int) -> str:
        nbytes = predicted_nbytes(tokens) - predicted_nbytes(MICRO_BATCH_TOKENS)
        return f"{nbytes / MIB:.0f}"

    def cell(where: str, tokens: int) -> str:
        nbytes = (found[where][tokens][f"{memory}_nbytes"] for memory in ("device", "host"))
        return " / ".join(f"{n / MIB:.0f}" for n in nbytes)

    columns = {
        "tokens": "{tokens:,}",
        "predicted MiB": lambda row: waiting(row["tokens"]),
        **{
            f"on {where}: device / host MiB": lambda row, where=where: cell(where, row["tokens"])
            for where in PLACES
        },
    }
    rows = [{"tokens": tokens} for tokens in words.tokens]
    print_table("inputs of blocks, beside one micro-batch", columns, rows)
    save(
        words.save,
        words,
        shape={"width": WIDTH, "layers": LAYERS, "micro_batch": MICRO_BATCH_TOKENS},
        predicted_nbytes={tokens: predicted_nbytes(tokens) for tokens in words.tokens},
        found=found,
    )
    if words.plot is not None:
        plot(found, words.plot)


def plot(found: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    pyplot = find_pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 4))
    tokens = sorted(found["device"])
    suspended = [(predicted_nbytes(t) - predicted_nbytes(MICRO_BATCH_TOKENS)) / MIB for t in tokens]
    axes.plot(tokens, suspended, "k--", label="predicted")
    for where, mark in zip(PLACES, "osx", strict=True):
        for memory, style in (("device", "-"), ("host", ":")):
            values = [found[where][t][f"{memory}_nbytes"] / MIB for t in tokens]
            axes.plot(tokens, values, mark + style, label=f"on {where}: {memory} memory")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens a step")
    axes.set_ylabel("MiB beside one micro-batch")
    axes.legend(fontsize=7)
    last = tokens[-1]
    kept, left = (found[where][last]["device_nbytes"] / MIB for where in ("device", "host"))
    axes.set_title(
        f"{last:,} tokens: the device holds {left:.0f} of {kept:.0f} MiB of inputs",
        fontsize="medium",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
