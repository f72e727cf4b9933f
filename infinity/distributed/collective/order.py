"""The order in which ranks begin the collective operations of a step. Pure: no clock, no thread.

Without a log the `Coordinator`, on rank 0, begins an operation when every rank has proposed it. A
collective operation needs every rank, and a rank that takes another path through the model never
enters it. So no rank begins an operation alone. A rank *proposes* it and continues; the coordinator
begins it when the last proposal has come, and sends this decision to all ranks in one order. A
proposal that cannot be matched is cancelled, and its ranks take the host path. A proposal cannot be
matched if

* a rank is done with the step and has not proposed it;
* every rank is done or waits for a proposal of its own: none of these would ever be matched;
* a rank withdraws it after a wait. A rank that has not proposed it by then is *absent*: no rank
  waits long for it again until it sends a message.

As in Horovod (Sergeev and Del Balso, 2018) one rank decides the order; cancelling is new.

The *agreed log* is the order of what ranks wanted in an earlier step, the same on all ranks. Every
rank issues all of its entries in its order, without a message. An entry is issued when this rank
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
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy

# The kind of an operation, and two numbers that identify its object. The same on all ranks.
Key = tuple[int, int, int]

# An entry that was of no use in so many steps running is left out.
PATIENT_STEPS = 4
# A rank reports no more lacking operations than this of one step.
MOST_LACKING = 256
# If what ranks proposed in a step makes no log, they propose nothing for some steps, twice as many
# every time.
_MOST_PAUSED = 64
# Nothing is fetched ahead of the first pass, which leaves weights on the device for the second one.
_FIRST_STEPS = 2
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
    """A rank's report of a step to the others. `digest` is that of what was played, and bit i of
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
            entry = self.entries[self.head]
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
) -> tuple[LogEntry, ...] | None:
    """Returns the log behind a step in which all ranks issued `played`, from what they report.

    It is what was of use: an operation that at least half of the ranks proposed; of the kinds in
    `unanimous`, one that all ranks proposed. Of what had no entry, all that was of use gets one. An
    entry stays until it was of no use in PATIENT_STEPS steps running: one step of another path, or
    without a batch, costs the log nothing. None: the ranks have not played the same.
    """
    digest = digest_of(played)
    if any(report.digest != digest for report in reports):
        return None
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


class StepOrder:
    """How a rank begins the operations of this step and of the next: by which log, or whether at
    all. The same on all ranks. Not thread-safe."""

    def __init__(self) -> None:
        self.step = 0  # The caller counts on, when this rank proposes nothing more in it.
        self.log: AgreedLog | None = None
        self.log_step = 0  # In which the log began.
        self.unanimous: set[int] = set()  # Kinds that are of no use without every rank.
        self._trace: list[LogEntry] = []  # What began in this step, without a log.
        self._aside: AgreedLog | None = None  # The log of the next step, see `set_aside`.
        self._is_aside = False
        self._paused_steps = 0
        self._pause = 1

    @property
    def is_on(self) -> bool:
        """Whether operations are proposed in this step."""
        return self._paused_steps == 0 and not self._is_aside

    def note_begun(self, key: Key, size: int) -> int:
        """Notes that an operation began without a log. Returns its index in what began."""
        self._trace.append(LogEntry(key, size))
        return len(self._trace) - 1

    def report(self, proposals: Iterable[tuple[Key, int, int | None]]) -> Report:
        """Returns what `report_of` makes of this step."""
        missed = 0 if self.log is None else self.log.missed
        return report_of(self._played(), missed, proposals, self.step)

    def _played(self) -> Sequence[LogEntry]:
        return self._trace if self.log is None else self.log.entries

    def begin_step(self, reports: Sequence[bytes]) -> bool:
        """Chooses the log of the step that begins, from the encoded reports of all ranks: what they
        wanted in the last one. If they have proposed in vain, pauses proposals for some steps,
        since proposals only cost time then. Returns False where the choice was set aside: the last
        step is this one."""
        if self._is_aside:
            self.log, self._aside, self._is_aside = self._aside, None, False
            return False
        played, has_log = self._played(), self.log is not None
        self.log, self._trace = None, []
        if self._paused_steps:
            self._paused_steps -= 1
            return True
        decoded = [Report.decode(content) for content in reports]
        entries = next_log(played, decoded, self.unanimous)
        if entries is None or self.step <= _FIRST_STEPS:
            return True
        if entries:
            self._pause = 1
            self.log, self.log_step = AgreedLog(entries), self.step
        elif not has_log and any(report.lacking for report in decoded):
            self._paused_steps, self._pause = self._pause, min(2 * self._pause, _MOST_PAUSED)
        return True

    def set_aside(self) -> None:
        """Keeps the choice of `begin_step` for its next call, and proposes nothing until then."""
        self.log, self._aside, self._is_aside = None, self.log, True


class Verb(IntEnum):
    """The control messages between ranks and the coordinator."""

    PROPOSE = 1
    AWAIT = 2  # The rank waits for the answer to its proposal.
    WITHDRAW = 3
    DONE = 4  # The rank proposes nothing more in this step.
    BEGIN = 5  # To all ranks, each of which has proposed it.
    CANCEL = 6  # To those that have.
    PLAY = 7  # To all ranks: issue the entries of the agreed log before this number.


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision for `ranks`: BEGIN or CANCEL."""

    verb: Verb
    step: int
    key: Key
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Step:
    """The proposals of one step that are not answered."""

    proposals: dict[Key, set[int]] = field(default_factory=dict)
    awaited: dict[int, Key] = field(default_factory=dict)  # By rank.
    done: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)


class Coordinator:
    """Answers the proposals of `count` ranks. Not thread-safe.

    A rank repeats a proposal only after the last one of that key was answered.
    """

    def __init__(self, count: int) -> None:
        self._count = count  # Of ranks.
        # A rank may be in the next step before the coordinator knows that all ranks are done.
        self._steps: dict[int, _Step] = {}

    def on_message(self, rank: int, verb: Verb, step: int, key: Key) -> list[Decision]:
        """Takes a control message. The messages of one rank come in the order in which it sent
        them.
        """
        # INV-22: an operation begins only when every rank has proposed it.
        now = self._steps.setdefault(step, _Step())
        answers: list[Decision] = []
        if verb is not Verb.WITHDRAW:
            now.absent.discard(rank)
        if verb is Verb.PROPOSE:
            proposed_by = now.proposals.setdefault(key, set())
            assert rank not in proposed_by and rank not in now.done
            proposed_by.add(rank)
            if len(proposed_by) == self._count:
                answers.append(self._answer(step, key, Verb.BEGIN))
            elif not now.done <= proposed_by:
                answers.append(self._answer(step, key, Verb.CANCEL))
        elif verb is Verb.DONE:
            now.done.add(rank)
            lacking = [proposal for proposal, ranks in now.proposals.items() if rank not in ranks]
            answers += [self._answer(step, proposal, Verb.CANCEL) for proposal in lacking]
        elif rank in now.proposals.get(key, ()):  # Else it was answered on the way.
            if verb is Verb.WITHDRAW:
                if rank in now.awaited:
                    now.absent.update(set(range(self._count)) - now.proposals[key])
                answers.append(self._answer(step, key, Verb.CANCEL))
            else:
                now.awaited[rank] = key
        answers += self._resolve_deadlock(step)
        if len(now.done) == self._count and not now.proposals:
            del self._steps[step]
        return answers

    def _resolve_deadlock(self, step: int) -> list[Decision]:
        now = self._steps[step]
        idle = now.awaited.keys() | now.done | now.absent
        if len(idle) < self._count:
            return []
        hopeless = list(dict.fromkeys(now.awaited.values()))
        return [self._answer(step, key, Verb.CANCEL) for key in hopeless]

    def _answer(self, step: int, key: Key, verb: Verb) -> Decision:
        now = self._steps[step]
        ranks = tuple(sorted(now.proposals.pop(key)))
        for rank in ranks:
            if now.awaited.get(rank) == key:
                del now.awaited[rank]
        return Decision(verb, step, key, ranks)
