"""A directory of safetensors made of pickled shards: `pytorch_model.bin`, or those of an index."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from infinity.checkpoint.huggingface.safetensors_file import TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import read_config, read_weight_map
from infinity.errors import ConfigError, corrupt
from infinity.tools.convert.rewrite import DirectoryPlan, PlannedTensor

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"


def _files_of(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not index.is_file():
        raise ConfigError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
    names = set(read_weight_map(index).values())
    for name in names:
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} has no {name}, which {_INDEX} names: copy it again")
    return [directory / name for name in sorted(names)]


def _tensors_of(file: Path) -> Mapping[str, torch.Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise corrupt(str(file), f"it cannot be read as tensors alone: {reason}") from None
    if not isinstance(content, dict):
        raise corrupt(str(file), f"expected tensors by name, got a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise corrupt(str(file), f"{name!r} is no tensor but a {type(value).__name__}")
    return content


def plan_pickled(directory: Path) -> DirectoryPlan:
    """Plans the same tensors as safetensors, shard by shard. The shards are mapped into memory, and
    only tensors are unpickled.

    Raises ConfigError for a directory without pickled weights or with a missing shard,
    CorruptionError for a shard that cannot be unpickled as tensors.
    """
    shards = {file.name: _tensors_of(file) for file in _files_of(directory)}
    nbytes = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    plan = DirectoryPlan(directory, nbytes, read_config(directory))
    for file, tensors in shards.items():
        shard = file.replace("pytorch_model", "model").removesuffix(".bin") + ".safetensors"
        for name, tensor in tensors.items():
            info = TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            make = lambda name=name, tensor=tensor: {name: tensor.contiguous()}  # noqa: E731
            plan.add(shard, name, PlannedTensor((info,), make))
    return plan
