"""Properties of every codec: encoding is near, deterministic, and splits at `rows`."""

from __future__ import annotations

import pytest
import torch

from infinity.codecs import AffineGroups, Codec, FloatBlocks, Plain, TableBlocks, mxfp4
from infinity.errors import ConfigError
from tests.decode.cases import CASES, PLAIN_CASES, bits, decoded, name_of, random_parts

# The relative error of normally distributed weights; 2^-9 is that of rounding to bfloat16.
# By element of floats, bits of numbers, or type.
ERRORS = {
    "E4M3": 0.03, "E2M1": 0.13, 2: 0.6, 3: 0.23, 4: 0.13, 8: 0.009, TableBlocks: 0.13, Plain: 0.003
}  # fmt: skip

every_case = pytest.mark.parametrize(
    ("codec", "shape"), [*CASES, *PLAIN_CASES], ids=map(name_of, [*CASES, *PLAIN_CASES])
)


def weight_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02


@every_case
def test_an_encoded_weight_decodes_to_one_near_it(codec: Codec, shape: tuple[int, ...]) -> None:
    weight = weight_of(shape)
    encoding = codec.encode(weight)
    sizes = [part.nbytes for part in encoding.codec.parts(shape)]
    assert [part.numel() for part in encoding.parts] == sizes
    out = decoded(encoding.codec, encoding.parts, shape, torch.bfloat16)
    kind = getattr(codec, "element", getattr(codec, "bits", type(codec)))
    assert (out.float() - weight).norm() < ERRORS[kind] * weight.norm()


@every_case
def test_encoding_is_deterministic(codec: Codec, shape: tuple[int, ...]) -> None:
    first, second = codec.encode(weight_of(shape)), codec.encode(weight_of(shape))
    assert first.codec == second.codec
    assert all(map(torch.equal, first.parts, second.parts))


@every_case
def test_zeros_survive(codec: Codec, shape: tuple[int, ...]) -> None:
    encoding = codec.encode(torch.zeros(shape))
    assert not decoded(encoding.codec, encoding.parts, shape, torch.float32).any()


@every_case
def test_the_ranges_of_rows_decode_to_those_rows(codec: Codec, shape: tuple[int, ...]) -> None:
    parts = random_parts(codec, shape, 1)
    full = decoded(codec, parts, shape, torch.bfloat16)
    num_cuts = 0
    for start in range(0, shape[0], 1):
        for stop in {start + 1, min(start + 128, shape[0]), shape[0]}:
            ranges = codec.rows(shape, start, stop)
            if ranges is None:
                continue
            num_cuts += start > 0
            cut = [part[begin:end] for part, (begin, end) in zip(parts, ranges, strict=True)]
            out = decoded(codec, cut, (stop - start, *shape[1:]), torch.bfloat16)
            assert torch.equal(bits(out), bits(full[start:stop]))
    is_flat = (
        getattr(codec, "layout", "").startswith(("GPTQ", "AWQ", "HQQ", "QUARK"))
        or isinstance(codec, TableBlocks)
        or (codec == mxfp4(True) and len(shape) == 2)
    )
    assert num_cuts or is_flat or codec == FloatBlocks((0, 0), "BF16")


@every_case
def test_a_part_of_another_size_is_refused(codec: Codec, shape: tuple[int, ...]) -> None:
    parts = random_parts(codec, shape, 1)
    out = torch.zeros(shape, dtype=torch.bfloat16)
    for place, part in enumerate(parts):
        wrong = [*parts[:place], part[:-1], *parts[place + 1 :]]
        with pytest.raises(ConfigError, match="bytes"):
            codec.decode(wrong, shape, out)
    assert not out.any()


@every_case
def test_an_output_of_another_shape_is_refused(codec: Codec, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="output"):
        codec.decode(random_parts(codec, shape, 1), shape, torch.empty(1, *shape))


@pytest.mark.parametrize(("codec", "shape"), CASES, ids=map(name_of, CASES))
def test_weights_that_are_not_finite_are_not_encoded(codec: Codec, shape: tuple[int, ...]) -> None:
    weight = weight_of(shape)
    weight.view(-1)[1] = float("inf")
    with pytest.raises(ConfigError, match="not finite"):
        codec.encode(weight)


@pytest.mark.parametrize(
    "codec",
    [AffineGroups(scale="F16"), AffineGroups(scale="F16", layout="MLX"),
     AffineGroups(scale="F16", layout="HQQ", has_zeros=True), TableBlocks(stored="F16")],
    ids=str,
)  # fmt: skip
def test_scales_of_half_keep_small_weights_and_refuse_large_ones(codec: Codec) -> None:
    small = weight_of((8, 64)) * 1e-4
    encoding = codec.encode(small)
    out = decoded(encoding.codec, encoding.parts, (8, 64), torch.float32)
    assert (out - small).norm() < 0.3 * small.norm()
    with pytest.raises(ConfigError, match="cannot encode values up to"):
        codec.encode(torch.full((8, 64), -6.6e4))


def test_a_group_whose_product_leaves_half_is_refused() -> None:
    """MLX rounds the product to half before the minimum is added."""
    weight = torch.cat([torch.full((8, 32), 6e4), torch.full((8, 32), -6e4)], dim=1)
    with pytest.raises(ConfigError, match="cannot encode values up to"):
        AffineGroups(64, scale="F16", layout="MLX").encode(weight)


@pytest.mark.parametrize(
    ("codec", "shape"),
    [(AffineGroups(), (4, 40)), (AffineGroups(has_zeros=True), (2, 8, 32)),
     (AffineGroups(32, layout="GPTQ", has_zeros=True), (8, 36)),
     (AffineGroups(32, layout="AWQ", has_zeros=True), (12, 32)), (mxfp4(), (4, 40)), (mxfp4(True), (40, 64)),
     (FloatBlocks(), (64,)), (AffineGroups(), (64,))],
)  # fmt: skip
def test_a_shape_that_the_format_cannot_store_is_refused(codec: Codec, shape: tuple) -> None:
    with pytest.raises(ConfigError):
        codec.encode(torch.zeros(shape))
