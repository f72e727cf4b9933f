"""Host memory that layer inputs have between a forward and its backward.

Note [Inputs before kept weights]
  A byte of an input that goes to the drives is written and read again. A byte of weights that are
  not kept between a forward and its backward is read once more, and drives read faster than they
  write. So inputs take the place of weights that are only kept, as far as enough memory is left to
  fetch weights ahead in (`Budgets.inputs_nbytes`).

  Reads ahead regard it. In a forward they leave the space that inputs will take: a unit that was
  read for later would go for the next input, and be read again. In a backward they wait for memory
  that inputs leave, but for units that are needed next: weights that go for a unit that is needed
  late are read again in the next forward.
"""

from __future__ import annotations


class InputMemory:
    """Bytes of inputs in host memory. Written by `ActivationStore` alone; `WeightCache` asks how
    far it may read ahead. Called under the engine's lock.

    `most_nbytes` may come from kept weights; `beside_nbytes` are for weights alone.
    """

    def __init__(self, most_nbytes: int, beside_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._beside_nbytes = beside_nbytes
        self._nbytes = 0
        self._highest_nbytes = 0  # Of this accumulation so far.
        self._expected_nbytes = 0  # The highest of the last one.
        self.are_returning = False  # The backward has begun, and not all have returned.

    def may_take(self, nbytes: int) -> bool:
        """Whether weights that are only kept give way to an input of so many bytes."""
        return self._nbytes + nbytes <= self._most_nbytes

    def take(self, nbytes: int) -> None:
        """An input got memory."""
        self._nbytes += nbytes
        self._highest_nbytes = max(self._highest_nbytes, self._nbytes)

    def leave(self, nbytes: int, *, returns: bool = False) -> None:
        """The memory of an input is free, or will soon be; with `returns` it is on the device."""
        self._nbytes -= nbytes
        self.are_returning = self._nbytes > 0 and (returns or self.are_returning)

    def end(self) -> None:
        """An accumulation is over: the next one is expected to be like it."""
        assert not self._nbytes
        self._expected_nbytes, self._highest_nbytes = self._highest_nbytes, 0

    def window_nbytes(self, window_nbytes: int) -> int:
        """Returns the part of the window for reads ahead that inputs leave."""
        held_nbytes = self._nbytes
        if held_nbytes and not self.are_returning:
            held_nbytes = max(held_nbytes, self._expected_nbytes)
        return min(
            window_nbytes,
            self._most_nbytes + self._beside_nbytes - min(held_nbytes, self._most_nbytes),
        )
