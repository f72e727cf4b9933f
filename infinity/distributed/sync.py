"""The ranks that train together, as one engine sees them: where they meet and what they agree on.

docs/design/0005-one-sided-exchange.md says why ranks meet so seldom.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy
from typing_extensions import override

from infinity.distributed.collectives import Collectives
from infinity.distributed.partials import Fill
from infinity.distributed.peer import Service
from infinity.distributed.reduce import DistributedGradients, from_wire_code
from infinity.distributed.store import DistributedStore
from infinity.distributed.unshard import DeviceUnshard
from infinity.errors import InfinityError, RankError
from infinity.state.partition import Partition
from infinity.state.units import Unit
from infinity.streaming.parameters import WeightCache


@dataclass(slots=True)
class CollectiveSection:
    """What ranks tell each other at the end of a block: `mine`, and after it `of_all`, by rank."""

    mine: bytes = b""
    of_all: list[bytes] = field(default_factory=list)


class RankSync(Service):
    """The ranks that train together, as the engine sees them."""

    def __init__(
        self,
        store: DistributedStore,
        weight_cache: WeightCache,
        gradients: DistributedGradients,
        collectives: Collectives | None,
    ) -> None:
        self._collectives = collectives
        self._store = store
        self._weight_cache = weight_cache
        self._gradients = gradients
        self.partition: Partition | None = store.partition
        self._partition = store.partition
        self.rank, self.num_ranks = store.partition.rank, store.partition.count
        self.transport = store.transport
        self._is_filling = True  # Until weights have their first values.
        self._unagreed: set[int] = set()  # Units that were set and that others do not see yet.

    def open(self) -> None:
        """Begins to serve the others, and waits until all of them do."""
        self.transport.open(self)
        self.barrier("infinity.offload")
        if self._collectives is not None:
            self._collectives.open()

    def begin_step(self) -> None:
        """All ranks enter the step: whatever was on its way between them has come."""
        collectives = self._collectives
        if collectives is None:
            self._gradients.begin_step(b"")
            return
        self._gradients.propose_rest()
        collectives.end_step(self._gradients.take_in)
        self._weight_cache.end_training()
        collectives.sync_weights(self._gradients.begin_step(collectives.decision()))

    # What others want: see `peer.Service`.

    @override
    def serve(self, unit: int, kind: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        return self._store.serve(unit, kind, to=to)

    @override
    def deliver(
        self, rank: int, tensor: int, code: int, generation: int, nbytes: int, receive: Fill
    ) -> None:
        dtype, number = from_wire_code(code)
        partial = self._store.receive(dtype, nbytes, receive, giver=rank)
        self._gradients.deliver(rank, tensor, generation, number, partial)

    @override
    def on_message(self, rank: int, content: bytes) -> None:
        assert self._collectives is not None
        self._collectives.on_message(rank, content)

    def barrier(self, what: str) -> None:
        """Returns when every rank has come here. Raises RankError."""
        self._exchange(what, b"")

    def _exchange(self, what: str, content: bytes) -> list[bytes]:
        """Every rank's content. Gradients may be on their way: what they need is room."""
        return self.transport.all_gather(what, content, meanwhile=self._gradients.take_in)

    def all_gather_numbers(self, what: str, number: float) -> list[float]:
        """Every rank's number, in rank order."""
        theirs = self._exchange(what, numpy.float64(number).tobytes())
        return [float(numpy.frombuffer(each, numpy.float64)[0]) for each in theirs]

    @contextmanager
    def collective_section(self, what: str) -> Iterator[CollectiveSection]:
        """The block on every rank: all of them leave it well, or all with an error.

        Returns when every rank's block is over. A rank whose block is well raises InfinityError
        with the words of the first that failed; RankError where one is gone.
        """
        shared, failure = CollectiveSection(), None
        try:
            yield shared
        except RankError:
            raise
        except Exception as error:
            failure = error
        words = "" if failure is None else f"{type(failure).__name__}: {failure}"
        head = len(words.encode()).to_bytes(4, "little")
        theirs = self._exchange(what, head + words.encode() + shared.mine)
        if failure is not None:
            raise failure
        for rank, content in enumerate(theirs):
            nbytes = 4 + int.from_bytes(content[:4], "little")
            if nbytes > 4:
                raise InfinityError(f"{what} failed on rank {rank}: {content[4:nbytes].decode()}")
        shared.of_all = [content[4:] for content in theirs]

    def forget_outdated(self) -> None:
        """Drops copies of this rank's shards that were written past the executor."""
        for index in self._store.rewritten:
            self._weight_cache.discard(len(self._partition.full_units) + index)
        self._store.rewritten.clear()

    def forget_gathered(self) -> None:
        """Drops weights that were put together from shards: the shards are others now."""
        if self._partition.shards_parameters:
            for unit in self._partition.full_units:
                self._weight_cache.discard(unit.index)

    def refuse_different(self, what: str, content: bytes, *, remedy: str) -> None:
        """Raises InfinityError on every rank where `content` is not the same everywhere."""
        theirs = self._exchange(what, content)
        for rank, other in enumerate(theirs):
            if other != theirs[0]:
                raise InfinityError(f"{what}: rank {rank} has something else than rank 0. {remedy}")

    @contextmanager
    def setting(self, units: Iterable[int]) -> Iterator[None]:
        """Around a change of units' weights from outside, which all ranks make alike."""
        if self._is_filling:
            yield
            return
        self.barrier("weights are about to be set")
        yield
        self._unagreed.update(units)
        self.sync_weights()

    def sync_weights(self) -> None:
        """What was set becomes what all ranks see, but for units that an outer gather holds."""
        idle = [unit for unit in sorted(self._unagreed) if not self._weight_cache.is_in_use(unit)]
        self._unagreed.difference_update(idle)
        if idle:
            self._sync_units(idle)

    def sync_first_weights(self) -> None:
        """Every parameter has its value, set here without a word to the others."""
        self._sync_units(range(len(self._partition.full_units)))
        self._is_filling = False

    def _sync_units(self, units: Iterable[int]) -> None:
        """Every rank sees what the owners have, after weights of these units were set from outside.
        Nobody holds them."""
        full_units = [self._partition.full_units[unit] for unit in units]
        flush_owned(self._store, self._weight_cache, full_units)
        self.barrier("weights were set")
        pull_updated(self._store, self._weight_cache, full_units)
        self.barrier("weights are agreed on")


class OneRank:
    """A process that trains alone: `RankSync` without another rank."""

    partition: Partition | None = None
    rank = 0
    num_ranks = 1

    def open(self) -> None:
        """Does nothing: there is no other rank."""

    def begin_step(self) -> None:
        """Does nothing: there is no other rank."""

    def sync_weights(self) -> None:
        """Does nothing: there is no other rank."""

    def sync_first_weights(self) -> None:
        """Does nothing: there is no other rank."""

    def forget_outdated(self) -> None:
        """Does nothing: there is no other rank."""

    def forget_gathered(self) -> None:
        """Does nothing: there is no other rank."""

    def all_gather_numbers(self, what: str, number: float) -> list[float]:
        """Returns the number of the only rank."""
        return [number]

    @contextmanager
    def collective_section(self, what: str) -> Iterator[CollectiveSection]:
        """A section of one rank: `of_all` is [`mine`]."""
        section = CollectiveSection()
        yield section
        section.of_all = [section.mine]

    def refuse_different(self, what: str, content: bytes, *, remedy: str) -> None:
        """Does nothing: there is no other rank."""

    @contextmanager
    def setting(self, units: Iterable[int]) -> Iterator[None]:
        """A block around writes to weights, which no other rank has to see."""
        yield


Ranks = RankSync | OneRank


def flush_owned(
    store: DistributedStore, weight_cache: WeightCache, full_units: Iterable[Unit]
) -> None:
    """What this rank owns of the units rests where others are served from. Nobody holds them."""
    if not store.partition.shards_parameters:
        for unit in full_units:
            weight_cache.take_off_device(unit.index)
    weight_cache.finish_writes()


def pull_updated(
    store: DistributedStore,
    weight_cache: WeightCache,
    full_units: Iterable[Unit],
    gathering: DeviceUnshard | None = None,
) -> None:
    """Makes this rank's whole weights those that their owners have published.

    What is put together from shards when it is needed is dropped; what every rank keeps whole is
    brought up to date, by the devices where they can.
    """
    begun = {unit: gathering and gathering.pull_updated(unit.index) for unit in full_units}
    for unit, gather in begun.items():
        if gather and gather.settle():
            gather.arrival.wait()
        elif store.partition.shards_parameters:
            weight_cache.discard(unit.index)
        elif unit.state_numel:
            weights = weight_cache.check_out(unit.index, read=True)
            try:
                store.gather_weights(unit.index, weights, is_mine_there=True).wait()
            finally:
                weight_cache.check_in(unit.index, dirty_nbytes=unit.trainable_nbytes)
    weight_cache.finish_writes()
