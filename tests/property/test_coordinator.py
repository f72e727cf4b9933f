"""The coordinator of collectives: whatever ranks propose, in whatever order messages arrive, no
rank hangs, and all start the same operations."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.distributed.collective.order import Coordinator, Key, Verb

NONE = (0, 0, 0)


class Rank:
    """Needs keys one after the other, proposes some of them ahead of their use, and `guess` first,
    which it may never need."""

    def __init__(self, rank: int, needs: list[list[int]], ahead: int, guess: int | None) -> None:
        self.rank = rank
        self.steps = [deque((0, each, 0) for each in step) for step in needs]
        self.ahead = ahead
        self.guess = guess
        self.step = 0
        self.pending: set[Key] = set()
        self.there: set[Key] = set()  # Answered, and not used yet.
        self.is_blocked = False
        self.has_withdrawn = False
        self.said: deque[tuple[Verb, int, Key]] = deque()
        self.heard: deque[tuple[Verb, Key]] = deque()
        self.begun: list[Key] = []
        self.is_done = False

    def can_move(self) -> bool:
        return not self.is_blocked and not (self.is_done and self.pending)

    def move(self) -> None:
        """Proposes, and then uses or waits for the next key; or ends its step."""
        if self.is_done:
            self.is_done, self.step = False, self.step + 1
            return
        needs = self.steps[self.step]
        wanted = list(needs)[: 1 + self.ahead]
        if self.guess is not None:
            wanted.insert(0, (0, self.guess, 0))
            self.guess = None
        for key in wanted:
            if key not in self.pending and key not in self.there:
                self.pending.add(key)
                self.said.append((Verb.PROPOSE, self.step, key))
        if wanted and not needs:
            return
        if not needs:
            self.said.append((Verb.DONE, self.step, NONE))
            self.is_done = True
        elif needs[0] in self.there:
            self.there.discard(needs.popleft())
        else:
            self.said.append((Verb.AWAIT, self.step, needs[0]))
            self.is_blocked, self.has_withdrawn = True, False

    def withdraw(self) -> None:
        self.said.append((Verb.WITHDRAW, self.step, self.steps[self.step][0]))
        self.has_withdrawn = True

    def on_message(self) -> None:
        verb, key = self.heard.popleft()
        assert key in self.pending, "an answer to nothing"
        self.pending.discard(key)
        self.there.add(key)
        if verb is Verb.BEGIN:
            self.begun.append(key)
        if self.is_blocked and key == self.steps[self.step][0]:
            self.is_blocked = False

    @property
    def is_over(self) -> bool:
        return self.step == len(self.steps) and not self.pending


@given(data=st.data(), count=st.integers(2, 4), steps=st.integers(1, 2), alike=st.booleans())
@settings(max_examples=200, deadline=None)
def test_ranks_always_end_and_start_the_same_collectives(
    data: st.DataObject, count: int, steps: int, alike: bool
) -> None:
    """Rank 0 may wait for all others by other means before it ends a step: then it is only by
    impatience that these go on."""
    needs = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=steps, max_size=steps)
    common = data.draw(needs)
    ranks = [
        Rank(
            r,
            common if alike else data.draw(needs),
            data.draw(st.integers(0, 2)),
            None if alike else data.draw(st.none() | st.integers(0, 3)),
        )
        for r in range(count)
    ]
    has_barrier = not alike and data.draw(st.booleans())
    coordinator, num_cancelled = Coordinator(count), 0

    def carry(rank: Rank) -> None:
        nonlocal num_cancelled
        verb, step, key = rank.said.popleft()
        for decision in coordinator.on_message(rank.rank, verb, step, key):
            assert (decision.verb is Verb.BEGIN) <= (len(decision.ranks) == count)
            num_cancelled += decision.verb is Verb.CANCEL
            for told in decision.ranks:
                ranks[told].heard.append((decision.verb, decision.key))

    def over(rank: Rank) -> bool:
        return rank.is_over and not rank.said

    source = data.draw(st.randoms(use_true_random=False))
    impatience = data.draw(st.sampled_from((0.0, 0.05)[has_barrier:]))

    def can_move(rank: Rank) -> bool:
        at_barrier = rank is ranks[0] and not rank.is_done and not rank.steps[rank.step]
        is_late = any(each.step <= rank.step and each.steps[rank.step] for each in ranks[1:])
        return rank.can_move() and not (has_barrier and at_barrier and is_late)

    withdrawals = idle = 0
    while not all(over(rank) for rank in ranks):
        moves = [lambda r=r: carry(r) for r in ranks if r.said]
        moves += [lambda r=r: r.on_message() for r in ranks if r.heard]
        moves += [lambda r=r: r.move() for r in ranks if not r.is_over and can_move(r)]
        idle = 0 if moves else idle + 1
        assert idle <= 1000 * bool(impatience), "all ranks wait for each other"
        if moves:
            source.choice(moves)()
        for rank in ranks:
            if rank.is_blocked and not rank.has_withdrawn and source.random() < impatience:
                rank.withdraw()
                withdrawals += 1
    assert all(rank.begun == ranks[0].begun for rank in ranks)
    if alike and not withdrawals and len({rank.ahead for rank in ranks}) == 1:
        assert num_cancelled == 0, "alike, and cancelled"
        assert bool(ranks[0].begun) == any(common)


def test_a_step_that_is_over_leaves_nothing_behind() -> None:
    coordinator = Coordinator(2)
    for step in range(3):
        coordinator.on_message(1, Verb.PROPOSE, step, (0, 7, 0))
        [decision] = coordinator.on_message(0, Verb.DONE, step, NONE)
        assert decision.verb is Verb.CANCEL and decision.ranks == (1,)
        assert coordinator.on_message(1, Verb.DONE, step, NONE) == []
    assert not coordinator._steps
