"""Letting the ranks of a job in, among whoever else connects.

Nobody is believed before the whole hello is there and its secret is right. All that have connected
are listened to at once, under one deadline, and of each no more is kept than a hello has. So one
that is silent, slow or many costs the others nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Generic, TypeVar

_MOST_WAITING = 256  # Strangers beyond it push out the one that has waited longest.

Name = TypeVar("Name")


class Reception(Generic[Name]):
    """A listening socket, until every expected connection was let in or the time is up.

    A hello is what `name_of` makes a name of, then `secret`: `hello_nbytes` together.
    `name_of` answers None for a hello that is of nobody who is missing.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        hello_nbytes: int,
        secret: bytes,
        name_of: Callable[[bytes], Name | None],
    ) -> None:
        self._listener = listener
        self._hello_nbytes = hello_nbytes
        self._secret = secret
        self._name_of = name_of
        self._waiting: dict[socket.socket, bytearray] = {}  # Oldest first.

    def arrivals(self, deadline_s: float) -> Generator[tuple[Name, socket.socket]]:
        """Those who said who they are, each as soon as it did; the caller stops when it has all.
        Ends at the deadline, a `time.monotonic`. Who has not been let in by then is closed."""
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._close_waiting)
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ)
            while (left_s := deadline_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._waiting:
                        name = self._listen_to(key.fileobj, selector)
                        if name is not None:
                            yield name, key.fileobj

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # It has hung up meanwhile.
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._waiting:
                raise
            self._drop(next(iter(self._waiting)), selector)  # Strangers have taken all there are.
            return
        connection.setblocking(False)
        if len(self._waiting) >= _MOST_WAITING:
            self._drop(next(iter(self._waiting)), selector)
        self._waiting[connection] = bytearray()
        selector.register(connection, selectors.EVENT_READ)

    def _listen_to(
        self, connection: socket.socket, selector: selectors.BaseSelector
    ) -> Name | None:
        """The name, once the hello is whole and right; who says something else is closed."""
        said = self._waiting[connection]
        try:
            more = connection.recv(self._hello_nbytes - len(said))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            more = b""
        said += more
        if more and len(said) < self._hello_nbytes:
            return None
        head, secret = bytes(said[: -len(self._secret)]), bytes(said[-len(self._secret) :])
        is_known = bool(more) and hmac.compare_digest(secret, self._secret)
        name = self._name_of(head) if is_known else None
        if name is None:
            self._drop(connection, selector)
            return None
        selector.unregister(connection)
        del self._waiting[connection]
        return name

    def _drop(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection)
        del self._waiting[connection]
        connection.close()

    def _close_waiting(self) -> None:
        for connection in self._waiting:
            with contextlib.suppress(OSError):
                connection.close()
        self._waiting.clear()
