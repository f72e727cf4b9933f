"""Training state: units, the state kinds of a unit, and the offset of each tensor.

A unit is the set of parameters that move together. Its state is flattened, per state kind, into one
contiguous run of bytes, so that a unit is a handful of large transfers and not thousands of small
ones. Everything here is a pure function of shapes and dtypes.

Layout of a unit (docs/formats/unit.md):
  parameters   every tensor in its own dtype (or, where frozen, as its checkpoint stores it:
               state/stored.py), trainable ones first, then, on a page of their own,
               the frozen ones; each tensor starts at a multiple of TENSOR_ALIGNMENT_NBYTES
  moments, gradients
               fp32 arrays over the trainable tensors only, all with the same element offsets; which
               moments exist depends on the optimizer (`Moments`), and they may have eight bits
               instead (docs/formats/moments_8bit.md)
  master       the rest of the fp32 master beside the parameters, at the same element offsets:
               a 16-bit residual beside bf16 parameters (docs/formats/split_master.md), all of the
               fp32 value beside fp16 ones, nothing beside fp32 ones
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache

import torch

from infinity.codecs.on_device import WeightPlace
from infinity.config.schema.engine import Optimizer, Precision
from infinity.errors import UnsupportedError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL
from infinity.sizes import PAGE_NBYTES, align_down, align_up
from infinity.state import moments_8bit
from infinity.state.stored import StoredTensor, StoredWeights, lay_out_stored

TENSOR_ALIGNMENT_NBYTES = 256
# The same alignment in fp32 elements: a cut at such a place leaves vector kernels' lanes as they
# are.
STATE_ALIGNMENT = TENSOR_ALIGNMENT_NBYTES // 4
STATE_ITEM_NBYTES = 4
# Chunks are cut at multiples of this many elements: whole pages also of a 16-bit array.
STATE_GRANULE = PAGE_NBYTES // 2

_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MomentFormat(StrEnum):
    """The format of a moment, in the words of `[precision]`."""

    FLOAT32 = "float32"
    EIGHT_BIT = "8bit"  # Approximate.


class StateKind(StrEnum):
    """One contiguous run of bytes of a unit."""

    PARAMETERS = "parameters"  # what the forward reads, in the compute dtype
    MASTER = "master"  # what narrower parameters lack of the fp32 value that is updated
    EXP_AVG = "exp_avg"  # first moment
    EXP_AVG_SQ = "exp_avg_sq"  # second moment
    MOMENTUM_BUFFER = "momentum_buffer"  # SGD's
    GRADIENTS = "gradients"  # fp32, summed over the backward passes of a step

    @property
    def kind(self) -> str:
        """The name by which `[placement]` speaks of it."""
        return "moments" if self in MOMENT_KINDS else self.value


# The moments of all optimizers, under torch's names; `Moments` has those of one optimizer.
MOMENT_KINDS = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ, StateKind.MOMENTUM_BUFFER)


@dataclass(frozen=True, slots=True)
class Moments:
    """State that an optimizer keeps per trainable element, beside the master."""

    kinds: tuple[StateKind, ...] = (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)
    format: MomentFormat = MomentFormat.FLOAT32

    @property
    def is_8bit(self) -> bool:
        """Whether the moments are 8-bit codes with scales."""
        return self.format is MomentFormat.EIGHT_BIT and bool(self.kinds)

    def is_8bit_kind(self, kind: StateKind) -> bool:
        """Whether the state kind is one of these moments, stored as codes."""
        return kind in self.kinds and self.is_8bit


OF_ADAM = Moments()

_MOMENTS = {
    "adamw": (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ),
    "adam": (StateKind.EXP_AVG, StateKind.EXP_AVG_SQ),
    "lion": (StateKind.EXP_AVG,),
    "sgd": (StateKind.MOMENTUM_BUFFER,),
}


def moments_of(optimizer: Optimizer, precision: Precision) -> Moments:
    """Returns the moments that a model reserves space for at offload."""
    kinds = _MOMENTS[optimizer.name][: optimizer.num_moments]
    return Moments(kinds, MomentFormat(precision.moments))


@cache
def _dtypes(
    moments: Moments, master_dtype: torch.dtype | None
) -> Mapping[StateKind, torch.dtype | None]:
    """Returns the dtype of each state kind: the same for the many units of a model."""

    def dtype(kind: StateKind) -> torch.dtype | None:
        if kind.kind == "moments" and kind not in moments.kinds:
            return None
        if moments.is_8bit_kind(kind):
            return torch.uint8
        return master_dtype if kind is StateKind.MASTER else torch.float32

    return {kind: dtype(kind) for kind in StateKind}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The facts about one parameter that decide the layout."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """One parameter and its place in the buffers of the unit."""

    facts: TensorFacts
    numel: int
    weight_offset_nbytes: int
    state_offset: int  # In fp32 elements; -1 for a frozen parameter, which has no state.

    @property
    def name(self) -> str:
        """The parameter's full name."""
        return self.facts.name

    @property
    def weight_nbytes(self) -> int:
        """The bytes of the weights, in their own dtype."""
        return self.numel * self.facts.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that move together, and the layout of their state."""

    index: int
    name: str
    tensors: tuple[TensorSpec, ...]
    trainable_nbytes: int  # The head of `parameters` that an update rewrites, in whole pages.
    weight_nbytes: int
    state_numel: int
    master_dtype: torch.dtype | None  # int16: a residual; fp32: the whole value; None: no master.
    moments: Moments = OF_ADAM
    kinds: frozenset[StateKind] | None = None  # Those that rest on this rank; None: all of them.
    stored: StoredWeights | None = None  # Frozen weights that rest in the checkpoint's own files.
    _trainable: tuple[TensorSpec, ...] = field(init=False, repr=False)  # Asked for every gradient.
    _dtypes: Mapping[StateKind, torch.dtype | None] = field(init=False, repr=False)
    # By `chunk_nbytes`; of `chunk_unit`.
    known_chunks: dict[int, tuple[Chunk, ...]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        trainable = tuple(tensor for tensor in self.tensors if tensor.state_offset >= 0)
        object.__setattr__(self, "_trainable", trainable)
        object.__setattr__(self, "_dtypes", _dtypes(self.moments, self.master_dtype))

    @property
    def has_residual(self) -> bool:
        """Whether the master is the weights and a residual of 16 bits."""
        return self.master_dtype is torch.int16

    @property
    def has_full_master(self) -> bool:
        """Whether the master is the fp32 value of every weight, which is made of it."""
        return self.master_dtype is torch.float32

    def dtype(self, kind: StateKind) -> torch.dtype | None:
        """The dtype of the elements of a state kind; None when the unit has none of it."""
        return self._dtypes[kind]

    def is_8bit(self, kind: StateKind) -> bool:
        """Returns whether the state kind is stored as codes with scales among them."""
        return self.moments.is_8bit_kind(kind)

    @property
    def granule_numel(self) -> int:
        """Chunks start at multiples of this; every state kind is at a page there."""
        return moments_8bit.GRANULE_NUMEL if self.moments.is_8bit else STATE_GRANULE

    @property
    def has_state(self) -> bool:
        """Whether its optimizer's state is kept here, if there is any."""
        is_kept = self.kinds is None or StateKind.MASTER in self.kinds
        return self.state_numel > 0 and is_kept

    def nbytes(self, kind: StateKind, numel: int | None = None) -> int:
        """Bytes of the state kind, or of `numel` elements of it that start a chunk; 0 when
        the unit has none of it."""
        if self.kinds is not None and kind not in self.kinds:
            return 0
        if kind is StateKind.PARAMETERS:
            return self.weight_nbytes if self.stored is None else self.stored.nbytes
        numel = self.state_numel if numel is None else numel
        if not numel:
            return 0  # Of a frozen unit, as most of a large model are.
        if self.is_8bit(kind):
            return moments_8bit.kind_nbytes(numel)
        dtype = self.dtype(kind)
        return 0 if dtype is None else dtype.itemsize * numel

    def spec(self, name: str) -> TensorSpec:
        """Returns the parameter with this name in the model."""
        return next(spec for spec in self.tensors if spec.name == name)

    def trainable(self) -> tuple[TensorSpec, ...]:
        """Returns the tensors that the optimizer updates."""
        return self._trainable

    def weight_places(self) -> Iterator[WeightPlace]:
        """Yields, of weights that rest in a checkpoint, the place of each slice in their host block
        and in the region of the unit."""
        assert self.stored is not None
        return self.stored.places({spec.name: _without_memory(spec) for spec in self.tensors})


def _without_memory(spec: TensorSpec) -> torch.Tensor:
    """Returns the parameter at its offset in the unit's weights, as a tensor without bytes."""
    facts = spec.facts
    first = spec.weight_offset_nbytes // facts.dtype.itemsize
    empty = torch.empty(first + spec.numel, dtype=facts.dtype, device="meta")
    return empty.as_strided(facts.shape, facts.stride, first)


def layout_unit(
    index: int, name: str, tensors: Sequence[TensorFacts], moments: Moments = OF_ADAM
) -> Unit:
    """Places the tensors of one unit. Order among trainable and among frozen ones is kept.

    Raises UnsupportedError for a trainable tensor whose dtype has no fp32 optimizer state.
    """
    # A block of codes that share a scale belongs to one tensor.
    alignment = BLOCK_NUMEL if moments.is_8bit else STATE_ALIGNMENT
    specs: list[TensorSpec] = []
    offset_nbytes = state_offset = 0
    for facts in (facts for facts in tensors if facts.is_trainable):
        if facts.dtype not in _TRAINABLE_DTYPES:
            raise UnsupportedError(
                f"parameter {facts.name!r} is trainable and {facts.dtype}; expected float32, "
                "bfloat16 or float16. Freeze it (requires_grad_(False)) or convert the model"
            )
        spec = _place(facts, offset_nbytes, state_offset)
        specs.append(spec)
        offset_nbytes = align_up(offset_nbytes + spec.weight_nbytes, TENSOR_ALIGNMENT_NBYTES)
        state_offset = align_up(state_offset + spec.numel, alignment)
    trainable_nbytes = offset_nbytes = align_up(offset_nbytes, PAGE_NBYTES)
    for facts in (facts for facts in tensors if not facts.is_trainable):
        spec = _place(facts, offset_nbytes, -1)
        specs.append(spec)
        offset_nbytes = align_up(offset_nbytes + spec.weight_nbytes, TENSOR_ALIGNMENT_NBYTES)
    return Unit(
        index=index,
        name=name,
        tensors=tuple(specs),
        trainable_nbytes=trainable_nbytes,
        # Empty tensors need a place too.
        weight_nbytes=align_up(max(offset_nbytes, 1), PAGE_NBYTES),
        state_numel=align_up(state_offset, STATE_GRANULE),
        master_dtype=_master_dtype({spec.facts.dtype for spec in specs if spec.state_offset >= 0}),
        moments=moments,
    )


def layout_units(
    groups: Iterable[tuple[str, Sequence[TensorFacts]]],
    moments: Moments = OF_ADAM,
    stored: Mapping[str, StoredTensor] | None = None,
) -> tuple[Unit, ...]:
    """Lays out the units of a model: its groups of tensors, by name, in the order of their use.

    A unit rests in the files of a checkpoint if `stored` has its tensors.
    """
    units = []
    for index, (name, tensors) in enumerate(groups):
        unit = layout_unit(index, name, tensors, moments)
        if stored and unit.tensors and unit.tensors[0].name in stored:
            parts = {spec.name: stored[spec.name] for spec in unit.tensors}
            unit = replace(unit, stored=lay_out_stored(parts))
        units.append(unit)
    return tuple(units)


def _master_dtype(dtypes: set[torch.dtype]) -> torch.dtype | None:
    """One format for the unit: fp16 has no residual of 16 bits, fp32 beside bf16 leaves it zero."""
    if torch.float16 in dtypes:
        return torch.float32
    return torch.int16 if torch.bfloat16 in dtypes else None


def _place(facts: TensorFacts, offset_nbytes: int, state_offset: int) -> TensorSpec:
    return TensorSpec(facts, math.prod(facts.shape), offset_nbytes, state_offset)


def weight_of(weights: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """One tensor among a unit's weight bytes (uint8): flat, in memory order and its own dtype."""
    start = spec.weight_offset_nbytes
    return weights[start : start + spec.weight_nbytes].view(spec.facts.dtype)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of one trainable tensor, in memory order."""

    tensor: TensorSpec
    start: int
    stop: int

    @property
    def state_start(self) -> int:
        """The first element, in the unit's arrays of state."""
        return self.tensor.state_offset + self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [start, stop) of a unit's arrays of state, and the slices of tensors within."""

    unit: Unit
    start: int
    stop: int
    slices: tuple[Slice, ...]

    def offset_nbytes(self, kind: StateKind) -> int:
        """The offset of the chunk in the unit's range of this kind."""
        return self.unit.nbytes(kind, self.start)

    def nbytes(self, kind: StateKind) -> int:
        """The bytes of the chunk in this kind."""
        return self.unit.nbytes(kind, self.stop - self.start)


def chunk_unit(unit: Unit, chunk_nbytes: int) -> tuple[Chunk, ...]:
    """Returns the chunks of a unit, which are worked out once: every step asks for them."""
    chunks = unit.known_chunks.get(chunk_nbytes)
    if chunks is None:
        chunks = unit.known_chunks[chunk_nbytes] = tuple(_cut(unit, chunk_nbytes))
    return chunks


def _cut(unit: Unit, chunk_nbytes: int) -> Iterator[Chunk]:
    """Cuts a unit's arrays of state into chunks of at most `chunk_nbytes` of fp32, or of a granule.

    Worked example: with granules of 2048 elements, 5000 elements (padded to 6144) and chunks of
    16 KiB (4096 elements) give [0, 4096) and [4096, 6144).
    """
    step = chunk_nbytes // STATE_ITEM_NBYTES
    assert step >= STATE_GRANULE and step % STATE_GRANULE == 0
    assert step >= min(unit.granule_numel, unit.state_numel)
    step = max(align_down(step, unit.granule_numel), unit.granule_numel)
    for start in range(0, unit.state_numel, step):
        stop = min(start + step, unit.state_numel)
        slices = []
        for tensor in unit.trainable():
            low = max(start, tensor.state_offset)
            high = min(stop, tensor.state_offset + tensor.numel)
            if low < high:
                slices.append(Slice(tensor, low - tensor.state_offset, high - tensor.state_offset))
        yield Chunk(unit, start, stop, tuple(slices))
