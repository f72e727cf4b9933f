"""64 ranks play the agreed log over communicators with the rules of NCCL, whatever ranks leave out.

The ranks are threads with the engine's own `Collectives`. A step gathers the units' weights for the
forward and for the backward, and sums the gradients, as the engine does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from typing_extensions import override

from infinity.distributed.collective import issuing
from infinity.distributed.collective.buckets import SUMMING
from infinity.distributed.collective.collectives import Collectives
from infinity.distributed.collective.order import Key
from infinity.distributed.collective.process_groups import DeviceGroups
from infinity.errors import InfinityError, RankError
from infinity.observe import Counters
from infinity.tiers.device import Copy
from tests.support.fake_nccl import (
    STUCK_S,
    Aborted,
    FakeCommunicator,
    FakeGroup,
    Kernel,
    OrderMismatch,
)

COUNT, NUM_UNITS, NBYTES = 64, 5, 16  # Bytes that a rank has of a unit.
GATHERING = 0
GATHER_S, SUM_S, COMPUTE_S = 0.6, 0.7, 1.0
FIRST_AGREED = 3  # The steps before it give no log.


Communicators = tuple[FakeCommunicator, FakeCommunicator]  # Of gathers, and of sums.


def duration_s(kind: str, nbytes: int) -> float:
    return 0.0 if nbytes == COUNT else GATHER_S if kind == "all_gather" else SUM_S


class Passage(Copy):
    """An operation under way."""

    def __init__(self, group: FakeGroup) -> None:
        assert group.last is not None
        self._group, self._kernel = group, group.last

    @override
    def done(self) -> bool:
        return self._kernel.is_over

    @override
    def wait(self) -> None:
        self.end_s()

    def end_s(self) -> float:
        return self._group.wait(self._kernel)


class World:
    """The ranks' transports. One thread carries all control messages, in the order of sending."""

    def __init__(self) -> None:
        self.failure: RankError | None = None
        self.ranks: list[Rank] = []
        self.meeting = threading.Barrier(COUNT, timeout=240)
        self.decisions = [b""] * COUNT
        self.messages: queue.SimpleQueue[tuple[int, int, bytes] | None] = queue.SimpleQueue()
        self.postman = threading.Thread(target=self._deliver, daemon=True)

    def _deliver(self) -> None:
        while (message := self.messages.get()) is not None:
            sender, receiver, content = message
            self.ranks[receiver].collectives.on_message(sender, content)

    def fail(self, rank: int, cause: str) -> None:
        self.failure = self.failure or RankError(rank, f"rank {rank} failed: {cause}")
        self.meeting.abort()


class Transport:
    """See `transport.PeerTransport`."""

    count = COUNT

    def __init__(self, world: World, rank: int) -> None:
        self._world, self.rank = world, rank
        self.failures = self

    @property
    def is_broken(self) -> bool:
        return self._world.failure is not None

    def check(self) -> None:
        if self._world.failure is not None:
            raise self._world.failure.again()

    def tell(self, rank: int, content: bytes) -> None:
        self._world.messages.put((self.rank, rank, content))

    def abort(self, cause: str) -> None:
        self._world.fail(self.rank, cause)


class Rank:
    """A rank that trains `NUM_UNITS` layers. `now_s`: the virtual time of its computation."""

    def __init__(self, world: World, rank: int, communicators: Communicators) -> None:
        self.world, self.rank = world, rank
        self.transport: Any = Transport(world, rank)
        gathers, sums = communicators
        self.groups = DeviceGroups(gathers.rank(rank), sums.rank(rank))
        FakeGroup.share_device([self.groups.gathers, self.groups.sums])
        self.counters = Counters()
        self.collectives = Collectives(self.transport, self.groups, self.counters, lambda: None)
        self.collectives.stand_in(GATHERING, self.gather_for_others)
        self.collectives.stand_in(SUMMING, self.sum_nothing, is_unanimous=True)
        self.now_s = 0.0
        self.step = 0
        self.sums: dict[int, float | None] = {}  # Of the last step, by unit; None: not all gave.
        self.read_alone: list[int] = []  # Units that came without the other ranks.

    # -- Operations --------------------------------------------------------------------------------

    def gather(self, key: Key, ready_s: float) -> tuple[Passage, torch.Tensor]:
        target = torch.empty(COUNT * NBYTES, dtype=torch.uint8)
        source = torch.full((NBYTES,), self.rank + key[1], dtype=torch.uint8)
        self.groups.gathers.ready_s = ready_s
        self.collectives.gathers.all_gather(target, source)
        return Passage(self.groups.gathers), target

    def sum(self, rows: torch.Tensor, flag: bool, ready_s: float) -> tuple[Passage, Any, Any]:
        of_all, present = torch.empty_like(rows), torch.empty(COUNT * COUNT, dtype=torch.bool)
        self.groups.sums.ready_s = ready_s
        self.collectives.sums.all_to_all(of_all, rows)
        flags = torch.full((COUNT,), flag, dtype=torch.bool)
        self.collectives.sums.all_gather(present.view(torch.uint8), flags.view(torch.uint8))
        return Passage(self.groups.sums), of_all, present[::COUNT]

    def gather_for_others(self, key: Key, _size: int) -> Copy:
        return self.gather(key, 0.0)[0]

    def sum_nothing(self, _key: Key, size: int) -> Copy:
        return self.sum(torch.zeros((COUNT, size)), False, 0.0)[0]

    def propose(self, kind: int, unit: int, act: Callable[[], tuple[Any, ...]]) -> Any:
        issued: list[Any] = []

        def issue() -> Copy:
            issued[:] = act()
            return issued[0]  # type: ignore[no-any-return]

        return self.collectives.propose((kind, unit, 0), issue, size=NBYTES // 4), issued

    # -- A step ------------------------------------------------------------------------------------

    def train(self, used: Sequence[int]) -> None:
        """Forward and backward of these units; one unit is gathered ahead of its use."""
        sums = []
        for units, is_backward in ((used, False), (used[::-1], True)):
            ahead = [self.propose_gather(unit) for unit in units[:1]]
            for place, unit in enumerate(units):
                self.receive(unit, *ahead.pop())
                ahead += [self.propose_gather(unit) for unit in units[place + 1 : place + 2]]
                self.now_s += COMPUTE_S
                if is_backward:
                    sums.append((unit, *self.give_gradients(unit)))
        self.sums = {}
        for unit, proposal, issued in sums:
            self.sums[unit] = None
            if self.collectives.settle(proposal):
                passage, rows, present = issued
                self.now_s = max(self.now_s, passage.end_s())
                if present.all():
                    self.sums[unit] = float(rows.sum())

    def propose_gather(self, unit: int) -> Any:
        key, ready_s = (GATHERING, unit, 0), self.now_s
        return self.propose(GATHERING, unit, lambda: self.gather(key, ready_s))

    def receive(self, unit: int, proposal: Any, issued: list[Any]) -> None:
        if self.collectives.settle(proposal):
            passage, weights = issued
            self.now_s = max(self.now_s, passage.end_s())
            wanted = torch.arange(COUNT, dtype=torch.uint8) + unit
            assert torch.equal(weights.view(COUNT, NBYTES), wanted[:, None].expand(-1, NBYTES))
        else:
            self.read_alone.append(unit)  # From each owner.

    def give_gradients(self, unit: int) -> Any:
        rows, ready_s = torch.full((COUNT, NBYTES // 4), float(self.rank + unit)), self.now_s
        return self.propose(SUMMING, unit, lambda: self.sum(rows, True, ready_s))

    def meet(self, *, alters: bool = False) -> None:
        """`optimizer.step()`: the ranks agree on the order of the next step. `alters`: this rank
        has another digest of what it played."""
        self.collectives.end_step()
        decision = self.collectives.decision()
        self.world.decisions[self.rank] = b"another." + decision[8:] if alters else decision
        try:
            self.world.meeting.wait()
            self.collectives.sync_weights(list(self.world.decisions))
            self.world.meeting.wait()
        except threading.BrokenBarrierError:
            self.transport.check()
            raise
        self.step += 1


Program = Callable[[Rank], None]


def run(program: Program, communicators: Communicators | None = None) -> list[Rank]:
    """Runs the program of each rank. Returns the ranks. Raises the first error that is no RankError
    of another rank, and leaves no thread behind."""
    world, errors = World(), []
    if communicators is None:
        gathers, sums = (FakeCommunicator(of, COUNT, duration_s) for of in ("gathers", "sums"))
        communicators = gathers, sums
    world.ranks = [Rank(world, rank, communicators) for rank in range(COUNT)]

    def of_rank(rank: Rank) -> None:
        try:
            rank.collectives.open()
            program(rank)
        except BaseException as error:
            errors.append(error)
            world.fail(rank.rank, str(error))
        finally:
            rank.collectives.close()

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in world.ranks]
    world.postman.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    world.messages.put(None)
    world.postman.join()
    for error in errors:
        if not isinstance(error, RankError):
            raise error
    if errors:
        raise errors[0]
    return world.ranks


ALL = range(NUM_UNITS)


def agree(rank: Rank) -> None:
    """Takes the steps that lead to the log of a step in which every rank uses all units."""
    for _ in range(FIRST_AGREED):
        assert not rank.collectives.is_in_lockstep
        rank.train(ALL)
        assert not rank.read_alone
        rank.meet()
    assert rank.collectives.is_in_lockstep


def sum_of(unit: int) -> float:
    return NBYTES // 4 * sum(float(rank + unit) for rank in range(COUNT))


EXTRA = NUM_UNITS  # No rank uses it in an ordinary step.
ODD = range(NUM_UNITS)[::2]


@dataclass(frozen=True)
class Step:
    """One step of all ranks. `passes`: the units of each pass of the ranks that are not like all
    others; `alone`: the units that such a rank gets without the others; `whole`: the units to whose
    sum all ranks give."""

    passes: dict[int, Sequence[Sequence[int]]]
    alone: Sequence[int] = ()
    whole: Sequence[int] = ALL
    is_agreed: bool = True  # In the step behind it.


def each(of_rank: Callable[[int], Sequence[int]]) -> dict[int, Sequence[Sequence[int]]]:
    return {rank: [of_rank(rank)] for rank in range(COUNT)}


def dropped(rank: int) -> Sequence[int]:
    """A rank's layers of a step with LayerDrop."""
    return [unit for unit in ALL if (rank * 31 + unit * 17) % 7]


def experts(rank: int) -> Sequence[int]:
    """Every rank has tokens for two experts of four; no expert has tokens of more than half."""
    return [0, *(unit for unit in (1, 2, 3, 4) if (rank + unit) % 4 < 2)]


IDLE: Sequence[Sequence[int]] = ()
STEPS: dict[str, Step] = {
    "alike": Step({}),
    "skip": Step({7: [(0, 2, 4)], 20: [(0, 1, 2, 3)], 63: [ODD]}, whole=(0, 2)),
    "alike again": Step({}),
    "more": Step({50: [(0, 1, EXTRA, 2, 3, 4)]}, alone=(EXTRA, EXTRA)),
    "half": Step({rank: [(*ALL, EXTRA)] for rank in range(0, COUNT, 2)}, alone=(EXTRA, EXTRA)),
    "half again": Step({rank: [(*ALL, EXTRA)] for rank in range(0, COUNT, 2)}),
    "no batch": Step({33: IDLE}, whole=()),
    "no gradients": Step(dict.fromkeys(range(COUNT), IDLE), whole=()),
    "alike too": Step({}),
    "layer drop": Step(each(dropped), whole=()),
    "routing": Step(each(experts), whole=(0,)),
    "uneven": Step(
        {rank: [ALL, ALL] for rank in range(COUNT) if rank % 3}, alone=[*ALL, *ALL[::-1]]
    ),
    "alike at last": Step({}),
    "unlike hashes": Step({}, is_agreed=False),
    "a new order": Step({}),
    "in the new order": Step({}),
}


def told(rank: Rank) -> float:
    return rank.counters.snapshot().get("ranks_control_messages", 0.0)


def test_ranks_that_skip_or_idle_or_read_more_issue_what_all_others_issue() -> None:
    """In lockstep no rank sends a message, whatever a rank leaves out, and no other rank waits
    longer. A sum counts only if all ranks gave to it."""
    took_s: dict[str, set[float]] = {word: set() for word in STEPS}

    def program(rank: Rank) -> None:
        agree(rank)
        for word, step in STEPS.items():
            before_s, told_before = rank.now_s, told(rank)
            rank.read_alone.clear()
            is_in_lockstep = rank.collectives.is_in_lockstep
            passes = step.passes.get(rank.rank, [ALL])
            for number, units in enumerate(passes):
                rank.train(units)
                if is_in_lockstep and number == 0:
                    wanted = {unit: sum_of(unit) if unit in step.whole else None for unit in units}
                    assert rank.sums == wanted, word
            if is_in_lockstep:
                assert rank.read_alone == list(step.alone if rank.rank in step.passes else ()), word
                if rank.rank not in step.passes:
                    took_s[word].add(round(rank.now_s - before_s, 6))
            rank.meet(alters=word == "unlike hashes" and rank.rank == 9)
            assert rank.collectives.is_in_lockstep == step.is_agreed, word
            assert (told(rank) == told_before) == is_in_lockstep, word

    run(program)
    # Each pass waits for its first gather, and the step for its last sum: no gather waits for sums.
    wanted_s = round(2 * GATHER_S + 2 * NUM_UNITS * COMPUTE_S + SUM_S, 6)
    assert took_s["alike"] == took_s["alike again"] == took_s["in the new order"] == {wanted_s}
    assert max(took_s["skip"]) <= wanted_s, "ranks wait for one that skips"


def test_what_some_rank_never_uses_is_in_the_log_too() -> None:
    """Nothing of it ever began. The gathers are of use to the others; a sum is of use to none."""
    never = {17: ODD, 40: (0, 1, 2, 4)}

    def program(rank: Rank) -> None:
        used, kept = never.get(rank.rank, ALL), Counter[str]()
        for step in range(FIRST_AGREED + 3):
            is_in_lockstep = rank.collectives.is_in_lockstep
            assert is_in_lockstep == (step >= FIRST_AGREED)
            rank.train(used)
            rank.meet()
            counted = Counter(rank.counters.snapshot()) - kept
            if is_in_lockstep:
                assert not rank.read_alone and not counted["ranks_control_messages"]
                assert counted["ranks_stand_ins"] == 2 * (NUM_UNITS - len(used))
                assert rank.sums == {unit: sum_of(unit) if unit in ODD else None for unit in used}
            kept = Counter(rank.counters.snapshot())
            rank.read_alone.clear()
            rank.world.meeting.wait()  # A rank that closes asks all ranks for the next log.

    run(program)


def test_ranks_go_on_without_a_paused_rank_which_has_lost_nothing_after_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its threads play the log for the others, who ask for it after a while."""
    monkeypatch.setattr(issuing, "PATIENCE_S", 2.0)  # A loaded machine pauses ranks, too.
    are_ahead = threading.Event()

    def program(rank: Rank) -> None:
        agree(rank)
        if rank.rank == 5:
            assert are_ahead.wait(60), "the others wait for a paused rank"
        first = rank.propose_gather(0)
        rank.receive(0, *first)
        are_ahead.set()
        rank.train(ALL[1:])
        assert rank.read_alone[:1] == ([0] if rank.rank == 5 else [])
        assert all(found in (None, sum_of(unit)) for unit, found in rank.sums.items())
        rank.meet()
        told_before = told(rank)
        assert rank.collectives.is_in_lockstep
        rank.read_alone.clear()
        rank.train(ALL)
        assert not rank.read_alone and rank.sums == {unit: sum_of(unit) for unit in ALL}
        rank.meet()
        assert told(rank) == told_before

    run(program)


def test_a_dead_rank_is_named_and_every_wait_for_it_ends() -> None:
    begun_s = time.monotonic()

    def program(rank: Rank) -> None:
        agree(rank)
        if rank.rank == 41:
            rank.world.fail(41, "killed")  # As the links find out.
            raise RankError(41, "rank 41 failed: killed")
        try:
            rank.train(ALL)
            rank.meet()
        except (Aborted, InfinityError):
            rank.transport.check()
        raise AssertionError("a step of 63 ranks ended")

    with pytest.raises(RankError, match="rank 41 failed: killed"):
        run(program)
    assert time.monotonic() - begun_s < STUCK_S / 2


def test_groups_of_one_device_end_only_if_both_are_aborted_at_once() -> None:
    """As NCCL: an abort waits for the kernels of the other communicator."""

    def stuck() -> DeviceGroups:
        sides = [FakeCommunicator(of, 2, duration_s).rank(0) for of in ("g", "s")]
        FakeGroup.share_device(sides)
        for side in sides:
            side.all_gather_single(torch.zeros(2, 8), torch.zeros(8), None)
        return DeviceGroups(*sides)

    one_by_one = stuck()
    first = threading.Thread(target=one_by_one.gathers.abort, daemon=True)
    first.start()
    first.join(0.1)
    assert first.is_alive(), "an abort does not wait for the sums on the device"
    one_by_one.sums.abort()
    first.join(STUCK_S / 2)
    assert not first.is_alive()
    begun_s = time.monotonic()
    stuck().abort()
    assert time.monotonic() - begun_s < STUCK_S / 2


def test_an_operation_out_of_order_is_named() -> None:
    communicator = FakeCommunicator("devices", 2, duration_s)
    group = [communicator.rank(rank) for rank in range(2)]
    row, rows = torch.zeros(8), torch.zeros(2, 8)
    group[0].all_gather_single(rows, row, None)
    waited: Kernel | None = group[0].last
    assert waited is not None and not waited.is_over, "an operation of one rank is over"
    with pytest.raises(OrderMismatch, match=r"operation 0 is .*all_to_all.* on rank 1"):
        group[1].all_to_all_single(rows, rows, None, None, None)
    with pytest.raises(OrderMismatch):
        group[0].wait(waited)
