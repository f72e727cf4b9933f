"""A LoRA step over a base in its own files, beside the same step with the base kept in memory.

    python bench/frozen_step.py --path /mnt/nvme0 --save bench/results/frozen_step.json
    python bench/frozen_step.py --layers 3 --experts 8 --steps 1     does it run?

C is the step with a host budget that keeps every stored byte: what computing and decoding take. B
is the time of the bytes that the other step reads, at the rate of fio on the same files (before and
after). A step that overlaps everything takes max(C, B). One row per format: bfloat16 has four times
the bytes of INT4 for the same computation, so on two cores the drive binds it.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from beyond_memory import ceiling
from common import Results, high_water_nbytes, moved_since, process_io, say
from quantized_base import Shape, random_fill, write_base

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path.cwd())
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="measured, after a first one")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int4"])
    parser.add_argument("--blocks", type=int, default=6, help="that the host holds, as stored")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    settings = {name: v for name, v in vars(given).items() if name not in ("path", "save")}
    results = Results(given.save, settings)
    for name in given.formats:
        shape = Shape(
            layers=given.layers, hidden=2048, experts=given.experts, expert_width=1024,
            dense_width=8192, heads=16, vocabulary=8000, q_rank=768, kv_rank=256,
            is_quantized=name == "int4",
        )  # fmt: skip
        directory = Path(tempfile.mkdtemp(prefix="infinity-frozen-step-", dir=given.path))
        try:
            results.keep({"name": name, **compare(given, shape, directory)})
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def compare(given: argparse.Namespace, shape: Shape, directory: Path) -> dict[str, Any]:
    """Writes the base and trains over it in memory and from the drive."""
    base = directory / "base"
    base_nbytes = write_base(shape, base, random_fill(0))
    block_nbytes = base_nbytes // shape.layers
    decoded_nbytes = block_nbytes * (4 if shape.is_quantized else 1)
    say(f"base of {shape.num_parameters / 1e9:.2f} B parameters, {base_nbytes / 1e9:.2f} GB")
    shards = sorted(base.glob("*.safetensors"))
    ceilings = [ceiling(shards)]
    in_memory = train(given, base, base_nbytes + 2 * decoded_nbytes + 4 * block_nbytes)
    gc.collect()
    from_drive = train(given, base, decoded_nbytes + given.blocks * block_nbytes)
    ceilings.append(ceiling(shards))
    rate = statistics.mean(ceilings)
    compute_s = statistics.median(step["seconds"] for step in in_memory)
    step_s = statistics.median(step["seconds"] for step in from_drive)
    read_nbytes = statistics.median(step["read_nbytes"] for step in from_drive)
    bytes_s = read_nbytes / rate
    bound_s = max(compute_s, bytes_s)
    say(f"C {compute_s:.2f} s, B {bytes_s:.2f} s, step {step_s:.2f} s: {step_s / bound_s:.3f} x "
        f"max(C, B); {read_nbytes / base_nbytes:.3f} x the base read at "
        f"{read_nbytes / step_s / rate:.3f} of fio's rate")  # fmt: skip
    return {
        "base_nbytes": base_nbytes, "compute_s": compute_s, "bytes_s": bytes_s, "step_s": step_s,
        "to_bound": step_s / bound_s, "of_ceiling": read_nbytes / step_s / rate,
        "ceiling_bytes_per_s": ceilings, "in_memory": in_memory, "from_drive": from_drive,
        "peak_rss_nbytes": high_water_nbytes(),
    }  # fmt: skip


def train(given: argparse.Namespace, base: Path, host_nbytes: int) -> list[dict[str, Any]]:
    """Returns the measured steps of a run in this host budget."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import infinity

    with infinity.init_empty_weights():
        config = AutoConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.manual_seed(0)
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))
    settings = {
        "tiers": {"host": {"capacity": f"{-(-host_nbytes // MIB)}MiB"},
                  "nvme": [{"path": str(base.parent / "swap")}]},
        "placement": {"master": "host", "moments": "host", "gradients": "host"},
    }  # fmt: skip
    infinity.offload(model, settings, weights=base)
    optimizer = infinity.AdamW(model, lr=1e-3)
    counters = infinity.engine_of(model).counters
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(0, config.vocab_size, (1, given.sequence), generator=generator)
        for _ in range(given.micro_batches)
    ]
    steps = []
    try:
        for _ in range(given.steps + 1):
            begun, before, counted = time.perf_counter(), process_io(), counters.snapshot()
            infinity.forward_backward(
                model, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, batches
            )
            optimizer.step()
            optimizer.zero_grad()
            now = counters.snapshot()
            steps.append({
                "seconds": time.perf_counter() - begun, **moved_since(before),
                **{name: now.get(name, 0) - counted.get(name, 0)
                   for name in ("decode_s", "read_wait_s", "fetches", "fetches_late")},
            })  # fmt: skip
    finally:
        infinity.close(model)
    return steps[1:]


if __name__ == "__main__":
    main()
