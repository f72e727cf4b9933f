"""Stored weights: runs of pages cover every range, and boxes are where a conversion puts sources."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.core_model_loading import (
    Concatenate,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from infinity.checkpoint.huggingface.names import SourcePlaces, TensorGroup
from infinity.codecs import Plain
from infinity.sizes import KIB, PAGE_NBYTES
from infinity.state.partition import partition
from infinity.state.stored import StoredSlice, lay_out_stored, stored_tiles
from infinity.state.units import layout_unit
from infinity.storage.protocol import FileRange
from infinity.storage.shards import ShardRun

RANGES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 1 << 20), st.integers(0, 40_000)),
    min_size=1,
    max_size=12,
)


def slice_of(name: str, parts: tuple[FileRange, ...]) -> StoredSlice:
    return StoredSlice(name, (), (), (), Plain("U8"), parts)


@given(RANGES)
def test_every_range_is_in_a_run_of_whole_pages(ranges: list[tuple[str, int, int]]) -> None:
    tensors = {
        f"t{index}": (slice_of(f"t{index}", (FileRange(*each),)),)
        for index, each in enumerate(ranges)
    }
    stored = lay_out_stored(tensors)
    end = 0
    for run in stored.runs:
        assert run.offset_nbytes % PAGE_NBYTES == run.nbytes % PAGE_NBYTES == 0 < run.nbytes
        assert run.block_offset_nbytes == end
        end += run.nbytes
    assert stored.nbytes == max(end, PAGE_NBYTES)
    for (_, stored_slice, places), (path, offset, nbytes) in zip(
        stored.slices, ranges, strict=True
    ):
        ((start, length),) = places
        assert length == nbytes and stored_slice.parts[0].path == path
        if nbytes:
            run = next(
                run
                for run in stored.runs
                if run.block_offset_nbytes <= start < run.block_offset_nbytes + run.nbytes
            )
            assert run.path == path
            assert run.offset_nbytes + start - run.block_offset_nbytes == offset
            assert start + nbytes <= run.block_offset_nbytes + run.nbytes


@given(RANGES, st.integers(2, 5))
def test_the_parts_of_ranks_are_the_bytes_of_the_block_by_the_same_runs(
    ranges: list[tuple[str, int, int]], count: int
) -> None:
    tensors = {str(i): (slice_of(str(i), (FileRange(*each),)),) for i, each in enumerate(ranges)}
    unit = replace(layout_unit(0, "u", []), stored=lay_out_stored(tensors))
    whole = {place for run in unit.stored.runs for place in pages_of(run)}  # type: ignore[union-attr]
    divided = partition([unit], rank=0, count=count, stage=3)
    (full,) = divided.full_units
    of_parts, checked = [], set()
    for shard in divided.shards[0]:
        assert shard.unit.stored is not None
        for run in shard.unit.stored.runs:
            (segment,) = shard.segments
            assert run.block_offset_nbytes + run.nbytes <= segment.nbytes
            at = run.block_offset_nbytes + segment.full_offset_nbytes
            of_parts += pages_of(replace(run, block_offset_nbytes=at))
            checked.add((run.path, run.offset_nbytes, run.nbytes))
    assert len(of_parts) == len(whole) and set(of_parts) == whole
    assert full.stored is not None and full.stored.slices == unit.stored.slices  # type: ignore[union-attr]
    assert checked == {(run.path, run.offset_nbytes, run.nbytes) for run in full.stored.runs}


def pages_of(run: ShardRun) -> list[tuple[str, int, int]]:
    """The file, the page of it, and the place in the block of every page."""
    return [
        (run.path, run.offset_nbytes + at, run.block_offset_nbytes + at)
        for at in range(0, run.nbytes, PAGE_NBYTES)
    ]


@given(RANGES)
def test_pages_are_read_once_and_gaps_are_small(ranges: list[tuple[str, int, int]]) -> None:
    tensors = {
        str(index): (slice_of(str(index), (FileRange(*each),)),)
        for index, each in enumerate(ranges)
    }
    stored = lay_out_stored(tensors)
    for one, other in zip(stored.runs, stored.runs[1:], strict=False):
        assert one.path < other.path or one.end_nbytes < other.offset_nbytes
    wanted = {
        (path, page)
        for path, offset, nbytes in ranges
        if nbytes
        for page in range(offset // PAGE_NBYTES, (offset + nbytes - 1) // PAGE_NBYTES + 1)
    }
    read = sum(run.nbytes for run in stored.runs) // PAGE_NBYTES
    assert len(wanted) <= read <= len(wanted) + len(wanted) * 16 * KIB // PAGE_NBYTES


@dataclass
class Conversion:
    """Stands for a conversion of transformers: stacks, concatenates and transposes."""

    num_stacked: int
    axis: int
    is_transposed: bool
    collected: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add_tensor(self, target: str, name: str, pattern: str, tensor: torch.Tensor) -> None:
        self.collected.setdefault(pattern, []).append(tensor)

    def convert(self, target: str, **unused: Any) -> dict[str, torch.Tensor]:
        stacks = [torch.stack(tensors) for tensors in self.collected.values()]
        made = torch.cat(stacks, dim=1 + self.axis)
        return {target: made.transpose(1, 2).contiguous() if self.is_transposed else made}


class Model:
    config = None


@given(
    st.integers(1, 5), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 6),
    st.integers(0, 1), st.booleans(), st.data(),
)  # fmt: skip
def test_boxes_are_where_the_conversion_puts_each_source(
    num_stacked: int, sizes: list[int], other: int, axis: int, is_transposed: bool, data: Any
) -> None:
    conversion = Conversion(num_stacked, axis, is_transposed)
    names, shapes = [], []
    for index, size in enumerate(sizes):
        for number in range(num_stacked):
            names.append((f"p{index}", f"e{number}.p{index}"))
            shapes.append((size, other) if axis == 0 else (other, size))
    group = TensorGroup(first_target="t", sources=tuple(names), transform=conversion)
    sources = [torch.rand(shape) for shape in shapes]
    by_name = dict(zip(group.source_names, sources, strict=True))
    expected = copy.deepcopy(group).convert(by_name.__getitem__, Model())["t"]  # type: ignore[arg-type]
    places = SourcePlaces(Model())  # type: ignore[arg-type]
    placed = places.of(group, shapes, {"t": tuple(expected.shape)})
    assert placed is not None
    made = torch.full_like(expected, float("nan"))
    for each in placed[0]:
        made[each.box].permute(each.axes).copy_(sources[each.index])
    assert torch.equal(made, expected)
    # And its tiles.
    slices = tuple(
        StoredSlice(
            str(each.index), each.box, each.axes, shapes[each.index], Plain("F32"),
            (FileRange("f", 1000 * each.index, sources[each.index].nbytes),),
        )
        for each in placed[0]
    )  # fmt: skip
    cuts = data.draw(st.sets(st.integers(1, num_stacked - 1))) if num_stacked > 1 else set()
    starts = [0, *sorted(cuts), num_stacked]
    tiles = stored_tiles(slices, starts)
    assert tiles is not None and len(tiles) == len(starts) - 1
    for rows, start, stop in zip(tiles, starts, starts[1:], strict=False):
        part = torch.full_like(expected[start:stop], float("nan"))
        for stored_slice in rows:
            stored_slice.target(part).copy_(sources[int(stored_slice.source)])
        assert torch.equal(part, expected[start:stop])


def test_a_conversion_that_computes_has_no_boxes() -> None:
    class Doubling(Conversion):
        def convert(self, target: str, **unused: Any) -> dict[str, torch.Tensor]:
            return {target: super().convert(target)[target] * 2}

    group = TensorGroup(
        first_target="t", sources=(("p", "a"), ("p", "b")), transform=Doubling(2, 0, False)
    )
    places = SourcePlaces(Model())  # type: ignore[arg-type]
    assert places.of(group, [(4, 3), (4, 3)], {"t": (2, 4, 3)}) is None


@pytest.mark.parametrize("stored", [(4, 6, 8), (4, 8, 6), (4, 8, 8), (8, 4, 8)])
def test_a_transposition_that_compares_real_shapes_has_the_box_of_the_real_ones(
    stored: tuple[int, ...],
) -> None:
    """Qwen3-VL-MoE: experts are published transposed, and transformers 5 saves them as they are."""
    size = (4, 6, 8) if 6 in stored else stored
    model: Any = SimpleNamespace(config=None, get_parameter=lambda _: torch.empty(size))
    transform = WeightConverter("e.p", "e.p", [Transpose(1, 2, check_dims=True)])
    group = TensorGroup(first_target="l.e.p", sources=(("e.p", "l.e.p"),), transform=transform)
    source = torch.rand(stored)
    (expected,) = group.convert(lambda _: source, model).values()
    placed = SourcePlaces(model).of(group, [stored], {"l.e.p": size})
    assert placed is not None
    ((only,),) = placed
    made = torch.empty(size)
    made[only.box].permute(only.axes).copy_(source)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("heads", [None, 1, 3, 4, 5])
@pytest.mark.parametrize("rows", [(120,), (240, 120)])
def test_a_rotation_of_heads_has_no_boxes(heads: int | None, rows: tuple[int, ...]) -> None:
    """Neither where the small sizes of the trial hold one pair of each head, an identity."""
    operations = [PermuteForRope(permute_layer_names=["q"]), Concatenate(0)]
    sources = [f"{name}.weight" for name, _ in zip("qk", rows, strict=False)]
    transform = WeightConverter(sources, ["made.weight"], operations[: len(rows)])
    pairs = tuple((source, f"l.{source}") for source in sources)
    group = TensorGroup(first_target="l.made.weight", sources=pairs, transform=transform)
    config = SimpleNamespace(**({} if heads is None else {"num_attention_heads": heads}))
    model: Any = SimpleNamespace(config=config)
    shapes = [(count, 8) for count in rows]
    values = {n: torch.rand(s) for (_, n), s in zip(pairs, shapes, strict=True)}
    made = group.convert(values.__getitem__, model)
    assert [tuple(tensor.shape) for tensor in made.values()] == [(sum(rows), 8)]
    assert SourcePlaces(model).of(group, shapes, {"l.made.weight": (sum(rows), 8)}) is None
