"""Barriers and collective sections: the interface of the engine to the ranks that train together.

docs/design/0005-between-ranks.md explains why there are few barriers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy
from torch import Tensor
from typing_extensions import override

from infinity.distributed.collective.collectives import Collectives
from infinity.distributed.collective.unshard import DeviceUnshard
from infinity.distributed.store import DistributedStore
from infinity.distributed.sums.partials import from_wire_code
from infinity.distributed.sums.reduce import DistributedGradients
from infinity.distributed.wire.channel import Fill
from infinity.distributed.wire.failures import ending_all, run_beside
from infinity.distributed.wire.protocol import Service
from infinity.errors import ConfigError, InfinityError, RankError, listed
from infinity.state.partition import Partition, Shard
from infinity.state.units import TensorSpec, Unit, weight_of
from infinity.streaming.weights.cache import WeightCache


@dataclass(slots=True)
class CollectiveSection:
    """The payload of a collective section: set `local` inside it; afterwards `of_all[r]` is rank
    r's."""

    local: bytes = b""
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
        # Units that were changed here and that other ranks do not see yet.
        self._unagreed: set[int] = set()

    def note_owner(self, owner: object) -> None:
        """Notes the object whose close, or whose collection, closes the links to other ranks."""
        known = weakref.ref(owner)
        self.transport.is_dropped = lambda: known() is None

    def end(self, close: Callable[[], None]) -> None:
        """Calls `close`, which waits for the other ranks. Beside a garbage collection, which any
        thread may make at any time, and which must not wait for them."""
        if self.transport.is_dropped():
            run_beside(close)
        else:
            close()

    def open(self) -> None:
        """Starts to serve the other ranks, and waits until all of them serve."""
        self.transport.serve(self)
        if self._collectives is not None:
            self._collectives.open()

    def routes(self) -> str:
        """Returns how contents go from this rank to the other ranks, in words."""
        return self.transport.memory.routes(self.num_ranks - 1)

    def begin_step(self, *, makes_step: bool = True) -> None:
        """Enters the step, with all ranks: everything that they have sent each other has come.
        Without `makes_step` the ranks only look at the gradients, and enter it again."""
        collectives = self._collectives
        if collectives is None:
            self._gradients.begin_step(b"")
            return
        self._gradients.propose_rest()
        collectives.end_step(self._gradients.take_in)
        self._weight_cache.end_training()
        collectives.sync_weights(self._gradients.begin_step(collectives.decision()))
        if not makes_step:  # Else all would play the log of the next step when they enter this one.
            collectives.set_aside()

    def making_step(self) -> AbstractContextManager[None]:
        """Returns a block that ends all ranks if it fails: they make a step that this rank does not
        make."""
        return ending_all(self.transport.failures, "in optimizer.step()")

    # Requests of other ranks: see `protocol.Service`.

    @override
    def begin_thread(self) -> None:
        self._store.begin_thread()

    @override
    def serve(self, unit: int, kind: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        return self._store.serve(unit, kind, to=to)

    @override
    def deliver(
        self, rank: int, tensor: int, code: int, generation: int, nbytes: int, receive: Fill
    ) -> None:
        dtype, number = from_wire_code(code)
        partial = self._store.receive(dtype, nbytes, receive, giver=rank)
        self._gradients.sums.deliver(rank, tensor, generation, number, partial)

    @override
    def on_message(self, rank: int, content: bytes) -> None:
        assert self._collectives is not None
        self._collectives.on_message(rank, content)

    def barrier(self, what: str) -> None:
        """Waits until every rank has called it. Raises RankError."""
        self._exchange(what, b"")

    def _exchange(self, what: str, content: bytes) -> list[bytes]:
        """Returns every rank's content. Frees memory for gradients that are in flight."""
        return self.transport.all_gather(what, content, meanwhile=self._gradients.take_in)

    def all_gather_numbers(self, what: str, *numbers: float) -> list[list[float]]:
        """Returns every rank's numbers, in rank order."""
        remote = self._exchange(what, numpy.array(numbers, numpy.float64).tobytes())
        return [numpy.frombuffer(content, numpy.float64).tolist() for content in remote]

    @contextmanager
    def collective_section(self, what: str) -> Iterator[CollectiveSection]:
        """A block that every rank enters: all ranks leave it without an error, or all with one.

        Returns when every rank has left the block. A rank without an error of its own raises
        InfinityError with the message of the first rank that failed; RankError if a rank is gone.
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
        remote = self._exchange(what, head + words.encode() + shared.local)
        if failure is not None:
            raise failure
        for rank, content in enumerate(remote):
            nbytes = 4 + int.from_bytes(content[:4], "little")
            if nbytes > 4:
                raise InfinityError(f"{what} failed on rank {rank}: {content[4:nbytes].decode()}")
        shared.of_all = [content[4:] for content in remote]

    def forget_outdated(self) -> None:
        """Drops copies of this rank's shards that were written past the weight cache."""
        for index in self._store.rewritten:
            self._weight_cache.discard(len(self._partition.full_units) + index)
        self._store.rewritten.clear()

    def forget_gathered(self) -> None:
        """Drops full weights that came from shards: the shards have changed."""
        for unit in self._partition.full_units:
            if self._partition.is_gathered(unit.index):
                self._weight_cache.discard(unit.index)

    def refuse_different(self, what: str, content: bytes, *, remedy: str) -> None:
        """Raises InfinityError on every rank if `content` differs between ranks."""
        remote = self._exchange(what, content)
        for rank, other in enumerate(remote):
            if other != remote[0]:
                raise InfinityError(f"{what}: rank {rank} has something else than rank 0. {remedy}")

    @contextmanager
    def setting(
        self, units: Iterable[int], uses: AbstractContextManager[None] | None = None
    ) -> Iterator[None]:
        """A block in which the program changes weights, in the same way on all ranks. All ranks
        leave it without an error, or all with one, and with the owners' weights.

        uses: fetches what the block reads, on every rank before any rank changes its shards
        """
        if self._store.is_filling:
            with uses or nullcontext():
                yield
            return
        self.begin_change("weights are about to be set")
        try:
            with self.collective_section("setting weights"), ExitStack() as entered:
                if uses is not None:
                    with self.collective_section("fetching weights to set"):
                        entered.enter_context(uses)
                yield
        except Exception:  # An interrupt is of this rank alone: no other one would come.
            self._agree(units)
            raise
        self._agree(units)

    def begin_change(self, what: str) -> None:
        """Ends what gathers weights on all ranks, because their shards are about to change. All
        ranks call it; `what` is for messages."""
        if self._collectives is not None:  # What it gathers later would be a mixture.
            self._collectives.end_log()
        self.barrier(what)

    def _agree(self, units: Iterable[int]) -> None:
        self._unagreed.update(units)
        self.sync_weights()

    def sync_weights(self) -> None:
        """Makes changed weights visible to all ranks, except those that an outer `gather` still
        uses.
        """
        idle = [unit for unit in sorted(self._unagreed) if not self._weight_cache.is_in_use(unit)]
        self._unagreed.difference_update(idle)
        if idle:
            self._sync_units(idle)

    def sync_first_weights(self) -> None:
        """Makes the first values of all weights visible to all ranks."""
        self._store.is_filling = False
        self._sync_units(range(len(self._partition.full_units)))

    def refuse_unknown(self, unit: int) -> None:
        """Raises ConfigError if an initialisation rule has computed this rank's part of a unit from
        weights of other ranks, which are not here while first values come (`gather_weights`)."""
        if not self._partition.is_gathered(unit):
            return
        full, shard = self._partition.full_units[unit], self._partition.local[unit]
        weights = self._weight_cache.check_out(unit, read=True)
        try:
            unknown = [spec.name for spec in full.tensors if _has_nan(weights, spec, shard)]
        finally:
            self._weight_cache.check_in(unit, dirty_nbytes=0)
        if unknown:
            raise ConfigError(
                f"{listed(unknown)} are not numbers after their initialisation. Its rule may read "
                "weights that it has left before and that other ranks keep; give "
                "offload(weights=...), more tiers.host.capacity, or a rule that finishes one "
                "module before the next"
            )

    def _sync_units(self, units: Iterable[int]) -> None:
        """Gives every rank the owners' weights of these units. None of the units is in use."""
        full_units = [self._partition.full_units[unit] for unit in units]
        if self._collectives is not None:  # What it gathers later would be the old weights.
            self._collectives.end_log()
        flush_owned(self._store, self._weight_cache, full_units)
        self.barrier("weights were set")
        pull_updated(self._store, self._weight_cache, full_units)
        self.barrier("weights are agreed on")


class OneRank:
    """A process that trains alone, with the methods of `RankSync`."""

    partition: Partition | None = None
    rank, num_ranks = 0, 1

    def _nothing(self, *_: object, **__: object) -> None:
        """Does nothing: there is no other rank."""

    note_owner = open = begin_step = sync_weights = sync_first_weights = refuse_unknown = _nothing
    forget_outdated = forget_gathered = barrier = refuse_different = begin_change = _nothing

    def end(self, close: Callable[[], None]) -> None:
        """Calls `close`."""
        close()

    def routes(self) -> str:
        """Returns "": there is no other rank."""
        return ""

    def making_step(self) -> AbstractContextManager[None]:
        """Returns a block that does nothing: there is no other rank."""
        return nullcontext()

    def all_gather_numbers(self, what: str, *numbers: float) -> list[list[float]]:
        """Returns the numbers of the only rank."""
        return [[*numbers]]

    @contextmanager
    def collective_section(self, what: str) -> Iterator[CollectiveSection]:
        """A section of one rank: `of_all` is [`local`]."""
        section = CollectiveSection()
        yield section
        section.of_all = [section.local]

    def setting(
        self, units: Iterable[int], uses: AbstractContextManager[None] | None = None
    ) -> AbstractContextManager[None]:
        """A block around writes to weights, within `uses`, which no other rank has to see."""
        return uses or nullcontext()


Ranks = RankSync | OneRank


def flush_owned(
    store: DistributedStore, weight_cache: WeightCache, full_units: Iterable[Unit]
) -> None:
    """Writes this rank's part of the units to where other ranks are served from. None is in use."""
    if not store.partition.shards_parameters:
        for unit in full_units:
            weight_cache.take_off_device(unit.index)
    weight_cache.finish_writes()


def _has_nan(weights: Tensor, spec: TensorSpec, shard: Shard) -> bool:
    """Whether a shard has elements of one tensor that are not numbers. weights: of the full unit,
    uint8."""
    first, item_nbytes = spec.weight_offset_nbytes, spec.facts.dtype.itemsize
    for segment in shard.segments if spec.facts.dtype.is_floating_point else ():
        start = max(segment.full_offset_nbytes - first, 0) // item_nbytes
        stop = (segment.full_offset_nbytes + segment.nbytes - first) // item_nbytes
        if start < stop and bool(weight_of(weights, spec)[start:stop].isnan().any()):
            return True
    return False


def pull_updated(
    store: DistributedStore,
    weight_cache: WeightCache,
    full_units: Iterable[Unit],
    gathering: DeviceUnshard | None = None,
) -> None:
    """Gives this rank's full weights the values that their owners have written.

    Weights that are gathered from shards are dropped. Weights that every rank keeps are updated, by
    the devices if they can.
    """
    begun = {unit: gathering and gathering.pull_updated(unit.index) for unit in full_units}
    for unit, gather in begun.items():
        if gather and gather.settle():
            gather.arrival.wait()
        elif store.partition.is_gathered(unit.index):
            weight_cache.discard(unit.index)
        elif parts := store.partition.remote_parts(unit.index):
            weights = weight_cache.check_out(unit.index, read=False, parts=parts)
            try:
                store.gather_weights(unit.index, weights, is_local_present=True).wait()
            except BaseException:
                weight_cache.check_in(unit.index, dirty_nbytes=0, is_valid=False)
                raise
            weight_cache.check_in(unit.index, dirty_nbytes=unit.trainable_nbytes)
    weight_cache.finish_writes()
