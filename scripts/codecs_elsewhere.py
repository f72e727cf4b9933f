r"""Compares the codecs with the packages that define their formats, bit by bit, on the CPU.

    python -m pip install --no-deps --target /tmp/packages compressed-tensors loguru bitsandbytes \
        mlx mlx-cpu hqq termcolor
    PYTHONPATH=/tmp/packages python scripts/codecs_elsewhere.py

The packages write random weights; their own dequantisation and `infinity.codecs` decode them. Not a
part of the test suite: with bitsandbytes installed, PEFT and transformers take other paths.
"""

from __future__ import annotations

import itertools
import sys
from importlib.metadata import version

import torch

from infinity.codecs import AffineGroups, Codec, TableBlocks, mxfp4, nvfp4
from infinity.codecs.part import flat_bytes

SHAPES = ((64, 64), (96, 160), (1, 32), (7, 224), (7, 192), (512, 1536))


def decoded(codec: Codec, parts: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    out = torch.empty(shape, dtype=codec.dtype)
    codec.decode([flat_bytes(part) for part in parts], shape, out)
    return out


def differing(codec: Codec, parts: list[torch.Tensor], expected: torch.Tensor) -> int:
    """Returns the number of elements that the codec decodes to other bits."""
    found = decoded(codec, parts, tuple(expected.shape))
    assert found.dtype is expected.dtype, (found.dtype, expected.dtype)
    return int((found.view(torch.int16) != expected.contiguous().view(torch.int16)).sum())


def int4(weight: torch.Tensor) -> int:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // 32, 32)
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()
    state = {"weight": weight, "weight_scale": scale}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    return differing(AffineGroups(), [packed["weight_packed"], packed["weight_scale"]], expected)


def e2m1(weight: torch.Tensor) -> int:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32,
        scale_dtype=torch.uint8,
    )  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, columns = weight.shape
    largest = weight.float().view(rows, columns // 32, 32).abs().amax(-1)
    scale = torch.exp2(torch.floor(torch.log2(largest)) - 2).bfloat16()
    state = {"weight": weight, "weight_scale": scale}
    packed = MXFP4PackedCompressor.compress(state, scheme)
    expected = MXFP4PackedCompressor.decompress(packed, scheme)["weight"]
    parts = [packed["weight_packed"], packed["weight_scale"]]
    return differing(mxfp4(), parts, expected.bfloat16())


def e2m1_of_16(weight: torch.Tensor) -> int:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, columns = weight.shape
    largest = weight.float().view(rows, columns // 16, 16).abs().amax(-1)
    whole = (448.0 * 6.0 / largest.amax()).view(1)
    scale = (largest / 6.0 * whole).to(torch.float8_e4m3fn)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": whole}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    expected = NVFP4PackedCompressor.decompress(packed, scheme)["weight"]
    parts = [packed[f"weight_{part}"] for part in ("packed", "scale", "global_scale")]
    return differing(nvfp4(), parts, expected.bfloat16())


def nf4(weight: torch.Tensor) -> int:
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    expected = bnb.dequantize_4bit(packed, state)
    codec = TableBlocks(64, state.state2.blocksize, float(state.offset), "BF16")
    parts = [packed, state.absmax, state.code, state.state2.absmax, state.state2.code]
    return differing(codec, parts, expected)


def llm_int8(weight: torch.Tensor) -> int:
    import bitsandbytes.functional as bnb

    codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    expected = bnb.int8_vectorwise_dequant(codes, scales).bfloat16()
    return differing(AffineGroups(weight.shape[1], "F32", 8, "LLM.int8"), [codes, scales], expected)


def mlx(weight: torch.Tensor) -> int:
    import mlx.core
    import numpy

    def as_torch(array: mlx.core.array) -> torch.Tensor:
        return torch.from_numpy(numpy.array(array.view(mlx.core.uint16)))

    count, source = 0, mlx.core.array(weight.float().numpy()).astype(mlx.core.bfloat16)
    for bits in (2, 3, 4, 5, 6, 8):
        parts = mlx.core.quantize(source, group_size=32, bits=bits)
        expected = mlx.core.dequantize(*parts, group_size=32, bits=bits)
        stored = [as_torch(part) for part in parts]
        expected = as_torch(expected).view(torch.bfloat16)
        count += differing(AffineGroups(32, "BF16", bits, "MLX"), stored, expected)
    return count


def hqq(weight: torch.Tensor) -> int:
    from hqq.core.quantize import Quantizer

    count, dtype = 0, torch.bfloat16
    for bits, axis in itertools.product((1, 2, 4, 8), (0, 1)):
        if weight.numel() // (32 if axis else 1) * bits % 8:
            continue
        codes, facts = Quantizer.quantize(
            weight,
            bits,
            group_size=32,
            axis=axis,
            compute_dtype=dtype,
            device="cpu",
            optimize=False,
        )
        facts.update({part: facts[part].to(dtype) for part in ("scale", "zero")})
        expected = Quantizer.dequantize(codes, {**facts, "compute_dtype": dtype})
        codec = AffineGroups(32, "BF16", bits, "HQQ" if axis else "HQQ_DOWN", True)
        count += differing(codec, [codes, facts["scale"], facts["zero"]], expected)
    return count


def main() -> int:
    packages = ("compressed-tensors", "bitsandbytes", "mlx", "hqq", "torch")
    print(", ".join(f"{name} {version(name)}" for name in packages))
    failed = 0
    for compare in (int4, e2m1, e2m1_of_16, nf4, llm_int8, mlx, hqq):
        for shape in SHAPES:
            if compare is nf4 and shape[0] > 1 and shape[1] % 64:
                continue  # bitsandbytes' kernel for the CPU takes the scales of other blocks there.
            generator = torch.Generator().manual_seed(shape[1])
            weight = (torch.randn(shape, generator=generator) * 0.02).bfloat16()
            count = compare(weight)
            failed += count > 0
            print(f"{compare.__name__} {shape}: {count} of {weight.numel()} elements differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
