"""The thread that updates chunks of state while the model's own code runs on a device.

Note [Who updates]
  Where the device is the host, kernels of the model use every core. Early updates then run between
  two of them, on the thread that trains, and pending ones where a unit is needed: two threads that
  both use every core are slower than one after the other. On a device with memory of its own the
  host's cores are free, and the thread that trains may wait for the device at any time; a thread
  of the engine's makes early and pending updates. The thread that trains checks weights out for
  it, because only that thread knows the streams.

Note [Without the lock] (INV-26)
  The backward takes the engine's lock for every gradient. If a chunk were updated under the lock,
  each of them would wait for one: on an H200 a backward of 0.10 s took 0.32 s. So the arithmetic
  of a chunk is `LooseWork`: its arrays were taken under the lock, and belong to nobody else until
  the work has ended. Code that needs it to be over, because a unit is needed, a step decides or
  memory is short, ends it: waits for the arithmetic with the lock, and does what is left.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from infinity.storage.protocol import Transfer

MOST_CHECKED_OUT = 2  # Units whose weights are checked out for the worker at once.
_POLL_S = 0.05


class LooseWork:
    """A part of a turn that runs without the engine's lock, and what follows it under the lock.

    `work` is called once, by the worker. `end(error)` is called once, by the first caller of `end`;
    `error` is what `work` has raised.
    """

    def __init__(
        self, work: Callable[[], None], end: Callable[[BaseException | None], None]
    ) -> None:
        self._work: Callable[[], None] | None = work
        self._end: Callable[[BaseException | None], None] | None = end
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Does the work. The worker, without the lock."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = None
            self._is_over.set()

    def end(self) -> None:
        """Waits until the work is over, and does what follows it, unless that is done. Any thread,
        under the lock. Raises what follows raises."""
        end, self._end = self._end, None
        if end is not None:
            self._is_over.wait()
            end(self._error)


Turn = Callable[[], Sequence[Transfer] | LooseWork | None]


class UpdateWorker:
    """Runs turns of work under the engine's lock, one after the other, on a thread of its own.

    `begin` is called first in the thread. `lock`: the engine's; it is free between two turns.
    `turn` is a bound method, which is held weakly. A turn does a chunk of work and never waits; it
    returns what is left of it without the lock, the transfers that the next turn needs, none if the
    next turn can follow at once, or None if there is nothing to do now: the next turn follows a
    `wake`, or the next look, which is soon. The thread waits for the transfers, and compares their
    checksums, without the lock.
    Code that needs the bytes of a transfer meets its error.

    What a turn raises is raised by the next `wake`, and no turn follows.
    """

    def __init__(self, lock: threading.RLock, turn: Turn, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._lock = lock
        self._turn = weakref.WeakMethod(turn)
        self._is_woken = threading.Event()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="infinity-updates", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be work. Any thread. Raises what the last turn has raised."""
        self.refuse_failed()
        self._num_threads = torch.get_num_threads()  # Updates have as many.
        self._is_woken.set()

    def refuse_failed(self) -> None:
        """Raises what the last turn has raised."""
        if self._failure is not None:  # GIL: the thread sets it once.
            raise self._failure

    def close(self) -> None:
        """Ends the thread after the turn that runs. The caller may hold the lock. Idempotent."""
        self._is_closing = True
        self._is_woken.set()
        if threading.current_thread() is not self._thread:  # Garbage is collected on any thread.
            self._thread.join()

    def _run(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            self._failure = error
            return
        while not self._is_closing and self._turn() is not None:
            # Work may become possible without a wake: a write that ends frees its staging slot.
            self._is_woken.wait(_POLL_S)
            self._is_woken.clear()
            while not self._is_closing and self._take_turn():
                pass

    def _take_turn(self) -> bool:
        """Returns whether another turn is to follow."""
        if not self._lock.acquire(timeout=_POLL_S):
            return True  # `close` may be waiting, with the lock.
        try:
            if torch.get_num_threads() != self._num_threads:
                torch.set_num_threads(self._num_threads)
            turn = self._turn()
            awaited = None if turn is None else turn()
        except BaseException as error:
            self._failure = error
            self._is_closing = True
            return False
        finally:
            turn = None
            self._lock.release()
        if awaited is None:
            return False
        if isinstance(awaited, LooseWork):
            awaited.run()
            return self._end_work(awaited)
        if not awaited:
            time.sleep(0)  # A thread that waits for the lock is next.
        for transfer in awaited:
            with contextlib.suppress(Exception):
                transfer.wait()
        return True

    def _end_work(self, work: LooseWork) -> bool:
        """Returns whether another turn is to follow."""
        while not self._lock.acquire(timeout=_POLL_S):
            if self._is_closing:
                return False  # The caller of `close` has the lock, and ends the work.
        try:
            work.end()
        except BaseException as error:
            self._failure = error
            self._is_closing = True
            return False
        finally:
            self._lock.release()
        return True
