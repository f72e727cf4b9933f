"""Ranks as processes of this machine, over gloo."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from tests.support import forked


def _run(
    rank: int,
    count: int,
    directory: str,
    ports: Any,
    results: Any,
    work: Callable[..., Any],
    arguments: Any,
    enter: Callable[[int], str] | None,
) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # No collection looks at what the server has imported.
    tempfile.tempdir = directory
    torch.set_num_threads(1)
    address = "127.0.0.1" if enter is None else enter(rank)
    os.environ["MASTER_ADDR"] = address
    # The kernel chooses the port; one that is only seen to be free may be another's a moment later.
    port = 0 if rank == 0 else ports.get()
    store = dist.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False)
    for _ in range(count - 1 if rank == 0 else 0):
        ports.put(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        # Pickled here: the queue would share the memory of tensors, which ends with this process.
        results.put((rank, pickle.dumps(work(rank, *arguments)), None))
    except BaseException as error:
        # What an interpreter does with an exception nobody catches: multiprocessing does not.
        sys.excepthook(type(error), error, error.__traceback__)
        text = f"{type(error).__name__}: {error}"
        results.put((rank, None, (text, traceback.format_exc())))
    results.close()
    results.join_thread()
    os._exit(0)  # Groups of ranks that ended otherwise are not waited for.


def seem_on_node(node: int, **facts: Any) -> None:
    """Gives this process a boot of its node, so that ranks of another node share no memory with it.

    facts: other fields of `Machine`. An address at which all ranks are makes nodes of one machine's
    processes.
    """
    from infinity.distributed import group
    from infinity.distributed.wire import addresses

    own = dataclasses.replace(addresses.this_machine(), boot=f"boot {node}", **facts)
    group.this_machine = lambda: own  # type: ignore[assignment]


class Ranks:
    """`count` processes that run `work(rank, *arguments)`. Ends them all when it is left.

    `enter(rank)` runs first in each process, and returns the address at which it finds rank 0.
    `tempfile.gettempdir()` there is a directory of these ranks alone, and is removed with them.
    """

    def __init__(
        self,
        count: int,
        work: Callable[..., Any],
        *arguments: Any,
        enter: Callable[[int], str] | None = None,
    ) -> None:
        context = forked.context()
        self._directory = tempfile.TemporaryDirectory(prefix="infinity-ranks-")
        self._results = context.Queue()
        self._ports = context.SimpleQueue()
        self.processes: list[BaseProcess] = [
            context.Process(
                target=_run,
                args=(
                    rank,
                    count,
                    self._directory.name,
                    self._ports,
                    self._results,
                    work,
                    arguments,
                    enter,
                ),
                daemon=True,
            )
            for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._directory.cleanup()

    def outcomes(self, ranks: set[int]) -> dict[int, tuple[Any, Any]]:
        """(answer, (error, traceback) or None) of each of `ranks`, as they end."""
        found: dict[int, tuple[Any, Any]] = {}
        deadline_s = time.monotonic() + forked.TIME_LIMIT_S
        while missing := sorted(ranks - found.keys()):
            codes = {rank: self.processes[rank].exitcode for rank in missing}
            try:
                rank, answer, error = self._results.get(timeout=1.0)
                found[rank] = answer and pickle.loads(answer), error
            except queue.Empty:
                # What a rank said before it ended has been read by now.
                assert not any(code is not None for code in codes.values()), f"died: {codes}"
                assert time.monotonic() < deadline_s, f"ranks {missing} hang"
        return found


def run_ranks(
    count: int,
    work: Callable[..., Any],
    *arguments: Any,
    enter: Callable[[int], str] | None = None,
) -> list[Any]:
    """What `work(rank, *arguments)` answers on each of `count` ranks. Raises when one failed."""
    with Ranks(count, work, *arguments, enter=enter) as ranks:
        outcomes = ranks.outcomes(set(range(count)))
    for rank, (_, error) in sorted(outcomes.items()):
        assert error is None, f"rank {rank}: {error[1]}"
    return [outcomes[rank][0] for rank in range(count)]
