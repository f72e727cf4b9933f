"""A rung of the kill ladder: `infinity train` as one rank, which may die at a call of its own.

    python -c ladder.CODE CONFIG DIRECTORY PORT RANK COUNT VICTIM CALL SIGNAL [OPTIONS...]

Every call is counted through which ranks wait for each other: the meeting in the store, the links,
what waits beside them, and the operations of torch.distributed that a trainer makes itself; beside
these the build of the model and its first values. CALL is "NUMBER" among all of them, from 1, or
"NUMBER NAME" among those of a name; 0 is the start of the process, and -1 none.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

CODE = "from tests.multirank import ladder; ladder.main()"
_OF_TRAINERS = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object",
)  # fmt: skip


class Rungs:
    """Counts the calls of this rank, lists them in a file, and ends the rank at one of them."""

    def __init__(self, directory: str, rank: str, call: str, number: int) -> None:
        self._list = Path(directory, f"calls-{rank}")
        self._list.write_text("")
        self._note = Path(directory, "death")
        self._counts: Counter[str] = Counter()
        self._call, self._number = call, number
        self._take("the start", 0)

    def _take(self, name: str, count: int) -> None:
        with self._list.open("a") as calls:
            calls.write(f"{name}\n")
        self._counts[name] += 1
        if self._call in (str(count), f"{self._counts[name]} {name}"):
            self._note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), self._number)
            time.sleep(600)

    def count(self, owner: Any, name: str, what: Callable[..., str]) -> None:
        """Counts the calls of a function of `owner` from now on."""
        call = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self._take(what(*arguments), self._counts.total())
            return call(*arguments, **options)

        setattr(owner, name, counted)


def main() -> None:
    config, directory, port, rank, count, victim, call, number, *options = sys.argv[1:]
    rungs = Rungs(directory, rank, call if rank == victim else "", int(number))
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": count,
        "LOCAL_RANK": rank,
    }  # fmt: skip
    import torch.distributed as dist

    from infinity.distributed import setup
    from infinity.distributed.wire import connecting, transport
    from infinity.engine import build
    from infinity.tools.cli import main as command
    from infinity.tools.training import job, ranks

    rungs.count(connecting.Meeting, "all_gather", lambda _, what, *more: f"meet: {what}")
    rungs.count(transport.PeerTransport, "all_gather", lambda _, tag, *more: f"gather: {tag}")
    for module in (setup, ranks):
        rungs.count(module, "waiting_beside", lambda *unused: "a process group")
    rungs.count(job, "build_model", lambda *unused: "the model")
    rungs.count(build, "fill", lambda *unused: "first values")
    for name in _OF_TRAINERS:
        rungs.count(dist, name, lambda *unused, name=name: f"trainer: {name}")
    sys.argv = ["infinity", "train", config, *options]
    command()
