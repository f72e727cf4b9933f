"""The agreed log: the order of a step's collective operations, as one rank plays it.

The log is the order in which the operations of an earlier step began, which is the same on all
ranks. Every rank issues all of its entries in its order, without a message. An entry is issued when
this rank has proposed it. It is issued without a proposal, by a stand-in, when this rank cannot
propose it any more before something that it waits for. Pure: no clock and no thread.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence

from infinity.distributed.coordinator import Key

# A rank whose step missed the log more often than once in RARE entries asks for a new log.
_RARE = 2
NO_LOG = bytes(8)


class AgreedLog:
    """One step of the log. Not thread-safe. A key is proposed again only after it was issued or
    released."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)
        self.head = 0  # Entries before it are issued.
        self._required = 0  # Entries before it are issued without a proposal.
        self.num_lacking = 0  # Proposals without an entry.
        self._num_missed = 0  # These, and entries without a proposal.
        self._bound: dict[int, Key] = {}
        self._places: dict[Key, int] = {}  # Of what is bound.
        self._free: dict[Key, list[int]] = {}  # Entries that are neither issued nor bound.
        for index, key in enumerate(self.keys):
            self._free.setdefault(key, []).append(index)

    def bind(self, key: Key) -> bool:
        """Notes a proposal of this rank. Returns whether the log has an entry for it."""
        if not self._free.get(key):
            self.num_lacking += 1
            self._num_missed += 1
            return False
        index = self._free[key].pop(0)
        self._bound[index], self._places[key] = key, index
        return True

    def release(self, key: Key) -> None:
        """Takes a proposal back whose entry is not issued."""
        index = self._places.pop(key)
        del self._bound[index]
        bisect.insort(self._free[key], index)

    def await_proposal(self, key: Key) -> None:
        """Notes that this rank waits for its proposal, and proposes nothing until then."""
        self.require(self._places[key])

    def require(self, index: int) -> None:
        """Lets the entries before `index` be issued, also those that this rank has not proposed."""
        self._required = max(self._required, index)

    def issue(self) -> Iterator[tuple[Key, bool]]:
        """Yields the entries that may be issued now, in order, and whether this rank has proposed
        them."""
        while self.head < len(self.keys):
            is_bound = self.head in self._bound
            if not is_bound and self.head >= self._required:
                return
            key = self.keys[self.head]
            if is_bound:
                del self._bound[self.head], self._places[key]
            else:
                self._free[key].pop(0)
                self._num_missed += 1
            self.head += 1
            yield key, is_bound

    def digest(self) -> bytes:
        """Returns the digest of the log; NO_LOG if this rank took another path in this step."""
        return NO_LOG if self._num_missed * _RARE > len(self.keys) else digest_of(self.keys)


def digest_of(keys: Sequence[Key]) -> bytes:
    """Returns 8 bytes that ranks with one log have in common; NO_LOG for no operation."""
    text = "\n".join(map(str, keys)).encode()
    return hashlib.blake2b(text, digest_size=len(NO_LOG)).digest() if keys else NO_LOG
