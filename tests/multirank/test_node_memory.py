"""Ranks of one machine read contents in each other's memory: what goes through sockets, whose memory
is mapped, and what an end in the middle of a content does."""

from __future__ import annotations

import dataclasses
import mmap
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

import infinity
from infinity.distributed import group as group_module
from infinity.distributed import setup
from infinity.distributed.wire import node_memory
from infinity.distributed.wire.channel import Channel
from infinity.distributed.wire.node_memory import (
    CHUNK_NBYTES,
    MappedMemory,
    MemoryOffer,
    OwnMemory,
    SharedRegion,
    map_memory,
)
from infinity.distributed.wire.protocol import HEADER, IN_MEMORY, INLINE_NBYTES, TAKEN, MessageType
from infinity.engine import open_tiers
from infinity.errors import RankError
from infinity.observe import Counters
from infinity.sizes import MIB
from infinity.state.partition import STAGES
from infinity.storage.arena import Arena, can_share
from tests.support.exhaustive import sampled
from tests.support.forked import TIME_LIMIT_S

from .processes import run_ranks
from .work import (
    MIXED,
    NVME,
    Case,
    assert_same_run,
    counted_in_a_step,
    expected,
    offload_case,
    train,
)

BOOT = "a boot"
NBYTES = 2 * CHUNK_NBYTES + 4711
CONTENT = numpy.random.default_rng(0).integers(0, 256, NBYTES, dtype=numpy.uint8)


def channels(own: OwnMemory) -> tuple[Channel, Channel, Counters, Counters]:
    """The channel of a rank that lends contents to rank 1, and that of rank 1, which reads them."""
    mapped = map_memory(own.offer, BOOT)
    assert mapped is not None
    ends, counters = socket.socketpair(), (Counters(), Counters())
    for end in ends:
        end.settimeout(TIME_LIMIT_S)
    bounce = own.bounce_buffer(1, is_answering=False)
    lender, reader = (Channel(end, each) for end, each in zip(ends, counters, strict=True))
    lender.share(counters[0], bounce, None)
    reader.share(counters[1], None, mapped)
    return lender, reader, *counters


def filler_of_lent(lender: Channel, reader: Channel) -> Any:
    """The filler behind the header of a content of NBYTES in memory."""
    lender.connection.sendall(HEADER.pack(MessageType.PUT | IN_MEMORY, 0, 0, 0, NBYTES))
    _, _, nbytes = reader.receive_header()
    return reader.filler(nbytes)


def sent(lender: Channel, content: memoryview, kind: MessageType = MessageType.PUT) -> Any:
    thread = threading.Thread(target=lender.send, args=(kind, (1, 2, 3), content.nbytes, [content]))
    thread.start()
    return thread


@pytest.mark.parametrize("place", ["elsewhere", "in the arena", "in the arena, long"])
def test_a_content_is_read_where_it_lies_and_only_its_name_goes_through_the_socket(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place.endswith("long"):
        monkeypatch.setattr(node_memory, "RANGE_NBYTES", CHUNK_NBYTES)
    with Arena(4 * MIB, is_shared=True) as arena:
        own = OwnMemory(2, BOOT, arena)
        lender, reader, lent, taken = channels(own)
        own.close_files()
        assert arena.descriptor is None
        content = memoryview(CONTENT)
        if place.startswith("in the arena"):
            arena.memory(MIB, NBYTES)[:] = content
            content = arena.memory(MIB, NBYTES)
        thread = sent(lender, content)
        kind, numbers, nbytes = reader.receive_header()
        assert (kind, numbers, nbytes) == (MessageType.PUT, (1, 2, 3), NBYTES)
        found = numpy.zeros(NBYTES, numpy.uint8)
        fill = reader.filler(nbytes)
        for start in range(0, NBYTES, 300_000):  # In pieces that are no chunks.
            fill(memoryview(found)[start : start + 300_000])
        thread.join(TIME_LIMIT_S)
        assert not thread.is_alive() and (found == CONTENT).all()
        num_ranges = 1 if place == "in the arena" else 3
        assert lent.snapshot()["ranks_socket_nbytes"] == (1 + num_ranges) * HEADER.size
        assert taken.snapshot()["ranks_socket_nbytes"] == num_ranges
        lender.close()
        reader.close()


def test_a_short_content_goes_with_its_header() -> None:
    lender, reader, lent, _ = channels(OwnMemory(2, BOOT, None))
    lender.post(MessageType.PUT, (0, 0, 0), memoryview(CONTENT)[:INLINE_NBYTES])
    _, _, nbytes = reader.receive_header()
    found = bytearray(nbytes)
    reader.filler(nbytes)(memoryview(found))
    assert found == CONTENT[:INLINE_NBYTES].tobytes()
    assert lent.snapshot()["ranks_socket_nbytes"] == HEADER.size + INLINE_NBYTES


def test_contents_are_lent_before_the_last_one_was_taken_and_none_is_overwritten() -> None:
    lender, reader, *_ = channels(OwnMemory(2, BOOT, None))
    contents = [memoryview(CONTENT)[2000 * n : 5000 * n + 3000] for n in range(20)]
    for number in range(3):  # Nobody takes them.
        assert lender.post(MessageType.PUT, (number, 0, 0), contents[number]) == number + 1
    assert lender.num_taken == 0
    posted: list[int] = []

    def post_rest() -> None:  # More than the ring has space for.
        posted.extend(
            lender.post(MessageType.PUT, (number, 0, 0), contents[number % 20])
            for number in range(3, 60)
        )

    thread = threading.Thread(target=post_rest)
    thread.start()
    for number in range(60):
        _, numbers, nbytes = reader.receive_header()
        found = bytearray(nbytes)
        reader.filler(nbytes)(memoryview(found))
        assert numbers[0] == number and found == contents[number % 20], number
    thread.join(TIME_LIMIT_S)
    lender.await_taken(posted[-1])
    assert lender.num_taken == posted[-1] == 60


def test_an_answer_that_is_none_is_refused_also_when_it_comes_late() -> None:
    lender, reader, *_ = channels(OwnMemory(2, BOOT, None))
    lender.post(MessageType.PUT, (0, 0, 0), memoryview(CONTENT)[:2000])
    number = lender.post(MessageType.PUT, (1, 0, 0), memoryview(CONTENT)[:2000])
    reader.connection.sendall(TAKEN + b"?")
    with pytest.raises(ConnectionError, match="to 2 ranges"):
        lender.await_taken(number)


@pytest.mark.parametrize(
    ("numbers", "nbytes", "why"),
    [
        ((SharedRegion.ARENA, 0, 0), 1, "region 1"),
        ((7, 0, 0), 1, "region 7"),
        ((SharedRegion.BOUNCE, 1, 0), 1, "at 4294967296"),
        ((SharedRegion.BOUNCE, 0, 0), 0, "named 0 bytes"),
        ((SharedRegion.BOUNCE, 0, 0), NBYTES + 1, "up to"),
    ],
)
def test_a_range_that_is_not_there_is_refused(
    numbers: tuple[int, int, int], nbytes: int, why: str
) -> None:
    lender, reader, *_ = channels(OwnMemory(2, BOOT, None))
    fill = filler_of_lent(lender, reader)
    lender.connection.sendall(HEADER.pack(MessageType.RANGE, *numbers, nbytes))
    with pytest.raises(ConnectionError, match=why):
        fill(memoryview(bytearray(NBYTES)))


def test_word_of_a_failure_ends_a_content_and_names_the_rank() -> None:
    lender, reader, *_ = channels(OwnMemory(2, BOOT, None))
    fill = filler_of_lent(lender, reader)
    lender.post(MessageType.CLOSE, (6, 0, 0), memoryview(b"rank 5 failed: of the test"))
    with pytest.raises(RankError, match="of the test") as caught:
        fill(memoryview(bytearray(NBYTES)))
    assert caught.value.rank == 5


def test_memory_that_is_not_the_other_ranks_is_not_mapped() -> None:
    own = OwnMemory(2, BOOT, None)
    offer, bounce = own.offer, own.offer.files[SharedRegion.BOUNCE]
    assert map_memory(offer, BOOT) is not None
    assert map_memory(offer, "another boot") is None
    assert map_memory(dataclasses.replace(offer, boot=""), "") is None, "an unknown boot"
    assert map_memory(dataclasses.replace(offer, token=bytes(32)), BOOT) is None
    assert map_memory(dataclasses.replace(offer, pid=2**22 + 1), BOOT) is None, "no such process"
    longer = {SharedRegion.BOUNCE: (bounce[0], bounce[1] + mmap.PAGESIZE)}
    assert map_memory(dataclasses.replace(offer, files=longer), BOOT) is None
    own.close_files()
    assert map_memory(offer, BOOT) is None, "the offer is over"


def test_a_file_that_may_shrink_is_not_mapped() -> None:
    """A read behind its end would be SIGBUS."""
    descriptor = os.memfd_create("of the test", os.MFD_ALLOW_SEALING)
    token = b"t" * 32
    os.write(descriptor, token.ljust(mmap.PAGESIZE))
    files = {SharedRegion.BOUNCE: (descriptor, mmap.PAGESIZE)}
    assert map_memory(MemoryOffer(BOOT, os.getpid(), token, files), BOOT) is None
    os.close(descriptor)


# -- Over processes --------------------------------------------------------------------------------

COUNTED = ("ranks_socket_nbytes", "ranks_gathered_nbytes", "ranks_reduced_nbytes")
# Control words of a step: headers and answers of a content, by its tensor and the other rank; a short
# content beside its header; meetings.
WORDS_NBYTES = 8 * (HEADER.size + 1)
STEP_NBYTES = 16 * (HEADER.size + 64)
ON_DEVICE = dict.fromkeys(("parameters", "master", "moments", "gradients"), "device")
STEADY = [
    *(
        Case(stage, placement, model="wide", capacity="128MiB", huge_pages=stage == 3)
        for stage, placement in zip((*STAGES, 3), ({}, NVME, MIXED, {}), strict=True)
    ),
    Case(3, NVME, model="wide", capacity="60MiB", accumulation=3, layer_major=True),
    Case(2, model="wide", capacity="128MiB", simulated=True, exchange="collective"),
    Case(3, model="wide", capacity="128MiB", simulated=True, exchange="collective"),
    *(
        Case(stage, ON_DEVICE, model="wide", capacity="128MiB", simulated=True, exchange=exchange)
        for stage, exchange in [(1, "one_sided"), (3, "one_sided"), (3, "collective")]
    ),
]


def _count(rank: int, cases: list[Case]) -> list[tuple[dict[str, float], int, int, str, set[str]]]:
    found = []
    for case in cases:
        model = offload_case(case, Path(tempfile.gettempdir(), "swap"))
        engine = infinity.engine_of(model)
        counted = counted_in_a_step(model, rank, case, COUNTED)
        units = engine.store.partition.full_units  # type: ignore[attr-defined]
        described = str(infinity.describe(model))
        tiers = {tier for of_kind in engine.placed_nbytes().values() for tier in of_kind}
        num_tensors = sum(len(unit.tensors) for unit in units)
        found.append((counted, len(units), num_tensors, described, tiers))
        engine.close()
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert not [line for line in maps if "r--s" in line and "infinity-arena" in line]
    return found


@pytest.mark.parametrize("count", sampled([2, 4], (2).__eq__))
def test_only_control_words_go_through_sockets_in_every_stage_and_placement(count: int) -> None:
    cases = STEADY if count == 2 else STEADY[:3]
    for results in run_ranks(count, _count, cases):
        for case, result in zip(cases, results, strict=True):
            where = "arena" if can_share(huge_pages=case.huge_pages) else "bounce buffers"
            counted, num_units, num_tensors, described, tiers = result
            assert (tiers == {"device"}) == (case.placement == ON_DEVICE), case
            words = (num_units + num_tensors) * (WORDS_NBYTES + INLINE_NBYTES // 2) + STEP_NBYTES
            assert counted["ranks_socket_nbytes"] < (count - 1) * words, case
            moved = counted["ranks_gathered_nbytes"] + counted["ranks_reduced_nbytes"]
            assert moved > 100 * counted["ranks_socket_nbytes"], case
            assert f"to {count - 1} ranks through shared memory ({where})" in described


def _train_one_without_a_map(rank: int, case: Case, mapping: str) -> tuple[Any, str]:
    """Rank 1 cannot map rank 0; or no rank has an arena that can be mapped."""
    if rank == 1 and mapping == "fails":
        real = map_memory
        first = iter([True])

        def refused(offer: MemoryOffer, boot: str) -> MappedMemory | None:
            return None if next(first, False) else real(offer, boot)

        group_module.map_memory = refused  # type: ignore[assignment]
    if mapping == "without arenas":
        open_tiers.can_share = lambda **_: False  # type: ignore[assignment]
    routes = []
    share = setup.share_memory

    def noted(group: Any, *arguments: Any) -> None:
        share(group, *arguments)
        routes.append(group.links.memory.routes(2))

    setup.share_memory = noted  # type: ignore[assignment]
    return train(rank, case), routes[0]


@pytest.mark.parametrize("mapping", ["fails", "without arenas"])
@pytest.mark.parametrize("stage", [1, 3])
def test_bits_are_the_same_where_memory_cannot_be_mapped(mapping: str, stage: int) -> None:
    case = Case(stage, NVME if stage == 3 else {}, accumulation=2, steps=2)
    runs = run_ranks(3, _train_one_without_a_map, case, mapping)
    for rank, ((found, routes), wanted) in enumerate(zip(runs, expected(case, 3), strict=True)):
        assert_same_run(found, wanted, f"rank {rank} of 3")
        if mapping == "without arenas":
            assert routes == "contents to 2 ranks through shared memory (bounce buffers)"
        else:
            assert ("contents to 1 ranks through sockets" in routes) == (rank == 0)
