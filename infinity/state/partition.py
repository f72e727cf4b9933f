"""Ownership by rank: every unit is divided into one contiguous shard per rank.

Bandwidth-centric, as in ZeRO-Infinity: each rank owns 1/N of every unit, so that all ranks' links
are busy at the same time. The unit's arrays of state are divided at multiples of STATE_GRANULE; the
weights are divided at the same elements, so that the owner of a part of the master can write the
weights that follow from it. Frozen weights have no state and are divided at pages. Those that rest
in a checkpoint's own files (`Unit.stored`) have no owner: every rank can read all of them there. In
stage 3 a shard has the pages that its rank reads for an exchange between devices.

Frozen weights may be divided over the ranks of a node (`over_node`): every node has all of them,
and no rank asks for those of another node. Rank number i of each node then has part i.

The result has two lists of units. *Full units* are the units of the modules, with the state kinds
that every rank keeps. *Shards* are this rank's parts of the other kinds. A shard is a unit of its
own, whose tensors are flat runs of elements. Stage by stage (Rajbhandari et al., "ZeRO", 2020,
section 5):

  stage  every rank keeps          one rank owns a part of
  1      parameters, gradients     master, moments, summed gradients
  2      parameters                master, moments, gradients
  3      nothing                   parameters, master, moments, gradients

Everything here is a pure function of layouts and numbers.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infinity.sizes import PAGE_NBYTES, align_up
from infinity.state.stored import StoredWeights
from infinity.state.units import STATE_GRANULE, StateKind, TensorFacts, TensorSpec, Unit

STAGES = (1, 2, 3)
_STATE = frozenset(StateKind) - {StateKind.PARAMETERS}
_KEPT = {
    1: frozenset({StateKind.PARAMETERS, StateKind.GRADIENTS}),
    2: frozenset({StateKind.PARAMETERS}),
    3: frozenset[StateKind](),
}


@dataclass(frozen=True, slots=True)
class ShardSegment:
    """`nbytes` bytes of weights: where they lie in the whole unit and where in the shard."""

    full_offset_nbytes: int
    shard_offset_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardSlice:
    """Elements [start, stop) of a full tensor, owned by `rank`; `part` is the same range in the
    shard.
    """

    rank: int
    full: TensorSpec
    part: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of one unit that one rank owns: elements [start, stop) of its arrays of state.

    `shares` are of trainable tensors, `frozen` of the others.
    """

    rank: int
    unit: Unit
    start: int
    stop: int
    shares: tuple[ShardSlice, ...]
    frozen: tuple[ShardSlice, ...]
    segments: tuple[ShardSegment, ...]

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights, padding between tensors included, rounding to pages not."""
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """All units over all ranks, seen from one rank. Unit i's shard is unit `len(full_units) +
    i`."""

    rank: int
    count: int
    stage: int
    full_units: tuple[Unit, ...]
    shards: tuple[tuple[Shard, ...], ...]  # By unit and rank.
    nodes: tuple[tuple[int, ...], ...]  # The ranks of each node.
    over_node: bool = False  # Whether frozen weights are divided over the ranks of a node.
    # Of this rank. `local`: its shard of each unit, in the order of the units. `units`: those that
    # have state on this rank, full units, then its shards. `node`: its node's ranks, with itself.
    local: tuple[Shard, ...] = field(init=False, repr=False)
    units: tuple[Unit, ...] = field(init=False, repr=False)
    node: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        local = tuple(of_unit[self.rank] for of_unit in self.shards)
        node = next(ranks for ranks in self.nodes if self.rank in ranks)
        object.__setattr__(self, "local", local)
        object.__setattr__(self, "units", (*self.full_units, *(shard.unit for shard in local)))
        object.__setattr__(self, "node", node)

    def is_of_node(self, unit: int) -> bool:
        """Whether every node has all of a full unit's weights, divided over its ranks."""
        return self.over_node and _is_frozen(self.full_units[unit])

    def sources(self, unit: int) -> tuple[Shard, ...]:
        """Returns the shards of which this rank puts a full unit's weights together."""
        of_ranks = self.shards[unit]
        return tuple(of_ranks[rank] for rank in self.node) if self.is_of_node(unit) else of_ranks

    def is_saver(self, unit: Unit) -> bool:
        """Whether this rank writes one of `units` to a checkpoint. Nodes that have the same weights
        take turns, unit by unit."""
        index = unit.index % len(self.full_units)
        return not self.is_of_node(index) or self.rank in self.nodes[index % len(self.nodes)]

    @property
    def shards_parameters(self) -> bool:
        """True in stage 3: a rank keeps only its shards of weights, and fetches full units (see
        `is_gathered`)."""
        return self.stage == 3

    def is_gathered(self, unit: int) -> bool:
        """Whether a rank has only its shard of these weights, and asks the others for the rest."""
        return (
            self.shards_parameters
            and unit < len(self.full_units)
            and self.full_units[unit].stored is None
        )

    @property
    def shards_gradients(self) -> bool:
        """True in stages 2 and 3: a rank sends each gradient when it is complete. In stage 1 the
        rank sums its backward passes, and sends the sums when the step begins."""
        return self.stage > 1

    def served(self, shard: Shard) -> Sequence[ShardSegment]:
        """The weights of a shard that other ranks fetch.

        If every rank keeps the full weights, these are the ones that a step changes: the trainable
            ones.
        """
        if self.shards_parameters:
            return shard.segments
        full = self.full_units[shard.unit.index - len(self.full_units)]
        return [s for s in shard.segments if s.full_offset_nbytes < full.trainable_nbytes]

    def own_part(self, unit: int) -> range:
        """Returns the bytes of a full unit's weights that this rank's updates change: one range,
        because trained tensors are adjacent; maybe empty."""
        end = self.full_units[unit].trainable_nbytes
        for segment in self.shards[unit][self.rank].segments:
            if segment.full_offset_nbytes < end:
                start = segment.full_offset_nbytes
                return range(start, start + segment.nbytes)
        return range(0)

    def remote_parts(self, unit: int) -> list[range]:
        """Returns the bytes of a full unit's weights that other ranks' updates change, ascending.
        Empty for a frozen unit."""
        own, end = self.own_part(unit), self.full_units[unit].trainable_nbytes
        return [part for part in (range(own.start), range(own.stop, end)) if part]

    def shares(self) -> dict[TensorSpec, list[ShardSlice]]:
        """The shares of every trainable tensor in element order. Empty tensors have none."""
        found: dict[TensorSpec, list[ShardSlice]] = {
            spec: [] for unit in self.full_units for spec in unit.trainable()
        }
        for of_unit in self.shards:
            for shard in of_unit:
                for share in shard.shares:
                    found[share.full].append(share)
        for shares in found.values():
            shares.sort(key=lambda share: share.start)
        return found


def partition(
    units: Sequence[Unit],
    *,
    rank: int,
    count: int,
    stage: int,
    nodes: Sequence[Sequence[int]] = (),
    over_node: bool = False,
) -> Partition:
    """Cuts every unit into one shard for each of `count` ranks. `units[i].index` is i.

    nodes: the ranks of each node; by default one node has all of them
    over_node: frozen weights are cut in as many parts as a node has ranks, the same for each node
    """
    assert 0 <= rank < count and stage in STAGES
    kept, owned = _KEPT[stage], _STATE | (frozenset({StateKind.PARAMETERS}) - _KEPT[stage])
    of_nodes = tuple(tuple(node) for node in nodes) or (tuple(range(count)),)
    numbers = {owner: number for node in of_nodes for number, owner in enumerate(node)}
    full_units, shards = [], []
    for unit in units:
        is_of_node = over_node and _is_frozen(unit)
        parts = [numbers[owner] if is_of_node else owner for owner in range(count)]
        num_parts = max(parts) + 1
        index = len(units) + unit.index
        full_units.append(_full(unit, kept, num_parts))
        bounds = list(_bounds(unit, num_parts))
        shards.append(
            tuple(
                _shard(unit, owner, *bounds[part], index=index, kinds=owned)
                if unit.stored is None
                else _stored_shard(unit, owner, part, num_parts, index=index, kinds=owned)
                for owner, part in enumerate(parts)
            )
        )
    return Partition(rank, count, stage, tuple(full_units), tuple(shards), of_nodes, over_node)


def _is_frozen(unit: Unit) -> bool:
    return not unit.trainable_nbytes


# INV-19: the parts cover the whole once.
def cut(total: int, part: int, count: int) -> tuple[int, int]:
    """Returns [start, stop) of one of `count` nearly equal parts: 10, 1, 3 -> (3, 6)."""
    return part * total // count, (part + 1) * total // count


def _part_of(unit: Unit, number: int, count: int, totals: Sequence[int]) -> int:
    """Returns the part of a unit that a rank owns. `number`: of the rank, among `count` ranks that
    have all parts together. `totals`: what is cut in `count` parts.

    Unequal parts rotate with the unit, so that each rank gets some of the units that are too small
    for all ranks. Equal parts are in rank order: devices gather them where they are used.
    """
    is_equal = all(total % count == 0 for total in totals)
    return number if is_equal else (number + unit.index) % count


def _bounds(unit: Unit, count: int) -> Iterator[tuple[int, int, int, int]]:
    """For each of `count` ranks: elements of state, and bytes of frozen weights behind the
    trainable head."""
    granules = unit.state_numel // STATE_GRANULE
    pages = (unit.weight_nbytes - unit.trainable_nbytes) // PAGE_NBYTES
    for number in range(count):
        part = _part_of(unit, number, count, [granules, pages])
        start, stop = cut(granules, part, count)
        first, last = cut(pages, part, count)
        yield start * STATE_GRANULE, stop * STATE_GRANULE, first * PAGE_NBYTES, last * PAGE_NBYTES


def _shard(
    unit: Unit,
    rank: int,
    start: int,
    stop: int,
    frozen_start_nbytes: int,
    frozen_stop_nbytes: int,
    *,
    index: int,
    kinds: frozenset[StateKind],
) -> Shard:
    low, high = _weight_place(unit, start), _weight_place(unit, stop)
    shares = tuple(_shares(unit, rank, start, stop, low))
    head_nbytes = align_up(high - low, PAGE_NBYTES)
    frozen_nbytes = frozen_stop_nbytes - frozen_start_nbytes
    cold = ShardSegment(unit.trainable_nbytes + frozen_start_nbytes, head_nbytes, frozen_nbytes)
    frozen = tuple(_frozen_shares(unit, rank, cold))
    segments = (ShardSegment(low, 0, high - low), cold)
    return Shard(
        rank=rank,
        unit=Unit(
            index=index,
            name=f"{unit.name} (shard of rank {rank})",
            tensors=tuple(share.part for share in (*shares, *frozen)),
            trainable_nbytes=head_nbytes,
            weight_nbytes=max(head_nbytes + frozen_nbytes, PAGE_NBYTES),
            state_numel=stop - start,
            master_dtype=unit.master_dtype if stop > start else None,
            moments=unit.moments,
            kinds=kinds,
        ),
        start=start,
        stop=stop,
        shares=shares,
        frozen=frozen,
        segments=tuple(segment for segment in segments if segment.nbytes),
    )


def _full(unit: Unit, kept: frozenset[StateKind], count: int) -> Unit:
    """Returns a unit with the state kinds that every rank keeps. Every rank can read weights that
    rest in files, and reads parts of them by the same runs as the whole."""
    stored = unit.stored
    if stored is None:
        return dataclasses.replace(unit, kinds=kept)
    keeps_weights = StateKind.PARAMETERS in kept
    return dataclasses.replace(
        unit,
        kinds=frozenset({StateKind.PARAMETERS}),
        stored=stored if keeps_weights else _divided(stored, count),
    )


def _divided(stored: StoredWeights, count: int) -> StoredWeights:
    pages = stored.nbytes // PAGE_NBYTES
    borders = [cut(pages, part, count)[0] * PAGE_NBYTES for part in range(count)]
    return stored.divided([*borders, stored.nbytes])


def _stored_shard(
    unit: Unit, rank: int, number: int, count: int, *, index: int, kinds: frozenset[StateKind]
) -> Shard:
    """Returns a rank's pages of the stored bytes of a unit, which no codec has to know of: devices
    put the bytes together before they decode them. Offsets are those in the stored block.
    `number`, `count`: as of `_part_of`."""
    assert unit.stored is not None
    is_cut = StateKind.PARAMETERS in kinds
    num_pages = unit.stored.nbytes // PAGE_NBYTES
    first, last = cut(num_pages, _part_of(unit, number, count, [num_pages]), count)
    start_nbytes, nbytes = first * PAGE_NBYTES, (last - first) * PAGE_NBYTES if is_cut else 0
    stored = unit.stored.cut(start_nbytes, start_nbytes + nbytes)
    name = f"{unit.name} (shard of rank {rank})"
    pages = dataclasses.replace(
        unit, index=index, name=name, tensors=(), weight_nbytes=stored.nbytes, kinds=kinds,
        stored=stored,
    )  # fmt: skip
    segments = (ShardSegment(start_nbytes, 0, nbytes),) if nbytes else ()
    return Shard(rank, pages, start=0, stop=0, shares=(), frozen=(), segments=segments)


def _weight_place(unit: Unit, element: int) -> int:
    """The byte in the unit's weights that belongs to an element of its arrays of state.

    Padding behind a tensor belongs to the tensor before it; element 0 is byte 0, the end of the
    state is the end of the trainable weights.
    """
    specs = list(unit.trainable())
    if element >= unit.state_numel or not specs:
        return unit.trainable_nbytes
    spec = specs[bisect_right([spec.state_offset for spec in specs], element) - 1]
    following = specs[specs.index(spec) + 1 :]
    end = following[0].weight_offset_nbytes if following else unit.trainable_nbytes
    return min(
        spec.weight_offset_nbytes + (element - spec.state_offset) * spec.facts.dtype.itemsize, end
    )


def _shares(unit: Unit, rank: int, start: int, stop: int, low_nbytes: int) -> Iterator[ShardSlice]:
    for full in unit.trainable():
        first = max(start, full.state_offset) - full.state_offset
        last = min(stop, full.state_offset + full.numel) - full.state_offset
        if first < last:
            state_offset = full.state_offset + first - start
            yield _share(rank, full, first, last, -low_nbytes, state_offset)


def _frozen_shares(unit: Unit, rank: int, segment: ShardSegment) -> Iterator[ShardSlice]:
    """Yields the elements in these bytes of tensors without state, which are split at pages."""
    shift_nbytes = segment.shard_offset_nbytes - segment.full_offset_nbytes
    for full in unit.tensors:
        size = full.facts.dtype.itemsize
        start_nbytes = segment.full_offset_nbytes - full.weight_offset_nbytes
        first = max(0, start_nbytes) // size
        last = min(full.numel, (start_nbytes + segment.nbytes) // size)
        if full.state_offset < 0 and first < last:
            yield _share(rank, full, first, last, shift_nbytes, -1)


def _share(
    rank: int, full: TensorSpec, first: int, last: int, shift_nbytes: int, state_offset: int
) -> ShardSlice:
    """`shift_nbytes`: from a place in the unit's weights to the place in the shard's."""
    facts = full.facts
    part = TensorSpec(
        TensorFacts(facts.name, (last - first,), (1,), facts.dtype, facts.is_trainable),
        last - first,
        full.weight_offset_nbytes + first * facts.dtype.itemsize + shift_nbytes,
        state_offset,
    )
    return ShardSlice(rank, full, part, first, last)
