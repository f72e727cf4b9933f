"""The order in which ranks begin the collective operations of a step. Pure: no clock, no thread.

A collective operation needs every rank, and a rank that takes another path through the model never
enters it. The *agreed log* is the order of what ranks wanted in an earlier step, the same on all
ranks. Every rank issues all of its entries in its order, without a message; what is not in it takes
the host path. An entry is issued when this rank
has proposed it. It is issued without a proposal, by a stand-in, when this rank cannot propose it
any more before something that it waits for. After the step, ranks tell each other what they missed
of the log and what they lacked in it (`Report`), which makes the next log (`next_log`).
"""

from __future__ import annotations

import bisect
import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

# The kind of an operation, and two numbers that identify its object. The same on all ranks.
Key = tuple[int, int, int]

# An entry that was of no use in so many steps running is left out.
PATIENT_STEPS = 4
# A rank reports no more lacking operations than this of one step.
MOST_LACKING = 1024
_DIGEST_NBYTES = 8
_HEAD = struct.Struct(f"<{_DIGEST_NBYTES}sI")  # Digest, bytes of what was missed.
_LACKING = struct.Struct("<IIIQQ")  # Place, key, size.


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An operation of the log. `size` tells a stand-in how large it is; its kind says how."""

    key: Key
    size: int = 0
    idle_steps: int = 0  # Running, in which it was of no use.


@dataclass(frozen=True, slots=True)
class Lacking:
    """An operation that a rank needed and that had no entry. It belongs before entry `place`."""

    place: int
    key: Key
    size: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank tells the others of a step. `digest` is that of what was played, and bit i of
    `missed` says that a stand-in issued entry i. `lacking`: in the order of the rank's proposals.
    """

    digest: bytes
    missed: int = 0
    lacking: tuple[Lacking, ...] = ()

    def encode(self) -> bytes:
        """Returns the report as bytes for `decode`."""
        missed = self.missed.to_bytes((self.missed.bit_length() + 7) // 8, "little")
        lacking = [_LACKING.pack(lack.place, *lack.key, lack.size) for lack in self.lacking]
        return b"".join([_HEAD.pack(self.digest, len(missed)), missed, *lacking])

    @staticmethod
    def decode(content: bytes) -> Report:
        """Returns the report of a rank: the inverse of `encode`."""
        digest, nbytes = _HEAD.unpack_from(content)
        end = _HEAD.size + nbytes
        lacking = tuple(
            Lacking(place, (kind, index, what), size)
            for place, kind, index, what, size in _LACKING.iter_unpack(content[end:])
        )
        return Report(digest, int.from_bytes(content[_HEAD.size : end], "little"), lacking)


class AgreedLog:
    """One step of the log. Not thread-safe. A key is proposed again only after it was issued or
    released."""

    def __init__(self, entries: Sequence[LogEntry]) -> None:
        self.entries = tuple(entries)
        self.head = 0  # Entries before it are issued.
        self.missed = 0  # Bit i: entry i was issued without a proposal.
        self._required = 0  # Entries before it are issued without a proposal.
        self._passed = 0  # Entries before it are no more to be proposed by this rank.
        self._late: Counter[Key] = Counter()  # Issued without a proposal that may still come.
        self._bound: dict[int, Key] = {}
        self._places: dict[Key, int] = {}  # Of what is bound.
        self._free: dict[Key, list[int]] = {}  # Entries that are neither issued nor bound.
        for index, entry in enumerate(self.entries):
            self._free.setdefault(entry.key, []).append(index)

    def bind(self, key: Key) -> int | None:
        """Notes a proposal of this rank. Returns the index of its entry; None if the log lacks
        one, or if other ranks did not wait for the proposal: a later entry is of a later use."""
        if self._late[key] or not self._free.get(key):
            self._late[key] -= bool(self._late[key])
            return None
        index = self._free[key].pop(0)
        self._bound[index], self._places[key] = key, index
        return index

    def release(self, key: Key) -> None:
        """Takes a proposal back whose entry is not issued."""
        index = self._places.pop(key)
        del self._bound[index]
        bisect.insort(self._free[key], index)

    def await_proposal(self, key: Key) -> None:
        """Notes that this rank waits for its proposal, and proposes nothing until then."""
        self._passed = max(self._passed, self._places[key])
        self.require(self._passed)

    def require(self, index: int) -> None:
        """Lets the entries before `index` be issued, also those that this rank has not proposed."""
        self._required = max(self._required, index)

    def issue(self) -> Iterator[tuple[LogEntry, bool]]:
        """Yields the entries that may be issued now, in order, and whether this rank has proposed
        them."""
        while self.head < len(self.entries):
            is_bound = self.head in self._bound
            if not is_bound and self.head >= self._required:
                return
            entry = self.entries[self.head]  # INV-22: every rank issues each one, in order.
            if is_bound:
                del self._bound[self.head], self._places[entry.key]
            else:
                self._free[entry.key].pop(0)
                self.missed |= 1 << self.head
                self._late[entry.key] += self.head >= self._passed
            self.head += 1
            yield entry, is_bound


def digest_of(entries: Sequence[LogEntry]) -> bytes:
    """Returns 8 bytes that ranks with one log have in common."""
    text = "\n".join(f"{entry.key} {entry.size} {entry.idle_steps}" for entry in entries)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_NBYTES).digest()


def report_of(
    played: Sequence[LogEntry],
    missed: int,
    proposals: Iterable[tuple[Key, int, int | None]],
    step: int,
) -> Report:
    """Returns this rank's report of a step, from its proposals in their order: key, size, and the
    index of the entry or None. `missed`: as of `AgreedLog`.

    An operation without an entry belongs behind the entry that the rank proposed last before it. It
    was not lacking if the rank missed an entry of its key: that came too early in this step. Of
    more than MOST_LACKING, the rank reports those that a hash of key and `step` chooses: the same
    keys on all ranks, others in another step.
    """
    early = numpy.flatnonzero(_bits(missed, len(played))).tolist()
    too_early = Counter(played[index].key for index in early)
    place, lacking = 0, []
    for key, size, found in proposals:
        if found is not None:
            place = found + 1
        elif too_early[key]:
            too_early[key] -= 1
        else:
            lacking.append(Lacking(place, key, size))
    if len(lacking) > MOST_LACKING:
        keys = sorted({lack.key for lack in lacking}, key=lambda key: (hash((step, key)), key))
        chosen = set(keys[:MOST_LACKING])
        lacking = [lack for lack in lacking if lack.key in chosen][:MOST_LACKING]
    return Report(digest_of(played), missed, tuple(lacking))


def next_log(
    played: Sequence[LogEntry], reports: Sequence[Report], unanimous: Collection[int]
) -> tuple[LogEntry, ...]:
    """Returns the log behind a step in which all ranks issued `played`, from what they report.

    It is what was of use: an operation that at least half of the ranks proposed; of the kinds in
    `unanimous`, one that all ranks proposed. Of what had no entry, all that was of use gets one. An
    entry stays until it was of no use in PATIENT_STEPS steps running: one step of another path, or
    without a batch, costs the log nothing. The log is empty if ranks have not played the same.
    """
    digest = digest_of(played)
    if any(report.digest != digest for report in reports):
        return ()
    count = len(reports)

    def is_of_use(key: Key, num_ranks: int) -> bool:
        return num_ranks == count if key[0] in unanimous else 2 * num_ranks >= count

    gained: dict[int, list[LogEntry]] = {}
    for lacking in _merged(len(played), reports, is_of_use):
        gained.setdefault(lacking.place, []).append(LogEntry(lacking.key, lacking.size))
    num_missed = numpy.zeros(len(played), numpy.int64)
    for report in reports:
        num_missed += _bits(report.missed, len(played))
    log: list[LogEntry] = []
    for index, (entry, missing) in enumerate(zip(played, num_missed.tolist(), strict=True)):
        log += gained.get(index, ())
        idle_steps = 0 if is_of_use(entry.key, count - missing) else entry.idle_steps + 1
        if idle_steps < PATIENT_STEPS:
            is_as_before = idle_steps == entry.idle_steps
            log.append(entry if is_as_before else replace(entry, idle_steps=idle_steps))
    return (*log, *gained.get(len(played), ()))


def _merged(
    num_played: int, reports: Sequence[Report], is_of_use: Callable[[Key, int], bool]
) -> list[Lacking]:
    """Returns what was of use of what ranks lacked, by place, in the order of the ranks.

    Ranks lacked one operation where they lacked one key between the same entries of their own, or,
    of what is left, somewhere. Ranks that missed little know its place best, so they come first.
    """
    wanted = _wanted(reports, is_of_use)
    merged: list[Lacking] = []
    keys: list[Key] = []  # Of `merged`, as are the next two.
    places: list[int] = []
    counts: list[int] = []  # Ranks that lacked it there.
    for report in sorted(reports, key=lambda rank: rank.missed.bit_count()):
        at = 0  # Behind the last operation of this rank.
        own = _own_entries(report, num_played) if report.lacking else []
        for lacking in (lack for lack in report.lacking if wanted[lack.key]):
            low = bisect.bisect_left(places, lacking.place, at)
            high = bisect.bisect_right(places, own[bisect.bisect_left(own, lacking.place)], low)
            try:
                at = keys.index(lacking.key, low, high)
                counts[at] += 1
            except ValueError:
                at = low
                place = max(lacking.place, places[at - 1] if at else 0)
                merged.insert(at, replace(lacking, place=place))
                keys.insert(at, lacking.key)
                places.insert(at, place)
                counts.insert(at, 1)
            at += 1
    chosen = []
    for index in sorted(range(len(merged)), key=lambda index: (-counts[index], index)):
        if wanted[keys[index]]:
            wanted[keys[index]] -= 1
            chosen.append(index)
    return [merged[index] for index in sorted(chosen)]


def _wanted(reports: Sequence[Report], is_of_use: Callable[[Key, int], bool]) -> Counter[Key]:
    """Returns how many further entries of each key would have been of use."""
    num_ranks: Counter[tuple[Key, int]] = Counter()
    for report in reports:
        of_rank = Counter(lack.key for lack in report.lacking)
        num_ranks.update((key, nth) for key, number in of_rank.items() for nth in range(number))
    return Counter(key for (key, _), number in num_ranks.items() if is_of_use(key, number))


def _own_entries(report: Report, num_played: int) -> list[int]:
    """Returns the entries that the rank has proposed, ascending, and `num_played`."""
    return [*numpy.flatnonzero(_bits(report.missed, num_played) == 0).tolist(), num_played]


def _bits(mask: int, count: int) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """Returns the lowest bits of a mask: uint8, shape (count,), bit i at i."""
    content = (mask & (1 << count) - 1).to_bytes((count + 7) // 8, "little")
    packed = numpy.frombuffer(content, numpy.uint8)
    return numpy.unpackbits(packed, count=count, bitorder="little")
