"""Collectives between the ranks of a torchrun job, held against a plain exchange of neighbours.

    torchrun --nproc-per-node 2 bench/collectives.py --size 64MiB --rounds 3 --json

Bandwidth is the bytes that every rank has to send and receive over its link, as nccl-tests count it
("bus bandwidth"): all-gather and reduce-scatter move (n - 1) / n of the full tensor, all-reduce
twice that.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from infinity.sizes import MIB, align_down, format_nbytes
from infinity.tools.bench.measure import Comparison, Contender, Measurement, clock, run_rounds
from infinity.tools.cli.bench import parse_size, tell

_SIZES_NBYTES = (1 * MIB, 16 * MIB, 256 * MIB)
# Named so since torch 2.13, which warns about the names before.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankProcesses:
    """This process among the others, and memory for one collective of about `nbytes` (fp32)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.rank, self.count, self.device = dist.get_rank(), dist.get_world_size(), device
        numel = align_down(nbytes // 4, 2 * self.count)
        self.nbytes = 4 * numel
        self.full = torch.zeros(numel, device=device)
        self.shard = torch.zeros(numel // self.count, device=device)


def collective(name: str, ranks: RankProcesses) -> Contender:
    """One operation. Every rank calls `run` at the same time; the slowest rank's time counts."""
    operation, is_right, share = _OPERATIONS[name]

    def transfer() -> None:
        operation(ranks)
        _finish(ranks.device)

    def run() -> Measurement:
        ranks.full.fill_(ranks.rank + 1)
        ranks.shard.fill_(ranks.rank + 1)
        _finish(ranks.device)
        dist.barrier()
        seconds, cpu_s = clock(transfer)
        slowest = torch.tensor([seconds, float(not is_right(ranks))], device=ranks.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        nbytes = int(ranks.nbytes * share(ranks.count))
        return Measurement(nbytes, slowest[0].item(), cpu_s, ok=not slowest[1].item())

    return Contender(name, run)


def sweep(most_nbytes: int, rounds: int, device: torch.device) -> Iterator[Comparison]:
    """Alternates between every collective and the exchange, per size. The same on every rank."""
    for nbytes in _SIZES_NBYTES:
        ranks = RankProcesses(min(nbytes, most_nbytes), device)
        *subjects, exchange = [collective(name, ranks) for name in _OPERATIONS]
        case = f"{format_nbytes(ranks.nbytes)}, {ranks.count} ranks, {dist.get_backend()}"
        compared = Comparison("collectives", case, subjects, [exchange], {"nbytes": ranks.nbytes})
        yield run_rounds(compared, rounds=rounds)


def _all_gather(ranks: RankProcesses) -> None:
    _gather_single(ranks.full, ranks.shard)


def _is_gathered(ranks: RankProcesses) -> bool:
    wanted = torch.arange(1.0, ranks.count + 1, device=ranks.device)
    return bool((ranks.full.view(ranks.count, -1) == wanted[:, None]).all())


def _reduce_scatter(ranks: RankProcesses) -> None:
    _scatter_single(ranks.shard, ranks.full)


def _all_reduce(ranks: RankProcesses) -> None:
    dist.all_reduce(ranks.full)


def _total(ranks: RankProcesses) -> float:
    return ranks.count * (ranks.count + 1) / 2


def _exchange(ranks: RankProcesses) -> None:
    """Each rank sends all to the next and receives from the one before: no arithmetic."""
    source = (ranks.rank - 1) % ranks.count
    target = (ranks.rank + 1) % ranks.count
    half = ranks.full.numel() // 2
    operations = [
        dist.P2POp(dist.isend, ranks.full[:half], target),
        dist.P2POp(dist.irecv, ranks.full[half : 2 * half], source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _is_exchanged(ranks: RankProcesses) -> bool:
    half = ranks.full.numel() // 2
    source = (ranks.rank - 1) % ranks.count
    return bool((ranks.full[half : 2 * half] == source + 1).all())


# name -> operation, comparison, and the share of the full tensor that one link carries.
_OPERATIONS: dict[
    str,
    tuple[Callable[[RankProcesses], None], Callable[[RankProcesses], bool], Callable[[int], float]],
] = {
    "all-gather": (_all_gather, _is_gathered, lambda n: (n - 1) / n),
    "reduce-scatter": (
        _reduce_scatter,
        lambda ranks: bool((ranks.shard == _total(ranks)).all()),
        lambda n: (n - 1) / n,
    ),
    "all-reduce": (
        _all_reduce,
        lambda ranks: bool((ranks.full == _total(ranks)).all()),
        lambda n: 2 * (n - 1) / n,
    ),
    "exchange": (_exchange, _is_exchanged, lambda _: 0.5),
}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Every rank measures; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=_SIZES_NBYTES[-1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        results = list(sweep(words.size, words.rounds, device))
        if dist.get_rank() == 0:
            environment = {"command": sys.argv, "ranks": dist.get_world_size()}
            tell(results, environment, as_json=words.json)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
