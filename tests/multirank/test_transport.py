"""The transport by itself, in one process: which connections are accepted, and which rank waits for
which."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from infinity.distributed.wire import failures
from infinity.distributed.wire import transport as transport_module
from infinity.distributed.wire.addresses import UNIX
from infinity.distributed.wire.connecting import listen
from infinity.distributed.wire.node_memory import NodeMemory, OwnMemory, map_memory
from infinity.distributed.wire.protocol import HEADER, MOST_RANKS, MessageType, Peer, Purpose
from infinity.distributed.wire.transport import PeerTransport
from infinity.errors import RankError, StorageError
from infinity.observe import Counters
from tests.support.forked import TIME_LIMIT_S

CONTENT = bytes(range(256)) * 1000


class Shelf:
    """Serves CONTENT, keeps what it receives."""

    def __init__(self) -> None:
        self.delivered: list[tuple[int, int, int, int, bytes]] = []

    def begin_thread(self) -> None:
        return None

    def serve(self, unit: int, kind: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        half = len(CONTENT) // 2
        return len(CONTENT), (memoryview(CONTENT)[:half], memoryview(CONTENT)[half:])

    def deliver(
        self,
        rank: int,
        tensor: int,
        dtype: int,
        generation: int,
        nbytes: int,
        receive: Callable[[memoryview], None],
    ) -> None:
        content = bytearray(nbytes)
        for start in range(0, nbytes, 100_000):
            receive(memoryview(content)[start : start + 100_000])
        self.delivered.append((rank, tensor, dtype, generation, bytes(content)))


def make(count: int, address: str = UNIX) -> list[PeerTransport]:
    """Transports of ranks in this process."""
    listeners, places = zip(*(listen(address, 8) for _ in range(count)), strict=True)
    peers = [Peer(rank, "here", rank, place, b"%032d" % rank) for rank, place in enumerate(places)]
    return [PeerTransport(rank, peers, listener) for rank, listener in enumerate(listeners)]


def stranger_to(peer: Peer) -> socket.socket:
    """A connection of another program, which may know the address of a rank."""
    family = socket.AF_UNIX if isinstance(peer.address, bytes) else socket.AF_INET
    connection = socket.socket(family)
    connection.connect(peer.address)
    return connection


def open_all(
    transports: Sequence[PeerTransport],
    shelves: Sequence[Any],
    memories: Sequence[NodeMemory] | None = None,
) -> None:
    """Connects ranks. `memories`: by rank; without it all use sockets alone."""
    collective_section([transport.open for transport in transports])
    for transport, memory in zip(transports, memories or (), strict=memories is not None):
        transport.share(Counters(), memory)
    collective_section(
        [lambda t=t, s=s: t.serve(s) for t, s in zip(transports, shelves, strict=True)]
    )


def shared_memories(count: int) -> list[NodeMemory]:
    """What each rank reads of the others, with the bounce buffers alone."""
    own = [OwnMemory(count, "a boot", None) for _ in range(count)]
    memories = []
    for rank in range(count):
        others = [other for other in range(count) if other != rank]
        mapped = {other: map_memory(own[other].offer, "a boot") for other in others}
        found = {other: memory for other, memory in mapped.items() if memory is not None}
        assert len(found) == count - 1
        memories.append(NodeMemory(own[rank], found, others))
    for each in own:
        each.close_files()
    return memories


def collective_section(functions: Iterable[object]) -> None:
    threads = [threading.Thread(target=function) for function in functions]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT_S)
        assert not thread.is_alive()


@pytest.fixture(params=["sockets", "tcp", "memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[list[PeerTransport], list[Shelf]]]:
    memories = shared_memories(2) if request.param == "memory" else None
    transport = make(2, "127.0.0.1" if request.param == "tcp" else UNIX)
    shelves = [Shelf(), Shelf()]
    open_all(transport, shelves, memories)
    yield transport, shelves
    collective_section([each.close for each in transport])


def test_gets_are_scattered_and_puts_arrive_before_barriers(
    pair: tuple[list[PeerTransport], list[Shelf]],
) -> None:
    transport, shelves = pair
    sinks = [bytearray(1000), bytearray(len(CONTENT) - 1000)]
    transport[0].get(1, 3, 0, [memoryview(sink) for sink in sinks]).wait()
    assert sinks[0] + sinks[1] == CONTENT
    for number in range(20):
        transport[1].put(0, number, 1, 2, memoryview(CONTENT), meanwhile=lambda: None)
    gathered: list[list[bytes]] = []
    collective_section(
        [lambda i=i: gathered.append(transport[i].all_gather("x", b"%d" % i)) for i in range(2)]
    )
    assert gathered == [[b"0", b"1"]] * 2
    assert shelves[0].delivered == [(1, number, 1, 2, CONTENT) for number in range(20)]


def test_a_control_message_does_not_wait_for_gradients_without_space(
    pair: tuple[list[PeerTransport], list[Shelf]], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, shelves = pair
    room, heard, deliver = threading.Event(), threading.Event(), shelves[1].deliver

    def deliver_late(*message: Any) -> None:
        room.wait(10)
        deliver(*message)

    monkeypatch.setattr(shelves[1], "deliver", deliver_late)
    monkeypatch.setattr(shelves[1], "on_message", lambda *unused: heard.set(), raising=False)
    transport[0].put(1, 0, 0, 0, memoryview(CONTENT), meanwhile=lambda: None)
    transport[0].tell(1, b"a word")
    assert heard.wait(5)
    room.set()


@pytest.mark.parametrize("address", [UNIX, "127.0.0.1"])
def test_connections_of_other_programs_are_refused(address: str) -> None:
    transport = make(2, address)
    mine = transport[0].peers[0]
    stranger = stranger_to(mine)
    stranger.sendall(HEADER.pack(MessageType.HELLO, 1, 0, 0, 32) + b"a guess".ljust(32))
    collective_section([each.open for each in transport])
    stranger.settimeout(TIME_LIMIT_S)
    with stranger:
        assert stranger.recv(1) == b"", "the connection is closed"
    collective_section([each.close for each in transport])


@pytest.mark.parametrize("address", [UNIX, "127.0.0.1"])
def test_silent_and_slow_clients_do_not_delay_a_start(address: str) -> None:
    transport = make(2, address)
    mine = transport[0].peers[0]
    silent = [stranger_to(mine) for _ in range(5)]
    hello = HEADER.pack(MessageType.HELLO, 1, 0, 0, 32)
    for number, each in enumerate(silent):
        each.sendall(hello[:number])
    start_s = time.monotonic()
    collective_section([each.open for each in transport])
    assert time.monotonic() - start_s < 15
    for each in silent:
        each.settimeout(TIME_LIMIT_S)
        with each, contextlib.suppress(ConnectionResetError):
            assert each.recv(1) == b"", "the connection is closed"
    collective_section([each.close for each in transport])


def test_one_deadline_bounds_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly they send, and however many."""
    monkeypatch.setattr(transport_module, "SILENCE_S", 1.0)
    first, second = make(2)
    me, is_over = first.peers[0], threading.Event()
    slow = [stranger_to(me) for _ in range(3)]

    def speak() -> None:
        for byte in HEADER.pack(MessageType.HELLO, 1, 0, 0, 32):
            for each in slow:
                with contextlib.suppress(OSError):
                    each.send(bytes([byte]))
            if is_over.wait(0.3):
                return

    speaking = threading.Thread(target=speak)
    speaking.start()
    start_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1 .* has not connected"):
        first.open()
    assert time.monotonic() - start_s < 8  # Each of them speaks for ten seconds.
    is_over.set()
    speaking.join(TIME_LIMIT_S)
    first.close()
    second._listener.close()
    for each in slow:
        each.close()


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ((MessageType.CONTROL, 0, 0, 0, 8 << 30), "announced a CONTROL of 8589934592 bytes"),
        ((MessageType.ALL_GATHER, 0, 0, 0, 1 << 62), "announced a ALL_GATHER"),
        ((MessageType.CLOSE, 1, 0, 0, 1 << 40), "announced a CLOSE"),
        ((MessageType.CLOSE, MOST_RANKS + 1, 0, 0, 0), "failed, and there is none"),
        ((MessageType.HEARTBEAT, 0, 0, 0, 1), "announced a HEARTBEAT"),
        ((77, 0, 0, 0, 0), "kind 77"),
    ],
)
def test_a_rank_that_announces_what_cannot_be_is_named(
    pair: tuple[list[PeerTransport], list[Shelf]],
    header: tuple[int, ...],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "CAUSE_S", 0.1)  # The end of a rank that lies explains itself.
    transport, _ = pair
    liar = transport[1]._outgoing[0, Purpose.GIVING]
    with liar.sending:
        liar.channel.connection.sendall(HEADER.pack(*header))
    assert transport[0]._wait_until(lambda: transport[0].is_broken, TIME_LIMIT_S)
    with pytest.raises(RankError, match=f"rank 1 .*{why}") as caught:
        transport[0].check()
    assert caught.value.rank == 1


def test_a_thread_that_fails_later_does_not_end_before_the_cause_is_sent(
    pair: tuple[list[PeerTransport], list[Shelf]],
) -> None:
    """The training thread ends the process soon after an updating thread has failed."""
    transport, _ = pair
    failing = [
        threading.Thread(target=transport[0].abort, args=(cause,)) for cause in ("cause", "later")
    ]
    with transport[0]._outgoing[1, Purpose.GIVING].sending:
        failing[0].start()
        assert transport[0]._wait_until(lambda: transport[0].is_broken, TIME_LIMIT_S)
        failing[1].start()
        failing[1].join(0.1)
        assert failing[1].is_alive()
    for thread in failing:
        thread.join(TIME_LIMIT_S)
    assert transport[1]._wait_until(lambda: transport[1].is_broken, TIME_LIMIT_S)
    with pytest.raises(RankError, match="rank 0 .* failed: cause"):
        transport[1].check()


def test_a_failure_is_logged_before_anything_waits_for_its_end(
    pair: tuple[list[PeerTransport], list[Shelf]], caplog: pytest.LogCaptureFixture
) -> None:
    (first, second), _ = pair
    failing = [
        threading.Thread(target=first.abort, args=(cause,), daemon=True)
        for cause in ("cause", "later")
    ]
    with first._outgoing[1, Purpose.GIVING].sending:  # So nobody is told yet.
        for thread in failing:
            thread.start()
            assert first._wait_until(lambda: first.is_broken, TIME_LIMIT_S)
        deadline_s = time.monotonic() + TIME_LIMIT_S
        while not caplog.records and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert all(thread.is_alive() for thread in failing)
    for thread in failing:
        thread.join(TIME_LIMIT_S)
    assert second._wait_until(lambda: second.is_broken, TIME_LIMIT_S)
    second.close()  # Its thread has logged what it was told.
    wanted = [f"rank 0 (process 0 on here) failed: cause (seen by rank {at})" for at in (0, 1)]
    assert [record.getMessage() for record in caplog.records] == wanted
    assert all(record.levelname == "ERROR" for record in caplog.records)


def test_a_rank_that_never_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "SILENCE_S", 1.0)
    first, second = make(2)
    with pytest.raises(RankError, match="rank 1 .* has not connected") as caught:
        first.open()
    assert caught.value.rank == 1
    first.close()
    second._listener.close()


@pytest.mark.parametrize("is_late", [False, True])
def test_different_calls_are_named(
    pair: tuple[list[PeerTransport], list[Shelf]], is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when one rank has seen it before the message about its own call has left."""
    transport, _ = pair
    if is_late:
        monkeypatch.setattr(transport[0], "_submit", lambda *message: None)
    found: list[str] = []

    def call(rank: int) -> None:
        with pytest.raises(RankError) as caught:
            transport[rank].all_gather(f"call {rank}", b"")
        found.append(str(caught.value))

    collective_section([lambda i=i: call(i) for i in range(2)])
    assert all("'call 0'" in text and "'call 1'" in text for text in found)


def test_a_rank_ahead_waits_for_the_last_backward_and_not_for_waiting_ranks(
    pair: tuple[list[PeerTransport], list[Shelf]],
) -> None:
    transport, _ = pair
    looks = threading.Semaphore(0)

    def waiting(step: int, count: int) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: transport[0].await_backwards(
                step, count, timeout_s=60, meanwhile=looks.release
            )
        )
        thread.start()
        assert looks.acquire(timeout=TIME_LIMIT_S), "it looks at what came, and waits on"
        return thread

    first = waiting(3, 1)
    transport[1].note_backward(3, 1)
    first.join(TIME_LIMIT_S)
    assert not first.is_alive()
    assert transport[0].await_backwards(2, 7, timeout_s=60, meanwhile=pytest.fail), (
        "that step is over"
    )
    assert not transport[0].await_backwards(3, 2, timeout_s=0.05, meanwhile=looks.release)
    second = waiting(3, 2)
    meeting = threading.Thread(target=lambda: transport[1].all_gather("a meeting", b""))
    meeting.start()  # It gives nothing more before the other one comes.
    second.join(TIME_LIMIT_S)
    assert not second.is_alive()
    transport[0].all_gather("a meeting", b"")
    meeting.join(TIME_LIMIT_S)


def test_a_drive_that_fails_is_of_the_rank_that_serves(
    pair: tuple[list[PeerTransport], list[Shelf]], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, shelves = pair

    def broken(unit: int, kind: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        raise StorageError(errno.EIO, operation="read", path="/swap")

    monkeypatch.setattr(shelves[1], "serve", broken)
    with pytest.raises(RankError, match="rank 1 .*Input/output error") as caught:
        transport[0].get(1, 0, 0, [memoryview(bytearray(8))]).wait()
    assert caught.value.rank == 1


@pytest.mark.parametrize("shares", [False, True])
def test_a_rank_that_takes_its_time_is_not_gone(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no space for what it receives, for longer than the timeout of a silent rank, and frees
    some while it waits in a barrier: the other rank's message arrives behind its put. A shard that
    is asked for does not wait for that."""
    # Longer than a thread of a busy machine waits for its turn.
    monkeypatch.setattr(transport_module, "SILENCE_S", 3.0)
    transport, shelves = make(2), [Shelf(), Shelf()]
    open_all(transport, shelves, shared_memories(2) if shares else None)
    # Not before: who connects has a beat's time to say who it is.
    monkeypatch.setattr(transport_module, "HEARTBEAT_S", 0.2)
    has_room, take = threading.Event(), shelves[1].deliver

    def deliver(*message: object) -> None:
        assert has_room.wait(TIME_LIMIT_S)
        take(*message)  # type: ignore[arg-type]

    monkeypatch.setattr(shelves[1], "deliver", deliver)
    content = bytes(16 << 20)  # More than sockets hold.
    transport[0].put(1, 0, 0, 0, memoryview(content), meanwhile=lambda: None)
    sink = bytearray(len(CONTENT))
    transport[0].get(1, 0, 0, [memoryview(sink)]).wait()
    assert sink == CONTENT and not shelves[1].delivered
    assert not has_room.wait(1.3 * transport_module.SILENCE_S)
    collective_section(
        [lambda i=i: transport[i].all_gather("x", b"", meanwhile=has_room.set) for i in range(2)]
    )
    assert shelves[1].delivered == [(0, 0, 0, 0, content)]
    collective_section([each.close for each in transport])
