"""A directory of safetensors made of pickled shards: `pytorch_model.bin`, or those of an index."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from infinity.checkpoint.huggingface.safetensors_file import TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import read_config, read_index
from infinity.errors import ConfigError, corrupt
from infinity.tools.convert.rewrite import DirectoryPlan, PlannedTensor

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"


def _shards_of(directory: Path) -> dict[str, Mapping[str, torch.Tensor]]:
    """Returns the tensors of each file, those that its index places in it."""
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return {_SINGLE: _tensors_of(directory / _SINGLE)}
    if not index.is_file():
        remedy = "safetensors need no conversion"
        raise ConfigError(f"{directory} has neither {_SINGLE} nor {_INDEX}; {remedy}")
    weight_map = read_index(index)[0]
    files = sorted(set(weight_map.values()))
    for name in files:
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} has no {name}, which {_INDEX} names: copy it again")
    shards = {file: _tensors_of(directory / file) for file in files}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise corrupt(str(directory / file), f"it lacks {name!r}, which {_INDEX} places in it")
    return {
        file: {name: value for name, value in own.items() if weight_map.get(name, file) == file}
        for file, own in shards.items()
    }


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
    CorruptionError for a shard that cannot be unpickled as tensors, or lacks one of the index.
    """
    shards = _shards_of(directory)
    nbytes = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    plan = DirectoryPlan(directory, nbytes, read_config(directory))
    for file, tensors in shards.items():
        shard = file.replace("pytorch_model", "model").removesuffix(".bin") + ".safetensors"
        for name, tensor in tensors.items():
            info = TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            plan.add(shard, name, PlannedTensor((info,), partial(_plain, name, tensor)))
    return plan


def _plain(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.resolve_conj().resolve_neg().contiguous()}
