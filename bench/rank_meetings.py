"""How long does a meeting of ranks take, beside an all-gather of gloo and the store of c10d?

    python bench/rank_meetings.py --ranks 2 4

Ranks of this machine meet with a content of some bytes each, as in `optimizer.step()`: by the
transport (`distributed/wire/transport.py`), by `all_gather` of a gloo group, and by the c10d store,
in which each rank sets its content and gets those of the others. The three are taken in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from infinity.distributed.group import find_group, share_memory
from infinity.observe import Counters
from infinity.sizes import KIB, MIB
from infinity.storage.arena import Arena

SIZES = (16, 64 * KIB, MIB, 16 * MIB)
_STORE_NBYTES = MIB  # Larger values are no use of a store.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=30)
    words = parser.parse_args()
    context = multiprocessing.get_context("fork")
    for count in words.ranks:
        ports = context.SimpleQueue()
        others = [
            context.Process(target=run, args=(rank, count, words.turns, ports))
            for rank in range(1, count)
        ]
        for other in others:
            other.start()
        run(0, count, words.turns, ports)
        for other in others:
            other.join()


def run(rank: int, count: int, turns: int, ports: Any) -> None:
    torch.set_num_threads(1)
    port = 0 if rank == 0 else ports.get()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    for _ in range(count - 1 if rank == 0 else 0):
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    topology = find_group()
    assert topology is not None and topology.links is not None
    transport = topology.links
    share_memory(topology, Counters(), Arena(MIB, is_shared=True))
    transport.serve(Shelf())
    for nbytes in SIZES:
        content = bytes(nbytes)
        local = torch.zeros(nbytes, dtype=torch.uint8)
        gathered = [torch.empty_like(local) for _ in range(count)]

        def by_store(turn: int, content: bytes = content) -> None:
            store.set(f"{len(content)} {turn} {rank}", content)
            for other in range(count):
                assert len(store.get(f"{len(content)} {turn} {other}")) == len(content)

        ways: dict[str, Callable[[int], object]] = {
            "transport": lambda turn, content=content: transport.all_gather("meeting", content),
            "gloo": lambda turn, gathered=gathered, local=local: dist.all_gather(gathered, local),
        }
        if nbytes <= _STORE_NBYTES:
            ways["store"] = by_store
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(turns):
            for way, meet in ways.items():
                transport.all_gather("begin", b"")
                start_s = time.monotonic()
                meet(turn)
                seconds[way].append(time.monotonic() - start_s)
        if rank == 0:
            medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}
            found = "  ".join(f"{way} {1e3 * median:8.3f} ms" for way, median in medians.items())
            print(f"{count} ranks, {nbytes:9,} bytes each: {found}", flush=True)
    transport.close()
    dist.destroy_process_group()


class Shelf:
    """Serves nothing."""


if __name__ == "__main__":
    main()
