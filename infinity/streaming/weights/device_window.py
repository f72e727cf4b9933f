"""The device memory for weights that rest elsewhere, a part of which may be lent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DeviceWindow:
    """Bytes of the device for weights; None: unlimited. Written by `WeightEvictor` alone.

    `least_nbytes`: the weights that nested modules use at once, and the largest unit beside them,
    which is fetched ahead.
    """

    nbytes: int | None = None
    least_nbytes: int = 0
    lent_nbytes: int = 0

    @property
    def left_nbytes(self) -> int | None:
        """The bytes that weights may take now; None: unlimited."""
        return None if self.nbytes is None else self.nbytes - self.lent_nbytes

    def lend(self, nbytes: int, *, in_use_nbytes: int) -> bool:
        """Lends bytes for anything but weights, if enough are left for weights beside those that
        are in use now. Returns whether it did."""
        left_nbytes = self.left_nbytes
        if left_nbytes is not None and left_nbytes - nbytes < self.least_nbytes + in_use_nbytes:
            return False
        self.lent_nbytes += nbytes
        return True
