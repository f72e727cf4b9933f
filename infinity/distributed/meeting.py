"""Where ranks meet before they have connections: the key-value store of torch.distributed.

Ranks meet here twice, to learn each other's addresses, and then connect (`group.py`). What they do
together later goes over the connections, which show the life of a rank; the store does not.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any

from infinity.errors import ConfigError, RankError

_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.05  # Between two looks into the store.
_WORD_S = 2.0  # A rank that has lost another one keeps the store, or its port, for so long.


class Meeting:
    """One meeting of the ranks of a group, in `store`. `of_job`: the number of each in the job.

    A rank that comes to a meeting alone waits for its n-th meeting in this store, as the others
    do. After `end` nothing of it is in the store.
    """

    def __init__(self, store: Any, rank: int, of_job: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._of_job = of_job
        self._counter = f"infinity/meetings/{of_job[rank]}"
        with self._naming_host():
            self._number = store.add(self._counter, 1)
        self._kept: list[str] = []

    def all_gather(self, what: str, content: Any, timeout_s: float, remedy: str = "") -> list[Any]:
        """Returns every rank's content, in rank order. Raises RankError for a rank that does not
        come in this time, and for one that another rank has lost."""
        keys = [f"{self._place}/{what}/{rank}" for rank in range(len(self._of_job))]
        deadline_s, look_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
        with self._naming_host():
            self._store.set(keys[self._rank], pickle.dumps(content))
            self._kept.append(keys[self._rank])
            while not self._store.check(keys):
                self._raise_word()
                if time.monotonic() > deadline_s:
                    late = next(r for r, key in enumerate(keys) if not self._store.check([key]))
                    number = self._of_job[late]
                    raise RankError(
                        number, f"rank {number} has not come within {timeout_s:.0f} s{remedy}"
                    )
                time.sleep(look_s)
                look_s = min(2 * look_s, _LAST_LOOK_S)
            return [pickle.loads(self._store.get(key)) for key in keys]

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """A block that refuses on all ranks, or in which this rank may lose another one. The ranks
        that have not come so far find the same error in the store, in place of this rank, which
        ends, and may keep the store."""
        try:
            yield
        except ConfigError:
            with contextlib.suppress(RankError):
                self.all_gather("refused", None, _WORD_S)
            raise
        except RankError as error:
            with contextlib.suppress(RuntimeError):
                if not self._store.check([f"{self._place}/lost"]):
                    self._store.set(f"{self._place}/lost", pickle.dumps((error.rank, error.cause)))
                    time.sleep(_WORD_S)
            with contextlib.suppress(RuntimeError):
                self._raise_word()
            raise

    def end(self, *, is_over: bool) -> None:
        """Removes what this rank has left in the store. Unless the meeting `is_over`, the next one
        of this rank is this one again."""
        with contextlib.suppress(RuntimeError):
            for key in self._kept:
                self._store.delete_key(key)
            if not is_over:
                self._store.add(self._counter, -1)

    @property
    def _place(self) -> str:
        ranks = "-".join(map(str, (self._of_job[0], len(self._of_job), self._of_job[-1])))
        return f"infinity/{ranks}/{self._number}"

    def _raise_word(self) -> None:
        if self._store.check([f"{self._place}/lost"]):
            raise RankError(*pickle.loads(self._store.get(f"{self._place}/lost")))

    @contextlib.contextmanager
    def _naming_host(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # All that a store raises.
            raise RankError(
                0, f"rank 0, or the launcher, which keeps the store of torch.distributed, is gone: "
                f"{' '.join(str(error).split())[:200]}",
            ) from error  # fmt: skip
