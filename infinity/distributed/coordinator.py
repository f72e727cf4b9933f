"""When all ranks do something together: once each of them has offered to, in one order for all.

A collective operation needs every rank, and a rank that has gone another way through the model
never comes. So nobody begins one alone. A rank *offers* it and goes on; the coordinator, on rank 0,
lets it begin when the last offer is there, and says so to all in one order. An offer that cannot be
met is called off, and whoever made it goes another way. It cannot be met when

* a rank has said that it is done with the step and did not offer it;
* every rank is done or waits for an offer of its own: none of these would ever be met;
* somebody has waited long enough and takes it back. Who has not come until then is *absent*, and
  nobody is waited for long again on its account, until it says something.

As in Horovod (Sergeev and Del Balso, 2018) a rank of its own decides the order; that offers can be
called off is new. Pure: it hears and answers, and knows no clock and no thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

# What is offered: its kind, and two numbers that say of what. The same on all ranks.
Key = tuple[int, int, int]


class Verb(IntEnum):
    """What ranks and the coordinator say to each other."""

    OFFER = 1
    AWAIT = 2  # The rank does nothing else until its offer is answered.
    WITHDRAW = 3
    DONE = 4  # The rank offers nothing more in this step.
    BEGIN = 5  # To all ranks, each of which has offered it.
    CANCEL = 6  # To those that have.


@dataclass(frozen=True, slots=True)
class Decision:
    """What the coordinator says to `ranks`: BEGIN or CANCEL."""

    verb: Verb
    step: int
    key: Key
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Step:
    """Offers of one step that are not answered."""

    proposals: dict[Key, set[int]] = field(default_factory=dict)
    awaited: dict[int, Key] = field(default_factory=dict)  # By rank.
    done: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)


class Coordinator:
    """Answers the offers of `count` ranks. Not thread-safe.

    A rank makes an offer again only when the last one of that key was answered.
    """

    def __init__(self, count: int) -> None:
        self._count = count  # Of ranks.
        # A rank may be in the next step before the coordinator has heard that all are done.
        self._steps: dict[int, _Step] = {}
        self.begun = 0
        self.cancelled = 0

    def on_message(self, rank: int, verb: Verb, step: int, key: Key) -> list[Decision]:
        """Takes one word of one rank; words of a rank come in their order."""
        # INV-22: an operation begins only when every rank has proposed it.
        now = self._steps.setdefault(step, _Step())
        answers: list[Decision] = []
        if verb is not Verb.WITHDRAW:
            now.absent.discard(rank)
        if verb is Verb.OFFER:
            offered_by = now.proposals.setdefault(key, set())
            assert rank not in offered_by and rank not in now.done
            offered_by.add(rank)
            if len(offered_by) == self._count:
                answers.append(self._answer(step, key, Verb.BEGIN))
            elif not now.done <= offered_by:
                answers.append(self._answer(step, key, Verb.CANCEL))
        elif verb is Verb.DONE:
            now.done.add(rank)
            lacking = [each for each, ranks in now.proposals.items() if rank not in ranks]
            answers += [self._answer(step, each, Verb.CANCEL) for each in lacking]
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
        if verb is Verb.BEGIN:
            self.begun += 1
        else:
            self.cancelled += 1
        return Decision(verb, step, key, ranks)
