"""The first failure of a rank of a group: it ends every wait here, and all other ranks learn it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from infinity.distributed.messages import Purpose
from infinity.distributed.outgoing import Outgoing
from infinity.distributed.peer import Peer
from infinity.errors import RankError

_log = logging.getLogger("infinity")

CAUSE_S = 1.0  # A closed socket may be seen before the message that explains it.
_DEATH_S = 5.0  # The links know of a death within this time.
_TELLING_S = 3.0  # Of a failure, to all ranks: one that does not listen must not keep this one.


class RankFailures:
    """The life of the ranks of a group, as `me` knows it. Thread-safe.

    `outgoing`: the sockets over which the other ranks learn of a failure. `changed` guards the
    state, which the transport shares.
    """

    def __init__(
        self, me: Peer, count: int, outgoing: Mapping[tuple[int, Purpose], Outgoing]
    ) -> None:
        self._me = me
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
        if self.first is not None:
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
        """Waits until the first failure is sent."""
        deadline_s = time.monotonic() + _TELLING_S
        for thread in list(self._telling):
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
