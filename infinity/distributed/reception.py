"""Admits the ranks of a job, among all processes that connect.

A connection is believed only when its whole hello has come and the secret is right. All connections
are read at once, under one deadline, and none keeps more bytes than a hello has. A connection that
is silent, slow or one of many therefore costs the ranks nothing.
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

_MOST_WAITING = 256  # Further connections close the one that has waited longest.

Name = TypeVar("Name")


class Reception(Generic[Name]):
    """A listening socket, until every expected connection was admitted or the time is up.

    A hello is `hello_nbytes` long: the bytes that `name_of` turns into a name, then `secret`.
    `name_of` returns None for a name that is not expected.
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
        """Yields admitted connections, each as soon as its hello is complete; the caller stops at
        the last.

        Ends at the deadline, a `time.monotonic`. Connections that were not admitted by then are
        closed.
        """
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
            return  # It has closed meanwhile.
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._waiting:
                raise
            self._drop(next(iter(self._waiting)), selector)  # Strangers have taken all descriptors.
            return
        connection.setblocking(False)
        if len(self._waiting) >= _MOST_WAITING:
            self._drop(next(iter(self._waiting)), selector)
        self._waiting[connection] = bytearray()
        selector.register(connection, selectors.EVENT_READ)

    def _listen_to(
        self, connection: socket.socket, selector: selectors.BaseSelector
    ) -> Name | None:
        """Returns the name once the hello is complete and right. Closes a connection with another
        hello.
        """
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
