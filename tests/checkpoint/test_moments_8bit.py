"""A checkpoint carries moments of eight bits by name, and is refused by a model with moments of
another format. That it is exact: `test_exact.py`."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.errors import ConfigError
from infinity.ops.dynamic_8bit import BLOCK_NUMEL, State8Bit, decode, num_scales
from tests.support.bits import assert_same

from .harness import run

EIGHT_BIT = {"moments": "8bit"}


def test_files_hold_codes_and_scales_by_parameter_name(tmp_path):
    with run("bf16", tmp_path / "swap", **EIGHT_BIT) as each:
        each.steps(0, 2)
        path = each.save(tmp_path / "checkpoints")
        found = {}
        for file in path.glob("unit-*.safetensors"):
            found |= load_file(file)
        weights = {name: found[name] for name in infinity.engine_of(each.model).parameter_names()}
        plain = infinity.checkpoint.optimizer_state_dict(each.model, each.optimizer)
    names = [n for group in each.optimizer.named_state()["groups"] for n in group["params"]]
    for name, weight in weights.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            codes, scales = found[f"{name}.{moment}"], found[f"{name}.{moment}.scales"]
            assert codes.dtype is torch.uint8 and codes.shape == weight.shape
            assert scales.dtype is torch.float32 and scales.shape == (num_scales(weight.numel()),)
            assert (scales > 0).any(), "two steps have left moments"
            wide = decode(State8Bit(codes.flatten(), scales), moment)
            exported = plain["state"][names.index(name)][moment]
            assert torch.equal(exported.flatten(), wide)
    assert any(weight.numel() % BLOCK_NUMEL for weight in weights.values()), "a short block too"


def test_memory_order_is_in_the_name_where_it_is_not_the_files(tmp_path):
    with run("conv", tmp_path / "swap", **EIGHT_BIT) as each:
        each.steps(0, 1)
        path = each.save(tmp_path / "checkpoints")
    names = set()
    for file in path.glob("unit-*.safetensors"):
        names |= set(load_file(file))
    assert any(name.endswith(".exp_avg.scales_0_2_3_1") for name in names)


@pytest.mark.parametrize("written", ["float32", "8bit"])
def test_moments_of_another_format_are_refused(tmp_path, written):
    other = {"float32": "8bit", "8bit": "float32"}[written]
    with run("bf16", tmp_path / "swap", moments=written) as each:
        each.steps(0, 1)
        each.save(tmp_path / "checkpoints")
    with run("bf16", tmp_path / "swap", moments=other) as each:
        before = each.state()
        with pytest.raises(ConfigError, match=f"set precision.moments to '{written}'"):
            each.load(tmp_path / "checkpoints")
        assert_same(before, each.state())
