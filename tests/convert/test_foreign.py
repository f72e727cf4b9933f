"""`infinity convert` of what no codec reads in place: pytorch_model.bin, of which nothing but tensors
is unpickled; torchao's tensors, which have torchao's own numbers; inputs that modelopt scales."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from infinity.checkpoint import weight_source
from infinity.codecs.detect import scheme_of
from infinity.errors import ConfigError, CorruptionError
from infinity.tools.convert.foreign import plan_foreign
from infinity.tools.convert.rewrite import write_directory
from tests.convert import torchao_tensors
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
    write_directory(plan_foreign(directory(tmp_path / "base", shards=shards)), tmp_path / "out")
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("model*.safetensors"):
        found |= load_file(file)
    expected = tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (shards > 1)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_safetensors_that_are_no_weights_of_the_model_do_not_count(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")
    for name in ("vae.safetensors", "encoder.safetensors"):
        save_file({"a.weight": torch.ones(2)}, base / name)
    assert run_command("convert", base, "-o", tmp_path / "out").exit_code == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors().keys()


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")

    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    torch.save({"weight": Runs()}, base / "pytorch_model.bin")
    with pytest.raises(CorruptionError, match=r"pytorch_model\.bin.*tensors alone"):
        plan_foreign(base)
    assert not (tmp_path / "ran").exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither pytorch_model\.bin nor .*; safetensors"):
        plan_foreign(tmp_path)
    base = directory(tmp_path / "base", shards=2)
    (base / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ConfigError, match="pytorch_model-00002-of-00002"):
        plan_foreign(base)


def test_the_index_says_which_shard_has_a_tensor(tmp_path: Path) -> None:
    base = directory(tmp_path / "base", shards=2)
    first, second = (base / f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    torch.save({**torch.load(second), "turned": torch.zeros(1)}, second)
    write_directory(plan_foreign(base), tmp_path / "out")
    found = [load_file(file) for file in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert torch.equal(found[0]["turned"], tensors()["turned"]) and "turned" not in found[1]
    torch.save({}, first)
    with pytest.raises(CorruptionError, match=r"00001-of-00002.bin.*lacks 'embedding.weight'"):
        plan_foreign(base)


def test_other_content_than_tensors_is_named(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")
    torch.save({"step": 3}, base / "pytorch_model.bin")
    with pytest.raises(CorruptionError, match="'step' is no tensor but a int"):
        plan_foreign(base)


def test_tensors_of_torchao_become_the_numbers_that_torchao_computes(tmp_path: Path) -> None:
    """Also where the parts of one lie in several files."""
    torchao_tensors.write_config(tmp_path / "base")
    with pytest.raises(ConfigError, match="which decodes them: pip install torchao"):
        plan_foreign(tmp_path / "base")
    with pytest.raises(ConfigError, match="quant_method='torchao'.* infinity convert DIR"):
        scheme_of({"quant_method": "torchao"}, "here")
    code = [sys.executable, "-m", torchao_tensors.__name__, str(tmp_path)]
    beside = f"{Path(sys.prefix, 'torchao')}{os.pathsep}{Path(__file__).parents[2]}"
    subprocess.run(code, env=os.environ | {"PYTHONPATH": beside}, check=True)
    assert (tmp_path / "int4-in-int8-out" / "config.json").is_file()


def test_broken_metadata_of_torchao_is_an_error_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(__spec__=object()))
    torchao_tensors.write_config(tmp_path)
    with pytest.raises(ConfigError, match="has pickled tensors of torchao"):
        plan_foreign(tmp_path)
    told = {"tensor_names": '["a.weight"]', "a.weight": "{"}
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata=told)
    with pytest.raises(
        ConfigError,
        match=r"model.safetensors: torchao's metadata cannot be read: Expecting property",
    ):
        plan_foreign(tmp_path)


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
        plan_foreign(base)
