"""The results of transformers' own dequantisation of the same stored tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.codecs import FloatBlocks, mxfp4
from tests.decode.cases import bits, decoded, random_parts
from tests.support.quantized import decoded_weights, tiny_causal_lm, write_quantized

transformers = pytest.importorskip("transformers")


def fp8_of_transformers(parts: list, shape: tuple[int, ...], grid: tuple[int, ...]) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = parts[0].view(torch.float8_e4m3fn).view(shape)
    scales = parts[1].view(torch.float32).view(grid)
    made = Fp8Dequantize(None).convert({"weight": [codes], "weight_scale_inv": [scales]})
    return next(iter(made.values())).bfloat16()


def test_fp8_of_full_blocks_has_the_bits_of_transformers() -> None:
    shape = (256, 384)
    parts = random_parts(FloatBlocks(), shape, 1)
    scales = parts[1].view(torch.float32)
    scales.copy_(torch.rand(scales.shape) * 2.0 ** torch.arange(-3.0, 3.0))
    theirs = fp8_of_transformers(parts, shape, (2, 3))
    ours = decoded(FloatBlocks(), parts, shape, torch.bfloat16)
    is_nan = torch.isnan(theirs)
    assert is_nan.sum() == torch.isnan(ours).sum() > 0
    assert torch.equal(bits(ours)[~is_nan], bits(theirs)[~is_nan])


def test_fp8_of_short_blocks_is_what_transformers_cannot_decode() -> None:
    """docs/formats/quantized.md: transformers derives the block from the grid."""
    # 576 rows are five blocks, which 576 is no multiple of: kv_a_proj_with_mqa of DeepSeek-V3.
    parts = random_parts(FloatBlocks(), (576, 256), 1)
    with pytest.raises(ValueError, match="not divisible"):
        fp8_of_transformers(parts, (576, 256), (5, 2))
    # 192 rows are two blocks, 128 and 64; transformers takes them for 96 and 96.
    shape = (192, 256)
    parts = random_parts(FloatBlocks(), shape, 1)
    parts[0].copy_(torch.full((192 * 256,), 0x38, dtype=torch.uint8))  # Ones.
    parts[1].view(torch.float32).copy_(torch.tensor([1.0, 1.0, 2.0, 2.0]))
    ours = decoded(FloatBlocks(), parts, shape, torch.bfloat16)
    theirs = fp8_of_transformers(parts, shape, (2, 2))
    assert ours[:, 0].tolist() == [1.0] * 128 + [2.0] * 64
    assert theirs[:, 0].tolist() == [1.0] * 96 + [2.0] * 96


def test_mxfp4_has_the_bits_of_transformers_for_every_scale_that_is_a_number() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    row = bytes((2 * i % 16) | ((2 * i + 1) % 16) << 4 for i in range(16))
    codes = torch.frombuffer(bytearray(row * 255), dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(codes.view(1, 255, 1, 16), scales.view(1, 255, 1))
    shape = (1, 32, 255)
    assert tuple(theirs.shape) == shape
    ours = decoded(mxfp4(True), [codes, scales], shape, torch.bfloat16)
    assert torch.equal(bits(ours), bits(theirs))


def test_a_tiny_gpt_oss_loads_in_transformers_with_the_same_weights(tmp_path: Path) -> None:
    write_quantized(tiny_causal_lm("gpt-oss"), tmp_path / "mxfp4", "mxfp4")
    quantization = transformers.Mxfp4Config(dequantize=True)
    model = load(tmp_path / "mxfp4", quantization_config=quantization)
    assert_has(model, decoded_weights(tmp_path / "mxfp4"))


def test_a_tiny_fp8_model_of_full_blocks_loads_in_transformers_with_the_same_weights(
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 256}
    write_quantized(tiny_causal_lm("llama", **sizes), tmp_path / "fp8", "fp8")
    quantization = transformers.FineGrainedFP8Config(dequantize=True)
    model = load(tmp_path / "fp8", quantization_config=quantization)
    assert_has(model, decoded_weights(tmp_path / "fp8"))


def test_a_tiny_metal_model_loads_in_transformers_with_the_same_weights(tmp_path: Path) -> None:
    """Without such a device, transformers dequantises it by its own code."""
    write_quantized(tiny_causal_lm("llama"), tmp_path / "metal", "metal")
    assert_has(load(tmp_path / "metal", device_map="cpu"), decoded_weights(tmp_path / "metal"))


def load(path: Path, **arguments: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, **arguments
    )


def assert_has(model: Any, weights: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    checked = [name for name in weights if name in state]
    assert any("down_proj" in name for name in checked)
    for name in checked:
        assert torch.equal(bits(state[name]), bits(weights[name])), name
