"""The choice of units that are updated in the backward."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.streaming.updates.policy import EarlyPolicy, choose_early

sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(sizes, st.floats(0, 1))
def test_the_chosen_bytes_are_the_share_to_within_half_of_the_largest_unit(
    nbytes: list[int], share: float
) -> None:
    order = list(range(len(nbytes)))
    chosen = choose_early(order, dict(enumerate(nbytes)), share)
    assert chosen == sorted(set(chosen))
    done = 0.0
    for unit in order:  # At every point of the backward, not only at its end.
        done += nbytes[unit] * (unit in chosen)
        wanted = share * sum(nbytes[: unit + 1])
        assert abs(done - wanted) <= max(nbytes) / 2 + 1e-6 or share == 0


@given(sizes)
def test_a_share_of_nothing_chooses_none_and_of_everything_all(nbytes: list[int]) -> None:
    order, by_unit = list(range(len(nbytes))), dict(enumerate(nbytes))
    assert choose_early(order, by_unit, 0.0) == []
    assert choose_early(order, by_unit, 1.0) == order


def step(policy: EarlyPolicy, *, left: int = 4, again: int | None = None, **end: object) -> bool:
    """A step over units 3 .. 0, each with two gradients; unit 0 ends with the backward."""
    planned = bool(policy.plan())
    for unit in reversed(range(left)):
        policy.note_gradient(unit)
        policy.note_gradient(unit)
        if unit:
            policy.note_left(unit)
    if again is not None:
        policy.note_gradient(again)
    options = {"num_undone": 0, "is_clipped": False, "missed": (), "wait_share": 0.0} | end
    policy.end_step(**options)  # type: ignore[arg-type]
    return planned


def policy_of(share: float = 1.0) -> EarlyPolicy:
    policy = EarlyPolicy(dict.fromkeys(range(4), 10))
    policy.share = share
    return policy


def test_units_whose_gradients_end_with_the_backward_are_never_planned() -> None:
    policy = policy_of()
    assert not step(policy)
    assert policy.plan() == [3, 2, 1]
    step(policy, again=2)
    assert policy.plan() == [3, 1]


def test_gradients_are_complete_when_as_many_have_come_as_in_the_last_step() -> None:
    policy = policy_of()
    step(policy)
    assert policy.note_gradient(3) and not policy.note_left(3)
    assert not policy.note_gradient(3)
    assert policy.note_left(3)
    policy.note_gradient(3)
    assert not policy.note_left(3)


def test_a_step_that_is_left_out_does_not_count_for_the_next() -> None:
    policy = policy_of()
    step(policy)
    for unit in reversed(range(4)):
        policy.note_gradient(unit)
        policy.note_left(unit)
    assert policy.note_dropped(range(4))
    assert policy.plan() == [3, 2, 1] and policy.note_gradient(3), "it begins anew"
    policy.note_gradient(3)
    assert policy.note_left(3)


def test_each_failure_doubles_the_steps_before_the_next_attempt() -> None:
    policy = policy_of()
    step(policy)
    rests = []
    for _ in range(4):
        assert policy.is_on
        step(policy, num_undone=1)
        rests.append(0)
        while not policy.is_on:
            step(policy)
            rests[-1] += 1
    assert rests == [2, 4, 8, 16]


def test_where_every_step_is_clipped_nothing_is_tried() -> None:
    policy = policy_of()
    assert not any(step(policy, is_clipped=True) for _ in range(50))


@given(st.lists(st.booleans(), max_size=30), st.floats(0, 1))
def test_the_share_stays_a_share(misses: list[bool], wait_share: float) -> None:
    policy = policy_of(0.5)
    step(policy)
    for is_missed in misses:
        missed = policy.plan()[:1] if is_missed else ()
        step(policy, missed=missed, wait_share=wait_share)
        assert 0 <= policy.share <= 1
