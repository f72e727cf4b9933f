"""Opens the sockets between the ranks of a job: two from every rank to every other one."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence

from infinity.distributed.messages import HEADER, MessageType, Purpose
from infinity.distributed.peer import Peer
from infinity.distributed.reception import Reception
from infinity.errors import RankError


def connect_to(peer: Peer, purpose: Purpose, *, rank: int, deadline_s: float) -> socket.socket:
    """Opens a socket of `rank` to a peer. Raises RankError.

    `deadline_s` is a time of `time.monotonic`.
    """
    try:
        left_s = max(0.1, deadline_s - time.monotonic())
        connection = socket.create_connection((peer.address, peer.port), timeout=left_s)
        _prepare(connection)
        hello = HEADER.pack(MessageType.HELLO, rank, purpose, 0, len(peer.secret))
        connection.sendall(hello + peer.secret)
    except OSError as error:
        raise RankError(peer.rank, f"{peer} cannot be reached: {error}") from error
    return connection


def accepted(
    listener: socket.socket, peers: Sequence[Peer], *, rank: int, deadline_s: float
) -> Iterator[tuple[int, Purpose, socket.socket]]:
    """Yields the sockets that other ranks open to `rank`: the other rank, the use, the socket.

    Ends when every socket is open, at the deadline, or if the listener fails; closes the listener.
    A connection that does not know the secret of `rank` is closed.
    """
    secret = peers[rank].secret
    missing = {(peer.rank, purpose) for peer in peers for purpose in Purpose if peer.rank != rank}

    def missing_name(header: bytes) -> tuple[int, Purpose] | None:
        kind, other, purpose, _, nbytes = HEADER.unpack(header)
        is_hello = kind == MessageType.HELLO and nbytes == len(secret)
        return (other, Purpose(purpose)) if is_hello and (other, purpose) in missing else None

    reception = Reception(
        listener, hello_nbytes=HEADER.size + len(secret), secret=secret, name_of=missing_name
    )
    with (
        contextlib.suppress(OSError),
        listener,
        contextlib.closing(reception.arrivals(deadline_s)) as arrivals,
    ):
        for (other, purpose), connection in arrivals:
            _prepare(connection)
            missing.discard((other, purpose))
            yield other, purpose, connection
            if not missing:
                break


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
