"""Shards that await the update of the last step: who comes first, and who waits for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.distributed.pending import PendingShards
from infinity.errors import InfinityError


def _in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def _has_begun_to_wait(pending: PendingShards, shard: int) -> bool:
    deadline_s = time.monotonic() + 60.0
    while shard not in pending._wanted and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return shard in pending._wanted


def test_shards_are_taken_in_order_and_those_that_are_waited_for_come_first() -> None:
    pending = PendingShards()
    pending.add([4, 5, 6, 7])
    assert pending.take() == 4
    thread, errors = _in_thread(lambda: pending.await_update(6))
    assert _has_begun_to_wait(pending, 6)
    pending.note_updated(4)
    assert pending.take() == 6
    assert list(pending.upcoming(but=6)) == [5, 7]
    pending.note_updated(6)
    thread.join(60.0)
    assert not thread.is_alive() and not errors
    assert pending.take() == 5 and pending.is_pending(5) and not pending.is_pending(6)


def test_all_updates_are_over_when_their_writes_are() -> None:
    pending = PendingShards()
    pending.await_all()  # Nothing was ever pending.
    pending.add([1])
    thread, errors = _in_thread(pending.await_all)
    pending.note_updated(pending.take() or 0)
    assert pending.take() is None and not pending.are_resting
    pending.await_update(1)  # A read may follow the update, before its writes are over.
    assert thread.is_alive()
    updating, _ = _in_thread(pending.await_more)
    thread.join(60.0)
    assert not thread.is_alive() and not errors and pending.are_resting
    pending.close()
    updating.join(60.0)
    assert not updating.is_alive()


@pytest.mark.parametrize("end", ["failure", "close"])
def test_every_wait_ends_with_the_updates(end: str) -> None:
    pending = PendingShards()
    pending.add([1, 2])
    pending.note_updated(1)
    waits = [_in_thread(lambda: pending.await_update(2)), _in_thread(pending.await_all)]
    assert _has_begun_to_wait(pending, 2)
    if end == "failure":
        pending.fail(MemoryError("of the test"))
    else:
        pending.close()
    for thread, errors in waits:
        thread.join(60.0)
        [error] = errors
        assert isinstance(error, InfinityError)
        assert ("of the test" in str(error)) == (end == "failure")
    pending.await_update(1)  # It was updated before.
    with pytest.raises(InfinityError):
        pending.await_update(2)
    if end == "failure":
        with pytest.raises(InfinityError, match="mixture of two steps"):
            pending.check()


def test_early_shards_come_last_the_newest_first_and_nobody_waits_for_them() -> None:
    pending = PendingShards()
    pending.add([1])
    pending.add_early(8)
    pending.add_early(7)
    assert pending.take() == 1 and pending.upcoming(but=1) == [7, 8]
    pending.note_updated(1)
    assert pending.take() is None, "writes of pending shards are finished first"
    assert pending.await_more() and pending.are_resting and not pending.is_idle
    pending.await_all()
    pending.await_update(7)
    assert pending.take() == 7
    assert not pending.end_early(7, is_made=True)
    assert pending.take() == 8 and not pending.is_pending(8)
    # The step decides: one is made, one is under way.
    assert pending.add([7, 8, 9]) == ({7}, {8})
    assert not pending.is_pending(7) and pending.is_pending(8)
    assert pending.end_early(8, is_made=True)
    pending.note_updated(8)
    assert pending.take() == 9


def test_a_withdrawn_shard_is_dropped_by_the_thread_before_the_wait_ends() -> None:
    pending = PendingShards()
    for shard in (3, 2, 1):
        pending.add_early(shard)
    assert pending.take() == 1 and not pending.end_early(1, is_made=True)
    assert pending.take() == 2
    begun: list[int] = []
    thread, errors = _in_thread(lambda: begun.extend(pending.withdraw([1, 2, 3, 4])))
    deadline_s = time.monotonic() + 60.0
    while pending.stale() != {2, 3} and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert not pending.goes_on(2) and thread.is_alive()
    assert not pending.end_early(2, is_made=True), "made too late"
    pending.note_dropped({2, 3})
    thread.join(60.0)
    assert sorted(begun) == [1, 2] and not errors
    assert pending.take() is None and pending.add([1, 2, 3]) == (set(), set())
    pending.note_change(1)
    assert pending.num_changes(1) == 1 and not pending.num_changes(2)


@settings(max_examples=50, deadline=None)
@given(
    shards=st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True),
    wanted=st.lists(st.integers(0, 20), max_size=6),
    rounds=st.integers(1, 3),
)
def test_each_shard_is_updated_once_and_no_wait_ends_before(
    shards: list[int], wanted: list[int], rounds: int
) -> None:
    pending, done = PendingShards(), list[int]()

    def update() -> None:
        while True:
            shard = pending.take()
            if shard is not None:
                done.append(shard)
                pending.note_updated(shard)
            elif not pending.await_more():
                return

    updating, errors = _in_thread(update)
    for _ in range(rounds):
        done.clear()
        pending.add(shards)

        def read(shard: int) -> None:
            pending.await_update(shard)
            assert shard in done or shard not in shards

        waits = [_in_thread(lambda shard=shard: read(shard)) for shard in wanted]  # type: ignore[misc]
        pending.await_all()
        assert sorted(done) == sorted(shards)
        for thread, failures in waits:
            thread.join(60.0)
            assert not thread.is_alive() and not failures
    pending.close()
    updating.join(60.0)
    assert not updating.is_alive() and not errors


def test_state_of_expected_shards_is_forgotten_before_it_changes() -> None:
    pending = PendingShards()
    pending.expect([1, 2, 3])
    assert not pending.is_idle and pending.expected() == [1, 2, 3]
    pending.add_early(1)  # Its update reads on.
    assert pending.expected() == [2, 3] and pending.upcoming(but=-1) == [1]
    thread, errors = _in_thread(lambda: pending.forget_expected([1, 2]))
    deadline_s = time.monotonic() + 60.0
    while pending.stale() != {2} and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert thread.is_alive() and pending.expected() == [3] and pending.goes_on(1)
    pending.note_dropped({2})
    thread.join(60.0)
    assert not thread.is_alive() and not errors


def test_a_shard_that_is_expected_no_more_is_dropped_unless_it_is_updated() -> None:
    pending = PendingShards()
    pending.expect([1, 2, 3])
    pending.add([2])
    assert pending.expected() == [1, 3] and pending.is_read(2) and not pending.is_read(1)
    pending.expect([3, 4])
    assert pending.stale() == {1} and pending.expected() == [3, 4]
    pending.forget_expected([2])  # It is pending: who changes its state waits for the update.


@pytest.mark.parametrize("what", ["pending", "early", "closed"])
def test_what_comes_while_writes_are_under_way_ends_the_wait_for_them(what: str) -> None:
    pending = PendingShards()
    waiting, errors = _in_thread(lambda: pending.await_next(60.0))
    if what == "pending":
        pending.add([1])
    elif what == "early":
        pending.add_early(1)
    else:
        pending.close()
    waiting.join(60.0)
    assert not waiting.is_alive() and not errors


def test_an_early_shard_waits_for_the_writes_of_pending_ones() -> None:
    pending = PendingShards()
    pending.add([1])
    assert pending.take() == 1
    pending.note_updated(1)
    pending.add_early(2)
    assert pending.take() is None
    pending.await_next(0.01)  # Nothing can be taken: it returns when the time is over.
    assert pending.take() is None
    assert pending.await_more() and pending.take() == 2
