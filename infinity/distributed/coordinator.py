"""The coordinator of collective operations: begins one when every rank has proposed it.

A collective operation needs every rank, and a rank that takes another path through the model never
enters it. So no rank begins an operation alone. A rank *proposes* it and continues. The
coordinator, on rank 0, begins it when the last proposal has come, and sends this decision to all
ranks in one order. A proposal that cannot be matched is cancelled, and its ranks take the host
path. A proposal cannot be matched if

* a rank is done with the step and has not proposed it;
* every rank is done or waits for a proposal of its own: none of these would ever be matched;
* a rank withdraws it after a wait. A rank that has not proposed it by then is *absent*: no rank
  waits long for it again until it sends a message.

As in Horovod (Sergeev and Del Balso, 2018) one rank decides the order; cancelling is new. Pure: no
clock and no thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

# The kind of an operation, and two numbers that identify its object. The same on all ranks.
Key = tuple[int, int, int]


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
