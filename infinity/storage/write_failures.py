"""The first write of a volume that has failed."""

from __future__ import annotations

import errno
import threading

from infinity.errors import StorageError
from infinity.storage.protocol import Ticket


class WriteFailures:
    """Watches writes, awaited or not. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._pending: list[Ticket] = []
        self._first: StorageError | None = None

    def watch(self, ticket: Ticket) -> None:
        """Adds a write that was queued."""
        with self._lock:
            self._pending.append(ticket)

    def note(self, error: StorageError) -> None:
        """Adds a failure that was met elsewhere."""
        with self._lock:
            self._first = self._first or error

    # INV-11: after a failed write every call raises the first error.
    def check(self) -> None:
        """Raises the first error, every time."""
        with self._lock:
            pending, self._pending = self._pending, []
            for ticket in pending:
                if ticket.done():
                    self._look(ticket)
                else:
                    self._pending.append(ticket)
            if self._first is not None:
                raise self._first.with_traceback(None)

    def _look(self, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except StorageError as error:
            # The caller has cancelled it, and knows that it is torn.
            if error.errno != errno.ECANCELED:
                self._first = self._first or error
