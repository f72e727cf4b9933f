"""What passes with a sweep over a base that is several times larger than memory, and costs no byte.

    python bench/sweeps.py --path /mnt/nvme0 --save bench/results/sweeps.json
    python bench/sweeps.py --layers 3 --experts 32     does it run?

The base is that of `beyond_memory.py`: 94.6 billion parameters, experts in INT4, 54.9 GB of random
weights (`--keep` leaves them). First sequences are scored: each sweep reads the base once, forward
only. Then one adapter trains, and then `--adapters` of them in the sweeps of one
(`infinity.together`), each on as many tokens as the one alone. Bytes are those the kernel counted
for the process, and the ceiling is fio's read of the same files, before and after. The first step
of each part has no order of the units to read ahead by (`is_first`).
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from beyond_memory import arguments_over_base, ceiling, written_base
from common import Results, high_water_nbytes, process_io, progress, say
from quantized_base import lora_over

GIB = 1 << 30


def main() -> None:
    parser = arguments_over_base(__doc__)
    parser.add_argument("--sequences", type=int, default=4, help="of a sweep, and of an adapter")
    parser.add_argument("--steps", type=int, default=2, help="sweeps, and steps of each adapter")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--only", choices=["score", "one", "several"], action="append")
    given = parser.parse_args()
    names = ("layers", "experts", "sequence", "sequences", "adapters", "host", "tile")
    results = Results(given.save, {name: getattr(given, name) for name in names})
    with written_base(given) as (_, base):
        run(given, base, results)


def run(given: argparse.Namespace, base: Path, results: Results) -> None:
    """Measures each part, and keeps a row of each sweep or step."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    shards = sorted(base.glob("*.safetensors"))
    base_nbytes = sum(path.stat().st_size for path in shards)
    ceilings = [ceiling(shards)]
    parts = {"score": score, "one": partial(train, count=1), "several": train}
    rows: list[dict[str, Any]] = []
    for name in given.only or parts:
        for number, found in enumerate(parts[name](given, base, base_nbytes), start=1):
            found |= {"peak_rss_nbytes": high_water_nbytes(), "load_average": os.getloadavg()[0]}
            rows.append({"name": f"{name} {number}", "is_first": number == 1, **found})
            results.keep(rows[-1])
            say(f"{rows[-1]['name']}: {found['seconds']:.1f} s, read "
                f"{found['read_nbytes'] / base_nbytes:.3f} x the base")  # fmt: skip
    ceilings.append(ceiling(shards))
    rate = statistics.mean(ceilings)
    results.keep({"name": "ceiling", "bytes_per_s": ceilings, "base_nbytes": base_nbytes})
    columns: dict[str, Any] = {
        "part": "{name}",
        "tokens": "{tokens:,}",
        "seconds": "{seconds:.1f}",
        "of base": lambda row: f"{row['read_nbytes'] / base_nbytes:.3f}",
        "GB/s": lambda row: f"{row['read_nbytes'] / row['seconds'] / 1e9:.2f}",
        "of fio": lambda row: f"{row['read_nbytes'] / row['seconds'] / rate:.3f}",
        "decode s": "{decode_s:.1f}", "waits s": "{read_wait_s:.1f}",
        "peak RSS GiB": lambda row: f"{row['peak_rss_nbytes'] / GIB:.2f}",
        "load": "{load_average:.1f}",
    }  # fmt: skip
    results.show(
        f"{base_nbytes / 1e9:.1f} GB; fio reads {rate / 1e9:.2f} GB/s of the same files",
        columns,
        rows,
    )


@contextmanager
def step_of(engine: Any, tokens: int, base_nbytes: int) -> Iterator[dict[str, Any]]:
    """Measures a sweep or a step, which is complete at the end of the block."""
    from jobs import measured

    earlier = process_io()["read_nbytes"]

    def so_far() -> str:
        return f"{(process_io()['read_nbytes'] - earlier) / base_nbytes:.3f} x the base read"

    with progress("step", so_far), measured(engine, ("decode_s", "read_wait_s")) as found:
        yield found
    found["tokens"] = tokens


def settings_of(given: argparse.Namespace, base: Path) -> dict[str, Any]:
    return {
        "tiers": {"host": {"capacity": given.host}, "nvme": [{"path": str(base.parent / "swap")}]},
        "placement": {"master": "host", "moments": "host", "gradients": "host",
                      "activations": "host"},
        "schedule": {"tile": given.tile},
    }  # fmt: skip


def score(given: argparse.Namespace, base: Path, base_nbytes: int) -> Iterator[dict[str, Any]]:
    """Scores as many sequences in each sweep."""
    import torch

    import infinity

    model = lora_over(base).unload().requires_grad_(False)
    infinity.offload(model, settings_of(given, base), weights=base)
    generator, tokens = torch.Generator().manual_seed(1), given.sequences * given.sequence
    vocabulary = model.config.vocab_size
    for _ in range(given.steps):
        ids = torch.randint(
            0, vocabulary, (given.sequences, given.sequence), generator=generator
        ).tolist()
        with step_of(infinity.engine_of(model), tokens, base_nbytes) as found:
            scores = list(infinity.score(model, ids, sweep_tokens=tokens))
        found["mean_logprob"] = float(torch.cat([each.logprobs for each in scores]).mean())
        yield found
    infinity.close(model)


def train(
    given: argparse.Namespace, base: Path, base_nbytes: int, count: int | None = None
) -> Iterator[dict[str, Any]]:
    """Trains `count` adapters together, by default those of the command line."""
    import torch

    import infinity

    model = lora_over(base)
    names = ["default", *(f"adapter{number}" for number in range(1, count or given.adapters))]
    for name in names[1:]:
        model.add_adapter(name, model.peft_config["default"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)  # PEFT trains the active adapter alone.
    infinity.offload(model, settings_of(given, base), weights=base)

    def loop(seed: int, name: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        own = [p for key, p in model.named_parameters() if name in key.split(".")]
        optimizer = infinity.AdamW(own, lr=1e-3)
        shape = (given.sequences, 1, given.sequence)
        batches = torch.randint(0, model.config.vocab_size, shape, generator=generator).unbind()
        infinity.forward_backward(
            model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, batches
        )
        optimizer.step()
        optimizer.zero_grad()

    engine, tokens = infinity.engine_of(model), len(names) * given.sequences * given.sequence
    for step in range(given.steps):
        with step_of(engine, tokens, base_nbytes) as found:
            loops = {name: partial(loop, step, name) for name in names}
            infinity.together(model, loops)
            engine.flush()
        yield found
    infinity.close(model)


if __name__ == "__main__":
    main()
