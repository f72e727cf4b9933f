"""The thread of a simulated stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class StreamWorker:
    """A thread that runs one task after the other. The interpreter does not wait for it at exit, so
    a failed run cannot block the exit."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Callable[[], int], Future[int]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], int]) -> Future[int]:
        """Runs `work` after the tasks before it."""
        future: Future[int] = Future()
        if self._thread.is_alive():
            self._work.put((work, future))
        else:  # All submitted tasks have ended.
            future.set_result(work())
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del item, work, future  # References must not live until the next task arrives.

    def close(self) -> None:
        """Waits until all submitted tasks have ended."""
        self._work.put(None)
        if not self.is_current():
            self._thread.join()

    def is_current(self) -> bool:
        """Whether the caller runs in this thread: garbage is collected on any thread."""
        return self._thread is threading.current_thread()
