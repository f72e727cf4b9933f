"""`infinity convert` of pytorch_model.bin: the same tensors, and nothing but tensors is unpickled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infinity.errors import ConfigError, CorruptionError
from infinity.tools.convert.pickled import plan_pickled
from infinity.tools.convert.rewrite import write_directory


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
