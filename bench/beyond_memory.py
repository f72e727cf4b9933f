"""LoRA over a quantised mixture of experts that is several times larger than the memory it gets.

    python bench/beyond_memory.py --path /mnt/nvme0 --save bench/results/beyond_memory.json
    python bench/beyond_memory.py --layers 3 --experts 32     does it run?

A DeepSeek-V3-like model of 93 billion parameters: experts in INT4, 53 GB of random weights that are
written once (`--keep` leaves them for another run). A step is layer-major: each block and each tile
of experts is read once per direction for all micro-batches. Bytes are those the kernel counted for
the process, peak memory is the kernel's (VmHWM), and the ceiling is fio's read of the same files
with the same block size, before and after the steps.

The result file is written after every step. With `--keep`, a run that was cut goes on behind the
last step of its result file: the adapter is saved after each step, and the base is there. The first
step of a process has no order of the units to read ahead by (`is_first`). Progress is printed every
30 seconds, and at the end a table, which is written beside the result file, too. Takes about 55 GB
of the drive and, on two cores and 2 GB/s, two to four minutes a step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Results, arguments, high_water_nbytes, moved_since, process_io, progress, say
from quantized_base import Shape, lora_over, random_fill, write_base

GIB = 1 << 30
NAME = "infinity-beyond-memory"
_COUNTERS = ("decode_s", "read_wait_s", "fetches", "fetches_late")


def main() -> None:
    parser = arguments_over_base(__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    names = ("layers", "experts", "sequence", "micro_batches", "host", "tile")
    results = Results(given.save, {name: getattr(given, name) for name in names})
    with written_base(given) as (shape, base):
        run(given, shape, base, results)


def arguments_over_base(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with what every program over this base is told."""
    parser = arguments(description)
    parser.add_argument("--layers", type=int, default=59)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--host", default="4GiB")
    parser.add_argument("--tile", default="512MiB")
    parser.add_argument("--keep", action="store_true", help="leave the base for another run")
    return parser


@contextmanager
def written_base(given: argparse.Namespace) -> Iterator[tuple[Shape, Path]]:
    """Yields the base of the command line, which is written unless a run has left it."""
    shape = Shape(
        layers=given.layers, hidden=2048, experts=given.experts, expert_width=1024,
        dense_width=8192, heads=16, vocabulary=32000, q_rank=768, kv_rank=256,
    )  # fmt: skip
    directory = given.path / f"{NAME}-{given.layers}x{given.experts}"
    base, done = directory / "base", directory / "whole"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        begun = time.perf_counter()
        nbytes = write_base(shape, base, random_fill(0))
        done.touch()
        say(f"base written: {nbytes / 1e9:.1f} GB in {time.perf_counter() - begun:.0f} s")
    try:
        yield shape, base
    finally:
        if not given.keep:
            shutil.rmtree(directory, ignore_errors=True)


def run(given: argparse.Namespace, shape: Shape, base: Path, results: Results) -> None:
    """Trains. Keeps a row of the whole, again after every step."""
    import torch
    from jobs import measured

    import infinity

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    shards = sorted(base.glob("*.safetensors"))
    base_nbytes = sum(path.stat().st_size for path in shards)
    say(f"{shape.num_parameters / 1e9:.1f} B parameters, {base_nbytes / 1e9:.1f} GB")
    ceilings = [ceiling(shards)]
    torch.manual_seed(0)
    model = lora_over(base)
    settings = {
        "tiers": {"host": {"capacity": given.host},
                  "nvme": [{"path": str(base.parent / "swap")}]},
        "placement": {"master": "host", "moments": "host", "gradients": "host",
                      "activations": "host"},
        "schedule": {"tile": given.tile},
    }  # fmt: skip
    kept = next((row for row in results.rows if row["name"] == "lora"), None)
    saved = base.parent / "runs"
    is_resumed = kept is not None and saved.exists()
    begun, before = time.perf_counter(), process_io()
    if is_resumed:
        infinity.offload(model, settings, resume=saved)
    else:
        shutil.rmtree(saved, ignore_errors=True)
        infinity.offload(model, settings, weights=base)
    offload_s, start_up = time.perf_counter() - begun, moved_since(before)
    say(f"offload: {offload_s:.1f} s, {start_up['read_nbytes'] / 1e6:.1f} MB read")
    optimizer = infinity.AdamW(model, lr=1e-3)
    if is_resumed:
        infinity.checkpoint.load(saved, model, optimizer)
    engine = infinity.engine_of(model)
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(0, shape.vocabulary, (1, given.sequence), generator=generator)
        for _ in range(given.micro_batches)
    ]

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss / len(batches)

    row: dict[str, Any] = {
        "name": "lora", "parameters": shape.num_parameters, "base_nbytes": base_nbytes,
        "tokens": given.sequence * given.micro_batches, "offload_s": offload_s,
        "start_up_read_nbytes": start_up["read_nbytes"], "ceiling_bytes_per_s": ceilings,
    }  # fmt: skip
    steps: list[dict[str, Any]] = list(kept["steps"]) if is_resumed and kept else []
    for number in range(len(steps), given.steps):
        is_first = number == 0 or (is_resumed and kept is not None and number == len(kept["steps"]))

        def so_far(earlier: int = process_io()["read_nbytes"]) -> str:
            read_nbytes = process_io()["read_nbytes"] - earlier
            return f"{read_nbytes / base_nbytes:.3f} x the base read"

        with progress("step", so_far), measured(engine, _COUNTERS) as found:
            losses = infinity.forward_backward(model, loss_of, batches)
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
        found |= {"is_first": is_first, "loss": sum(loss.item() for loss in losses)}
        found |= {"peak_rss_nbytes": high_water_nbytes(), "load_average": os.getloadavg()[0]}
        steps.append(found)
        last = steps[-1]
        if given.keep:
            infinity.checkpoint.save(saved, model, optimizer)
        results.keep({**row, "steps": steps})
        say(f"step: {last['seconds']:.1f} s, read {last['read_nbytes'] / base_nbytes:.3f} x the "
            f"base, written {last['written_nbytes'] / 1e6:.1f} MB, loss {last['loss']:.3f}, peak "
            f"{last['peak_rss_nbytes'] / GIB:.2f} GiB")  # fmt: skip
    before = process_io()
    model.save_pretrained(base.parent / "adapter")
    moved = moved_since(before)
    infinity.close(model)
    ceilings.append(ceiling(shards))
    seconds = statistics.median(each["seconds"] for each in steps[1:] or steps)
    reads_s = 2 * base_nbytes / statistics.mean(ceilings)
    say(f"median step {seconds:.1f} s; the reads alone would take {reads_s:.1f} s at fio's rate")
    row |= {"adapter_read_nbytes": moved["read_nbytes"], "peak_rss_nbytes": high_water_nbytes()}
    results.keep({**row, "steps": steps})
    rate = statistics.mean(ceilings)
    columns: dict[str, Any] = {
        "step": lambda step: f"{step['number']}{' (first)' if step['is_first'] else ''}",
        "seconds": "{seconds:.1f}",
        "of base": lambda step: f"{step['read_nbytes'] / base_nbytes:.3f}",
        "written MB": lambda step: f"{step['written_nbytes'] / 1e6:.0f}",
        "GB/s": lambda step: f"{step['read_nbytes'] / step['seconds'] / 1e9:.2f}",
        "of fio": lambda step: f"{step['read_nbytes'] / step['seconds'] / rate:.3f}",
        "reads s": lambda step: f"{step['read_nbytes'] / rate:.1f}",
        "decode s": "{decode_s:.1f}", "waits s": "{read_wait_s:.1f}", "loss": "{loss:.3f}",
        "peak RSS GiB": lambda step: f"{step['peak_rss_nbytes'] / GIB:.2f}",
        "load": "{load_average:.1f}",
    }  # fmt: skip
    results.show(
        f"{shape.num_parameters / 1e9:.1f} B parameters, {base_nbytes / 1e9:.1f} GB; "
        f"{row['tokens']} tokens a step; fio reads {rate / 1e9:.2f} GB/s of the same files; "
        f"offload {offload_s:.0f} s",
        columns,
        [{"number": number, **step} for number, step in enumerate(steps, start=1)],
    )


def ceiling(shards: list[Path]) -> float:
    """Returns the bytes per second that fio reads from some of the files, past the page cache."""
    chosen = shards[1 : len(shards) : max(1, len(shards) // 4)]
    command = [
        "fio", "--name=read", "--rw=read", "--direct=1", "--ioengine=libaio", "--iodepth=4",
        "--bs=4M", "--readonly", "--output-format=json", "--runtime=8", "--time_based",
        f"--filename={':'.join(map(str, chosen))}",
    ]  # fmt: skip
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        say("no ceiling: fio is missing or failed")
        return float("nan")
    rate = json.loads(answer)["jobs"][0]["read"]["bw_bytes"]
    say(f"fio reads {rate / 1e9:.2f} GB/s of the same files")
    return float(rate)


if __name__ == "__main__":
    main()
