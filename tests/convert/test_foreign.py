"""`infinity convert` of what no codec reads in place: pytorch_model.bin, of which nothing but tensors
is unpickled; torchao's tensors, which have torchao's own numbers; inputs that modelopt scales."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)

from infinity.checkpoint import weight_source
from infinity.errors import ConfigError, CorruptionError
from infinity.tools.convert.foreign import plan_pickled, plan_scaled, plan_torchao
from infinity.tools.convert.rewrite import write_directory
from tests.support.commands import run_command
from tests.support.quantized import tiny_causal_lm, write_quantized


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embedding = torch.randn(5, 3)
    turned = torch.randn(3, 4).t()  # Not contiguous.
    return {
        "embedding.weight": embedding, "head.weight": embedding, "turned": turned,
        "conjugated": torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
        "half": torch.randn(7).bfloat16(), "count": torch.tensor(3),
    }  # fmt: skip


def directory(path: Path, *, shards: int = 1) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "tiny"}')
    (path / "tokenizer.json").write_text("{}")
    if shards == 1:
        torch.save(tensors(), path / "pytorch_model.bin")
        return path
    weight_map = {}
    for index, (name, tensor) in enumerate(tensors().items()):
        file = f"pytorch_model-{index % shards + 1:05}-of-{shards:05}.bin"
        weight_map[name] = file
        content = torch.load(path / file) if (path / file).exists() else {}
        torch.save({**content, name: tensor}, path / file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("shards", [1, 2])
def test_every_tensor_keeps_its_bits(shards: int, tmp_path: Path) -> None:
    write_directory(plan_pickled(directory(tmp_path / "base", shards=shards)), tmp_path / "out")
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("model*.safetensors"):
        found |= load_file(file)
    expected = tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (shards > 1)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")

    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    torch.save({"weight": Runs()}, base / "pytorch_model.bin")
    with pytest.raises(CorruptionError, match=r"pytorch_model\.bin.*tensors alone"):
        plan_pickled(base)
    assert not (tmp_path / "ran").exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither pytorch_model\.bin nor .*; safetensors"):
        plan_pickled(tmp_path)
    base = directory(tmp_path / "base", shards=2)
    (base / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ConfigError, match="pytorch_model-00002-of-00002"):
        plan_pickled(base)


def test_the_index_says_which_shard_has_a_tensor(tmp_path: Path) -> None:
    base = directory(tmp_path / "base", shards=2)
    first, second = (base / f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    torch.save({**torch.load(second), "turned": torch.zeros(1)}, second)
    write_directory(plan_pickled(base), tmp_path / "out")
    found = [load_file(file) for file in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert torch.equal(found[0]["turned"], tensors()["turned"]) and "turned" not in found[1]
    torch.save({}, first)
    with pytest.raises(CorruptionError, match=r"00001-of-00002.bin.*lacks 'embedding.weight'"):
        plan_pickled(base)


def test_other_content_than_tensors_is_named(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")
    torch.save({"step": 3}, base / "pytorch_model.bin")
    with pytest.raises(CorruptionError, match="'step' is no tensor but a int"):
        plan_pickled(base)


KINDS = {
    "int8": Int8WeightOnlyConfig(),
    "fp8": Float8WeightOnlyConfig(),
    "int4 in int8": IntxWeightOnlyConfig(weight_dtype=torch.int4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_torchao_become_the_numbers_that_torchao_computes(
    kind: str, tmp_path: Path
) -> None:
    """Also where the parts of one lie in several files."""
    model = tiny_causal_lm("llama", num_hidden_layers=1)
    quantize_(model.model, KINDS[kind])
    expected = {name: _numbers(value) for name, value in model.state_dict().items()}
    stored, told = flatten_tensor_state_dict(model.state_dict())
    base, names = tmp_path / "base", sorted(stored)
    base.mkdir()
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "torchao"}}
    (base / "config.json").write_text(json.dumps(config))
    for number in range(2):
        part = {name: stored[name] for name in names[number::2]}
        own = told if number == 0 else {"tensor_names": "[]"}
        save_file(part, base / f"model-{number + 1:05}-of-00002.safetensors", metadata=own)
    weight_map = {
        name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)
    }
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="quant_method='torchao'.* infinity convert DIR"):
        weight_source(base)

    assert run_command("convert", base, "-o", tmp_path / "out").exit_code == 0
    with closing(weight_source(tmp_path / "out")) as source:
        found = {name: source.read(name) for name in source.names()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert any(type(value) is not torch.Tensor for value in model.state_dict().values())


def _numbers(value: torch.Tensor) -> torch.Tensor:
    return value.dequantize() if type(value) is not torch.Tensor else value


def test_broken_metadata_of_torchao_is_an_error_of_its_file(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has pickled tensors of torchao"):
        plan_torchao(tmp_path)
    told = {"tensor_names": '["a.weight"]', "a.weight": "{"}
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata=told)
    with pytest.raises(ConfigError, match="model.safetensors: torchao's metadata cannot be read"):
        plan_torchao(tmp_path)


def test_weights_whose_inputs_modelopt_scales_are_scaled_themselves(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_quantized(tiny_causal_lm("llama", num_hidden_layers=1), base, "modelopt-nvfp4")
    with closing(weight_source(base)) as source:
        plain = {name: source.read(name, torch.float32) for name in source.names()}
    name, index = "model.layers.0.mlp.down_proj", base / "model.safetensors.index.json"
    scale = torch.rand(plain[f"{name}.weight"].shape[1]).bfloat16()
    save_file({f"{name}.pre_quant_scale": scale}, base / "scales.safetensors")
    table = json.loads(index.read_text())
    table["weight_map"][f"{name}.pre_quant_scale"] = "scales.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="pre_quant_scale.* infinity convert DIR"):
        weight_source(base)

    assert run_command("convert", base, "-o", tmp_path / "out").exit_code == 0
    with closing(weight_source(tmp_path / "out")) as source:
        found = {name: source.read(name) for name in source.names()}
    plain[f"{name}.weight"] *= scale.float()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[n], plain[n].bfloat16()) for n in found)

    save_file({f"{name}.pre_quant_scale": scale[1:].clone()}, base / "scales.safetensors")
    with pytest.raises(ConfigError, match=r"has the shape \(\d+,\), and"):
        plan_scaled(base)
