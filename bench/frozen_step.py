"""A LoRA step over a base in its own files, beside the same step with the base kept in memory.

    python bench/frozen_step.py --path /mnt/nvme0 --save bench/results/frozen_step.json
    python bench/frozen_step.py --quick                     a small model: does it run?

C is the step in a host budget that keeps every stored byte: computing and decoding. That budget has
space for some decoded blocks, too, which are not decoded again: C is rather too small than too
large, and the row has the seconds of decoding of both steps. B is the time
of the bytes that the other step reads, at the drive's ceiling. A step that overlaps both takes
max(C, B). One row per format: bfloat16 has almost four times the bytes of INT4 for the same
computation, so on two cores the drive binds it.

Both models are open in one process. A round has a block of consecutive steps in memory, a read of
the whole base, a block of consecutive steps from the drive, and a read of the base again. The first
step of a block is not counted: the block before left the drive and the caches in another state. The
reads of the base are the ceiling: the ranges that the step reads, past the page cache, by the same
storage engine in another arena, with as many requests in flight as it takes, and nothing to
compute. Bytes are those the kernel counted for the process (/proc/self/io). Ratios are per round;
the row has their median, and all rounds. The file is written after every round, and rounds that it
has are not repeated. At the end a table is printed, and written beside the file as text.

The default takes about 6 minutes on two cores and 2 GB/s, `--quick` less than one. 5 GB of the
drive and 9 GiB of memory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import Results, arguments, high_water_nbytes, move, say, timed
from jobs import measured
from quantized_base import Shape, lora_over, random_fill, write_base

MIB = 1 << 20
_REQUESTS = 8  # In flight for the ceiling; each is a unit of the model.
_COUNTERS = ("decode_s", "read_wait_s", "fetches", "fetches_late", "fetches_unplanned")


def main() -> None:
    parser = arguments(__doc__, quick="a small model, one round")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048, help="hidden; experts have half of it")
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="counted, in each block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=["bf16", "int4"])
    parser.add_argument("--blocks", type=int, default=6, help="that the host holds, as stored")
    given = parser.parse_args()
    if given.quick:
        given.experts, given.width, given.rounds, given.steps = 8, 512, 1, 2
    unsaved = ("path", "save", "quick", "formats", "rounds")
    settings = {name: value for name, value in vars(given).items() if name not in unsaved}
    results = Results(given.save, settings)
    for name in given.formats:
        rounds = next((row["rounds"] for row in results.rows if row["name"] == name), [])
        if len(rounds) < given.rounds:
            directory = Path(tempfile.mkdtemp(prefix="infinity-frozen-step-", dir=given.path))
            try:
                compare(given, name, directory, results, rounds)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    show(results)


def show(results: Results) -> None:
    """Prints and writes a line for each format: medians of the rounds."""
    columns = {
        "format": "{name}", "base GB": lambda row: f"{row['base_nbytes'] / 1e9:.2f}",
        "C s": "{compute_s:.2f}", "B s": "{bytes_s:.2f}", "step s": "{step_s:.2f}",
        "/ max(C, B)": "{to_bound:.3f}",
        "low - high": lambda row: " - ".join(
            f"{of(each['to_bound'] for each in row['rounds']):.3f}" for of in (min, max)
        ),
        "of base": "{of_base:.3f}", "of ceiling": "{of_ceiling:.3f}",
        "ceiling GB/s": lambda row: f"{row['ceiling_bytes_per_s'] / 1e9:.2f}",
        "decode C s": "{decode_in_memory_s:.2f}", "decode s": "{decode_from_drive_s:.2f}",
        "RSS GiB": lambda row: f"{row['peak_rss_nbytes'] / (1 << 30):.1f}",
        "rounds": lambda row: str(len(row["rounds"])),
    }  # fmt: skip
    results.show(
        "C: step over a base in memory; B: bytes read / ceiling; all seconds are medians of rounds",
        columns,
        results.rows,
    )


def compare(
    given: argparse.Namespace,
    name: str,
    directory: Path,
    results: Results,
    rounds: list[dict[str, Any]],
) -> None:
    """Writes the base, and trains over it in memory and from the drive, by turns."""
    width = given.width
    shape = Shape(
        layers=given.layers, hidden=width, experts=given.experts, expert_width=width // 2,
        dense_width=4 * width, heads=max(1, width // 128), vocabulary=8000, q_rank=3 * width // 8,
        kv_rank=width // 8, chosen=min(8, given.experts), is_quantized=name == "int4",
    )  # fmt: skip
    base = directory / "base"
    base_nbytes = write_base(shape, base, random_fill(0))
    block_nbytes = base_nbytes // shape.layers
    decoded_nbytes = block_nbytes * (4 if shape.is_quantized else 1)
    say(f"{name}: {shape.num_parameters / 1e9:.2f} B parameters, {base_nbytes / 1e9:.2f} GB")
    in_memory = Side(given, base, base_nbytes + 2 * decoded_nbytes + 4 * block_nbytes + 64 * MIB)
    from_drive = Side(given, base, decoded_nbytes + given.blocks * block_nbytes + 16 * MIB)
    try:
        while len(rounds) < given.rounds:
            ceilings = []
            memory = in_memory.block(given.steps)
            ceilings.append(from_drive.ceiling())
            drive = from_drive.block(given.steps)
            ceilings.append(from_drive.ceiling())
            assert [each["loss"] for each in memory] == [each["loss"] for each in drive]
            rounds.append(summary(base_nbytes, memory, drive, ceilings))
            last = rounds[-1]
            say(f"round {len(rounds)}: C {last['compute_s']:.2f} s, B {last['bytes_s']:.2f} s, "
                f"step {last['step_s']:.2f} s = {last['to_bound']:.3f} x max(C, B); "
                f"{last['of_base']:.3f} x the base at {last['of_ceiling']:.3f} of "
                f"{last['ceiling_bytes_per_s'] / 1e9:.2f} GB/s")  # fmt: skip
            names = (
                "compute_s", "bytes_s", "step_s", "to_bound", "of_base", "of_ceiling",
                "ceiling_bytes_per_s", "decode_in_memory_s", "decode_from_drive_s",
            )  # fmt: skip
            medians = {each: statistics.median(row[each] for row in rounds) for each in names}
            results.keep({
                "name": name, "parameters": shape.num_parameters, "base_nbytes": base_nbytes,
                "is_bound_by_drive": medians["bytes_s"] > medians["compute_s"], **medians,
                "peak_rss_nbytes": high_water_nbytes(), "rounds": rounds,
            })  # fmt: skip
    finally:
        in_memory.close()
        from_drive.close()


def summary(
    base_nbytes: int,
    memory: list[dict[str, Any]],
    drive: list[dict[str, Any]],
    ceilings: list[float],
) -> dict[str, Any]:
    """Returns the figures of a round. Reads ahead of a step belong to the next one, so bytes and
    seconds of the block from the drive are means."""
    rate = statistics.mean(ceilings)
    compute_s = statistics.median(step["seconds"] for step in memory)
    step_s = statistics.mean(step["seconds"] for step in drive)
    read_nbytes = statistics.mean(step["read_nbytes"] for step in drive)
    bytes_s = read_nbytes / rate
    return {
        "compute_s": compute_s, "bytes_s": bytes_s, "step_s": step_s,
        "to_bound": step_s / max(compute_s, bytes_s), "of_base": read_nbytes / base_nbytes,
        "of_ceiling": read_nbytes / step_s / rate, "ceiling_bytes_per_s": rate,
        "ceilings_bytes_per_s": ceilings, "in_memory": memory, "from_drive": drive,
        "decode_in_memory_s": statistics.median(step["decode_s"] for step in memory),
        "decode_from_drive_s": statistics.mean(step["decode_s"] for step in drive),
    }  # fmt: skip


class Side:
    """One of the two: a model with an adapter over the base, in a host budget."""

    def __init__(self, given: argparse.Namespace, base: Path, host_nbytes: int) -> None:
        import torch

        import infinity

        torch.manual_seed(0)  # Of the adapter, the same on both sides.
        self._model = lora_over(base)
        swap = tempfile.mkdtemp(prefix="swap-", dir=base.parent)
        settings = {
            "tiers": {"host": {"capacity": f"{-(-host_nbytes // MIB)}MiB"},
                      "nvme": [{"path": swap}]},
            "placement": {"master": "host", "moments": "host", "gradients": "host",
                          "activations": "host"},
        }  # fmt: skip
        infinity.offload(self._model, settings, weights=base)
        self._optimizer = infinity.AdamW(self._model, lr=1e-3)
        self._engine = infinity.engine_of(self._model)
        generator = torch.Generator().manual_seed(1)
        self._batches = [
            torch.randint(
                0, self._model.config.vocab_size, (1, given.sequence), generator=generator
            )
            for _ in range(given.micro_batches)
        ]

    def block(self, count: int) -> list[dict[str, Any]]:
        """Returns `count` consecutive steps, after one that is not counted."""
        self._step()
        steps = [self._step() for _ in range(count)]
        for weights in self._engine.weight_cache.weights:  # The drive is free for what follows.
            if weights.reading is not None:
                weights.reading.wait()
        return steps

    def _step(self) -> dict[str, Any]:
        import infinity

        with measured(self._engine, _COUNTERS) as found:
            losses = infinity.forward_backward(
                self._model,
                lambda ids: self._model(input_ids=ids, labels=ids, use_cache=False).loss,
                self._batches,
            )
            self._optimizer.step()
            self._optimizer.zero_grad()
        return found | {"loss": sum(each.item() for each in losses)}

    def ceiling(self) -> float:
        """Returns the bytes per second at which the storage engine reads the base, once."""
        from infinity.config import SwapConfig
        from infinity.storage.arena import Arena
        from infinity.storage.native_engine import open_configured
        from infinity.storage.protocol import Priority
        from infinity.storage.shards import ShardFiles

        shards = self._engine.store.shards
        assert shards is not None
        stored = [unit.stored for unit in self._engine.store.units if unit.stored is not None]
        slot_nbytes = -(-max(each.nbytes for each in stored) // MIB) * MIB
        arena = Arena(_REQUESTS * slot_nbytes)
        engine = open_configured(SwapConfig.load({}).io, arena)
        files = ShardFiles(engine, list(shards.identities.values()), verify=False)

        def read(number: int) -> Any:
            address = arena.address + number % _REQUESTS * slot_nbytes
            runs = stored[number].runs
            return files.read(runs, address=address, priority=Priority.FORWARD, label="ceiling")

        reads = (partial(read, number) for number in range(len(stored)))
        elapsed_s = timed(lambda: move(reads, _REQUESTS))()
        files.close()
        engine.close()
        arena.close()
        return sum(each.nbytes for each in stored) / elapsed_s

    def close(self) -> None:
        import infinity

        infinity.close(self._model)


if __name__ == "__main__":
    main()
