"""Threads that carry out calls until the process is gone.

An executor of `concurrent.futures` takes no call any more once the interpreter has begun to end,
which is before exit handlers run. The resources of a script that ends without `close` are released
by an exit handler, and other ranks may need this one until then.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


def _nothing() -> None: ...


class DaemonThreads:
    """Up to `count` threads, which begin calls in the order in which they were submitted.

    The threads start with the first call and end with `close`, or when this object is collected.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], None] = _nothing) -> None:
        """`begin` is called first in each thread; every call raises its error."""
        self._count = count
        self._name = name
        self._begin = begin
        self._lock = threading.Lock()  # Guards the rest.
        self._calls: _Calls = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(
        self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs
    ) -> Future[T]:
        """Returns the result to come. Where threads cannot start any more, the caller's thread
        computes it."""
        future: Future[T] = Future()
        call = future, partial(function, *arguments, **named)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: no call is taken after close()")
            can_run = bool(self._threads) or self._start()
            if can_run:
                self._calls.put(call)
        if not can_run:
            _carry_out(*call, None)
        return future

    def _start(self) -> bool:
        """Starts the threads, with the lock. Returns whether there is one."""
        for number in range(self._count):
            thread = threading.Thread(
                target=_run,
                args=(self._calls, self._begin),
                name=f"{self._name}_{number}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # From Python 3.12 on, in an exit handler.
                break
            self._threads.append(thread)
        # Not at the exit: exit handlers may need the threads.
        weakref.finalize(self, _end, self._calls, len(self._threads)).atexit = False
        return bool(self._threads)

    def close(self) -> None:
        """Waits for the calls that were submitted, and ends the threads. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                _end(self._calls, len(self._threads))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _end(calls: _Calls, count: int) -> None:
    for _ in range(count):
        calls.put(None)


def _run(calls: _Calls, begin: Callable[[], None]) -> None:
    failure: BaseException | None = None
    try:
        begin()
    except BaseException as error:
        failure = error
    while (call := calls.get()) is not None:
        _carry_out(*call, failure)
        del call  # It keeps what it needs in memory.


def _carry_out(future: Future[Any], call: Callable[[], Any], failure: BaseException | None) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        if failure is not None:
            raise failure
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
