"""The thread that updates chunks of state while the model's own code runs on a device.

Note [Who updates]
  Where the device is the host, kernels of the model use every core. Early updates then run between
  two of them, on the thread that trains, and pending ones where a unit is needed: two threads that
  both use every core are slower than one after the other. On a device with memory of its own the
  host's cores are free, and the thread that trains may wait for the device at any time; a thread
  of the engine's makes early and pending updates. The thread that trains checks weights out for
  it, because only that thread knows the streams.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

MOST_CHECKED_OUT = 2  # Units whose weights are checked out for the worker at once.
_POLL_S = 0.05


class Waitable(Protocol):
    """A transfer of a drive, or a copy of a device."""

    def wait(self) -> object:
        """Blocks until it is over, and raises its error."""


Turn = Callable[[], Sequence[Waitable] | None]


class UpdateWorker:
    """Runs turns of work under the engine's lock, one after the other, on a thread of its own.

    `begin` is called first in the thread. `lock`: the engine's; it is free between two turns.
    `turn` is a bound method, which is held weakly. A turn does a chunk of work and never waits; it
    returns the transfers that the next turn needs, none if the next turn can follow at once, or
    None if there is nothing to do now: the next turn follows a `wake`, or the next look, which is
    soon. The thread waits for the transfers, and compares their checksums, without the lock.
    Whoever needs the bytes of a transfer meets its error.

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
        if self._failure is not None:
            raise self._failure
        self._num_threads = torch.get_num_threads()  # Updates have as many.
        self._is_woken.set()

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
        if not awaited:
            time.sleep(0)  # Who waits for the lock is next.
        for transfer in awaited:
            with contextlib.suppress(Exception):
                transfer.wait()
        return True
