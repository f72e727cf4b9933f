"""Errors that a device reports, in words of the engine.

A kernel that reads memory that is gone fails after the call that has issued it, and a later call,
which is not to blame, raises the error. So the error names the units whose weights left the device
last.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from infinity.errors import DeviceError
from infinity.tiers.device import POISON_VARIABLE

_MOST_RELEASED = 5  # Names in one message.


class DeviceFaults:
    """The units that left one device last. Any thread."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._released: deque[str] = deque(maxlen=_MOST_RELEASED)
        self._has_failed = False  # What leaves from then on is not to blame.

    def note_released(self, unit: str) -> None:
        """Records that the weights of a unit have left."""
        if not self._has_failed:
            self._released.append(unit)

    def explained(self, error: Exception) -> DeviceError:
        """Returns the error of the package for one of the device."""
        self._has_failed = True
        released = tuple(dict.fromkeys(reversed(self._released.copy())))
        what = (str(error).splitlines() or [type(error).__name__])[0]
        names = ", ".join(map(repr, released)) or "none"
        message = (
            f"the device ({self._device}) reports an error of work that was issued before: {what}. "
            "After most errors no further call succeeds: end the process, and start again from a "
            "checkpoint. An illegal memory access is often a view of a weight that is used after "
            f"the weight has left; units that left last, the latest first: {names}. To find the "
            f"view, run a small model with the environment variable {POISON_VARIABLE}=1: the view "
            "reads as NaN there, and no call fails"
        )
        return DeviceError(message, released)


_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def reporting_faults(
    method: Callable[Concatenate[Any, _Arguments], _Answer],
) -> Callable[Concatenate[Any, _Arguments], _Answer]:
    """Makes a method of an object with `faults` raise DeviceError for an error of its device, which
    is the cause."""

    def reporting(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        try:
            return method(self, *args, **kwargs)
        except torch.AcceleratorError as error:
            raise self.faults.explained(error) from error

    functools.update_wrapper(reporting, method)
    return reporting
