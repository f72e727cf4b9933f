"""How far weights may be read ahead beside layer inputs: `InputMemory`."""

from __future__ import annotations

from infinity.streaming.inputs.activations import InputMemory


def memory() -> InputMemory:
    """100 bytes, of which inputs may take 60 from kept weights."""
    return InputMemory(60, 40)


def test_without_inputs_the_window_is_all_of_it() -> None:
    assert memory().window_nbytes(100) == 100
    assert memory().window_nbytes(30) == 30  # As configured.


def test_inputs_take_no_more_from_weights_than_they_may() -> None:
    inputs = memory()
    assert inputs.may_take(60) and not inputs.may_take(61)
    inputs.take(50)
    assert inputs.may_take(10) and not inputs.may_take(11)
    inputs.take(30)  # That was free.
    assert inputs.window_nbytes(100) == 40


def test_a_forward_leaves_space_for_the_inputs_of_the_last_one() -> None:
    inputs = memory()
    inputs.take(20)
    assert inputs.window_nbytes(100) == 80  # The first one: nothing is known.
    inputs.take(30)
    inputs.leave(50, returns=True)
    inputs.end()
    assert inputs.window_nbytes(100) == 100  # What is read now is used before inputs need space.
    inputs.take(10)
    assert inputs.window_nbytes(100) == 50


def test_a_backward_reads_ahead_into_the_space_that_inputs_leave() -> None:
    inputs = memory()
    inputs.take(50)
    assert not inputs.are_returning
    inputs.leave(20, returns=True)
    assert inputs.are_returning and inputs.window_nbytes(100) == 70
    inputs.leave(10)  # To NVMe.
    assert inputs.are_returning and inputs.window_nbytes(100) == 80
    inputs.leave(20, returns=True)
    assert not inputs.are_returning


def test_what_goes_to_nvme_in_a_forward_begins_no_backward() -> None:
    inputs = memory()
    inputs.take(50)
    inputs.leave(20)
    assert not inputs.are_returning and inputs.window_nbytes(100) == 70
