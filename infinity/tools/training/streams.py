"""Standard output and error whose failure does not end a run.

The reader of a stream may end first: `| tee log` ends with the same Ctrl-C, a terminal hangs up,
the disk under a log is full. Or it stops to read: a log collector hangs, a pager waits, a terminal
is held with Ctrl-S. The run continues. It prints one warning on the other stream, and another at
its end.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_NAMES = ("stdout", "stderr")
_PATIENCE_S = 10.0  # For a reader that lives and reads nothing.
_PART = 1024  # Characters: 4096 bytes, which a pipe that is writable takes at once (pipe(7)).


def open_closed_descriptors() -> None:
    """Opens missing descriptors 0 to 2 on /dev/null. Otherwise the next opened file would get one
    of these numbers, and messages would be written into the file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    for name in _NAMES:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


class Outliving:
    """A text stream that records failures in `error` instead of raising them."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Writes to the stream; a stream that is gone is noted and does not end the run."""
        if not isinstance(
            text, str
        ):  # click asks by writing no bytes whether bytes may be written.
            raise TypeError(f"expected text, got {type(text).__name__}")
        try:
            for start in range(0, len(text), _PART):
                if self._is_read():
                    self._stream.write(text[start : start + _PART])
                    self._stream.flush()
        except UnicodeEncodeError as error:  # A question mark is better than the end of the run.
            text = text.encode(error.encoding, "replace").decode(error.encoding)
            return self.write(text)
        except (OSError, ValueError) as error:
            self._note(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, as `write`."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._note(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _is_read(self) -> bool:
        """Whether the stream takes a part of a text now. Waits for the reader, the first time; a
        write would wait for it without end, and a signal would not end the run."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError, AttributeError):
            return True  # No descriptor: nobody is waited for.
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        is_stuck = self.error is not None and self.error.errno == errno.EAGAIN
        if poll.poll(0 if is_stuck else 1000 * _PATIENCE_S):
            return True
        self._note(OSError(errno.EAGAIN, f"its reader read nothing for {_PATIENCE_S:.0f} s"))
        return False

    def __str__(self) -> str:
        assert self.error is not None
        return f"some of what was printed on {self._name}: {self.error.strerror or self.error}"

    def _note(self, error: OSError | ValueError) -> None:
        is_first = self.error is None
        self.error = error if isinstance(error, OSError) else OSError(errno.EBADF, str(error))
        # A broken pipe is final; a full disk may have space again.
        if self.error.errno == errno.EPIPE:
            discard(self._stream)
        if is_first:
            self._warn()

    def _warn(self) -> None:
        """Warns on the other stream, if there is one with a reader."""
        other = getattr(sys, _NAMES[_NAMES.index(self._name) - 1])
        if isinstance(other, Outliving) and other.error is None:
            other.write(f"warning: the run goes on without {self}\n")
            other.flush()


def discard(stream: Any) -> None:
    """Redirects the stream and its buffer to /dev/null. Otherwise the interpreter would fail at
    exit."""
    with suppress(OSError, ValueError, AttributeError):  # Not every stream has a descriptor.
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()


@contextmanager
def outliving_streams() -> Iterator[None]:
    """Makes sys.stdout and sys.stderr `Outliving` for the time of a `with` block."""
    plain = {name: getattr(sys, name) for name in _NAMES}
    for name, stream in plain.items():
        setattr(sys, name, Outliving(stream, name))
    try:
        yield
    finally:
        for name, stream in plain.items():
            setattr(sys, name, stream)
            try:
                stream.flush()
            except (OSError, ValueError):
                discard(stream)


def lost_streams() -> list[str]:
    """Describes the output that could not be printed so far."""
    streams = [getattr(sys, name) for name in _NAMES]
    return [str(stream) for stream in streams if isinstance(stream, Outliving) and stream.error]
