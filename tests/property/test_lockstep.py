"""The agreed log: whatever a rank proposes, waits for and takes back, it issues the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.distributed.coordinator import Key
from infinity.distributed.lockstep import NO_LOG, AgreedLog, digest_of

KEYS = st.integers(0, 5).map(lambda unit: (0, unit, 0))
ACTS = st.tuples(st.sampled_from(["propose", "wait", "release", "asked"]), KEYS, st.integers(0, 20))


@given(keys=st.lists(KEYS, max_size=16), acts=st.lists(ACTS, max_size=40))
def test_a_rank_issues_the_log_in_its_order_and_never_waits_for_itself(
    keys: list[Key], acts: list[tuple[str, Key, int]]
) -> None:
    log, issued, pending = AgreedLog(keys), [], set[Key]()

    def issue() -> None:
        for key, is_proposed in log.issue():
            issued.append(key)
            assert is_proposed == (key in pending) or not is_proposed
            if is_proposed:
                pending.remove(key)

    for act, key, number in acts:
        if act == "propose" and key not in pending:
            is_in_log = key in keys[log.head :]
            assert log.bind(key) == is_in_log
            if is_in_log:
                pending.add(key)
        elif act == "wait" and key in pending:
            log.await_proposal(key)
            issue()
            assert key not in pending
        elif act == "release" and key in pending:
            log.release(key)
            pending.remove(key)
        elif act == "asked":
            log.require(number)
            issue()
            assert len(issued) >= min(number, len(keys))
        issue()
        assert issued == keys[: len(issued)]
    log.require(len(keys))
    issue()
    assert issued == keys and not pending


def test_a_rank_asks_for_a_new_log_when_it_has_missed_most_of_it() -> None:
    keys = [(0, unit, 0) for unit in range(4)]
    for num_proposed, wanted in ((4, digest_of(keys)), (2, digest_of(keys)), (1, NO_LOG)):
        log = AgreedLog(keys)
        assert all(log.bind(key) for key in keys[:num_proposed])
        log.require(len(keys))
        assert [is_proposed for _, is_proposed in log.issue()].count(True) == num_proposed
        assert log.digest() == wanted
    assert digest_of([]) == NO_LOG != digest_of(keys) != digest_of(keys[::-1])
