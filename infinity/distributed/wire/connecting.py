"""How ranks meet, and open the sockets between them: two from every rank to every other one.

Ranks meet twice in the key-value store of torch.distributed (`Meeting`), to learn each other's
addresses, and then connect (`group.py`). What they do together later goes over the connections,
which show the life of a rank; the store does not.

A rank admits the other ranks among all processes that connect. A connection is believed only when
its whole hello has come and the secret is right. All connections are read at once, under one
deadline, and none keeps more bytes than a hello has. A connection that is silent, slow or one of
many therefore costs the ranks nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import pickle
import resource
import select
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from infinity.distributed.wire.addresses import UNIX
from infinity.distributed.wire.protocol import HEADER, Address, MessageType, Peer, Purpose
from infinity.errors import ConfigError, RankError

_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.05  # Between two looks into the store.
_WORD_S = 2.0  # A rank that has lost another one keeps the store, or its port, for so long.
_MOST_WAITING = 256  # Further connections close the one that has waited longest.

_SPARE_FILES = 256  # For connections of strangers, and for what the process opens later.


def allow_sockets(num_ranks: int) -> None:
    """Raises this process's limit of open files to what it may have, if the sockets of so many
    ranks would exceed it. Raises ConfigError if they need more than that."""
    per_rank = 2 * len(Purpose)  # This rank opens one of each, and the other one does.
    needed = len(os.listdir("/proc/self/fd")) + per_rank * (num_ranks - 1) + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{num_ranks} ranks have {per_rank} sockets between two of them, and this process may "
            f"open {hard} files; it needs {needed}. Raise the limit before the start: ulimit -n "
            f"{needed}, LimitNOFILE={needed} of systemd, or docker run --ulimit nofile={needed}"
        )
    limit = needed if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def closed(connections: Iterable[socket.socket]) -> set[socket.socket]:
    """Returns those that the other end has closed, of sockets on which it sends nothing yet."""
    poll, by_number = select.poll(), {connection.fileno(): connection for connection in connections}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return {by_number[number] for number, _ in poll.poll(0)}


def listen(address: str, backlog: int) -> tuple[socket.socket, Address]:
    """Returns a socket that accepts connections at an address of this machine, or, for UNIX, at a
    name that the kernel chooses; and where other ranks find it."""
    listener = socket.socket(socket.AF_UNIX if address == UNIX else socket.AF_INET)
    listener.bind("" if address == UNIX else (address, 0))
    listener.listen(backlog)
    return listener, listener.getsockname()


def connect_to(peer: Peer, purpose: Purpose, *, rank: int, deadline_s: float) -> socket.socket:
    """Opens a socket of `rank` to a peer. Raises RankError.

    `deadline_s` is a time of `time.monotonic`.
    """
    try:
        is_unix = isinstance(peer.address, bytes)
        connection = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        connection.settimeout(max(0.1, deadline_s - time.monotonic()))
        _connect(connection, peer, deadline_s)
        _prepare(connection)
        connection.sendall(_hello(peer, rank, purpose))
    except OSError as error:
        raise RankError(peer.number, f"{peer} cannot be reached: {error}") from error
    return connection


def _connect(connection: socket.socket, peer: Peer, deadline_s: float) -> None:
    assert peer.address is not None, "no rank connects before all can be reached"
    while True:
        try:
            connection.connect(peer.address)
        except BlockingIOError:  # A UNIX socket with a timeout does not wait for a full backlog.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_FIRST_LOOK_S)
        else:
            return


def accepted(
    listener: socket.socket, peers: Sequence[Peer], *, rank: int, deadline_s: float
) -> Iterator[tuple[int, Purpose, socket.socket]]:
    """Yields the sockets that other ranks open to `rank`: the other rank, the use, the socket.

    Ends when every socket is open, at the deadline, or if the listener fails; closes the listener,
    and the connections that were not admitted.
    """
    expected = {
        _hello(peers[rank], peer.rank, purpose): (peer.rank, purpose)
        for peer in peers
        for purpose in Purpose
        if peer.rank != rank
    }
    with (
        contextlib.suppress(OSError),
        contextlib.closing(_Arrivals(listener, len(peers[rank].secret))) as arrivals,
    ):
        while expected and (left_s := deadline_s - time.monotonic()) > 0:
            for hello, connection in arrivals.complete(left_s):
                # Each comparison takes as long as any other: time tells nothing of a secret.
                found = [known for known in expected if hmac.compare_digest(known, hello)]
                if not found:
                    connection.close()
                    continue
                _prepare(connection)
                yield *expected.pop(found[0]), connection


class _Arrivals:
    """The connections that have come to a listener and have not said all of their hello."""

    def __init__(self, listener: socket.socket, secret_nbytes: int) -> None:
        self._listener = listener
        self._hello_nbytes = HEADER.size + secret_nbytes
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, bytes] = {}  # Oldest first.
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Closes the listener and the connections that are left."""
        self._selector.close()
        for connection in (self._listener, *self._waiting):
            connection.close()

    def complete(self, timeout_s: float) -> Iterator[tuple[bytes, socket.socket]]:
        """Yields hellos that are complete, with their connections, which are the caller's then.

        Waits for bytes or connections, at most `timeout_s`.
        """
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._waiting:
                hello = self._read(key.fileobj)
                if hello is not None:
                    yield hello, key.fileobj

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # It has closed meanwhile.
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._waiting:
                raise
            self._drop_oldest()  # Strangers have taken all descriptors.
            return
        connection.setblocking(False)
        if len(self._waiting) >= _MOST_WAITING:
            self._drop_oldest()
        self._waiting[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> bytes | None:
        """Returns the hello once it is complete, or what there is of it at the connection's end."""
        try:
            more = connection.recv(self._hello_nbytes - len(self._waiting[connection]))
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            more = b""
        self._waiting[connection] += more
        if more and len(self._waiting[connection]) < self._hello_nbytes:
            return None
        self._selector.unregister(connection)
        return self._waiting.pop(connection)

    def _drop_oldest(self) -> None:
        connection = next(iter(self._waiting))
        self._selector.unregister(connection)
        del self._waiting[connection]
        connection.close()


def _hello(server: Peer, rank: int, purpose: Purpose) -> bytes:
    """Returns the first bytes of a socket that `rank` opens to `server`."""
    header = HEADER.pack(MessageType.HELLO, rank, purpose, 0, len(server.secret))
    return header + server.secret


def _prepare(connection: socket.socket) -> None:
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Meeting:
    """One meeting of the ranks of a group, in `store`. `of_job`: the number of each in the job.

    A rank that comes to a meeting alone waits for its n-th meeting in this store, as the others
    do. After `end` nothing of it is in the store.
    """

    def __init__(self, store: Any, rank: int, of_job: Sequence[int]) -> None:
        self._store = store
        self._rank = rank
        self._of_job = of_job
        self._counter = f"infinity/meetings/{of_job[rank]}"
        with self._naming_host():
            self._number = store.add(self._counter, 1)
        self._kept: list[str] = []

    def all_gather(self, what: str, content: Any, timeout_s: float, remedy: str = "") -> list[Any]:
        """Returns every rank's content, in rank order. Raises RankError for a rank that does not
        come in this time, and for one that another rank has lost."""
        keys = self._await_all(what, content, timeout_s, remedy)
        with self._naming_host():
            return [pickle.loads(self._store.get(key)) for key in keys]

    def _await_all(self, what: str, content: Any, timeout_s: float, remedy: str) -> list[str]:
        """Gives this rank's content and waits for that of the others. Returns the keys."""
        keys = [f"{self._place}/{what}/{rank}" for rank in range(len(self._of_job))]
        deadline_s, look_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
        with self._naming_host():
            self._store.set(keys[self._rank], pickle.dumps(content))
            self._kept.append(keys[self._rank])
            while not self._store.check(keys):
                self._raise_word()
                if time.monotonic() > deadline_s:
                    late = next(r for r, key in enumerate(keys) if not self._store.check([key]))
                    number = self._of_job[late]
                    raise RankError(
                        number, f"rank {number} has not come within {timeout_s:.0f} s{remedy}"
                    )
                time.sleep(look_s)
                look_s = min(2 * look_s, _LAST_LOOK_S)
        return keys

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """A block that refuses on all ranks, or in which this rank may lose another one. The ranks
        that have not come so far find the same error in the store, in place of this rank, which
        ends, and may keep the store."""
        try:
            yield
        except ConfigError:
            # Nothing is read: a rank that has seen all removes its key at once, and the store would
            # wait minutes for a key that is gone.
            with contextlib.suppress(RankError):
                self._await_all("refused", None, _WORD_S, "")
            raise
        except RankError as error:
            with contextlib.suppress(RuntimeError):
                if not self._store.check([f"{self._place}/lost"]):
                    self._store.set(f"{self._place}/lost", pickle.dumps((error.rank, error.cause)))
                    time.sleep(_WORD_S)
            with contextlib.suppress(RuntimeError):
                self._raise_word()
            raise

    def end(self, *, is_over: bool) -> None:
        """Removes what this rank has left in the store. Unless the meeting `is_over`, the next one
        of this rank is this one again."""
        with contextlib.suppress(RuntimeError):
            for key in self._kept:
                self._store.delete_key(key)
            if not is_over:
                self._store.add(self._counter, -1)

    @property
    def _place(self) -> str:
        ranks = "-".join(map(str, (self._of_job[0], len(self._of_job), self._of_job[-1])))
        return f"infinity/{ranks}/{self._number}"

    def _raise_word(self) -> None:
        if self._store.check([f"{self._place}/lost"]):
            raise RankError(*pickle.loads(self._store.get(f"{self._place}/lost")))

    @contextlib.contextmanager
    def _naming_host(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # All that a store raises.
            raise RankError(
                0, f"rank 0, or the launcher, which keeps the store of torch.distributed, is gone: "
                f"{' '.join(str(error).split())[:200]}",
            ) from error  # fmt: skip
