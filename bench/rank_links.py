"""How long does a rank wait for weights while it gives gradients away?

    python bench/rank_links.py --rate 1000

Two processes of this machine, joined as ranks are. The first gives parts of gradients until much
waits to be sent, and then asks for a shard, as a prefetch in the backward does; what is measured is
the time until the shard is there, beside that of a shard asked for while nothing is given. The two
are taken in turn. `--rate` paces each socket (MB/s), as a network would; without it bytes go as
fast as the two processors copy them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from infinity.distributed.wire import connecting
from infinity.distributed.wire.protocol import Peer
from infinity.distributed.wire.transport import PeerTransport
from infinity.sizes import MIB

_SO_MAX_PACING_RATE = 47  # socket(7); not in the module `socket`.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--given", type=int, default=48, help="MiB that wait to be sent")
    parser.add_argument("--shard", type=int, default=4, help="MiB that are asked for")
    parser.add_argument("--rate", type=int, help="MB/s of a socket")
    parser.add_argument("--turns", type=int, default=15)
    words = parser.parse_args()
    listeners, places = zip(*(connecting.listen("127.0.0.1", 8) for _ in range(2)), strict=True)
    peers = [Peer(rank, "here", rank, place, bytes(32)) for rank, place in enumerate(places)]
    context = multiprocessing.get_context("fork")
    other = context.Process(target=run, args=(1, peers, listeners[1], words))
    other.start()
    run(0, peers, listeners[0], words)
    other.join()


class Shelf:
    """Has a shard, and takes what it is given."""

    def __init__(self, nbytes: int) -> None:
        self._shard = bytes(nbytes)

    def serve(self, unit: int, piece: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        return len(self._shard), [memoryview(self._shard)]

    def deliver(
        self,
        rank: int,
        tensor: int,
        dtype: int,
        generation: int,
        nbytes: int,
        receive: Callable[[memoryview], None],
    ) -> None:
        receive(memoryview(bytearray(nbytes)))


def run(rank: int, peers: list[Peer], listener: socket.socket, words: Any) -> None:
    if words.rate:
        pace_sockets(words.rate * 1_000_000)
    transport = PeerTransport(rank, peers, listener)
    transport.open()
    transport.serve(Shelf(words.shard * MIB))
    sink, part = bytearray(words.shard * MIB), bytes(MIB)
    waits: dict[int, list[float]] = {0: [], words.given: []}
    for turn in range(2 * words.turns):
        given = words.given * (turn % 2)
        transport.all_gather("begin", b"")
        if rank == 0:
            for tensor in range(given):
                transport.put(1, tensor, 0, 0, memoryview(part), meanwhile=lambda: None)
            start_s = time.monotonic()
            transport.get(1, 0, 0, [memoryview(sink)]).wait()
            waits[given].append(time.monotonic() - start_s)
        transport.all_gather("end", b"")
    if rank == 0:
        for given, seconds in waits.items():
            median_ms = 1e3 * statistics.median(seconds)
            print(f"{words.shard} MiB asked for behind {given:3} MiB given: {median_ms:7.2f} ms")
    transport.close()


def pace_sockets(rate_nbytes: int) -> None:
    prepare = connecting._prepare

    def prepared(connection: socket.socket) -> None:
        prepare(connection)
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate_nbytes)

    connecting._prepare = prepared


if __name__ == "__main__":
    main()
