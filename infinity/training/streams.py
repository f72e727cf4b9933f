"""Standard output and error that a run does not die of.

Whoever reads them may go first: `| tee log` dies of the same Ctrl-C, a terminal hangs up, the disk
under a log fills. The run goes on, says so once where somebody may still read it, and again at its
end.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_NAMES = ("stdout", "stderr")


def open_closed_descriptors() -> None:
    """Descriptors 0 to 2 that the program was started without lead to /dev/null. The next file that
    is opened would get their number else, and messages would be written into it."""
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
    """A text stream whose failures are noted in `error`, not raised. Otherwise the same stream."""

    def __init__(self, stream: Any, name: str) -> None:
        self._stream = stream
        self._name = name
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:  # Better a question mark than no end of the run.
            text = text.encode(error.encoding, "replace").decode(error.encoding)
            return self.write(text)
        except (OSError, ValueError) as error:
            self._note(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._note(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __str__(self) -> str:
        assert self.error is not None
        return f"some of what was printed on {self._name}: {self.error.strerror or self.error}"

    def _note(self, error: OSError | ValueError) -> None:
        is_first = self.error is None
        self.error = error if isinstance(error, OSError) else OSError(errno.EBADF, str(error))
        if self.error.errno == errno.EPIPE:  # For good; a full disk may have room again.
            discard(self._stream)
        if is_first:
            self._warn()

    def _warn(self) -> None:
        """On the other stream, if that is another one, and somebody reads it."""
        other = getattr(sys, _NAMES[_NAMES.index(self._name) - 1])
        if isinstance(other, Outliving) and other.error is None:
            other.write(f"warning: the run goes on without {self}\n")
            other.flush()


def discard(stream: Any) -> None:
    """What is written from now on, and what waits in the buffer, goes to /dev/null: the interpreter
    would fail at its end else."""
    with suppress(OSError, ValueError, AttributeError):  # Not every stream has a descriptor.
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()


@contextmanager
def outliving_streams() -> Iterator[None]:
    """Within, sys.stdout and sys.stderr are `Outliving`."""
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
    """What could not be printed so far."""
    streams = [getattr(sys, name) for name in _NAMES]
    return [str(each) for each in streams if isinstance(each, Outliving) and each.error]
