"""A LoRA step over Kimi-K2's real shape: 61 layers, 384 experts, 1.03 trillion parameters.

    python bench/trillion.py --path /mnt/nvme0 --save bench/results/trillion.json
    python bench/trillion.py --layers 3 --experts 32     does it run?

The base has the names, sizes and layout of the INT4 checkpoint, as files of holes: 594 GB that take
a few hundred MB of the drive. Routers, norms and the embeddings of the tokens are real, so tokens
choose experts of their own; the other weights are zeros. What is measured is real otherwise: the
headers are parsed, every byte that a step needs is read with O_DIRECT, checked, decoded and
multiplied with, and the adapter is saved. A frozen expert that no token chose is not read, so few
tokens read a part of the base; the row says how much.

The kernel counts no bytes of a hole (`read_nbytes`), so the bytes of the base are the engine's own
count of what it asked the kernel for (`shard_read_nbytes`).

The result file is written after the start-up, after every step and at the end, when a table is
printed and written beside it, too. The defaults take
some 15 minutes on two cores. Progress is printed every 30 seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Results, arguments, high_water_nbytes, moved_since, process_io, progress, say
from quantized_base import KIMI_K2, lora_over, sparse_fill, write_base

GIB = 1 << 30
_COUNTERS = ("shard_read_nbytes", "decode_s", "read_wait_s", "fetches")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=KIMI_K2.layers)
    parser.add_argument("--experts", type=int, default=KIMI_K2.experts)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--host", default="6GiB")
    parser.add_argument("--tile", default="100MiB")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="infinity-trillion-", dir=given.path))
    try:
        settings = {name: v for name, v in vars(given).items() if name not in ("path", "save")}
        run(given, directory, Results(given.save, settings))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(given: argparse.Namespace, directory: Path, results: Results) -> None:
    """Writes the base and trains. Keeps a row of what was measured, again after each part."""
    shape = dataclasses.replace(KIMI_K2, layers=given.layers, experts=given.experts)
    base = directory / "base"
    base_nbytes = write_base(shape, base, sparse_fill(list(range(given.tokens)), shape.hidden))
    say(f"base: {shape.num_parameters / 1e9:.1f} B parameters, {base_nbytes / 1e9:.1f} GB")

    # Importing peft takes seconds, which are not the model's.
    import peft  # noqa: F401
    import torch
    from jobs import measured

    import infinity

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    begun = time.perf_counter()
    model = lora_over(base)
    built_s = time.perf_counter() - begun
    settings = {
        "tiers": {"host": {"capacity": given.host}, "nvme": [{"path": str(directory / "swap")}]},
        "placement": {"master": "host", "moments": "host", "gradients": "host"},
        "schedule": {"tile": given.tile},
    }
    begun = time.perf_counter()
    before = process_io()
    with progress("offload", lambda: f"peak RSS {high_water_nbytes() / GIB:.2f} GiB"):
        infinity.offload(model, settings, weights=base)
    offload_s = time.perf_counter() - begun
    start_up = moved_since(before)
    say(f"offload: {offload_s:.1f} s, {start_up['read_nbytes'] / 1e6:.1f} MB read, peak RSS "
        f"{high_water_nbytes() / GIB:.2f} GiB")  # fmt: skip
    optimizer = infinity.AdamW(model, lr=1e-4)
    engine = infinity.engine_of(model)
    tokens = torch.arange(given.tokens, device=next(model.parameters()).device).view(1, -1)
    row: dict[str, Any] = {
        "name": "lora", "parameters": shape.num_parameters, "base_nbytes": base_nbytes,
        "built_s": built_s, "offload_s": offload_s,
        "start_up_read_nbytes": start_up["read_nbytes"], "steps": [],
        "peak_rss_nbytes": high_water_nbytes(),
    }  # fmt: skip
    results.keep(row)

    def read_nbytes() -> float:
        return float(engine.counters.snapshot().get("shard_read_nbytes", 0))

    for _ in range(given.steps):

        def so_far(earlier: float = read_nbytes()) -> str:
            return f"{(read_nbytes() - earlier) / 1e9:.1f} GB of the base read"

        with progress("step", so_far), measured(engine, _COUNTERS) as found:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
        row["steps"].append(found | {"loss": loss.item()})
        last, row["peak_rss_nbytes"] = row["steps"][-1], high_water_nbytes()
        results.keep(row)
        say(f"step: {last['seconds']:.1f} s, {last['shard_read_nbytes'] / 1e9:.1f} GB of the base "
            f"read, loss {last['loss']:.3f}, peak {high_water_nbytes() / GIB:.2f} GiB")  # fmt: skip
    begun, before = time.perf_counter(), process_io()
    model.save_pretrained(directory / "adapter")
    save_s = time.perf_counter() - begun
    adapter_nbytes = (directory / "adapter" / "adapter_model.safetensors").stat().st_size
    say(f"adapter saved: {adapter_nbytes / 1e6:.1f} MB in {save_s:.1f} s")
    infinity.close(model)
    row |= {
        "adapter_nbytes": adapter_nbytes, "adapter_save_s": save_s,
        "adapter_read_nbytes": moved_since(before)["read_nbytes"],
        "peak_rss_nbytes": high_water_nbytes(),
    }  # fmt: skip
    results.keep(row)
    results.show(
        f"{row['parameters'] / 1e9:.0f} B parameters, {base_nbytes / 1e9:.0f} GB of INT4 as holes; "
        f"offload {offload_s:.0f} s, {row['start_up_read_nbytes'] / 1e6:.0f} MB read; adapter of "
        f"{adapter_nbytes / 1e6:.0f} MB saved in {save_s:.1f} s",
        {
            "step": "{number}", "seconds": "{seconds:.1f}",
            "base read GB": lambda step: f"{step['shard_read_nbytes'] / 1e9:.1f}",
            "decode s": "{decode_s:.1f}", "waits s": "{read_wait_s:.1f}", "loss": "{loss:.3f}",
            "peak RSS GiB": lambda step: f"{row['peak_rss_nbytes'] / GIB:.2f}",
        },
        [{"number": number, **step} for number, step in enumerate(row["steps"], start=1)],
    )  # fmt: skip


if __name__ == "__main__":
    main()
