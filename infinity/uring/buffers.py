"""Memory and files as operations of a ring name them: plain or registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Raw(NamedTuple):
    """Memory by address. The caller keeps it alive and writable until the completion is taken."""

    address: int
    nbytes: int


class RegisteredBuffer(NamedTuple):
    """Memory that the ring has pinned, or a range of it."""

    index: int  # type: ignore[assignment]  # Hides tuple.index, which no caller uses.
    address: int
    nbytes: int

    def part(self, offset_nbytes: int, nbytes: int) -> RegisteredBuffer:
        """Returns a range of this buffer. Raises ValueError for a range outside the buffer."""
        if offset_nbytes < 0 or nbytes < 0 or offset_nbytes + nbytes > self.nbytes:
            raise ValueError(f"{offset_nbytes=}, {nbytes=} is outside a buffer of {self.nbytes}")
        return RegisteredBuffer(self.index, self.address + offset_nbytes, nbytes)


class RegisteredFile(NamedTuple):
    """A file that the ring keeps open, by its index in the ring's table."""

    index: int  # type: ignore[assignment]  # Hides tuple.index, which no caller uses.


Memory: TypeAlias = "Buffer | Raw | RegisteredBuffer"
File: TypeAlias = int | RegisteredFile
