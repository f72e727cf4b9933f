"""The agreed log: whatever a rank proposes, waits for and takes back, it issues the same order; the
next log is what was of use to enough ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from infinity.distributed.collective.order import (
    MOST_LACKING,
    PATIENT_STEPS,
    AgreedLog,
    Key,
    Lacking,
    LogEntry,
    Report,
    digest_of,
    next_log,
    report_of,
)

KEYS = st.integers(0, 5).map(lambda unit: (0, unit, 0))
ACTS = st.tuples(st.sampled_from(["propose", "wait", "release", "asked"]), KEYS, st.integers(0, 20))
GATHER, SUM = 0, 1
UNANIMOUS = frozenset({SUM})


@given(keys=st.lists(KEYS, max_size=16), acts=st.lists(ACTS, max_size=40))
def test_a_rank_issues_the_log_in_its_order_and_never_waits_for_itself(
    keys: list[Key], acts: list[tuple[str, Key, int]]
) -> None:
    log, issued, pending = AgreedLog([LogEntry(key) for key in keys]), [], set[Key]()
    missed, late = [], Counter[Key]()

    def issue(*, is_asked: bool = False) -> None:
        for entry, is_proposed in log.issue():
            issued.append(entry.key)
            assert is_proposed == (entry.key in pending) or not is_proposed
            if is_proposed:
                pending.remove(entry.key)
            else:
                missed.append(len(issued) - 1)
                late[entry.key] += is_asked

    for act, key, number in acts:
        if act == "propose" and key not in pending:
            index = log.bind(key)
            assert (index is not None) == (key in keys[log.head :] and not late[key])
            late[key] = max(late[key] - 1, 0)
            if index is not None:
                assert keys[index] == key
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
            issue(is_asked=True)
            assert len(issued) >= min(number, len(keys))
        issue()
        assert issued == keys[: len(issued)]
    log.require(len(keys))
    issue()
    assert issued == keys and not pending
    assert log.missed == sum(1 << index for index in missed)


def play(log: Sequence[LogEntry], needs: Sequence[Key]) -> Report:
    """A rank needs one thing after the other and proposes nothing ahead."""
    played, proposals = AgreedLog(log), []
    for key in needs:
        index = played.bind(key)
        proposals.append((key, 7, index))
        if index is not None:
            played.await_proposal(key)
            assert key in [entry.key for entry, _ in played.issue()]
    played.require(len(log))
    list(played.issue())
    return report_of(log, played.missed, proposals, 0)


def agree(log: Sequence[LogEntry], ranks: Sequence[Sequence[Key]]) -> tuple[LogEntry, ...]:
    """The log behind a step of these ranks. Every rank reads what the others have sent."""
    reports = [play(log, needs) for needs in ranks]
    assert [Report.decode(report.encode()) for report in reports] == reports
    found = next_log(log, reports, UNANIMOUS)
    assert found is not None
    return found


PATHS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4), st.just(0)), max_size=8)


@given(
    path=st.permutations([(kind, unit, 0) for kind in range(2) for unit in range(4)]),
    skipped=st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=6),
    start=PATHS,
)
def test_the_log_comes_to_have_what_is_of_use_to_ranks_that_skip_parts_of_one_path(
    path: list[Key], skipped: list[set[int]], start: list[Key]
) -> None:
    """From any log. Then a rank lacks what is of no use; and misses what it skips, unless it began
    with a log of another path."""
    paths = [[key for index, key in enumerate(path) if index not in some] for some in skipped]
    log: tuple[LogEntry, ...] = tuple(LogEntry(key) for key in start)
    for _ in range(3 * PATIENT_STEPS):
        log = agree(log, paths)
    num_ranks = Counter(key for path in paths for key in path)
    of_use = {
        k
        for k, n in num_ranks.items()
        if (n == len(paths) if k[0] in UNANIMOUS else n * 2 >= len(paths))
    }
    assert {entry.key for entry in log} == of_use
    for own in paths:
        report = play(log, own)
        assert {each.key for each in report.lacking} == set(own) - of_use
        missed = [log[index].key for index in range(len(log)) if report.missed >> index & 1]
        assert set(missed) == of_use - set(own) or (start and set(missed) >= of_use - set(own))


@given(log=PATHS, odd=PATHS, count=st.integers(3, 6), steps=st.integers(1, PATIENT_STEPS - 1))
def test_some_steps_of_another_path_or_without_a_batch_cost_no_entry(
    log: list[Key], odd: list[Key], count: int, steps: int
) -> None:
    """Of one rank, or of all of them; neither is a reason to ask for the order anew."""
    before = tuple(LogEntry(key, 7) for key in log)
    for paths in ([odd] + [log] * (count - 1), [[]] * count):
        now = before
        for _ in range(steps):
            now = agree(now, paths)
        assert [entry.key for entry in now] == log, "one rank alone gains nothing"
        for _ in range(2):
            now = agree(now, [log] * count)
        assert now == before
        assert not any(play(now, log).missed for _ in range(count))


def test_an_operation_goes_where_the_rank_that_was_first_proposed_it() -> None:
    first, second, third = ((GATHER, unit, 0) for unit in range(3))
    entries = [LogEntry(first), LogEntry(third)]
    found = agree(entries, [[first, second, third], [first, third], [first, third, second], []])
    assert [entry.key for entry in found] == [first, second, third]
    assert found[1].size == 7, "what the stand-in of a rank that never proposed it needs"


def test_entries_of_few_ranks_are_left_out_and_sums_stay_only_if_all_ranks_give() -> None:
    gather, total = (GATHER, 0, 0), (SUM, 0, 0)
    log: tuple[LogEntry, ...] = (LogEntry(gather), LogEntry(total))
    for step in range(1, 2 * PATIENT_STEPS + 1):
        log = agree(log, [[gather, total], [gather, total], [gather], []])
        wanted = [gather, total] if step < PATIENT_STEPS else [gather]
        assert [entry.key for entry in log] == wanted
    for step in range(1, PATIENT_STEPS + 1):
        log = agree(log, [[gather], [], [], []])
        assert [entry.key for entry in log] == ([gather] if step < PATIENT_STEPS else [])
    assert agree(log, [[gather, total]] * 4) == (LogEntry(gather, 7), LogEntry(total, 7))


def test_a_log_that_was_played_before_its_step_is_kept_as_it_is() -> None:
    """Weights were set between the steps."""
    log = [LogEntry((GATHER, unit, 0)) for unit in (0, 1, 1, 0)]
    played = AgreedLog(log)
    played.require(len(log))
    assert not any(is_proposed for _, is_proposed in played.issue())
    report = report_of(log, played.missed, [(entry.key, 0, None) for entry in log], 0)
    assert not report.lacking
    found = next_log(log, [report] * 3, UNANIMOUS)
    assert found is not None and [entry.key for entry in found] == [entry.key for entry in log]


def test_ranks_with_unlike_logs_agree_on_none() -> None:
    one, other = [LogEntry((0, 1, 0))], [LogEntry((0, 2, 0))]
    assert next_log(one, [play(one, []), play(other, [])], UNANIMOUS) is None
    assert digest_of([]) != digest_of(one) != digest_of(other)


@given(step=st.integers(0, 9), extra=st.integers(0, 3))
def test_all_ranks_report_the_same_of_too_many_lacking_operations(step: int, extra: int) -> None:
    keys = [(GATHER, unit, 0) for unit in range(2 * MOST_LACKING)]
    one, other = (
        report_of([], 0, [(key, 0, None) for key in path], step).lacking
        for path in (keys, keys[::-1][extra:])
    )
    assert len(one) == MOST_LACKING == len(other) and one[0] == Lacking(0, one[0].key, 0)
    common = {each.key for each in one} & {each.key for each in other}
    assert len(common) >= MOST_LACKING - extra
    assert [each.key for each in one] == sorted(each.key for each in one)
    other = report_of([], 0, [(key, 0, None) for key in keys], step + 1).lacking
    assert {each.key for each in other} != {each.key for each in one}
