"""`infinity convert` of experts of Llama 4 as modelopt packs them: the numbers of its own decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from infinity.checkpoint import weight_source
from infinity.errors import ConfigError
from infinity.tools.cli import app
from infinity.tools.convert.foreign import plan_foreign
from tests.train.test_text_of_images import saved

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


def packed_fp8(weight: torch.Tensor, per: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of (experts, in, out), by the ends of their names, and what they decode to."""
    axes = {"tensor": (0, 1, 2), "expert": (1, 2), "column": (1,)}[per]
    wide = weight.abs().amax(axes, keepdim=True).float() / 448
    codes = (weight / wide).to(torch.float8_e4m3fn)
    parts = {"": codes, "_weight_scale": wide.squeeze(axes), "_input_scale": torch.tensor(0.5)}
    return parts, codes.float() * wide


def packed_nvfp4(weight: torch.Tensor, _: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `packed_fp8`; two codes along `in` share a byte, and 16 a scale."""
    count, rows, columns = weight.shape
    codes = torch.randint(16, (count, rows, columns), dtype=torch.uint8)
    scale = (0.5 + torch.rand(count, rows // 16, columns)).to(torch.float8_e4m3fn)
    scale_2 = torch.tensor(0.01)
    of_all = scale.float().repeat_interleave(16, 1) * scale_2
    parts = {"": codes[:, 1::2] << 4 | codes[:, ::2], "_weight_scale": scale,
             "_weight_scale_2": scale_2}  # fmt: skip
    return parts, E2M1[codes.long()] * of_all


@pytest.mark.parametrize(
    ("pack", "algorithm", "per"),
    [
        (packed_fp8, "FP8", "tensor"),
        (packed_fp8, "FP8", "expert"),
        (packed_fp8, "FP8_PER_CHANNEL_PER_TOKEN", "column"),
        (packed_nvfp4, "NVFP4", ""),
    ],
)
def test_a_matrix_for_each_expert_has_the_numbers_of_the_packed_ones(
    pack: Any, algorithm: str, per: str, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    model = saved("llama4", base)
    tensors, expected = dict(load_file(base / "model.safetensors")), {}
    torch.manual_seed(0)
    for name in [name for name in tensors if ".experts." in name]:
        parts, values = pack(tensors.pop(name), per)
        tensors |= {name + end: part.contiguous() for end, part in parts.items()}
        expected[name] = values.to(torch.bfloat16)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    declared = {"quantization": {"quant_algo": algorithm, "group_size": 16}}
    (base / "hf_quant_config.json").write_text(json.dumps(declared))
    with pytest.raises(ConfigError, match="infinity convert DIR -o OUT writes a matrix for each"):
        weight_source(base)
    result = CliRunner().invoke(app, ["convert", str(base), "-o", str(out), "--quiet"])
    assert result.exit_code == 0, result.output
    source = weight_source(out)
    for name, values in expected.items():
        stem, kind = name.rsplit(".", 1)
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for number, matrix in enumerate(values):
            found = [source.read(f"{stem}.{number}.{part}.weight") for part in kinds]
            assert torch.equal(torch.cat(found).to(torch.bfloat16), matrix.mT)
    plan = source.plan(model)
    assert {name for name in plan.view.targets if ".experts." in name} <= {*plan.stored()}


def test_packed_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    name = "model.layers.0.mlp.experts.down_proj"
    tensors = {name: torch.zeros(2, 4, 4).to(torch.float8_e4m3fn)}
    save_file(tensors | {f"{name}_weight_scale": torch.tensor(1.0)}, tmp_path / "m.safetensors")
    result = CliRunner().invoke(app, ["convert", str(tmp_path), "-o", str(tmp_path / "out")])
    assert result.exit_code == 2 and "have no known order of gate and up" in result.output


@pytest.mark.parametrize(
    ("codes", "scale"),
    [((), ()), ((4, 6), ()), ((2, 4, 7), ()), ((0, 4, 6), ()), ((2, 4, 6), (3,)),
     ((2, 4, 6), (1, 1, 6)), ((2, 4, 6), (2, 4))],
)  # fmt: skip
def test_packed_experts_of_another_shape_are_refused(
    codes: tuple[int, ...], scale: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama4"}')
    name = "model.layers.0.feed_forward.experts.gate_up_proj"
    tensors = {name: torch.zeros(codes).to(torch.float8_e4m3fn)}
    save_file(tensors | {f"{name}_weight_scale": torch.ones(scale)}, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"has the shape \(.*expected what modelopt packs"):
        plan_foreign(tmp_path)
