"""The native kernels give the bits of the references, which give those of a slow scalar one."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.codecs import AffineGroups, Codec, FloatBlocks, TableBlocks, mxfp4, nvfp4, rounding
from infinity.codecs import native as native_module
from infinity.codecs.affine import ggml
from infinity.codecs.part import STORED_DTYPES
from infinity.codecs.rounding import store
from infinity.config import machine
from infinity.errors import UnsupportedError
from infinity.ops.optimizers import instruction_sets
from tests.decode import scalar
from tests.decode.cases import CASES, PLAIN_CASES, bits, decoded, name_of, random_parts

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

every_case = pytest.mark.parametrize(("codec", "shape"), CASES, ids=map(name_of, CASES))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())


def reference(
    codec: Codec, parts: list, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    store(codec.values(parts, shape), out)
    return out


def assert_same_bits(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(bits(out), bits(expected))


# -- Kernel and reference ------------------------------------------------------------------------


@every_case
@every_dtype
def test_the_kernel_has_the_bits_of_the_reference(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, simd: str
) -> None:
    for seed, offset in enumerate((0, 1, 2, 3, 5)):
        parts = random_parts(codec, shape, seed, offset)
        assert native_module.runs(parts, torch.empty(shape, dtype=dtype))
        assert_same_bits(decoded(codec, parts, shape, dtype), reference(codec, parts, shape, dtype))


@every_case
@every_dtype
def test_an_output_may_have_any_strides_and_nothing_beside_it_changes(
    codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, simd: str
) -> None:
    parts = random_parts(codec, shape, 1, 1)
    expected = reference(codec, parts, shape, dtype)
    lengths = [length + 3 for length in shape]
    for order in itertools.permutations(range(len(shape))):
        block = torch.full([lengths[place] for place in order], 7.0, dtype=dtype)
        view = block.permute([order.index(place) for place in range(len(shape))])
        cut = tuple(slice(1, 1 + length) for length in shape)
        codec.decode(parts, shape, view[cut])
        assert_same_bits(view[cut], expected)
        view[cut] = 7.0
        assert torch.equal(block, torch.full_like(block, 7.0))


@pytest.mark.parametrize(
    ("codec", "shape"),
    [(FloatBlocks(), (700, 700)), (AffineGroups(), (700, 704)), (mxfp4(True), (2, 704, 500)),
     (TableBlocks(), (333, 1001)), (FloatBlocks(), (1, 200_000)), (FloatBlocks((1, 0)), (200_000, 1))],
    ids=str,
)  # fmt: skip
def test_threads_change_no_bit(codec: Codec, shape: tuple[int, ...], simd: str) -> None:
    parts = random_parts(codec, shape, 2)
    expected = reference(codec, parts, shape, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert_same_bits(decoded(codec, parts, shape, torch.bfloat16), expected)
    finally:
        torch.set_num_threads(before)


def test_the_flushing_of_denormals_changes_no_bit(simd: str) -> None:
    codec, shape = FloatBlocks(), (128, 256)
    codes = torch.randint(256, (128 * 256,), dtype=torch.uint8)
    scales = torch.tensor([2.0**-140, 2.0**-128]).view(torch.uint8)
    expected = decoded(codec, [codes, scales], shape, torch.bfloat16)
    assert expected.float().abs().nan_to_num().gt(0).sum() > 1000
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        out = decoded(codec, [codes, scales], shape, torch.bfloat16)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(out, expected)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.SIMD_VARIABLE, "mmx")
    codec, shape = CASES[0]
    with pytest.raises(UnsupportedError, match="mmx"):
        decoded(codec, random_parts(codec, shape, 0), shape, torch.bfloat16)


@every_case
@pytest.mark.parametrize("numel", [1, 700, 20_000])
def test_references_that_decode_in_steps_have_the_same_bits(
    codec: Codec, shape: tuple[int, ...], numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_module, "runs", lambda parts, out: False)
    monkeypatch.setattr(rounding, "STEP_NUMEL", numel)
    parts = random_parts(codec, shape, 9)
    out = decoded(codec, parts, shape, torch.bfloat16)
    assert_same_bits(out, reference(codec, parts, shape, torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 2, 64), (2, 0, 64)])
@pytest.mark.parametrize("codec", [FloatBlocks(), AffineGroups(), mxfp4(), TableBlocks()], ids=str)
def test_a_weight_without_elements_decodes(codec: Codec, shape: tuple[int, ...]) -> None:
    parts = random_parts(codec, shape, 0)
    decoded(codec, parts, shape, torch.bfloat16)
    assert codec.values(parts, shape).shape == shape


def test_one_record_may_have_any_address() -> None:
    content = torch.arange(211, dtype=torch.uint8)
    values = ggml("Q6_K").values([content[1:]], (1, 256))
    assert_same_bits(values, ggml("Q6_K").values([content[1:].clone()], (1, 256)))


@st.composite
def weights(draw: st.DrawFn) -> tuple[Codec, tuple[int, ...]]:
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 150))
    matrices = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    kind = draw(st.sampled_from(["fp8", "int4", "mxfp4", "nvfp4", "nf4"]))
    if kind == "nvfp4":
        codec = nvfp4(draw(st.sampled_from(["OVER", "TIMES"])))
        return codec, (*matrices, rows, 16 * draw(st.integers(1, 9)))
    if kind == "fp8":
        block = draw(
            st.tuples(st.sampled_from([0, 1, 7, 16, 128]), st.sampled_from([0, 5, 32, 128]))
        )
        scale = draw(st.sampled_from(["F32", "BF16", "F16", "F8_E8M0"]))
        return FloatBlocks(block, scale), (*matrices, rows, columns)
    if kind == "int4":
        group = draw(st.sampled_from([8, 16, 32, 40, 64]))
        scale = draw(st.sampled_from(["F32", "BF16", "F16"]))
        return AffineGroups(group, scale), (*matrices, rows, group * draw(st.integers(1, 4)))
    if kind == "mxfp4":
        blocks = 32 * draw(st.integers(1, 4))
        if draw(st.booleans()):
            return mxfp4(True), (*matrices, blocks, columns)
        return mxfp4(), (*matrices, rows, blocks)
    codec = TableBlocks(
        draw(st.sampled_from([2, 32, 64, 128])),
        draw(st.sampled_from([0, 4, 256])),
        draw(st.sampled_from([0.0, 0.125, 1e30])),
        draw(st.sampled_from(["BF16", "F16", "F32"])),
    )
    return codec, (*matrices, rows, columns)


@settings(max_examples=150, deadline=None)
@given(
    weight=weights(),
    seed=st.integers(0, 2**31),
    offset=st.integers(0, 7),
    dtype=st.sampled_from(sorted(DTYPES, key=str)),
    simd=st.sampled_from(["", "avx2", "scalar"]),
    is_transposed=st.booleans(),
    gap=st.integers(0, 3),
)
def test_kernel_and_reference_agree_on_every_shape(
    weight: tuple[Codec, tuple[int, ...]],
    seed: int,
    offset: int,
    dtype: torch.dtype,
    simd: str,
    is_transposed: bool,
    gap: int,
) -> None:
    codec, shape = weight
    parts = random_parts(codec, shape, seed, offset)
    turned = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    out = torch.zeros((*turned[:-1], turned[-1] + gap), dtype=dtype)[..., gap:]
    out = out.transpose(-1, -2) if is_transposed else out
    with pytest.MonkeyPatch.context() as patch:
        if simd in instruction_sets():
            patch.setenv(machine.SIMD_VARIABLE, simd)
        codec.decode(parts, shape, out)
    assert_same_bits(out, reference(codec, parts, shape, dtype))


# -- Reference and scalar ------------------------------------------------------------------------

EDGES = {
    "F32": (0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3C23D70A,
            0xBF9D70A4, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001),
    "BF16": (0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3C24, 0xBF9D, 0x7F7F, 0x7F80, 0x7FC1),
    "F16": (0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x211F, 0xBCEB, 0x7BFF, 0x7C00, 0x7E01),
    "F8_E8M0": (0, 1, 2, 64, 104, 110, 127, 128, 250, 253, 254, 255),
}  # fmt: skip


def scale_bytes(dtype: str) -> list[bytes]:
    return [edge.to_bytes(STORED_DTYPES[dtype].itemsize, "little") for edge in EDGES[dtype]]


def expected_bits(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """The bits of values that were rounded to `dtype`; every NaN is the positive quiet one."""
    numbers = torch.tensor(values, dtype=torch.float64).float().to(dtype)
    quiet = torch.full_like(numbers, math.nan)
    return bits(torch.where(torch.isnan(numbers), quiet, numbers))


def check(codec: Codec, parts: list, shape: tuple, values: list[float], dtype: torch.dtype) -> None:
    name = DTYPES[dtype]
    expected = expected_bits([scalar.rounded(value, name) for value in values], dtype)
    assert torch.equal(bits(reference(codec, parts, shape, dtype)).view(-1), expected)
    for simd in instruction_sets():  # The scalar values, which are slow, serve all of them.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(machine.SIMD_VARIABLE, simd)
            assert torch.equal(bits(decoded(codec, parts, shape, dtype)).view(-1), expected), simd


@every_dtype
@pytest.mark.parametrize("scale", EDGES)
def test_every_fp8_code_with_every_edge_scale(scale: str, dtype: torch.dtype) -> None:
    edges = scale_bytes(scale)
    shape = (len(edges), 256)
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(edges))
    scales = torch.frombuffer(bytearray(b"".join(edges)), dtype=torch.uint8)
    values = [
        scalar.product(scalar.e4m3(code), scalar.stored_float(edge, scale), "F32")
        for edge in edges
        for code in range(256)
    ]
    check(FloatBlocks((1, 0), scale), [codes, scales], shape, values, dtype)


@every_dtype
@pytest.mark.parametrize("scale", ["F32", "BF16", "F16"])
def test_every_int4_code_with_every_edge_scale(scale: str, dtype: torch.dtype) -> None:
    edges = scale_bytes(scale)
    shape = (len(edges), 32)
    row = bytes((2 * i % 16) | ((2 * i + 1) % 16) << 4 for i in range(16))
    codes = torch.frombuffer(bytearray(row * len(edges)), dtype=torch.uint8)
    scales = torch.frombuffer(bytearray(b"".join(edges)), dtype=torch.uint8)
    values = [
        scalar.product(float(i % 16 - 8), scalar.stored_float(edge, scale), scale)
        for edge in edges
        for i in range(32)
    ]
    check(AffineGroups(32, scale), [codes, scales], shape, values, dtype)


@every_dtype
@pytest.mark.parametrize("is_transposed", [False, True])
def test_every_mxfp4_code_with_every_scale(is_transposed: bool, dtype: torch.dtype) -> None:
    row = bytes((2 * i % 16) | ((2 * i + 1) % 16) << 4 for i in range(16))
    codes = torch.frombuffer(bytearray(row * 256), dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)
    values = [
        scalar.product(scalar.e2m1(i % 16), scalar.e8m0(scale), "F32")
        for scale in range(256)
        for i in range(32)
    ]
    if is_transposed:
        values = [values[32 * row + column] for column in range(32) for row in range(256)]
    shape = (32, 256) if is_transposed else (256, 32)
    check(mxfp4(is_transposed), [codes, scales], shape, values, dtype)


@every_dtype
@pytest.mark.parametrize("global_scale", ["OVER", "TIMES"])
@pytest.mark.parametrize("whole", [1.0, 0.0009765, 3e38, 2.0**-140, 0.0, -7.3, math.inf, math.nan])
def test_every_nvfp4_code_with_every_scale(
    whole: float, global_scale: str, dtype: torch.dtype
) -> None:
    row = bytes((2 * i % 16) | ((2 * i + 1) % 16) << 4 for i in range(8))
    codes = torch.frombuffer(bytearray(row * 256), dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)
    of_matrix = torch.tensor([whole])
    whole = of_matrix.item()
    values = []
    for code in range(256):
        if global_scale == "TIMES":
            scale = scalar.product(scalar.e4m3(code), whole, "F32")
        else:
            scale = scalar.quotient(scalar.e4m3(code), whole, "F32")
        rounded = "F32" if global_scale == "TIMES" else "BF16"
        values += [scalar.product(scalar.e2m1(i), scale, rounded) for i in range(16)]
    parts = [codes, scales, of_matrix.view(torch.uint8)]
    check(nvfp4(global_scale), parts, (256, 16), values, dtype)


def test_finite_mxfp4_values_are_exact_in_bfloat16() -> None:
    for code, scale in itertools.product(range(16), range(254)):
        value = scalar.e2m1(code) * scalar.e8m0(scale)
        assert abs(value) >= 2.0**128 or scalar.rounded(value, "BF16") == value


@every_dtype
@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
def test_every_nf4_code_with_nested_scales(stored: str, dtype: torch.dtype) -> None:
    codec = TableBlocks(32, 4, offset=0.0390625, stored=stored)
    random = torch.Generator().manual_seed(5)
    table = torch.randn(16, generator=random).sort().values
    nested_table = torch.randn(256, generator=random)
    nested = torch.tensor([1.0, 3e38, 2.0**-149, math.inf, 0.01, -0.5, math.nan, 0.0])
    row = bytes(((2 * i % 16) << 4) | ((2 * i + 1) % 16) for i in range(16))
    codes = torch.frombuffer(bytearray(row * 32), dtype=torch.uint8)
    scales = torch.arange(0, 256, 8, dtype=torch.uint8)
    parts = [part.view(torch.uint8) for part in (codes, scales, table, nested, nested_table)]
    values = []
    for block, i in itertools.product(range(32), range(32)):
        scale = scalar.product(nested_table[8 * block].item(), nested[block // 4].item(), "F32")
        scale = scalar.total(scale, codec.offset, "F32")
        value = scalar.product(table[i % 16].item(), scale, "F32")
        values.append(scalar.rounded(value, stored))
    check(codec, parts, (32, 32), values, dtype)


def test_the_scalar_rounding_is_that_of_struct() -> None:
    for dtype, kind in [("F16", "<e"), ("F32", "<f")]:
        for value in (1 / 3, 1e-7, 6e-8, 1e-45, 65504.0, 2.0**-25, 3 * 2.0**-26, -0.1):
            packed = struct.unpack(kind, struct.pack(kind, value))[0]
            assert scalar.rounded(value, dtype) == packed


# -- Plain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "shape"), PLAIN_CASES, ids=map(name_of, PLAIN_CASES))
def test_a_plain_tensor_is_copied_bit_by_bit_or_cast(codec: Codec, shape: tuple[int, ...]) -> None:
    for offset in (0, 1):
        parts = random_parts(codec, shape, 4, offset)
        out = torch.empty(shape, dtype=codec.dtype)
        codec.decode(parts, shape, out)
        assert torch.equal(out.view(torch.uint8).view(-1), parts[0])
        strided = torch.empty((*shape, 2), dtype=codec.dtype)[..., 0]
        codec.decode(parts, shape, strided)
        assert torch.equal(strided.contiguous().view(torch.uint8).view(-1), parts[0])
        wide = torch.empty(shape, dtype=torch.float64)
        codec.decode(parts, shape, wide)
        assert torch.equal(wide.nan_to_num(), out.double().nan_to_num())
