"""How a wait for other ranks ends when one of them is gone: in the error of the links, which names
that rank.

Words between ranks go over the links (`transport.py`), which raise that error themselves. The calls
of torch.distributed that are left, such as making a process group, go through `waiting_beside` and
`naming_lost_ranks`.
"""

from __future__ import annotations

import _thread
import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

import torch

from infinity.distributed.transport import REFUSED, PeerTransport
from infinity.errors import InfinityError, RankError

_LOOK_S = 0.02
_MOST_WORDS_NBYTES = 4096
_beside: list[_thread.LockType] = []  # Held by calls of `run_beside` that are not over.

T = TypeVar("T")


@contextmanager
def ending_all(links: PeerTransport, where: str) -> Iterator[None]:
    """Ends all ranks if the block fails: the others wait for what it was to do, or have given it
    what is lost. The error goes on, so that a program that catches it does not keep the others
    waiting."""
    try:
        yield
    except RankError:
        raise  # The others know.
    except BaseException as error:
        links.failures.fail(f"{where}: {type(error).__name__}: {error}")
        raise


def refuse(links: PeerTransport, error: InfinityError) -> None:
    """Waits until the other ranks have come to a refusal of their own, or learn of this one in
    another call, before this rank ends. A RankError is known to them."""
    if not isinstance(error, RankError):
        words = f"{type(error).__name__}: {error}".encode()[:_MOST_WORDS_NBYTES]
        with suppress(InfinityError):
            links.all_gather(REFUSED, words)


@contextmanager
def naming_lost_ranks(links: PeerTransport) -> Iterator[None]:
    """Surrounds an operation of torch.distributed. Raises the error of the links, which names the
    rank that is gone, for one of a backend, which names a socket."""
    try:
        yield
    except InfinityError:
        raise
    except RuntimeError as error:
        first = links.failures.await_first(links.silence_s)
        raise first or InfinityError(f"torch.distributed between ranks: {error}") from error


def waiting_beside(links: PeerTransport, call: Callable[[], T]) -> T:
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
    with naming_lost_ranks(links):
        return await_result(links, result.done, result.result)


def await_result(links: PeerTransport, is_done: Callable[[], bool], result: Callable[[], T]) -> T:
    """Returns the result once it is there. Raises RankError if a rank is gone before."""
    pause_s = 0.0
    while not is_done():
        links.check()
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


def tell_of_uncaught_exceptions(links: PeerTransport) -> None:
    """Sends an uncaught exception to the other ranks, which then name the cause. Where another rank
    is the cause, its name is the last that the program prints."""
    before, known = sys.excepthook, weakref.ref(links)

    def tell(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        living: Any = known()
        if living is None or living.failures.is_closing:
            before(kind, error, traceback)
            return
        cause = living.failures.cause_of(error)
        if cause is not error:
            cause.__cause__ = error
        living.failures.end(cause)
        living.failures.await_told()
        before(type(cause), cause, cause.__traceback__)

    sys.excepthook = tell
