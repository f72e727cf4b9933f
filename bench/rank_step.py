"""How long is a step over ranks, beside DDP, FSDP2 and DeepSpeed in one run on one machine?

    python bench/rank_step.py --path /mnt/nvme0 --save bench/results/rank_step.json
    python bench/rank_step.py --path /tmp --quick

A GPT-2-like model in fp32 trains over gloo, a thread a rank, AdamW without clipping, a sequence a
rank and step. Every program runs in processes of its own and they take turns, round by round. A row
has the median over the steps of all rounds, of the slowest rank, and what a rank sends through
sockets of the engine's own and moves to and from the drives in a step. "ours-N-where": ZeRO stage
N, state where it says. "fsdp2" keeps its shards on the host, as everything here, with the policy
that it has for that. DeepSpeed takes part where bench/peers/.venv-deepspeed is (deepspeed_aio.py
--install), with its optimizer on the host.

`--drive READ WRITE` (GB/s, of `infinity bench`) adds, for state on NVMe, the ratio of a step to the
longer of the same stage on the host and its bytes at the drive's speed.

Every program keeps freed memory for the next allocation, as `infinity train` does: else a fifth of
the processor time is page faults. The share of early updates has settled after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from common import Results, high_water_nbytes, say
from peer import VENV, deepspeed_variables

WARM_UP = 10
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
             "MALLOC_ARENA_MAX": "1"}  # fmt: skip
OURS = tuple(f"ours-{stage}-{where}" for where in ("host", "nvme") for stage in (1, 2, 3))
PROGRAMS = ("ddp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3", *OURS)
KINDS = ("parameters", "master", "moments", "gradients")
SHAPE = ("layers", "width", "vocabulary", "steps")
COUNTED = ("ranks_socket_nbytes", "nvme_read_nbytes", "nvme_write_nbytes")

Step = Callable[[Any], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--path", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--sequence", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--host", default="16GiB", help="of the node, for state on the host")
    parser.add_argument("--host-beside-nvme", default="6GiB")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drive", type=float, nargs=2, metavar=("READ", "WRITE"))
    parser.add_argument("--quick", action="store_true", help="a small model, one round: it works")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        work(argparse.Namespace(**json.loads(words.worker)))
        return
    if words.quick:
        words.layers, words.width, words.vocabulary, words.sequence = 2, 64, 512, [32]
        words.ranks, words.rounds, words.steps, words.host = words.ranks[:1], 1, 2, "512MiB"
        words.host_beside_nvme = "256MiB"
    results = Results(words.save, {k: v for k, v in vars(words).items() if k != "save"})
    for count in words.ranks:
        for sequence in words.sequence:
            measure(count, sequence, words, results)
    print(table(results.rows))


def measure(count: int, sequence: int, words: argparse.Namespace, results: Results) -> None:
    """Keeps a row for each program. Programs that fail are named and left out."""
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for number in range(words.rounds):
        for program in words.programs:
            if number and program not in found:
                continue
            try:
                found.setdefault(program, []).append(run(program, count, sequence, words))
            except RuntimeError as error:
                found.pop(program, None)
                say(f"{program} with {count} ranks is left out: {error}")
    rows: dict[str, dict[str, Any]] = {}
    for program, rounds in found.items():
        steps = [
            max(at) for each in rounds for at in zip(*(r["steps_s"] for r in each), strict=True)
        ]
        row = {
            "name": f"{program} {count}x{sequence}", "program": program, "ranks": count,
            "sequence": sequence, "step_s": statistics.median(steps), "steps_s": steps,
            "loss": rounds[0][0]["loss"],
            "peak_rss_nbytes": max(rank["peak_rss_nbytes"] for each in rounds for rank in each),
            **{n: statistics.mean(r[n] for e in rounds for r in e) for n in COUNTED},
        }  # fmt: skip
        on_host = rows.get(program.replace("nvme", "host"))
        if program.endswith("nvme") and words.drive and on_host:
            read_s, write_s = (
                count * row[name] / 1e9 / rate
                for name, rate in zip(COUNTED[1:], words.drive, strict=True)
            )
            row["bytes_s"] = read_s + write_s
            row["ratio"] = row["step_s"] / max(on_host["step_s"], row["bytes_s"])
        rows[program] = row
        results.keep(row)


def run(program: str, count: int, sequence: int, words: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank has answered. Raises RuntimeError if one has failed."""
    is_deepspeed = program.startswith("deepspeed")
    if is_deepspeed and not VENV.exists():
        raise RuntimeError(f"there is no {VENV}")
    say(f"{program}, {count} ranks, {sequence} tokens each")
    variables = os.environ | (deepspeed_variables(VENV) if is_deepspeed else {})
    variables["PYTHONWARNINGS"] = "ignore"  # DeepSpeed calls what PyTorch has renamed, every time.
    python = str(VENV / "bin/python") if is_deepspeed else sys.executable
    settings = {
        k: v for k, v in vars(words).items() if k in ("layers", "width", "vocabulary", "steps")
    }
    settings["host"] = words.host if program.endswith("host") else words.host_beside_nvme
    with tempfile.TemporaryDirectory(prefix="infinity-rank-step-", dir=words.path) as scratch:
        settings |= {"program": program, "count": count, "sequence": sequence, "scratch": scratch}
        ranks = []
        for rank in range(count):
            worker = [python, __file__, "--path", scratch, "--worker"]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            ranks.append(
                subprocess.Popen(
                    [*worker, json.dumps(settings | {"rank": rank})],
                    env={**variables, **place, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                )
            )
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"its ranks ended with {codes}, see above")
        return [json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(count)]


# -- A rank ----------------------------------------------------------------------------------------


def work(words: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    store = dist.FileStore(str(Path(words.scratch, "rendezvous")), words.count)
    dist.init_process_group("gloo", store=store, rank=words.rank, world_size=words.count)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=words.layers, n_embd=words.width, n_head=max(1, words.width // 64),
            vocab_size=words.vocabulary, n_positions=words.sequence, tie_word_embeddings=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    kind, *rest = words.program.split("-")
    builders = {"ours": ours, "ddp": ddp, "fsdp2": fsdp2, "deepspeed": deepspeed}
    step, counters = builders[kind](model, words, *rest)
    times: list[float] = []
    loss, before = 0.0, {}
    for number in range(WARM_UP + words.steps):
        if number == WARM_UP:
            before = counters()
        generator = torch.Generator().manual_seed(1000 * number + words.rank)
        ids = torch.randint(0, words.vocabulary, (1, words.sequence), generator=generator)
        dist.barrier()
        begun_s = time.perf_counter()
        loss = step(ids)
        times.append(time.perf_counter() - begun_s)
    after = counters()
    answer = {
        "steps_s": times[WARM_UP:],
        "loss": loss,
        "peak_rss_nbytes": high_water_nbytes(),
        **{n: (after.get(n, 0) - before.get(n, 0)) / words.steps for n in COUNTED},
    }
    Path(words.scratch, f"{words.rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # Groups and engines of every program end with the process.


def step_of(model: Any, optimizer: Any) -> Step:
    def step(ids: Any) -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def plain_step(model: Any) -> Step:
    import torch

    return step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def ddp(model: Any, words: argparse.Namespace) -> tuple[Step, Callable[[], dict[str, float]]]:
    from torch.nn.parallel import DistributedDataParallel

    return plain_step(DistributedDataParallel(model)), dict


def fsdp2(model: Any, words: argparse.Namespace) -> tuple[Step, Callable[[], dict[str, float]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options = {
        "mesh": init_device_mesh("cpu", (words.count,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return plain_step(model), dict


def deepspeed(
    model: Any, words: argparse.Namespace, stage: str
) -> tuple[Step, Callable[[], dict[str, float]]]:
    import deepspeed as package

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": int(stage), "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 10**9,
    }
    engine, *_ = package.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )

    def step(ids: Any) -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step, dict


def ours(
    model: Any, words: argparse.Namespace, stage: str, where: str
) -> tuple[Step, Callable[[], dict[str, float]]]:
    import infinity

    config: dict[str, Any] = {
        "distributed": {"zero_stage": int(stage)},
        "tiers": {"host": {"capacity": words.host}, "device": {"kind": "cpu"}},
        "placement": dict.fromkeys(KINDS, where),
        "precision": {"compute": "float32"},
    }
    if where == "nvme":
        swap = {"path": f"{words.scratch}/swap", "capacity": "64GiB"}
        config["tiers"]["nvme"] = [swap]
    model = infinity.offload(model, config)
    step = step_of(model, infinity.AdamW(model, lr=1e-4))
    return step, infinity.engine_of(model).counters.snapshot


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks, tokens | program | s a step | by sockets | by drives | of ceiling | loss |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        drives = (row["nvme_read_nbytes"] + row["nvme_write_nbytes"]) / 1e6
        is_ours = row["program"].startswith("ours")
        lines.append(
            f"| {row['ranks']} x {row['sequence']} | {row['program']} | {row['step_s']:.3f} | "
            + (f"{row['ranks_socket_nbytes'] / 1e3:,.1f} KB | " if is_ours else "- | ")
            + (f"{drives:,.0f} MB | " if drives else "- | ")
            + (f"{row['ratio']:.2f} | " if "ratio" in row else "- | ")
            + f"{row['loss']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
