"""How fast does DeepSpeed ZeRO-3 train beside this engine, everything on the same drive?

    python bench/peers/deepspeed_aio.py --install            makes bench/peers/.venv-deepspeed, once
    python bench/peers/deepspeed_train.py --path /mnt/nvme0   compares, prints a table

A GPT-2-like model in bfloat16 with an fp32 master, or all in fp32 (`--compute`), AdamW, clipping
by the global norm, activations recomputed per block, micro-batches of one sequence. Both keep
parameters and optimizer state on NVMe. Gradients of this engine rest on the host, or on NVMe as
DeepSpeed's do (`--gradients`). Each side runs in a process of its own, and they take turns in
blocks of consecutive steps, so that steps can hide transfers of their neighbours. The first step
of a block is not counted, and all transfers of a side are over when its block ends. Both have the
same allocator settings; `--plain-allocator` leaves DeepSpeed with glibc's defaults, as it is
shipped. DeepSpeed's settings are the best of those that were tried on the machine of `results/`.
On its CPU accelerator it does not read parameters again that it has put on NVMe, which is to its
advantage here.

Peak memory is counted from after the start, once the whole model that each builds is gone. Both
start from the same weights and see the same batches, so their losses must go the same way.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peer import VENV, Peer, answer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import environment, high_water_nbytes, moved_since, print_table, process_io, say

VOCABULARY = 50257
# What `infinity train` sets for itself: large blocks stay in the process.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "34359738368",
             "MALLOC_TOP_PAD_": "67108864"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=Path.cwd())
    parser.add_argument("--venv", type=Path, default=VENV)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--compute", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--host", default="2GiB", help="host budget of this engine")
    parser.add_argument(
        "--gradients", default="host", choices=["host", "nvme"], help="of this engine"
    )
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=4, help="more steps of the first block")
    parser.add_argument("--plain-allocator", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--worker", choices=["deepspeed", "infinity"], help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker is not None:
        serve({"deepspeed": DeepSpeed, "infinity": Infinity}[words.worker](words), words)
        return
    with tempfile.TemporaryDirectory(dir=words.path, prefix="infinity-peer-") as scratch:
        compare(words, Path(scratch))


# -- The two sides, each in its own process --------------------------------------------------------


def plain_model(words: argparse.Namespace, **options: Any) -> Any:
    """Only transformers and torch: both sides build it, with the same weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(
        n_layer=words.layers, n_embd=words.width, n_head=words.width // 64,
        n_positions=words.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, **options,
    )  # fmt: skip
    return GPT2LMHeadModel(shape).train()


def batches_of(step: int, words: argparse.Namespace) -> list[Any]:
    """Four random batches in turn, which can be learnt by heart."""
    import torch

    source = torch.Generator().manual_seed(step % 4)
    shape = words.accumulation, 1, words.sequence
    return list(torch.randint(VOCABULARY, shape, generator=source))


class Infinity:
    def __init__(self, words: argparse.Namespace) -> None:
        import infinity
        from infinity.tools.training.process import keep_freed_memory

        keep_freed_memory()
        config = {
            "tiers": {"host": {"capacity": words.host}, "nvme": [{"path": str(words.scratch)}]},
            "placement": {
                **dict.fromkeys(("parameters", "master", "moments"), "nvme"),
                "gradients": words.gradients,
            },
            "precision": {"compute": words.compute},
        }
        self._accumulate = infinity.forward_backward
        self._words = words
        self.model = infinity.offload(plain_model(words), config)
        self.optimizer = infinity.AdamW(
            self.model, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0
        )
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, number: int) -> float:
        parts = batches_of(number, self._words)
        losses = self._accumulate(
            self.model,
            lambda ids: self.model(input_ids=ids, labels=ids).loss / len(parts),
            parts,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(map(float, losses))

    def finish(self) -> None:
        """Waits until all transfers are over."""
        from infinity.engine.registry import engine_of

        engine_of(self.model).flush()


class DeepSpeed:
    def __init__(self, words: argparse.Namespace) -> None:
        import deepspeed

        # What the environment says of the allocator is read when the process starts.
        assert words.plain_allocator or "MALLOC_MMAP_THRESHOLD_" in os.environ
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611"
        )
        deepspeed.init_distributed("gloo")
        nvme = {"device": "nvme", "nvme_path": str(words.scratch)}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": words.accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": words.compute == "bfloat16"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.0},
            },
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 10_000_000,
                "stage3_param_persistence_threshold": 0,
                "offload_param": {**nvme, "buffer_count": 6, "buffer_size": 60_000_000},
                "offload_optimizer": {
                    **nvme, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True,
                },
            },
            "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True,
                    "intra_op_parallelism": 1, "single_submit": False},
            "steps_per_print": 10**9,
        }  # fmt: skip
        self._words = words
        model = plain_model(words)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

    def step(self, number: int) -> float:
        total = 0.0
        for ids in batches_of(number, self._words):
            loss = self.engine(input_ids=ids, labels=ids).loss
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss) / self._words.accumulation
        return total

    def finish(self) -> None:
        """Lets the last group's write end: it is pipelined, and no call waits for it."""
        time.sleep(0.5)


def serve(side: Any, words: argparse.Namespace) -> None:
    """Answers each line, the number of a block's first step and the number of its steps, with the
    medians of what its steps took, without the first one, and with the last loss."""
    forget_peak()
    answer({"num_parameters": side.num_parameters})
    for line in sys.stdin:
        first, count = json.loads(line)
        found = []
        for number in range(first, first + count):
            io, start_s = process_io(), time.perf_counter()
            loss = side.step(number)
            found.append({"seconds": time.perf_counter() - start_s, **moved_since(io)})
        side.finish()
        medians = {name: statistics.median(each[name] for each in found[1:]) for name in found[0]}
        answer({**medians, "loss": loss, "peak_rss_nbytes": high_water_nbytes()})


def forget_peak() -> None:
    """What is said of memory is of training: the whole model, which each side is given at first, is
    let go and does not count (proc(5), clear_refs)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


# -- Turns -----------------------------------------------------------------------------------------


def start(name: str, words: argparse.Namespace, scratch: Path) -> Peer:
    """One of the two, in a process of its own."""
    is_peer = name == "deepspeed"
    (scratch / name).mkdir()
    options = [
        text
        for key in ("layers", "width", "sequence", "accumulation", "compute", "host", "gradients")
        for text in (f"--{key}", str(getattr(words, key)))
    ]
    if words.plain_allocator:
        options.append("--plain-allocator")
    return Peer(
        __file__,
        ["--worker", name, "--scratch", str(scratch / name), *options],
        venv=words.venv if is_peer else None,
        variables=ALLOCATOR if is_peer and not words.plain_allocator else None,
    )


def compare(words: argparse.Namespace, scratch: Path) -> None:
    sides = {name: start(name, words, scratch) for name in ("infinity", "deepspeed")}
    num_parameters = sides["infinity"].hello["num_parameters"]
    rounds = []
    step = 0
    for number in range(words.rounds):
        count = 1 + words.steps + words.warm_up * (number == 0)
        rounds.append({name: side.ask([step, count]) for name, side in sides.items()})
        step += count
        told = ", ".join(
            f"{name} {each['seconds']:.2f} s, loss {each['loss']:.3f}"
            for name, each in rounds[-1].items()
        )
        say(f"round {number + 1} of {words.rounds}: {told}")
    for side in sides.values():
        side.close()
    tokens = words.accumulation * words.sequence
    results: dict[str, Any] = {}
    for side in sides:
        each = {
            name: statistics.median(float(turn[side][name]) for turn in rounds)
            for name in rounds[0][side]
        }
        results[side] = {**each, "rounds": [turn[side] for turn in rounds]}
    ratio = statistics.median(
        turn["deepspeed"]["seconds"] / turn["infinity"]["seconds"] for turn in rounds
    )
    columns = {
        "": "{side}", "step s": "{seconds:.2f}",
        "tokens/s": lambda row: f"{tokens / row['seconds']:.0f}",
        "read B/p": lambda row: f"{row['read_nbytes'] / num_parameters:.1f}",
        "written B/p": lambda row: f"{row['written_nbytes'] / num_parameters:.1f}",
        "peak RSS GB": lambda row: f"{row['peak_rss_nbytes'] / 1e9:.1f}",
        "last loss": lambda row: f"{rounds[-1][row['side']]['loss']:.3f}",
    }  # fmt: skip
    title = (
        f"{num_parameters:,} parameters, {words.compute}, "
        f"{words.accumulation} x {words.sequence}, gradients of infinity on {words.gradients}"
    )
    print_table(title, columns, [{"side": side, **row} for side, row in results.items()])
    print(f"infinity is {ratio:.2f} times as fast ({len(rounds)} pairs of blocks)")
    if words.save is not None:
        settings = {name: str(value) for name, value in vars(words).items() if name != "save"}
        written = {
            "settings": settings, "environment": environment(), "ratio": ratio, "results": results,
        }  # fmt: skip
        words.save.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
