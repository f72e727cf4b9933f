"""The engine's parts where state is divided over ranks: same interfaces, one rank's share.

  RankGroup        what the engine says to other ranks: barriers, and the end
  RankedGradients  gradients go to their owners, which sum them in a fixed order and take the mean
  RankedUpdater    the step updates this rank's shards, between two points all ranks pass together
  ShardWeights     the weights of a shard, as the updater asks for them
  RankedMasters    masters of which this rank has a part

docs/design/0005-one-sided-exchange.md says why it is done this way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from infinity.engine.gradients import Gradients, in_memory_order
from infinity.engine.master import Masters
from infinity.engine.passes import Passes
from infinity.engine.update import StepRecord, Updater
from infinity.errors import InfinityError, RankError, UnsupportedError
from infinity.ops.split_master import join, split
from infinity.ranks.inbox import Inbox
from infinity.ranks.links import Links
from infinity.ranks.parcels import PATIENCE_S, Fill, Parcel, Parcels
from infinity.ranks.store import RankedStore
from infinity.schedule.executor import Executor
from infinity.state.partition import Partition, Shard, Share
from infinity.state.units import STATE_GRANULE, Piece, TensorSpec, Unit
from infinity.tiers.device import DeviceAdapter
from infinity.tiers.pool import HostPool

_SUMMED_NUMEL = 256 * STATE_GRANULE  # At a time: fp64 copies are made of them.
_LEAD_S = 10.0  # How long a rank that is ahead waits for others, once in a step.
_LOOK_S = 0.02  # Between looks at what has come, while waiting for room.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(slots=True)
class Together:
    """What ranks tell each other at the end of a block: `mine`, and after it `of_all`, by rank."""

    mine: bytes = b""
    of_all: list[bytes] = field(default_factory=list)


class RankGroup:
    """The ranks that train together, as the engine sees them."""

    def __init__(self, store: RankedStore, executor: Executor, gradients: RankedGradients) -> None:
        self._store = store
        self._executor = executor
        self._gradients = gradients
        self.partition = store.partition
        self.links = store.links
        self._is_filling = True  # Until weights have their first values.
        self._unagreed: set[int] = set()  # Units that were set and that others do not see yet.

    def open(self) -> None:
        """Begins to serve the others, and waits until all of them do."""
        self.links.open(self)
        self.barrier("infinity.offload")

    def begin_step(self) -> None:
        self._gradients.begin_step()

    # What others want: see links.Service.

    def serve(self, unit: int, piece: int, *, to: int) -> tuple[int, Iterable[memoryview]]:
        return self._store.serve(unit, piece, to=to)

    def deliver(
        self, rank: int, tensor: int, dtype: int, generation: int, nbytes: int, receive: Fill
    ) -> None:
        parcel = self._store.receive(_DTYPES[dtype], nbytes, receive, giver=rank)
        self._gradients.deliver(rank, tensor, generation, parcel)

    def barrier(self, what: str) -> None:
        """Returns when every rank has come here. Raises RankError."""
        self._meet(what, b"")

    def _meet(self, what: str, content: bytes) -> list[bytes]:
        """Every rank's content. Gradients may be on their way: what they need is room."""
        return self.links.all_gather(what, content, meanwhile=self._gradients.take_in)

    def gather_numbers(self, what: str, number: float) -> list[float]:
        """Every rank's number, in rank order."""
        theirs = self._meet(what, numpy.float64(number).tobytes())
        return [float(numpy.frombuffer(each, numpy.float64)[0]) for each in theirs]

    @contextmanager
    def together(self, what: str) -> Iterator[Together]:
        """The block on every rank: all of them leave it well, or all with an error.

        Returns when every rank's block is over. A rank whose block is well raises InfinityError
        with the words of the first that failed; RankError where one is gone.
        """
        shared, failure = Together(), None
        try:
            yield shared
        except RankError:
            raise
        except Exception as error:
            failure = error
        words = "" if failure is None else f"{type(failure).__name__}: {failure}"
        head = len(words.encode()).to_bytes(4, "little")
        theirs = self._meet(what, head + words.encode() + shared.mine)
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
            self._executor.discard(len(self.partition.wholes) + index)
        self._store.rewritten.clear()

    def forget_gathered(self) -> None:
        """Drops weights that were put together from shards: the shards are others now."""
        if self.partition.stage == 3:
            for unit in self.partition.wholes:
                self._executor.discard(unit.index)

    def refuse_different(self, what: str, content: bytes, *, remedy: str) -> None:
        """Raises InfinityError on every rank where `content` is not the same everywhere."""
        theirs = self._meet(what, content)
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
        self.agree()

    def agree(self) -> None:
        """What was set becomes what all ranks see, but for units that an outer gather holds."""
        idle = [unit for unit in sorted(self._unagreed) if not self._executor.is_held(unit)]
        self._unagreed.difference_update(idle)
        if idle:
            self._agree_on(idle)

    def agree_on_first_weights(self) -> None:
        """Every parameter has its value, set here without a word to the others."""
        self._agree_on(range(len(self.partition.wholes)))
        self._is_filling = False

    def _agree_on(self, units: Iterable[int]) -> None:
        """Every rank sees what the owners have, after weights of these units were set from outside.
        Nobody holds them."""
        wholes = [self.partition.wholes[unit] for unit in units]
        publish(self._store, self._executor, wholes)
        self.barrier("weights were set")
        refresh(self._store, self._executor, wholes)
        self.barrier("weights are agreed on")


def publish(store: RankedStore, executor: Executor, wholes: Iterable[Unit]) -> None:
    """What this rank owns of the units rests where others are served from. Nobody holds them."""
    if store.partition.stage < 3:
        for unit in wholes:
            executor.take_off_device(unit.index)
    executor.finish_writes()


def refresh(store: RankedStore, executor: Executor, wholes: Iterable[Unit]) -> None:
    """Makes this rank's whole weights those that their owners have published.

    What is put together from shards when it is needed is dropped; what every rank keeps whole is
    brought up to date.
    """
    for unit in wholes:
        if store.partition.stage == 3:
            executor.discard(unit.index)
        elif unit.state_numel:
            weights = executor.check_out(unit.index, read=True)
            try:
                store.gather_weights(unit.index, weights, is_mine_there=True).wait()
            finally:
                executor.check_in(unit.index, dirty_nbytes=unit.trainable_nbytes)
    executor.finish_writes()


class RankedGradients(Gradients):
    """The gradients of whole units, on their way to the ranks that own a part of them.

    In stage 1 they are summed here over the backward passes of a step, as on one rank, and given to
    their owners when the step begins. In stages 2 and 3 each is given away when it is complete, or
    where micro-batches go through block by block, when those of all of them are. The owner's sum
    over ranks is that of `Inbox`; each contribution is divided by the number of ranks first, as
    DistributedDataParallel does, so two ranks give its bits. `owned` has the sums, for shard units.

    Presence and norms are those of the whole group, from `begin_step` on.
    """

    def __init__(
        self,
        store: RankedStore,
        *,
        pool: HostPool,
        device: DeviceAdapter,
        reduce_dtype: torch.dtype | None,
        passes: Passes,
        **parts: Any,
    ) -> None:
        super().__init__(store, pool=pool, device=device, **parts)
        self._reduce_dtype = reduce_dtype  # None: as they come.
        self._passes = passes
        self.owned = Gradients(store, pool=pool, device=device, **parts)
        self._ranked_device = device
        self._partition: Partition = store.partition
        self._links: Links = store.links
        self._shares = store.partition.shares()
        self._specs = list(self._shares)
        self._index = {spec: index for index, spec in enumerate(self._specs)}
        self._mine: dict[int, tuple[Unit, Share]] = {}
        for shard in store.partition.mine:
            for share in shard.shares:
                self._mine[self._index[share.whole]] = shard.unit, share
        self._parcels: Parcels = store.parcels
        self._inbox: Inbox[Parcel] = Inbox(
            self._partition.count, combine=self._combine, drop=self._parcels.drop
        )
        # How far this rank is: steps it has entered, backward passes since that are over.
        self._num_steps = self._num_backwards = 0
        self._may_give = self._waits_for_others = True
        # Of sums made here that are one gradient alone so far: the dtype that holds them exactly.
        self._sent_as: dict[TensorSpec, torch.dtype | None] = {}
        self._given: set[TensorSpec] = set()  # By this rank, since the last step.
        self._known: set[TensorSpec] = set()  # Of which some rank has given a gradient.
        self._all_norms: dict[TensorSpec, torch.Tensor] | None = None

    # -- In ----------------------------------------------------------------------------------------

    def add(self, unit: Unit, spec: TensorSpec, gradient: torch.Tensor) -> None:
        if self._partition.stage == 1 or self._passes.is_layer_major:
            if spec.numel:
                self._sent_as[spec] = None if spec in self._sent_as else gradient.dtype
                super().add(unit, spec, gradient)
        else:
            _refuse_sparse(spec, gradient)
            self._give(spec, in_memory_order(gradient.detach(), spec))
        self._given.add(spec)

    def _give(self, spec: TensorSpec, flat: torch.Tensor) -> None:
        """Sends the parts of a gradient to their owners and adds what may be added already."""
        self._await_turn()
        flat = flat if self._reduce_dtype is None else flat.to(self._reduce_dtype)
        index = self._index[spec]
        generation = self._inbox.generation(index)
        if not self._ranked_device.shares_host_memory and self._partition.stage > 1:
            on_host = torch.empty(flat.shape, dtype=flat.dtype)
            self._ranked_device.copy(flat, on_host).wait()
            flat = on_host
        for share in self._shares[spec]:
            part = flat[share.start : share.stop]
            if share.rank == self._partition.rank:
                # A view would keep the whole gradient in memory.
                self.deliver(share.rank, index, generation, self._keep(part.clone()))
            else:
                content = memoryview(part.view(torch.uint8).numpy())
                dtype = _DTYPES.index(part.dtype)
                self._links.put(
                    share.rank, index, dtype, generation, content, meanwhile=self.take_in
                )
        self._sum_up(all_are_there=False)

    def _await_turn(self) -> None:
        """A backward gives nothing away before the last one is over on all ranks, so that what
        waits for a rank that is behind is of two backward passes, not of a whole step.

        Not for long: a rank that has no more batches may wait elsewhere for this one.
        """
        if not self._may_give and self._waits_for_others:
            self._waits_for_others = self._links.await_backwards(
                self._num_steps, self._num_backwards, timeout_s=_LEAD_S, meanwhile=self.take_in
            )
        self._may_give = True

    def _keep(self, values: torch.Tensor) -> Parcel:
        """This rank's own contribution. Where there is no room, what can be summed makes some."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (parcel := self._parcels.put(values)) is None:
            self.take_in()
            self._links.check()
            self._parcels.await_room(_LOOK_S)
            if time.monotonic() > deadline_s:
                raise self._parcels.no_room(values.nbytes)
        return parcel

    def deliver(self, rank: int, tensor: int, generation: int, parcel: Parcel) -> None:
        """A part of a gradient that this rank owns, from `rank`. Any thread."""
        self._inbox.deliver(tensor, rank, generation, parcel)

    def _part_of_mean(self, parcel: Parcel) -> torch.Tensor:
        """A contribution, divided by the number of ranks: fp32, memory that may be changed."""
        values = self._parcels.read(parcel)
        return values if parcel.is_mean else values.float().mul_(1.0 / self._partition.count)

    def _combine(self, one: Parcel, other: Parcel) -> Parcel:
        total = self._part_of_mean(one).add_(self._part_of_mean(other))
        return self._parcels.merge((one, other), total)

    def take_in(self) -> None:
        """Adds up what has come from other ranks."""
        self._sum_up(all_are_there=False)

    def _sum_up(self, *, all_are_there: bool) -> None:
        for tensor, parcel in self._inbox.take(all_are_there=all_are_there):
            unit, share = self._mine[tensor]
            mean = self._part_of_mean(parcel).to(self._ranked_device.torch_device)
            self.owned.add(unit, share.part, mean)
            self._parcels.drop(parcel)

    # -- The step ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """All ranks enter the step: sums are complete, and everybody knows which there are."""
        if self._partition.stage == 1:
            for unit in self._partition.wholes:
                self._give_sums(unit)
        given = numpy.array([spec in self._given for spec in self._specs], dtype=numpy.bool_)
        generations = [self._inbox.generation(index) for index in range(len(self._specs))]
        mine = numpy.array(generations, dtype=numpy.int64)
        theirs = self._links.all_gather(
            "optimizer.step()", given.tobytes() + mine.tobytes(), meanwhile=self.take_in
        )
        for rank, content in enumerate(theirs):
            flags = numpy.frombuffer(content, numpy.bool_, len(self._specs))
            given = given | flags
            counts = numpy.frombuffer(content, numpy.int64, offset=len(self._specs))
            self._refuse_other_generation(rank, mine, counts)
        self._sum_up(all_are_there=True)
        self._num_steps, self._num_backwards = self._num_steps + 1, 0
        self._may_give = self._waits_for_others = True
        self._known.update(self._specs[index] for index in numpy.flatnonzero(given))
        self._given.clear()
        self._all_norms = None
        self._fill_in_zeros()

    def _fill_in_zeros(self) -> None:
        """A gradient that its giver has made zero since never came, and is there all the same."""
        for index, (unit, share) in self._mine.items():
            if self._specs[index] in self._known and not self.owned.has(share.part):
                self.owned.add(unit, share.part, torch.zeros(share.part.numel))

    def _give_sums(self, unit: Unit) -> None:
        """Gives away what was summed here."""
        for spec in unit.trainable():
            if super().has(spec):
                dtype = self._sent_as.pop(spec) or torch.float32
                self._give(spec, super().view(unit, spec).to(dtype, copy=True))  # For its way.
                super().forget(spec)

    def _give_away(self, unit: Unit) -> None:
        """In stages 2 and 3 sums rest nowhere: they are in the unit's buffer until given."""
        if unit in self._buffers:
            self._give_sums(unit)
            self._pool.free(self._buffers.pop(unit).block)

    def _refuse_other_generation(
        self, rank: int, mine: numpy.ndarray[Any, Any], theirs: numpy.ndarray[Any, Any]
    ) -> None:
        differing = numpy.flatnonzero(mine != theirs)
        if differing.size:
            name = self._specs[differing[0]].name
            raise RankError(
                rank,
                f"rank {rank} has cleared the gradient of {name!r} another number of times than "
                f"rank {self._partition.rank}; call zero_grad() on all ranks alike",
            )

    # -- Looking -----------------------------------------------------------------------------------

    def has(self, spec: TensorSpec) -> bool:
        return spec in self._known or spec in self._given

    def norm(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        """2-norm of one gradient over all ranks' shards: fp32 scalar on the host.

        Squares are summed in fp64 by blocks that no number of ranks cuts, then in their order: the
        bits do not depend on how many ranks there are.
        """
        if self._all_norms is None:
            self._all_norms = self._exchange_norms()
        return self._all_norms[spec]

    def _exchange_norms(self) -> dict[TensorSpec, torch.Tensor]:
        wanted = [spec for spec in self._specs if spec in self._known]
        sums = []
        for spec in wanted:
            mine = self._mine.get(self._index[spec])
            if mine is not None:
                unit, share = mine
                sums.append(block_sums(self.owned.view(unit, share.part), _first_block(share)))
        content = torch.cat(sums).numpy().tobytes() if sums else b""
        theirs = [
            torch.from_numpy(numpy.frombuffer(each, dtype=numpy.float64).copy())
            for each in self._links.all_gather("gradient norms", content)
        ]
        places = [0] * len(theirs)
        norms = {}
        for spec in wanted:
            parts = []
            for share in self._shares[spec]:
                count = num_blocks(share.stop - share.start, _first_block(share))
                place = places[share.rank]
                parts.append(theirs[share.rank][place : place + count])
                places[share.rank] = place + count
            total = torch.cat(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
            norms[spec] = total.sqrt().float()
        return norms

    def read(self, unit: Unit, spec: TensorSpec) -> torch.Tensor:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} is divided over {self._partition.count} ranks and is "
            "not read as a whole; optimizer.grad_norm has the norm of all of them"
        )

    # -- After a step ------------------------------------------------------------------------------

    def forget(self, spec: TensorSpec) -> None:
        index = self._index.get(spec)
        if index is None:
            return
        super().forget(spec)
        self._sent_as.pop(spec, None)
        self._inbox.forget(index)
        self._given.discard(spec)
        self._known.discard(spec)
        if index in self._mine:
            self.owned.forget(self._mine[index][1].part)

    def zero(self, unit: Unit, spec: TensorSpec) -> None:
        if spec not in self._index:
            return
        was_given, was_known = spec in self._given, spec in self._known
        self.forget(spec)  # On every rank, so that all are of one generation.
        if was_given:
            self._given.add(spec)
        if was_known:
            self._known.add(spec)

    # -- What is done with the sums ----------------------------------------------------------------

    def finish_copies(self) -> None:
        super().finish_copies()
        self.owned.finish_copies()

    def write_out(self, unit: Unit) -> None:
        if self._partition.stage == 1:
            super().write_out(unit)
        elif self._passes.is_layer_major:
            self._end_sums([unit])
            self.finish_copies()
            self._give_away(unit)
        self.owned.write_out(self._partition.mine[unit.index].unit)

    def write_out_all(self) -> None:
        if self._partition.stage == 1:
            super().write_out_all()
        else:
            self._end_sums(list(self._summing))
            self.finish_copies()
            for unit in list(self._buffers):
                self._give_away(unit)
            self._num_backwards, self._may_give = self._num_backwards + 1, False
            self._links.note_backward(self._num_steps, self._num_backwards)
        self._sum_up(all_are_there=False)
        self.owned.write_out_all()

    def reclaim(self) -> bool:
        # Sums that are to be given away wait for all their parts, whatever room there is.
        return (self._partition.stage == 1 and super().reclaim()) or self.owned.reclaim()

    def settle(self) -> None:
        super().settle()
        self.owned.settle()

    def apply_scales(self, unit: Unit) -> None:
        self.owned.apply_scales(self._partition.mine[unit.index].unit)


def _refuse_sparse(spec: TensorSpec, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} has layout {gradient.layout}; expected a dense "
            "one. Build the embedding with sparse=False"
        )


def _first_block(share: Share) -> int:
    """Elements of the share before the first multiple of a granule in the unit's state."""
    start = share.whole.state_offset + share.start
    return min(-start % STATE_GRANULE, share.stop - share.start)


def num_blocks(numel: int, first: int) -> int:
    """How many sums `block_sums` gives."""
    return (first > 0) + math.ceil((numel - first) / STATE_GRANULE)


def block_sums(values: torch.Tensor, first: int) -> torch.Tensor:
    """Sums of squares, fp64, of `values[:first]` and then of each STATE_GRANULE elements.

    Each sum is a tree of its own, so that its bits do not depend on what else is summed.
    """
    sums = [_tree_sums(values[:first])] if first else []
    sums += [_tree_sums(part) for part in values[first:].split(_SUMMED_NUMEL) if part.numel()]
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.float64)


def _tree_sums(values: torch.Tensor) -> torch.Tensor:
    count = math.ceil(values.numel() / STATE_GRANULE)
    squares = torch.zeros(count * STATE_GRANULE, dtype=torch.float64)
    squares[: values.numel()] = values
    level = squares.square_().view(count, STATE_GRANULE)
    while level.shape[1] > 1:
        half = level.shape[1] // 2
        level = level[:, :half] + level[:, half:]
    return level[:, 0]


class ShardWeights:
    """Weights of shards, for the updater: the executor's, or a part of what every rank keeps."""

    def __init__(self, executor: Executor, store: RankedStore) -> None:
        self._executor = executor
        self._store = store
        self._partition = store.partition
        self._num_wholes = len(store.partition.wholes)

    def expected(self) -> Iterator[int]:
        return (self._num_wholes + unit for unit in self._executor.expected())

    def await_update(self, unit: int, is_awaited: bool) -> None:
        """Nothing is attached inside the step."""

    def check_out(self, unit: int, *, read: bool) -> torch.Tensor:
        index = unit - self._num_wholes
        if self._partition.stage == 3:
            if index in self._store.rewritten:
                self._store.rewritten.discard(index)
                self._executor.discard(unit)
            return self._executor.check_out(unit, read=read)
        weights = self._executor.check_out(index, read=True)
        place = self._partition.mine[index].segments[0]
        return weights[place.whole_offset_nbytes : place.whole_offset_nbytes + place.nbytes]

    def check_in(
        self, unit: int, *, dirty_nbytes: int, write_now: bool = True, is_valid: bool = True
    ) -> None:
        if self._partition.stage == 3:
            self._executor.check_in(
                unit, dirty_nbytes=dirty_nbytes, write_now=write_now, is_valid=is_valid
            )
            return
        whole = self._partition.wholes[unit - self._num_wholes]
        dirty_nbytes = whole.trainable_nbytes if dirty_nbytes else 0
        self._executor.check_in(whole.index, dirty_nbytes=dirty_nbytes)


class RankedUpdater(Updater):
    """The optimizer's step over this rank's shards. All ranks enter it and leave it together."""

    def __init__(
        self, store: RankedStore, *, executor: Executor, gradients: RankedGradients, **parts: Any
    ) -> None:
        weights: Any = ShardWeights(executor, store)
        super().__init__(store, executor=weights, gradients=gradients.owned, **parts)
        self._ranked_store = store
        self._wholes = executor
        self._parts = {share.whole: share.part for s in store.partition.mine for share in s.shares}

    def apply(self, record: StepRecord) -> None:
        """Updates what this rank owns and lets every rank see the new weights.

        A failure ends all ranks: others have made a step that this one has not.
        """
        links = self._ranked_store.links
        try:
            self._wholes.finish_writes()  # Weights that were set from outside since.
            super().apply(self._mine_of(record))
            changed = self._changed_by(record)
            publish(self._ranked_store, self._wholes, changed)
            links.all_gather("shards are updated", b"")
            refresh(self._ranked_store, self._wholes, changed)
            links.all_gather("optimizer.step() is over", b"")
            if self._ranked_store.partition.stage == 3:
                self._wholes.prefetch_anew()
        except RankError:
            raise
        except BaseException as error:
            links.abort(f"in optimizer.step(): {type(error).__name__}: {error}")
            raise

    def _changed_by(self, record: StepRecord) -> list[Unit]:
        wholes = self._ranked_store.partition.wholes
        return [unit for unit in wholes if any(s in record.settings for s in unit.trainable())]

    def _mine_of(self, record: StepRecord) -> StepRecord:
        settings: Mapping[TensorSpec, Any] = {
            self._parts[spec]: setting
            for spec, setting in record.settings.items()
            if spec in self._parts
        }
        return StepRecord(settings, record.clip_factor)


class RankedMasters(Masters):
    """Masters of whole tensors: this rank keeps its part, and reads the others' from them."""

    def __init__(self, store: RankedStore, pool: HostPool) -> None:
        super().__init__(store, pool)
        self._ranked_store = store
        self._shares = store.partition.shares()

    def _split(self, unit: Unit, spec: TensorSpec) -> Iterator[tuple[Share, Shard | None]]:
        mine = self._ranked_store.partition.mine[unit.index]
        for share in self._shares[spec]:
            yield share, mine if share.rank == mine.rank else None

    def read(self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor) -> torch.Tensor:
        whole = self._ranked_store.gather_state(unit.index, Piece.MASTER)
        flat = whole[spec.state_offset : spec.state_offset + spec.numel]
        return join(narrow, flat) if unit.has_residual else flat.clone()

    def write(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, value: torch.Tensor
    ) -> None:
        for share, shard in self._split(unit, spec):
            place = slice(share.start, share.stop)
            if shard is not None:
                super().write(shard.unit, share.part, narrow[place], value[place])
            else:
                wide = value[place].to(torch.float32)
                narrow[place] = split(wide)[0] if unit.has_residual else wide

    def follow(
        self, unit: Unit, spec: TensorSpec, narrow: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        for share, shard in self._split(unit, spec):
            if shard is not None:
                place = slice(share.start, share.stop)
                old = None if before is None else before[place]
                super().follow(shard.unit, share.part, narrow[place], old)
