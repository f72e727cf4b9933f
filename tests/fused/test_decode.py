"""The Triton kernels that decode have the bits of the reference: in the interpreter, and by the
instructions that they are compiled to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from infinity.codecs import AffineGroups, Codec, FloatBlocks, TableBlocks, mxfp4, nvfp4, on_device
from infinity.codecs.affine import ggml
from infinity.codecs.on_device import FusedCodec
from infinity.codecs.part import Shape
from infinity.codecs.records import RECORDS
from infinity.errors import UnsupportedError
from infinity.fused import choice
from infinity.fused.decode import ALIGNMENT, launch_of, place_of
from tests.decode.cases import CASES as EVERY_LAYOUT
from tests.decode.cases import bits, name_of, random_parts
from tests.fused.compiled import float_operations
from tests.support.exhaustive import sampled

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES: tuple[tuple[Codec, tuple[int, ...]], ...] = (
    (FloatBlocks(), (131, 140)),
    (FloatBlocks((3, 5), "BF16"), (2, 10, 66)),
    (FloatBlocks((1, 0), "F16"), (5, 53)),
    (FloatBlocks((0, 0), "F8_E8M0"), (5, 53)),
    (AffineGroups(), (35, 96)),
    (AffineGroups(128, "F16"), (3, 256)),
    (AffineGroups(24, "F32"), (2, 7, 48)),
    (mxfp4(), (2, 33, 96)),
    (mxfp4(is_transposed=True), (2, 64, 40)),
    (nvfp4("TIMES"), (2, 33, 48)),
    (nvfp4(), (35, 48)),
    (TableBlocks(), (35, 129)),
    (TableBlocks(nested_block=0, stored="F16"), (33, 7)),
    (TableBlocks(128, 2, 0.04, "F32"), (515,)),
)
# Of fp32: zeros, denormals, the smallest and the largest, infinities, NaNs of both signs.
SCALE_BITS = (
    0, 1, 0x80000000, 0x80000001, 0x007FFFFF, 0x00800000, 0x3C23D70A, 0x3F800000, 0xBF800001,
    0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC00123,
)  # fmt: skip


def reference(
    codec: Codec, parts: list[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    codec.decode(parts, shape, out)
    return out


def decode_alone(
    codec: FusedCodec, parts: list[torch.Tensor], shape: tuple[int, ...], out: torch.Tensor
) -> None:
    """Decodes one weight by a launch, from parts in memory of their own."""
    is_aligned = out.data_ptr() % ALIGNMENT == 0
    form, stride = codec.code_layout(shape), out.stride()
    launch = launch_of(form, shape, stride, out.dtype, is_aligned=is_aligned)
    assert launch is not None
    launch.run(parts, torch.tensor([place_of(0, codec.offset, [0] * len(parts))]), out)


PACKED = (
    *(case for case in EVERY_LAYOUT if isinstance(case[0], AffineGroups)),
    *((ggml(kind), (3, 512)) for kind in RECORDS),
)
FIRST: dict[tuple[str, bool], tuple[AffineGroups, Shape]] = {
    (codec.layout, codec.has_order): (codec, shape) for codec, shape in PACKED[::-1]
}


KEPT = [*CASES, *FIRST.values()]  # Each with one of the dtypes and alignments, which come in turn.


@pytest.mark.parametrize(
    ("case", "offset"),
    sampled(
        product([*CASES, *PACKED], range(len(DTYPES))),
        lambda case: case[0] in KEPT and KEPT.index(case[0]) % len(DTYPES) == case[1],
    ),
    ids=lambda value: name_of(value) if isinstance(value, tuple) else str(value),
)
def test_a_kernel_has_the_bits_of_the_reference_at_any_alignment(
    interpreter: None, case: tuple[FusedCodec, Shape], offset: int
) -> None:
    (codec, shape), dtype = case, DTYPES[offset]
    parts = random_parts(codec, shape, offset, offset)
    out = torch.full(shape, 7.0, dtype=dtype)
    decode_alone(codec, parts, shape, out)
    assert torch.equal(bits(out), bits(reference(codec, parts, shape, dtype)))


@pytest.mark.parametrize(
    "codec", [FloatBlocks(), AffineGroups(), mxfp4(True), TableBlocks()], ids=str
)
def test_an_output_may_have_strides_and_nothing_beside_it_changes(
    interpreter: None, codec: FusedCodec
) -> None:
    shape = (2, 3, 32, 64)
    parts = random_parts(codec, shape, 1, 1)
    memory = torch.full((2, 3, 64, 70), 7.0, dtype=torch.bfloat16)
    out = memory[..., 3:35].mT
    decode_alone(codec, parts, shape, out)
    assert torch.equal(bits(out), bits(reference(codec, parts, shape, out.dtype)))
    assert (memory[..., :3] == 7.0).all() and (memory[..., 35:] == 7.0).all()
    shape = (2, 2, 32, 64)
    strides = memory[:, :2].mT.stride()  # No one of them leads from matrix to matrix.
    form = codec.code_layout(shape)
    assert launch_of(form, shape, strides, out.dtype, is_aligned=True) is None


def test_every_code_meets_every_kind_of_scale(interpreter: None) -> None:
    wide = torch.tensor(SCALE_BITS, dtype=torch.int64).to(torch.int32)
    scales = wide.view(torch.uint8)
    every_byte = torch.arange(256).to(torch.uint8)
    pairs = every_byte.repeat(len(SCALE_BITS))
    table = torch.linspace(-1, 1, 16).view(torch.uint8)
    powers = every_byte.repeat_interleave(16)  # E8M0: a block of 32 codes each, of all 16.
    of_powers = (torch.arange(16) * 17).to(torch.uint8).repeat(256)
    assert len(powers) == len(of_powers)
    cases: tuple[tuple[FusedCodec, tuple[int, int], list[torch.Tensor]], ...] = (
        (FloatBlocks((1, 0)), (len(SCALE_BITS), 256), [pairs, scales]),
        (AffineGroups(512, "F32"), (len(SCALE_BITS), 512), [pairs, scales]),
        (TableBlocks(512, 0, stored="BF16"), (len(SCALE_BITS), 512), [pairs, scales, table]),
        (mxfp4(), (256, 32), [of_powers, every_byte]),
    )
    for codec, shape, parts in cases:
        for dtype in DTYPES:
            out = torch.empty(shape, dtype=dtype)
            decode_alone(codec, parts, shape, out)
            assert torch.equal(bits(out), bits(reference(codec, parts, shape, dtype))), codec


# -- What a device runs --------------------------------------------------------------------------


def test_no_product_is_contracted_and_no_denormal_is_flushed(compiler: None) -> None:
    from infinity.fused import decode_kernels

    def operations(codec: FusedCodec, shape: Shape, has_e4m3: bool = True) -> set[str]:
        stride = (shape[-1], 1)
        launch = launch_of(codec.code_layout(shape), shape, stride, torch.bfloat16, is_aligned=True)
        assert launch is not None
        constants = {**launch.constants, "has_e4m3": has_e4m3}
        assert not constants.pop("enable_fp_fusion") and constants.pop("num_warps") == 4
        return set(float_operations(decode_kernels.decode, types, constants))

    pointers = dict.fromkeys(("codes", "scales", "table", "nested", "nested_map"), "*u8")
    strides = ("rows", "columns", "matrix_stride", "row_stride", "column_stride")
    types = {**pointers, "out": "*i16", "places": "*i64", **dict.fromkeys(strides, "i64")}
    product = {"mul.rn.f32", "cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32"}
    is_number = {"setp.num.f32", "setp.num.f16"}
    eight = {"cvt.rn.f16x2.e4m3x2", "cvt.f32.f16"}
    for shape in ((256, 256), (37, 53)):  # Words of eight codes, and single ones.
        assert operations(FloatBlocks(), shape) <= product | is_number | eight
        assert operations(FloatBlocks(), shape, False) <= product | is_number | {"selp.f32"}
        rounded = {"add.rn.f32", "selp.f32", "cvt.rn.f16.f32", "cvt.f32.f16"}
        assert operations(TableBlocks(stored="F16"), shape) <= product | is_number | rounded
    assert operations(AffineGroups(), (64, 64)) <= product | {"add.rn.f32"}
    assert operations(mxfp4(), (64, 64)) <= product
    several = {"add.rn.f32", "sub.rn.f32", "selp.f32", "cvt.f32.f16", "cvt.rn.f16.f32"}
    several |= {f"cvt.rn.f32.{kind}{bits}" for kind in "su" for bits in (16, 32)}
    of_packed = product | is_number | several
    for layout in ("GPTQ", "MLX", "HQQ", "Q4_K"):
        codec, shape = FIRST[layout, False]
        assert operations(codec, shape[-2:]) <= of_packed | {"cvt.rn.f16x2.f32"}


# -- The choice ----------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that is taken for one that runs Triton kernels."""
    monkeypatch.setattr(choice, "explain_no_triton", lambda device: "")
    monkeypatch.setattr(on_device, "trials", choice.Trials())
    return torch.device("cpu")


@pytest.mark.parametrize(
    "codec",
    sampled(
        [
            *(FloatBlocks((16, 16)), AffineGroups(), mxfp4(True), TableBlocks(), ggml("Q3_K")),
            AffineGroups(32, "F16", 4, "GPTQ", True, True, True),
            AffineGroups(32, "F16", 2, "HQQ_DOWN", True),
            AffineGroups(53, "F32", 8, "LLM.int8"),
        ],
        lambda codec: getattr(codec, "scale", "F16") == "F32" or isinstance(codec, TableBlocks),
    ),
    ids=str,
)
def test_a_kernel_that_passes_its_trial_is_used(
    interpreter: None, device: torch.device, codec: FusedCodec
) -> None:
    assert on_device.explain_refusal(codec, torch.bfloat16, device) == ""


class Wrong(FloatBlocks):
    trial_shapes = ((32, 32),)

    def values(self, parts: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
        return 2 * FloatBlocks.values(self, parts, shape)


class Broken(FloatBlocks):
    @property
    def trial_shapes(self) -> tuple[Shape, ...]:
        raise RuntimeError("no C compiler")


@pytest.mark.parametrize(
    ("codec", "reason"), [(Wrong((16, 16)), "its bits are not"), (Broken(), "no C compiler")]
)
def test_a_kernel_that_fails_its_trial_is_refused_and_logged_once(
    interpreter: None,
    codec: FusedCodec,
    reason: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        assert reason in on_device.explain_refusal(codec, torch.bfloat16, device)
    assert [reason in record.message for record in caplog.records] == [True]
    monkeypatch.setattr(on_device, "trials", choice.Trials())
    monkeypatch.setenv(choice.VARIABLE, "triton")
    with pytest.raises(UnsupportedError, match=f"{reason}.*unset INFINITY_DEVICE_KERNELS"):
        on_device.explain_refusal(codec, torch.bfloat16, device)


def test_the_environment_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    assert "needs compute capability 8.0, the device has 7.5" in choice.explain_no_triton(cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choice.explain_no_triton(cuda) == ""
    assert choice.explain_no_triton(torch.device("cpu")) == "cpu is not a CUDA device"
    monkeypatch.setenv(choice.VARIABLE, "torch")
    assert choice.explain_no_triton(cuda) == "INFINITY_DEVICE_KERNELS=torch"
    monkeypatch.setenv(choice.VARIABLE, "triton")
    monkeypatch.setattr(choice, "_has_triton", lambda: False)
    with pytest.raises(UnsupportedError, match="triton is not installed; unset"):
        on_device.explain_refusal(FloatBlocks((8, 8)), torch.bfloat16, cuda)
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(UnsupportedError, match="to be triton or torch, got 'cuda'"):
        choice.explain_no_triton(cuda)
