"""How long is a step with all state on NVMe, beside the same step in memory and beside its bytes?

    python bench/step.py --path /mnt/nvme0 --save bench/results/step.json
    python bench/step.py --quick                     a small model: does it run?
    python bench/step.py ... --tokens 32768          one more row of the same file

A GPT-2-like model in bfloat16 trains twice in one process, by turns: once with everything on the
host, once with parameters, masters and moments on NVMe through a host budget. Same kernels, same
micro-batches layer by layer (`infinity.forward_backward`), same recomputation, same allocator
settings; the losses must be equal to the last bit. C is the step in memory; B is the time that the
bytes of the other step take in the same run, when reads and writes of that mix are all that
happens. A step cannot be faster than the larger of the two.

Bytes are those the kernel counted for the process (/proc/self/io), so a cache would show.

A round of 512 tokens takes 16 s on two cores, so the default takes 25 minutes (2, 5 and 18 for its
rows), 32,768 tokens 75 more; `--quick` takes one. Each row is printed and saved as it is finished.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Results, arguments, move, print_table, say, spread, timed
from jobs import Job, measured, medians
from rich.console import Console

from infinity.config import SwapConfig
from infinity.storage.arena import Arena
from infinity.storage.native_engine import open_configured
from infinity.storage.protocol import Priority
from infinity.storage.volume import Volume, VolumePath
from infinity.tools.training.process import keep_freed_memory

KINDS = ("parameters", "master", "moments")
VOCABULARY = 50257
PIECE_NBYTES = 16 << 20
_WARM_UP = 4  # Micro-batches.


def main() -> None:
    parser = arguments(__doc__, quick="a small model, one round")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences, at most")
    parser.add_argument("--host", default="2GiB")
    parser.add_argument("--compute", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gradients", default="host", choices=["host", "nvme"])
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    if words.quick:
        words.layers, words.width, words.host, words.rounds = 4, 256, "256MiB", 1
        words.tokens = [tokens for tokens in words.tokens if tokens <= 2048] or [512]
    keep_freed_memory()
    what = {k: v for k, v in vars(words).items() if k not in ("path", "tokens", "save", "quick")}
    results = Results(words.save, what)
    console = Console()
    with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-step-") as scratch:
        sides = {where: side(where, words, Path(scratch)) for where in ("host", "nvme")}
        for tokens in words.tokens:
            row = measure(sides, tokens, words)
            results.keep(row)
            show([row], words, console)
        for job in sides.values():
            job.engine.close()
    if len(results.rows) > 1:
        show(results.rows, words, console)


def side(
    where: str,
    words: argparse.Namespace,
    scratch: Path,
    *,
    updates: str = "auto",
    max_norm: float | None = 1.0,
) -> Job:
    """One of the two: a model with its state on the host or on NVMe."""
    config = {
        "tiers": {
            "host": {"capacity": "auto" if where == "host" else words.host},
            "nvme": [{"path": str(scratch / f"{where}-{updates}")}],
        },
        "schedule": {"updates": updates},
        "placement": dict.fromkeys(KINDS, where)
        | {"gradients": words.gradients if where == "nvme" else "host"},
        "precision": {"compute": words.compute},
    }
    return Job(config, words.layers, words.width, words.sequence, max_norm=max_norm)


def measure(sides: dict[str, Job], tokens: int, words: argparse.Namespace) -> dict[str, Any]:
    """Rounds of host, NVMe and bare bytes by turns, after one of a few micro-batches that is not
    counted."""
    source = torch.Generator().manual_seed(tokens)
    ids = torch.randint(VOCABULARY, (tokens // words.sequence, words.sequence), generator=source)
    micro_batches = list(ids.split(words.micro_batch))
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(words.rounds + 1):
        here = micro_batches if number > 0 else micro_batches[:_WARM_UP]
        each = {where: step(job, here) for where, job in sides.items()}
        assert each["host"]["loss"] == each["nvme"]["loss"], "placement changed the loss"
        moved = each["nvme"]["read_nbytes"], each["nvme"]["written_nbytes"]
        each["bytes"] = {"seconds": bare_s(*map(int, moved), words)}
        rounds.append(each)
        told = ", ".join(f"{where} {each[where]['seconds']:.2f} s" for where in each)
        say(f"{tokens} tokens, round {number} of {words.rounds}: {told}")
    rounds = rounds[1:]
    ratios = [
        each["nvme"]["seconds"] / max(each["host"]["seconds"], each["bytes"]["seconds"])
        for each in rounds
    ]
    return {
        "name": str(tokens),
        "tokens": tokens,
        "micro_batches": len(micro_batches),
        **spread(ratios),
        "medians": {where: medians([each[where] for each in rounds]) for where in rounds[0]},
        "rounds": rounds,
        "num_parameters": sides["nvme"].num_parameters,
    }


def step(job: Job, micro_batches: list[torch.Tensor]) -> dict[str, float]:
    """One optimizer step; what it took and moved."""
    with measured(job.engine, ("read_wait_s", "write_wait_s", "update_s")) as found:
        loss = job.layer_major_step(micro_batches)
    return found | {"loss": loss}


def bare_s(read_nbytes: int, written_nbytes: int, words: argparse.Namespace) -> float:
    """Seconds for the storage engine to move so much in that mix, with nothing else to do.

    In pieces of 16 MiB, eight on their way: a quarter of the bytes, and at least 1 GiB, is moved.
    """
    share = min(1.0, max(0.25, (1 << 30) / max(1, read_nbytes + written_nbytes)))
    arena = Arena(8 * PIECE_NBYTES)
    engine = open_configured(SwapConfig.load({}).io, arena)
    with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-bare-") as scratch:
        volume = Volume(engine, [VolumePath(path=scratch)])
        [extents] = volume.reserve([512 << 20])
        places = (512 << 20) // PIECE_NBYTES

        def submit(operation: str, number: int, slot: int) -> Any:
            call = volume.read if operation == "read" else volume.write
            return call(
                extents,
                offset_nbytes=number % places * PIECE_NBYTES,
                nbytes=PIECE_NBYTES,
                address=arena.address + slot * PIECE_NBYTES,
                priority=Priority.STATE,
            )

        for number in range(places):  # Unwritten extents are slow to write.
            submit("write", number, 0).wait()
        plan = mix(int(read_nbytes * share), int(written_nbytes * share))
        moves = (partial(submit, what, number, number % 8) for number, what in enumerate(plan))
        elapsed_s = timed(lambda: move(moves, 8))()
        volume.close()
    engine.close()
    arena.close()
    return elapsed_s * (read_nbytes + written_nbytes) / max(1, len(plan) * PIECE_NBYTES)


def mix(read_nbytes: int, written_nbytes: int) -> list[str]:
    """Reads and writes of 16 MiB, evenly mixed."""
    reads, writes = read_nbytes // PIECE_NBYTES, written_nbytes // PIECE_NBYTES
    places = [((i + 0.5) / reads, "read") for i in range(reads)]
    places += [((i + 0.5) / writes, "write") for i in range(writes)]
    return [operation for _, operation in sorted(places)]


def show(found: list[dict[str, Any]], words: argparse.Namespace, console: Console) -> None:
    title = (
        f"{found[0]['num_parameters']:,} parameters, {words.compute}, host budget {words.host}, "
        f"gradients on {words.gradients}"
    )

    def waits(row: dict[str, Any]) -> str:
        nvme = row["medians"]["nvme"]
        return f"{nvme['read_wait_s'] + nvme['write_wait_s']:.2f}"

    def moved(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row['medians']['nvme'][name] / row['num_parameters']:.1f}"

    columns = {
        "tokens": "{tokens:,}", "NVMe s": "{medians[nvme][seconds]:.2f}",
        "in memory s (C)": "{medians[host][seconds]:.2f}",
        "bytes s (B)": "{medians[bytes][seconds]:.2f}", "to max(C, B)": "{ratio:.2f}",
        "low - high": "{ratio_low:.2f} - {ratio_high:.2f}", "waits s": waits,
        "read B/p": moved("read_nbytes"), "written B/p": moved("written_nbytes"),
    }  # fmt: skip
    print_table(title, columns, sorted(found, key=lambda row: row["tokens"]), console)


if __name__ == "__main__":
    main()
