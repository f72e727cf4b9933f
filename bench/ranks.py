"""What does a rank keep, and what does it send, by stage and number of ranks?

    python bench/ranks.py --save bench/results/ranks.json --plot bench/results/plots/ranks.png

A GPT-2-like model trains over gloo on this machine, once for every stage and number of ranks. Bytes
are counted, not estimated: what rests on the tiers of a rank, the most that was lent out of its
arena, the most that waited in its reduce buffer, and what it sent and received in one step. Beside
them stand the formulas of ZeRO with our formats: per parameter 2 or 4 bytes of weight (bf16 or
fp32), 4 of gradient, 8 of moments, and beside bf16 2 of residual. Stage 1 sums gradients apart from
those of the rank, 4/N more. No figure here depends on the speed of the machine, but for the reduce
buffer: it is larger where ranks share processors and run apart.

A second table has what crosses the link between a rank's host and its device in a step of stage 3,
on simulated devices with room for half of the model: one by one, every device gets all weights
from its own host; between devices, each host brings 1/N (distributed.exchange).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import print_table, save

STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--compute", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--host", default="2GiB", help="host budget of the node")
    parser.add_argument("--path", type=Path, help="a directory: state on NVMe instead of the host")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--plot", type=Path)
    words = parser.parse_args()
    rows = [
        measure(stage, count, words)
        for count in words.ranks
        for stage in ((1, 2, 3) if count > 1 else (3,))
    ]
    transport = [
        measure(3, count, words, exchange)
        for count in words.ranks
        for exchange in (("one_sided", "collective") if count > 1 else ("one_sided",))
    ]
    report(rows, transport, words)
    if words.plot:
        plot(rows, transport, words.compute, words.plot)


def measure(
    stage: int, count: int, words: argparse.Namespace, exchange: str | None = None
) -> dict[str, Any]:
    """One line: the rank with the most of each, which is what a machine must have. With `exchange`,
    on simulated devices."""
    with tempfile.TemporaryDirectory(prefix="infinity-ranks-") as scratch:
        torch.multiprocessing.spawn(
            train, args=(count, stage, words, exchange, scratch), nprocs=count, join=True
        )
        found = [json.loads((Path(scratch) / f"{r}.json").read_text()) for r in range(count)]
    numel = found[0]["num_parameters"]
    return {
        "stage": stage if count > 1 else None,
        "ranks": count,
        "exchange": exchange,
        "num_parameters": numel,
        "resting_nbytes": max(each["resting_nbytes"] for each in found),
        "formula_nbytes": formula(stage, count, words.compute) * numel,
        "arena_high_water_nbytes": max(each["arena_high_water_nbytes"] for each in found),
        "reduce_buffer_high_water_nbytes": max(
            each["reduce_buffer_high_water_nbytes"] for each in found
        ),
        "sent_nbytes": sum(each["sent_nbytes"] for each in found) / count,
        "gathered_nbytes": sum(each["gathered_nbytes"] for each in found) / count,
        "socket_nbytes": max(each["socket_nbytes"] for each in found),
        "link_in_nbytes": max(each["link_in_nbytes"] for each in found),
        "link_out_nbytes": max(each["link_out_nbytes"] for each in found),
        "collectives": min(each["collectives"] for each in found),
        "data_parallel_nbytes": 2 * (count - 1) / count * numel * item_nbytes(words.compute),
    }


def formula(stage: int, count: int, compute: str) -> float:
    """Bytes per parameter that rest on one rank: what every rank keeps, and its part."""
    weight = float(item_nbytes(compute))
    if count == 1:
        return 16.0
    kept = {1: weight + 4, 2: weight, 3: 0.0}[stage]
    divided = 16.0 if stage == 3 else 16.0 - weight  # Gradients that are summed included.
    return kept + divided / count


def item_nbytes(compute: str) -> int:
    return 2 if compute == "bfloat16" else 4


def train(
    rank: int,
    count: int,
    stage: int,
    words: argparse.Namespace,
    exchange: str | None,
    scratch: str,
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    import infinity
    from infinity.distributed.collective.exchange import Buffers
    from infinity.testing import SimulatedDevice

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(scratch) / "rendezvous"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    shape = GPT2Config(
        n_layer=words.layers, n_embd=words.width, n_head=4, vocab_size=512,
        n_positions=words.sequence,
    )  # fmt: skip
    model = GPT2LMHeadModel(shape)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    config: dict[str, Any] = {
        "distributed": {"zero_stage": stage},
        "tiers": {"host": {"capacity": words.host}, "device": {"kind": "cpu"}},
        "precision": {"compute": words.compute},
    }
    if words.path:
        config["tiers"]["nvme"] = [{"path": str(words.path / "swap"), "capacity": words.host}]
    device = None
    if exchange is not None:
        device = SimulatedDevice(rank, delay_s=0.0)
        config["distributed"]["exchange"] = exchange
        block_nbytes = sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
        block_nbytes *= item_nbytes(words.compute)
        buffers = Buffers(count, block_nbytes, block_nbytes, block_nbytes)
        kept_nbytes = buffers.nbytes if exchange == "collective" else 0
        window_nbytes = num_parameters * item_nbytes(words.compute) // 2
        config["tiers"]["device"]["capacity"] = window_nbytes + kept_nbytes
    infinity.offload(model, config, device=device)
    engine = infinity.engine_of(model)
    optimizer = infinity.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    before: dict[str, float] = {}
    for step in range(STEPS):
        if step == STEPS - 1:
            before = engine.counters.snapshot()
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(0, 512, (1, words.sequence), generator=generator)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = engine.counters.snapshot()
    placed = engine.placed_nbytes()
    found = {
        "num_parameters": num_parameters,
        "resting_nbytes": sum(sum(tiers.values()) for tiers in placed.values()),
        "arena_high_water_nbytes": engine.pool._host.high_water_nbytes,
        "reduce_buffer_high_water_nbytes": after.get("ranks_reduce_buffer_high_water_nbytes", 0),
        "sent_nbytes": grown(before, after, "ranks_reduced_nbytes"),
        "gathered_nbytes": grown(before, after, "ranks_gathered_nbytes"),
        "socket_nbytes": grown(before, after, "ranks_socket_nbytes"),
        "link_in_nbytes": grown(before, after, "device_in_nbytes"),
        "link_out_nbytes": grown(before, after, "device_out_nbytes"),
        "collectives": grown(before, after, "ranks_collectives"),
    }
    (Path(scratch) / f"{rank}.json").write_text(json.dumps(found))
    engine.close()
    dist.destroy_process_group()


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0) - before.get(name, 0)


def report(
    rows: list[dict[str, Any]], transport: list[dict[str, Any]], words: argparse.Namespace
) -> None:
    for row in rows:
        sent = row["sent_nbytes"] + row["gathered_nbytes"]
        row["volume_share"] = sent / row["data_parallel_nbytes"] if row["ranks"] > 1 else None

    def each(name: str, places: int = 2) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[name] / row['num_parameters']:.{places}f}"

    columns: dict[str, Any] = {
        "ranks": "{ranks}", "stage": lambda row: str(row["stage"] or "-"),
        "rests": each("resting_nbytes"), "formula": each("formula_nbytes"),
        "arena": each("arena_high_water_nbytes"),
        "reduce buffer": each("reduce_buffer_high_water_nbytes"), "sent": each("sent_nbytes"),
        "received": each("gathered_nbytes"), "data parallel": each("data_parallel_nbytes"),
        "volume": lambda row: (
            "-" if row["volume_share"] is None else f"{row['volume_share']:.2f}"
        ),
        "through sockets": each("socket_nbytes", 4),
    }  # fmt: skip
    print_table("bytes per parameter, of the rank that has most", columns, rows)
    columns = {
        "ranks": "{ranks}", "exchange": "{exchange}", "to the device": each("link_in_nbytes"),
        "to the host": each("link_out_nbytes"), "operations of all ranks": "{collectives:.0f}",
    }  # fmt: skip
    title = "bytes per parameter over a rank's own link, stage 3, one step"
    print_table(title, columns, transport)
    save(words.save, words, rows=rows, links=transport)


def plot(
    rows: list[dict[str, Any]], transport: list[dict[str, Any]], compute: str, path: Path
) -> None:
    """Bytes per parameter over the number of ranks: counted as points, formulas as lines; and what
    comes to a device over its own link."""
    from infinity.tools.pictures.timeline import find_pyplot

    pyplot = find_pyplot()
    figure, (axis, crossed) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    counts = sorted({row["ranks"] for row in rows})
    for stage in (1, 2, 3):
        mine = [row for row in rows if row["stage"] in (stage, None)]
        (line,) = axis.plot(
            counts, [formula(stage, count, compute) for count in counts], "--", linewidth=1
        )
        axis.plot(
            [row["ranks"] for row in mine],
            [row["resting_nbytes"] / row["num_parameters"] for row in mine],
            "o",
            color=line.get_color(),
            label=f"stage {stage}",
        )
    alone = next(row for row in transport if row["ranks"] == 1)
    alone_nbytes = alone["link_in_nbytes"] / alone["num_parameters"]
    for exchange, fall in (("one_sided", 0), ("collective", 1)):
        (line,) = crossed.plot(
            counts, [alone_nbytes / count**fall for count in counts], "--", linewidth=1
        )
        mine = [row for row in transport if row["ranks"] == 1 or row["exchange"] == exchange]
        crossed.plot(
            [row["ranks"] for row in mine],
            [row["link_in_nbytes"] / row["num_parameters"] for row in mine],
            "o",
            color=line.get_color(),
            label=exchange.replace("_", "-"),
        )
    most = counts[-1]
    resting = {
        row["stage"]: row["resting_nbytes"] / row["num_parameters"]
        for row in rows
        if row["ranks"] in (1, most)
    }
    axis.set_title(
        f"Stage 3: {resting[None]:.0f} bytes a parameter alone, {resting[3]:.1f} on one of {most}"
    )
    across = {row["exchange"]: row["link_in_nbytes"] for row in transport if row["ranks"] == most}
    crossed.set_title(
        f"Collectives: {across['collective'] / across['one_sided']:.2f} of the bytes over a link"
    )
    axis.set_ylabel("bytes per parameter that rest on a rank")
    axis.legend(title="counted; formula dashed")
    crossed.set_ylabel("bytes per parameter and step to the device")
    crossed.legend(title="stage 3, counted; constant and 1/N dashed")
    for each in (axis, crossed):
        each.set_xscale("log", base=2)
        each.set_xticks(counts, [str(count) for count in counts])
        each.set_ylim(0)
        each.set_xlabel("ranks")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
