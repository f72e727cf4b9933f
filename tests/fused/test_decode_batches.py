"""Many weights are decoded by few launches, each weight once, with the bits of the reference."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity.codecs import (
    AffineGroups,
    Codec,
    FloatBlocks,
    Plain,
    TableBlocks,
    mxfp4,
    nvfp4,
    on_device,
)
from infinity.codecs import on_device as batches
from infinity.codecs.on_device import DecodePlan, FusedCodec, WeightPlace, batches_of
from infinity.fused import choice
from infinity.fused.decode import DecodeLaunch, launch_of, place_of
from tests.decode.cases import bits
from tests.fused.conftest import forget
from tests.fused.variants import Variants

KINDS: tuple[tuple[Codec, tuple[int, ...]], ...] = (
    (FloatBlocks((3, 5), "BF16"), (7, 33)),
    (FloatBlocks((1, 0)), (2, 3, 16)),
    (AffineGroups(8), (5, 16)),
    (AffineGroups(8), (33, 8)),
    (AffineGroups(8, "F32"), (5, 16)),
    (mxfp4(), (3, 32)),
    (mxfp4(is_transposed=True), (32, 5)),
    (nvfp4(), (2, 3, 16)),
    (TableBlocks(32, 2, 0.04), (9, 9)),
    (TableBlocks(32, 2, -0.3), (9, 9)),
    (TableBlocks(32, 0, stored="F16"), (41,)),
    (Plain("BF16"), (4, 3)),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ORDERS = ("dense", "rows", "columns", "strided", "stacked columns")


def strides_of(shape: tuple[int, ...], order: str) -> tuple[int, ...]:
    """Strides of a weight: as an expert in a stack, as a transposed one, and others."""
    rows, columns = shape[-2] if len(shape) > 1 else 1, shape[-1]
    row, column = {
        "dense": (columns, 1),
        "rows": (columns + 3, 1),
        "columns": (1, rows),
        "strided": (2 * columns + 1, 2),
        "stacked columns": (1, 2 * rows),
    }[order]
    return (max(rows * row, columns * column), row, column)[-len(shape) :]


@st.composite
def units(draw: st.DrawFn, kinds: Any = KINDS) -> tuple[list[WeightPlace], int, int]:
    """Weights, the bytes of the block with their parts, and those of the memory for them."""
    weights, stored_nbytes, numel = [], 0, 0
    for codec, shape in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6)):
        dtype, order = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(ORDERS))
        for _ in range(draw(st.sampled_from((1, 1, 2, 4)))):
            parts = []
            for part in codec.parts(shape):
                stored_nbytes += draw(st.integers(0, 17))
                parts.append((stored_nbytes, part.nbytes))
                stored_nbytes += part.nbytes
            numel += draw(st.integers(0, 5))
            stride = strides_of(shape, order)
            weights.append(WeightPlace(codec, shape, tuple(parts), dtype, numel, stride))
            numel += 1 + sum(
                (length - 1) * step for length, step in zip(shape, stride, strict=True)
            )
            numel += numel % 2  # A weight of fp32 counts in other elements.
    weights = [
        WeightPlace(w.codec, w.shape, w.parts, w.dtype, w.start * 4 // w.dtype.itemsize, w.stride)
        for w in weights
    ]
    return draw(st.permutations(weights)), stored_nbytes, 4 * numel


def by_reference(weights: list[WeightPlace], block: torch.Tensor, memory: torch.Tensor) -> None:
    for weight in weights:
        parts = [block[start : start + nbytes] for start, nbytes in weight.parts]
        target = memory.view(weight.dtype)[weight.start :].as_strided(weight.shape, weight.stride)
        weight.codec.decode(parts, weight.shape, target)


@pytest.fixture
def launches(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Launches of batches where they can be: the number of weights of each."""
    seen: list[int] = []
    run = DecodeLaunch.run

    def counted(launch: DecodeLaunch, parts: Any, places: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(len(places))
        run(launch, parts, places, out)

    monkeypatch.setattr(DecodeLaunch, "run", counted)
    monkeypatch.setattr(on_device, "runs", lambda batch, device: batch.launch is not None)
    return seen


slow = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])


@slow
@given(units(), st.integers(0, 7), st.integers(0, 2**31))
def test_a_plan_has_the_bits_of_the_reference_and_changes_nothing_beside_the_weights(
    launches: list[int],
    unit: tuple[list[WeightPlace], int, int],
    offset: int,
    seed: int,
) -> None:
    weights, stored_nbytes, nbytes = unit
    source = torch.Generator().manual_seed(seed)
    block = torch.randint(256, (offset + stored_nbytes,), generator=source, dtype=torch.uint8)
    memory = torch.full((nbytes,), 0x55, dtype=torch.uint8)
    expected = memory.clone()
    launches.clear()
    plan = DecodePlan(weights)
    plan.decode(block[offset:], memory)
    by_reference(weights, block[offset:], expected)
    assert torch.equal(memory, expected)
    fused = [weight for weight in weights if isinstance(weight.codec, FusedCodec)]
    assert sum(launches) == len(fused)


@given(units(), st.integers(1, 3))
def test_every_weight_is_in_one_batch_of_weights_like_it(
    unit: tuple[list[WeightPlace], int, int], most: int
) -> None:
    weights, _, _ = unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MOST_WEIGHTS", most)
        found = batches_of(weights)
    assert Counter(weight for batch in found for weight in batch.weights) == Counter(weights)
    kinds: Counter[object] = Counter()
    for batch in found:
        of_batch = {
            (str(w.codec).split("offset")[0], w.shape, w.dtype, w.stride) for w in batch.weights
        }
        assert len(of_batch) == 1 and len(batch.weights) <= most
        kinds[of_batch.pop()] += 1
        if batch.launch is not None:
            assert len(batch.rows()) == len(batch.weights)
    counts = Counter((str(w.codec).split("offset")[0], w.shape, w.dtype, w.stride) for w in weights)
    assert kinds == {kind: -(-count // most) for kind, count in counts.items()}


def experts(count: int) -> tuple[list[WeightPlace], int, int]:
    """Three matrices for each of the experts, of two shapes, two in one parameter."""
    codec, at, weights = AffineGroups(8), 1, []
    for expert in range(count):
        for shape, start in (((4, 16), 0), ((4, 16), 64), ((16, 8), 128 * count)):
            parts = []
            for part in codec.parts(shape):
                parts.append((at, part.nbytes))
                at += part.nbytes + 1
            stride = (shape[1], 1)
            first = start + expert * 128
            weights.append(WeightPlace(codec, shape, tuple(parts), torch.bfloat16, first, stride))
    return weights, at, 2 * 256 * count


@pytest.mark.parametrize(("count", "expected"), [(1, [2, 1]), (20, [40, 20])])
def test_all_experts_of_one_shape_are_one_launch(
    launches: list[int], count: int, expected: list[int]
) -> None:
    weights, stored_nbytes, nbytes = experts(count)
    block = torch.randint(256, (stored_nbytes,), dtype=torch.uint8)
    memory, reference = torch.zeros(2, nbytes, dtype=torch.uint8)
    DecodePlan(weights).decode(block, memory)
    by_reference(weights, block, reference)
    assert torch.equal(memory, reference)
    assert launches == expected


def test_a_launch_has_no_more_weights_than_a_grid_has_rows() -> None:
    (weight, *_), _, _ = experts(1)
    lengths = [len(batch.weights) for batch in batches_of([weight] * 131_071)]
    assert lengths == [65_535, 65_535, 1]


def test_offsets_may_exceed_32_bits(interpreter: None) -> None:
    codec, shape, far = AffineGroups(8), (5, 16), 5 << 30
    memory = mmap.mmap(-1, far + mmap.PAGESIZE)  # Of which a few pages are touched.
    parts = [
        torch.frombuffer(memory, dtype=torch.uint8, offset=far + at, count=part.nbytes)
        for part, at in zip(codec.parts(shape), (100, 301), strict=True)
    ]
    for part in parts:
        part.copy_(torch.randint(256, (len(part),), dtype=torch.uint8))
    target = torch.frombuffer(memory, dtype=torch.bfloat16, offset=far + 1000, count=80)
    base = torch.frombuffer(memory, dtype=torch.uint8, offset=0, count=2)
    launch = launch_of(codec.code_layout(shape), shape, (16, 1), torch.bfloat16, is_aligned=False)
    assert launch is not None
    row = place_of((far + 1000) // 2, 0.0, [far + 100, far + 301])
    launch.run([base, base], torch.tensor([row]), base.view(torch.bfloat16))
    expected = torch.empty(shape, dtype=torch.bfloat16)
    codec.decode(parts, shape, expected)
    assert torch.equal(bits(target.view(shape)), bits(expected))


# -- The trial -----------------------------------------------------------------------------------


Kinds = dict[object, set[str]]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Variants, Kinds]]:
    """Interpreted kernels, and what the trials of each kind of weights have compiled."""
    pytest.importorskip("triton")
    found = Variants("infinity.fused.decode_kernels", monkeypatch, forget)
    monkeypatch.setattr(on_device, "trials", choice.Trials())
    monkeypatch.setattr(choice, "explain_no_triton", lambda device: "")
    with numpy.errstate(all="ignore"):
        yield found, {}
    forget()


@settings(slow, max_examples=2)
@given(units([kind for kind in KINDS if isinstance(kind[0], FusedCodec)]), st.integers(0, 17))
def test_a_trial_compiles_what_later_launches_run(
    variants: tuple[Variants, Kinds], unit: tuple[list[WeightPlace], int, int], offset: int
) -> None:
    launched, tried = variants
    weights, stored_nbytes, nbytes = unit
    block = torch.zeros(offset + stored_nbytes, dtype=torch.uint8)[offset:]
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    for batch in batches_of(weights):
        codec, dtype, launch = batch.first.codec, batch.first.dtype, batch.launch
        assert launch is not None and isinstance(codec, FusedCodec)
        launched.found.clear()
        cpu = torch.device("cpu")
        assert on_device.explain_refusal(codec, dtype, cpu, launch.variant) == ""
        kind = codec.trial_codecs, dtype, launch.variant
        tried.setdefault(kind, set(launched.found))
        assert len(tried[kind]) == 1
        launched.found.clear()
        batch.decode_at_once(block, memory, torch.tensor(batch.rows()))
        if len(batch.first.shape) < 3:  # One matrix: no stride leads to the next.
            rows, columns, _, *others = launch.numbers
            far = replace(launch, numbers=(rows, columns, 1 << 40, *others))
            replace(batch, launch=far).decode_at_once(block, memory, torch.tensor(batch.rows()))
        assert launched.found == tried[kind]
