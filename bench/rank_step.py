"""How long is a step over ranks, beside DDP, FSDP2 and DeepSpeed in one run on one machine?

    python bench/rank_step.py --path /mnt/nvme0 --save bench/results/rank_step.json
    python bench/rank_step.py --path /tmp --quick

A GPT-2-like model in fp32 trains over gloo, a thread a rank, AdamW without clipping, a sequence a
rank and step. Programs run in processes of their own. State on the host and state on NVMe of one
stage are alive together and take turns, some steps each: their ratio is asked for, and a machine
changes from minute to minute. The other programs run alone. A row has the median over the steps of
all turns, of the slowest rank, and what a rank sends through sockets of the engine's own and moves
to and from the drives in a step. "ours-N-where": ZeRO stage N, state where it says. "fsdp2" keeps
its shards on the host, as everything here, with the policy that it has for that. DeepSpeed takes
part where bench/peers/.venv-deepspeed is (deepspeed_aio.py --install), with its optimizer on the
host.

`--drive READ WRITE` (GB/s, of `infinity bench`) adds, for state on NVMe, the ratio of a step to the
longer of the same stage on the host and its bytes at the drive's speed: the median over the turns.

Every program keeps freed memory for the next allocation, as `infinity train` does: else a fifth of
the processor time is page faults. The share of early updates has settled after the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from common import Results, high_water_nbytes, say
from peer import VENV, Peer, answer

WARM_UP = 10
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
             "MALLOC_ARENA_MAX": "1"}  # fmt: skip
OURS = tuple(f"ours-{stage}-{where}" for where in ("host", "nvme") for stage in (1, 2, 3))
PROGRAMS = ("ddp", "fsdp2", "deepspeed-1", "deepspeed-2", "deepspeed-3", *OURS)
KINDS = ("parameters", "master", "moments", "gradients")
SHAPE = ("layers", "width", "vocabulary")
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
    parser.add_argument("--host", default="5GiB", help="of the node, for state on the host")
    parser.add_argument("--host-beside-nvme", default="6GiB")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--drive", type=float, nargs=2, metavar=("READ", "WRITE"))
    parser.add_argument("--quick", action="store_true", help="a small model, one turn: it works")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.worker:
        work(argparse.Namespace(**json.loads(words.worker)))
        return
    if words.quick:
        words.layers, words.width, words.vocabulary, words.sequence = 2, 64, 512, [32]
        words.ranks, words.turns, words.steps, words.host = words.ranks[:1], 1, 2, "512MiB"
        words.host_beside_nvme = "256MiB"
    results = Results(words.save, {k: v for k, v in vars(words).items() if k != "save"})
    for count in words.ranks:
        for sequence in words.sequence:
            measure(count, sequence, words, results)
    print(table(results.rows))


def measure(count: int, sequence: int, words: argparse.Namespace, results: Results) -> None:
    """Keeps a row for each program. Programs that fail are named and left out."""
    for programs in together(words.programs):
        say(f"{' and '.join(programs)}, {count} ranks, {sequence} tokens each")
        try:
            turns = take_turns(programs, count, sequence, words)
        except SystemExit:  # The reason was printed.
            say(f"{' and '.join(programs)}: left out")
            continue
        rows = {program: row_of(program, turns[program], count, sequence) for program in programs}
        for program, row in rows.items():
            on_host = program.replace("nvme", "host")
            if words.drive and program.endswith("nvme") and on_host in rows:
                read_s, write_s = (
                    count * row[name] / 1e9 / rate
                    for name, rate in zip(COUNTED[1:], words.drive, strict=True)
                )
                row["bytes_s"] = read_s + write_s
                row["ratio"] = statistics.median(
                    own / max(other, row["bytes_s"])
                    for own, other in zip(row["turns_s"], rows[on_host]["turns_s"], strict=True)
                )
            results.keep(row)


def together(programs: Sequence[str]) -> Iterator[list[str]]:
    """The programs that are alive at a time: both places of one stage, any other alone."""
    for program in programs:
        on_host, on_nvme = program.replace("nvme", "host"), program.replace("host", "nvme")
        if not program.startswith("ours") or not {on_host, on_nvme} <= set(programs):
            yield [program]
        elif program == on_host:
            yield [on_host, on_nvme]


def row_of(
    program: str, turns: list[list[dict[str, Any]]], count: int, sequence: int
) -> dict[str, Any]:
    """turns: what each rank has answered to each turn."""
    steps = [[max(at) for at in zip(*(r["steps_s"] for r in turn), strict=True)] for turn in turns]
    return {
        "name": f"{program} {count}x{sequence}", "program": program, "ranks": count,
        "sequence": sequence, "step_s": statistics.median(s for turn in steps for s in turn),
        "turns_s": [statistics.median(turn) for turn in steps],
        "steps_s": [*itertools.chain(*steps)],
        "loss": turns[-1][0]["loss"],
        "peak_rss_nbytes": max(rank["peak_rss_nbytes"] for rank in turns[-1]),
        **{n: statistics.mean(r[n] for turn in turns for r in turn) for n in COUNTED},
    }  # fmt: skip


def take_turns(
    programs: list[str], count: int, sequence: int, words: argparse.Namespace
) -> dict[str, list[list[dict[str, Any]]]]:
    """What each rank of each program answers to each turn. Exits if one fails."""
    with contextlib.ExitStack() as stack:
        groups = {}
        for program in programs:
            groups[program] = start(program, count, sequence, words, stack)
            ask(groups[program], WARM_UP)
        turns: dict[str, list[list[dict[str, Any]]]] = {program: [] for program in programs}
        for _ in range(words.turns):
            for program, ranks in groups.items():
                turns[program].append(ask(ranks, words.steps))
    return turns


def start(
    program: str, count: int, sequence: int, words: argparse.Namespace, stack: contextlib.ExitStack
) -> list[Peer]:
    """The ranks of a program, which `stack` ends. Exits where it is not installed."""
    settings = {k: v for k, v in vars(words).items() if k in SHAPE}
    settings["host"] = words.host if program.endswith("host") else words.host_beside_nvme
    scratch = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="infinity-rank-step-", dir=words.path)
    )
    settings |= {"program": program, "count": count, "sequence": sequence, "scratch": scratch}
    ranks = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        # DeepSpeed calls what PyTorch has renamed, every time.
        place |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        peer = Peer(
            __file__,
            ["--path", scratch, "--worker", json.dumps(settings | {"rank": rank})],
            venv=VENV if program.startswith("deepspeed") else None,
            variables=place | ALLOCATOR,
        )
        stack.callback(peer.close)
        stack.callback(peer.kill)
        ranks.append(peer)
    return ranks


def ask(ranks: list[Peer], steps: int) -> list[dict[str, Any]]:
    """What each rank answers to a turn of `steps`. Exits if one has ended."""
    for rank in ranks:
        rank.tell(steps)
    return [rank.hear() for rank in ranks]


# -- A rank ----------------------------------------------------------------------------------------


def work(words: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    answer("started")
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
    number = 0
    for line in sys.stdin:
        steps_s, before = [], counters()
        for _ in range(int(line)):
            generator = torch.Generator().manual_seed(1000 * number + words.rank)
            ids = torch.randint(0, words.vocabulary, (1, words.sequence), generator=generator)
            number += 1
            dist.barrier()
            begun_s = time.perf_counter()
            loss = step(ids)
            steps_s.append(time.perf_counter() - begun_s)
        dist.barrier()
        after = counters()
        content = {
            "steps_s": steps_s,
            "loss": loss,
            "peak_rss_nbytes": high_water_nbytes(),
            **{n: (after.get(n, 0) - before.get(n, 0)) / len(steps_s) for n in COUNTED},
        }
        answer(content)


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
