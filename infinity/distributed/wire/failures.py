"""How the end of one rank ends every wait of the others, in an error that names it and its cause.

The first failure of a rank of a group ends every wait here, and all other ranks learn it. Words
between ranks go over the links (`transport.py`), which raise that error themselves. The calls of
torch.distributed that are left, such as making a process group, go through `waiting_beside` and
`naming_lost_ranks`.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch

from infinity.distributed.wire.channel import Outgoing
from infinity.distributed.wire.protocol import Peer, Purpose
from infinity.errors import InfinityError, RankError

_log = logging.getLogger("infinity")

CAUSE_S = 1.0  # A closed socket may be seen before the message that explains it.
_DEATH_S = 5.0  # The links know of a death within this time.
_TELLING_S = 3.0  # Of a failure, to all ranks: one that does not listen must not keep this one.


class RankFailures:
    """The life of the ranks of a group, as `me` knows it. Thread-safe.

    `outgoing`: the sockets over which the other ranks learn of a failure. `changed` guards the
    state, which the transport shares. A rank that is silent for `silence_s` is stuck.
    """

    def __init__(
        self,
        me: Peer,
        count: int,
        outgoing: Mapping[tuple[int, Purpose], Outgoing],
        silence_s: float,
    ) -> None:
        self._me = me
        self.silence_s = silence_s
        self._count = count
        self._outgoing = outgoing
        self.changed = threading.Condition()
        self.first: RankError | None = None
        self.left: set[int] = set()  # Ranks that have closed.
        self.is_closing = False  # This rank.
        self.on_failure: Callable[[], None] | None = None  # Called in a thread of its own.
        self._telling: list[threading.Thread] = []

    def check(self) -> None:
        """Raises RankError when a rank is known to be gone."""
        if self.first is not None:  # GIL: it is set once, and never changed.
            raise self.first.again()

    @property
    def is_done(self) -> bool:
        """Whether all other ranks have closed. A socket that closes then is no failure."""
        return len(self.left) == self._count - 1

    def await_first(self, within_s: float) -> RankError | None:
        """Returns the first failure, as soon as there is one, to be raised; None after this
        time."""
        with self.changed:
            self.changed.wait_for(lambda: self.first is not None, within_s)
        return self.first and self.first.again()

    def cause_of(self, error: BaseException) -> BaseException:
        """Returns what an exception of this rank comes to: the first failure for one that was
        raised in torch.distributed, else the exception itself.

        A backend may see the socket of a dead rank before the links do.
        """
        if isinstance(error, RankError) or not _is_of_backend(error):
            return error
        return self.await_first(_DEATH_S) or error

    def end(self, error: BaseException) -> None:
        """Ends all ranks, because this one ends with `error` or with what `cause_of` it is. The
        other ranks learn it in threads of their own."""
        cause = self.cause_of(error)
        if isinstance(cause, RankError):
            self.note(cause)
        else:
            self.fail(f"{type(error).__name__}: {error}")

    def abort(self, cause: str) -> None:
        """Sends the reason why this rank ends to the other ranks, and waits until it is sent: the
        process may end."""
        self.fail(cause)
        self.await_told()

    def fail(self, cause: str) -> None:
        """Sends the reason why this rank ends to the other ranks, in threads of their own."""
        if not self.is_closing:
            self.note(RankError(self._me.number, f"{self._me} failed: {cause}"))

    def await_told(self) -> None:
        """Waits until the first failure is sent. Not under a lock that another thread may need."""
        deadline_s = time.monotonic() + _TELLING_S
        with self.changed:
            telling = list(self._telling)
        for thread in telling:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def note(self, error: RankError, *, is_alive: bool = False) -> None:
        """Keeps the first failure, ends every wait on this rank, and begins to send the failure to
        the other ranks: a caller may hold a lock. The failed rank receives it too if it `is_alive`.
        """
        with self.changed:
            if self.first is not None or self.is_done:
                return
            self.first = error
            self.changed.notify_all()
            for (_, purpose), link in list(self._outgoing.items()):
                if purpose is Purpose.GIVING and (is_alive or link.peer.number != error.rank):
                    tell = threading.Thread(target=link.tell, args=(error,), daemon=True)
                    tell.start()
                    self._telling.append(tell)
        # At once: this process may end, or wait for its device, before it raises.
        _log.error("%s (seen by rank %d)", error.cause, self._me.number)
        if self.on_failure is not None:
            threading.Thread(target=self.on_failure, daemon=True).start()

    # INV-20: a rank that ends, ends every wait for it.
    def lost(self, peer: Peer, why: str) -> None:
        """Handles a broken socket. Waits for a message about the cause, which may be in flight."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.first is not None or self.is_closing or peer.rank in self.left, CAUSE_S
            )
            if self.is_closing:
                self.left.add(peer.rank)
                self.changed.notify_all()
            if peer.rank in self.left:
                return
        self.note(RankError(peer.number, f"{peer} is gone: {why}"))


def _is_of_backend(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, was raised in torch.distributed."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            if str(trace.tb_frame.f_globals.get("__name__")).startswith("torch.distributed"):
                return True
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
    return False


_LOOK_S = 0.02
_beside: list[_thread.LockType] = []  # Held by calls of `run_beside` that are not over.

T = TypeVar("T")


@contextmanager
def ending_all(failures: RankFailures, where: str) -> Iterator[None]:
    """Ends all ranks if the block fails: the others wait for what it was to do, or have given it
    what is lost. The error goes on, so that a program that catches it does not keep the others
    waiting."""
    try:
        yield
    except RankError:
        raise  # The others know.
    except BaseException as error:
        failures.fail(f"{where}: {type(error).__name__}: {error}")
        raise


@contextmanager
def naming_lost_ranks(failures: RankFailures) -> Iterator[None]:
    """Surrounds an operation of torch.distributed. Raises the error of the links, which names the
    rank that is gone, for one of a backend, which names a socket."""
    try:
        yield
    except InfinityError:
        raise
    except RuntimeError as error:
        first = failures.await_first(failures.silence_s)
        raise first or InfinityError(f"torch.distributed between ranks: {error}") from error


def waiting_beside(failures: RankFailures, call: Callable[[], T]) -> T:
    """Returns the result of a call of torch.distributed that waits for other ranks.

    The call runs in a thread, which stays in it if a rank is gone: no backend lets itself be
    interrupted while it makes a group. Raises RankError then.
    """
    result: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="infinity-joining", daemon=True).start()
    with naming_lost_ranks(failures):
        return await_result(failures, result.done, result.result)


def await_result(failures: RankFailures, is_done: Callable[[], bool], result: Callable[[], T]) -> T:
    """Returns the result once it is there. Raises RankError if a rank is gone before."""
    pause_s = 0.0
    while not is_done():
        failures.check()
        time.sleep(pause_s)
        pause_s = min(pause_s + 1e-4, _LOOK_S)
    return result()


def run_beside(call: Callable[[], None]) -> None:
    """Runs a call in a thread, which the interpreter waits for when it ends. For finalizers: a
    garbage collection may interrupt any code, so this takes no lock, not even one of `threading`.
    """
    is_over = _thread.allocate_lock()
    is_over.acquire()
    _beside.append(is_over)

    def run() -> None:
        try:
            call()
        finally:
            _beside.remove(is_over)
            is_over.release()

    _thread.start_new_thread(run, ())


@atexit.register
def _await_beside() -> None:
    for is_over in _beside.copy():
        with is_over:
            pass


def tell_of_uncaught_exceptions(failures: RankFailures) -> None:
    """Sends an uncaught exception to the other ranks, which then name the cause. Where another rank
    is the cause, its name is the last that the program prints."""
    before, known = sys.excepthook, weakref.ref(failures)

    def tell(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        living: Any = known()
        if living is None or living.is_closing:
            before(kind, error, traceback)
            return
        cause = living.cause_of(error)
        if cause is not error:
            cause.__cause__ = error
        living.end(cause)
        living.await_told()
        before(type(cause), cause, cause.__traceback__)

    sys.excepthook = tell
