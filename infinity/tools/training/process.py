"""The process of a run: its streams, its signals, its memory."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from infinity.sizes import GIB

# -- Standard output and error whose failure does not end a run ------------------------------------
#
# The reader of a stream may end first: `| tee log` ends with the same Ctrl-C, a terminal hangs up,
# the disk under a log is full. Or it stops to read: a log collector hangs, a pager waits, a
# terminal is held with Ctrl-S. The run continues. It prints one warning on the other stream, and
# another at its end.


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
        if not isinstance(text, str):  # click writes no bytes, to ask whether any may be written.
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
        other = getattr(sys, _NAMES[_NAMES.index(self._name) - 1])
        if is_first and isinstance(other, Outliving) and other.error is None:
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


# -- Signals: the first requests an orderly end, a second ends the run at once ---------------------


# Requests of a person. The second one ends the run at once.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
# Warnings of an end: a terminal hangs up, a scheduler warns, time is up. Some are sent repeatedly.
_NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_ALWAYS = (signal.SIGINT, signal.SIGTERM)
# torchrun sends its workers signals that the terminal has sent them already.
_FORWARDER_VARIABLE = "TORCHELASTIC_RUN_ID"
_FORWARDED_WITHIN_S = 5.0


class Interrupt:
    """While entered, signals set `received` instead of ending the process.

    A second SIGINT, SIGTERM or SIGQUIT raises KeyboardInterrupt in the main thread, and restores
    the former handlers, so that a third one is not caught. SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU
    request the same orderly end, and never count as the second signal. Except for SIGINT and
    SIGTERM, a signal that is already handled or ignored (as by nohup) is left alone. The first
    signal writes `notice` to standard error. Outside the main thread, where signals cannot be
    handled, an Interrupt has no effect.
    """

    def __init__(self, notice: str = "") -> None:
        self.received: signal.Signals | None = None
        self.notice = notice
        self._former: dict[signal.Signals, object] = {}
        self._asked_s: float | None = None  # The time of the first signal in `_ENDING`.
        self._is_forwarded = _FORWARDER_VARIABLE in os.environ

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect of a process ended by a signal: 130 for SIGINT, 143 for
        SIGTERM."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*_ENDING, *_NOTICES):
                if number in _ALWAYS or signal.getsignal(number) is signal.SIG_DFL:
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *unused: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            now_s = time.monotonic()
            if self._asked_s is None:
                self._asked_s = now_s
            elif not self._is_forwarded or now_s - self._asked_s > _FORWARDED_WITHIN_S:
                self._restore()
                raise KeyboardInterrupt
        elif self.received is not None:
            return
        if self.received is None:
            self.received = signal.Signals(number)
        # Without a standard error, its descriptor may belong to another file.
        if sys.__stderr__ is not None:
            with suppress(OSError):  # The same signal may have ended the reader.
                os.write(2, self.notice.encode())  # It may have interrupted a print.

    def _restore(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        self._former.clear()


# -- Freed memory is kept for the next allocation, not returned to the kernel ----------------------
#
# glibc serves a block above a threshold (128 KiB to 32 MiB, adaptive) by mmap and unmaps it when it
# is freed. A training step on the CPU then faults in its activations page by page, in every step.
# With a high threshold, activations come from the heap and stay there.
#
# glibc also gives every thread its own heap, which keeps the memory that the thread once needed.
# The micro-batches of `infinity.forward_backward` run in threads and would keep it many times over.
# Such a heap ends at 64 MiB, above which it maps and unmaps as before. One heap for all threads
# avoids both, with hardly any contention, because tensors are few and large.
#
# CUDA's allocator keeps segments of the sizes that were asked for. Units of different sizes leave
# holes between their blocks there, and what one stream has freed no other stream takes. A segment
# that expands has one range of addresses for a stream, so freed blocks join.
# Source: PyTorch, "CUDA semantics", section "Memory management".


# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def keep_freed_memory() -> bool:
    """Tunes malloc for the process. Returns False if the C library is not glibc.

    Call it before torch allocates and before other threads start. The heap then stays at its
    high-water mark, which a training step needs anyway. `give_back` returns memory after a phase
    that needed more.
    """
    options = {_M_MMAP_THRESHOLD: GIB, _M_TRIM_THRESHOLD: 2 * GIB - 1, _M_ARENA_MAX: 1}
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return all(bool(mallopt(option, value)) for option, value in options.items())
    return False


def expand_segments() -> bool:
    """Has segments of CUDA memory expand, unless the user has configured the allocator.

    Returns whether it did. Call it before CUDA allocates: torch reads the variable then.
    """
    if any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        return False
    os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    return True


def give_back() -> None:
    """Returns every free page of the heap to the kernel."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
