"""A process with torchao, whose own numbers `infinity convert` must write."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infinity.checkpoint import weight_source
from tests.support.commands import run_command
from tests.support.quantized import tiny_causal_lm


def write_config(directory: Path, **others: object) -> None:
    """Writes a config.json that names torchao, in a directory that may be new."""
    directory.mkdir(exist_ok=True)
    config = others | {"quantization_config": {"quant_method": "torchao"}}
    (directory / "config.json").write_text(json.dumps(config))


def check(config: Any, base: Path, out: Path) -> None:
    """Writes a base, whose parts lie in two files, and compares what is made of it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    model = tiny_causal_lm("llama", num_hidden_layers=1)
    quantize_(model.model, config)
    expected, quantised = {}, 0
    for name, value in model.state_dict().items():
        is_quantised = type(value) is not torch.Tensor
        quantised += is_quantised
        expected[name] = value.dequantize() if is_quantised else value
    assert quantised == 7
    stored, told = flatten_tensor_state_dict(model.state_dict())
    write_config(base, **model.config.to_dict())
    weight_map = {}
    for number in range(2):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        part = {name: stored[name] for name in sorted(stored)[number::2]}
        metadata = {"tensor_names": "[]"} if number else told
        save_file(part, base / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    result = run_command("convert", base, "-o", out)
    assert result.exit_code == 0, result.output
    with closing(weight_source(out)) as source:
        found = {name: source.read(name) for name in source.names()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def main(directory: Path) -> None:
    """Checks three kinds of tensors."""
    from torchao import quantization as torchao

    configs = {
        "int8": torchao.Int8WeightOnlyConfig(),
        "fp8": torchao.Float8WeightOnlyConfig(),
        "int4-in-int8": torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    }
    for kind, config in configs.items():
        check(config, directory / kind, directory / f"{kind}-out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
