"""Weights that are packed as the specifications of GPTQ, AWQ and compressed-tensors say, in numpy.

The packers here have no code of the package: they place every number on its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.codecs import AffineGroups
from infinity.codecs.packing import packed, unpacked
from infinity.config import machine
from infinity.ops.optimizers import instruction_sets
from tests.decode.cases import decoded

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of(rows: Any, bits: int) -> np.ndarray:
    """Each row as one integer of bits, lowest first, in words of 32 bits."""
    width = -(-rows.shape[1] * bits // 32)
    words = np.zeros((rows.shape[0], width), dtype=np.uint32)
    for index, row in enumerate(rows):
        whole = sum(int(number) << (bits * place) for place, number in enumerate(row))
        words[index] = [(whole >> (32 * word)) & 0xFFFFFFFF for word in range(width)]
    return words


def awq_words(rows: Any) -> np.ndarray:
    words = np.zeros((rows.shape[0], rows.shape[1] // 8), dtype=np.uint32)
    for place, column in enumerate(AWQ_ORDER):
        words |= rows[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return words


def flat(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())


def as_bits(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint16 if array.dtype == np.float16 else np.uint32)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[AffineGroups, int, int]:
    """A codec, and rows (out) and columns (in) of a weight."""
    layout = draw(st.sampled_from(["ROWS", "BYTES", "GPTQ", "AWQ"]))
    scale = draw(st.sampled_from(["F16", "F32"]))
    group, count = draw(st.sampled_from([8, 32, 40])), draw(st.integers(1, 3))
    if layout == "ROWS":
        bits, has_zeros = draw(st.integers(2, 8)), draw(st.booleans())
        has_order = draw(st.booleans())
        codec = AffineGroups(group, scale, bits, "ROWS", has_zeros, has_order=has_order)
        return codec, draw(st.integers(1, 70)), group * count - has_order * draw(st.integers(0, 7))
    if layout == "BYTES":
        codec = AffineGroups(group, scale, 8, "BYTES", draw(st.booleans()))
        return codec, draw(st.integers(1, 70)), group * count
    if layout == "AWQ":
        codec = AffineGroups(group, scale, 4, "AWQ", True)
        return codec, 8 * draw(st.integers(1, 20)), draw(st.integers(1, 150))
    is_raised, has_order = draw(st.booleans()), draw(st.booleans())
    bits = draw(st.sampled_from([2, 4, 8] if is_raised else range(2, 9)))
    codec = AffineGroups(group, scale, bits, "GPTQ", True, is_raised, has_order)
    return codec, 32 * draw(st.integers(1, 5)), 32 * draw(st.integers(1, 5))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(0, 2**31), st.sampled_from(["", "avx2", "scalar"]))
def test_numbers_that_are_packed_by_the_specification_decode_to_their_values(
    drawn: tuple[AffineGroups, int, int], seed: int, simd: str
) -> None:
    codec, rows, columns = drawn
    random, most = np.random.default_rng(seed), (1 << codec.bits) - 1
    groups = -(-columns // codec.group)
    codes = random.integers(0, most + 1, (rows, columns))
    least = 1 if codec.is_raised else 0
    zeros = random.integers(least, most + 1, (rows, groups))
    kind = np.float16 if codec.scale == "F16" else np.float32
    scales = (random.standard_normal((rows, groups)) * 0.1).astype(kind)
    order = np.arange(columns) // codec.group
    if codec.has_order:
        order = random.permutation(order)
    if codec.layout == "GPTQ":
        parts = [words_of(codes, codec.bits).T, scales.T,
                 words_of(zeros.T - codec.is_raised, codec.bits)]  # fmt: skip
    elif codec.layout == "AWQ":
        parts = [awq_words(codes.T), scales.T, awq_words(zeros.T)]
    elif codec.layout == "BYTES":
        parts = [(codes - 128).astype(np.int8), scales, (zeros - 128).astype(np.int8)]
    else:
        parts = [words_of(codes, codec.bits), scales, words_of(zeros.T, codec.bits).T]
    if not codec.has_zeros:
        zeros, parts = np.full_like(zeros, 1 << (codec.bits - 1)), parts[:2]
    if codec.has_order:
        parts.append(order.astype(np.int32))
    expected = (codes - zeros[:, order]).astype(kind) * scales[:, order]
    stored = [flat(part) for part in parts]
    shape = (rows, columns)
    dtype = torch.float16 if kind is np.float16 else torch.float32
    with pytest.MonkeyPatch.context() as patch:
        if simd in instruction_sets():
            patch.setenv(machine.SIMD_VARIABLE, simd)
        native = decoded(codec, stored, shape, dtype).numpy()
    assert np.array_equal(as_bits(native), as_bits(expected))
    reference = codec.values(stored, shape).contiguous().numpy()
    assert np.array_equal(as_bits(reference), as_bits(expected))


@given(
    st.sampled_from(["ROWS", "COLUMNS"]), st.integers(1, 8), st.integers(1, 40), st.integers(1, 40)
)
def test_packing_is_the_inverse_of_unpacking(
    packing: Any, bits: int, rows: int, columns: int
) -> None:
    numbers = torch.randint(1 << bits, (rows, columns), dtype=torch.uint8)
    assert torch.equal(
        unpacked(packed(numbers, packing, bits), packing, bits, rows, columns), numbers
    )


def test_zeros_of_gptq_that_were_lowered_as_words_are_raised_as_words() -> None:
    """GPTQModel subtracts one from each field of a word, and a zero of 0 borrows from the next."""
    zeros = np.array([[0, 3, 15, 0, 0, 8, 1, 2]])
    lowered = words_of(zeros, 4) - np.uint32(0x11111111)
    codec = AffineGroups(8, "F32", 4, "GPTQ", True, True)
    parts = [words_of(np.full((8, 8), 5), 4), np.ones((1, 8), np.float32), lowered]
    out = decoded(codec, [flat(part) for part in parts], (8, 8), torch.float32)
    assert out[:, 0].tolist() == (5 - zeros[0]).tolist()


# -- Layouts of other writers ----------------------------------------------------------------------


def numbers_of(shape: tuple[int, int], bits: int) -> Any:
    return np.random.default_rng(bits).integers(0, 1 << bits, shape)


def floats_of(shape: tuple[int, int], kind: Any = np.float32) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(kind)


def assert_values(codec: AffineGroups, parts: list[Any], expected: Any) -> None:
    stored, dtype = [flat(part) for part in parts], torch.from_numpy(expected).dtype
    native = decoded(codec, stored, expected.shape, dtype).numpy()
    assert np.array_equal(as_bits(native), as_bits(expected))
    turned = torch.empty(expected.T.shape, dtype=dtype).t()
    codec.decode(stored, expected.shape, turned)
    assert np.array_equal(as_bits(turned.numpy()), as_bits(expected))
    values = codec.values(stored, expected.shape).contiguous().numpy()
    assert np.array_equal(as_bits(values), as_bits(expected))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_scales_a_code_and_adds_a_bias_in_the_dtype_of_both(bits: int, simd: str) -> None:
    """mlx `backend/cpu/quantized.cpp`: scale * code + bias, each rounded."""
    codes, groups = numbers_of((10, 192), bits), (10, 3)
    scales, biases = floats_of(groups, np.float16), floats_of(groups, np.float16)[::-1]
    spread = (codes.astype(np.float16).reshape(10, 3, 64) * scales[..., None]) + biases[..., None]
    codec = AffineGroups(64, "F16", bits, "MLX")
    assert_values(codec, [words_of(codes, bits), scales, biases], spread.reshape(10, 192))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_hqq_subtracts_a_zero_that_is_no_integer(bits: int, axis: int, simd: str) -> None:
    """hqq `core/quantize.py`: ((W_q - zero) * scale).reshape(shape); `core/bitpack.py`."""
    stored = (144, 32) if axis else (32, 144)
    groups = (144, 1) if axis else (1, 144)
    codes = numbers_of(stored, bits)
    scales, zeros = floats_of(groups, np.float16), floats_of(groups, np.float16) * 5
    expected = (codes.astype(np.float16) - zeros) * scales
    planes = np.split(codes, 8 // bits)
    packed_codes = sum(plane << (8 - bits * (at + 1)) for at, plane in enumerate(planes))
    codec = AffineGroups(32, "F16", bits, "HQQ" if axis else "HQQ_DOWN", True)
    parts = [packed_codes.astype(np.uint8), scales, zeros]
    assert_values(codec, parts, expected.reshape(48, 96))


def test_llm_int8_multiplies_by_the_scale_and_then_by_one_of_127(simd: str) -> None:
    """bitsandbytes `_ops.py`, int8_vectorwise_dequant: A * stats * 7.874015718698502e-3."""
    codes = numbers_of((10, 33), 8).astype(np.int64) - 128
    scales = floats_of((10, 1))
    expected = codes.astype(np.float32) * scales * np.float32(7.874015718698502e-3)
    codec = AffineGroups(33, "F32", 8, "LLM.int8")
    assert_values(codec, [codes.astype(np.int8), scales], expected)


@pytest.mark.parametrize("is_signed", [True, False])
def test_quark_multiplies_in_fp32(is_signed: bool, simd: str) -> None:
    """quark `torch/utils/pack.py`, Pack_4_bits; `dequantize_int_per_group_affine`."""
    codes, zeros = numbers_of((40, 96), 4), numbers_of((40, 3), 4)
    scales = floats_of((40, 3), np.float16)
    expected = (codes - zeros.repeat(32, 1)).astype(np.float32) * scales.repeat(32, 1)
    flip = 8 * is_signed
    parts = [awq_words(codes.T ^ flip), scales.T, awq_words(zeros.T ^ flip)]
    codec = AffineGroups(32, "F16", 4, "QUARK_SIGNED" if is_signed else "QUARK", True)
    assert_values(codec, parts, expected.astype(np.float32))
