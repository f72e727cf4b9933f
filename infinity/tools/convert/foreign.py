"""A directory of plain safetensors made of what no codec reads in place: pickled shards
(`pytorch_model.bin`, or those of an index), tensors of torchao, and layers whose inputs modelopt
scales.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.huggingface.import_weights import WeightSource
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader, TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import read_config, read_index
from infinity.errors import ConfigError, corrupt, refusing
from infinity.tools.convert.quantize import plain, without_quantisation
from infinity.tools.convert.rewrite import DirectoryPlan, PlannedTensor, as_numbers, copied

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_INPUT_SCALE = ".pre_quant_scale"


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


# -- torchao ---------------------------------------------------------------------------------------


def plan_torchao(directory: Path) -> DirectoryPlan | None:
    """Plans the numbers of torchao's tensors, which torchao computes, in the dtype that each names;
    None for a directory without them. One tensor is in memory at a time.

    The metadata of a file name its tensors, and the class and the stored parts of each. Source:
    torchao `prototype/safetensors/safetensors_support.py`.

    Raises ConfigError without torchao, for pickled tensors and for a class that it does not store;
    CorruptionError for a part that is missing.
    """
    config = read_config(directory)
    if (config.get("quantization_config") or {}).get("quant_method") != "torchao":
        return None
    if find_spec("torchao") is None:
        raise ConfigError(
            f"{directory} has tensors of torchao, which decodes them: pip install torchao"
        )
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{directory} has pickled tensors of torchao, whose classes change with its releases; "
            "expected *.safetensors. Save it again by transformers' save_pretrained, or use the "
            "bfloat16 model"
        )
    with ExitStack() as stack:
        readers = [stack.enter_context(SafetensorsReader(file)) for file in files]
        stored = {name: reader for reader in readers for name in reader.tensors}
        nbytes = sum(reader.tensors[name].nbytes for name, reader in stored.items())
        plan = DirectoryPlan(directory, nbytes, without_quantisation(config))
        for file, reader in zip(files, readers, strict=True):
            with refusing(f"{file}: torchao's metadata cannot be read", Exception):
                for name, outcome in _torchao_tensors(directory, reader.metadata, stored):
                    plan.add(file.name, name, outcome)
        plan.close = stack.pop_all().close
    return plan


def _torchao_tensors(
    directory: Path, metadata: Mapping[str, str], stored: Mapping[str, SafetensorsReader]
) -> Iterator[tuple[str, PlannedTensor]]:
    """Yields the tensors that the metadata of a file names, by name."""

    def tensor(parts: Sequence[str], told: Mapping[str, str], *, is_read: bool) -> Any:
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        facts = [(stored[part], stored[part].tensors[part]) for part in parts]
        values = {
            info.name: reader.read(info.name) if is_read
            else torch.empty(info.shape, dtype=info.dtype, device="meta")
            for reader, info in facts
        }  # fmt: skip
        (found,) = unflatten_tensor_state_dict(values, told)[0].values()
        return found.dequantize() if is_read else found

    for name in json.loads(metadata["tensor_names"]):
        table = json.loads(metadata[name])
        if table["_type"] == "Tensor":
            yield name, copied(directory, [stored[name].tensors[name]], stored[name].read)
            continue
        module, _, leaf = name.rpartition(".")
        parts = [f"{module}._{leaf}_{part}" for part in table["_tensor_data_names"]]
        told = {name: metadata[name], "tensor_names": json.dumps([name])}
        shown = tensor(parts, told, is_read=False)
        make = partial(tensor, parts, told, is_read=True)
        yield name, as_numbers(name, tuple(shown.shape), shown.dtype, make)


# -- Inputs that modelopt scales -------------------------------------------------------------------


class _Scaled(WeightSource):
    """The weights of a directory without the factors of their inputs, which no codec reads."""

    def stored_facts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        facts = super().stored_facts()
        return {name: fact for name, fact in facts.items() if not name.endswith(_INPUT_SCALE)}


def plan_scaled(directory: Path) -> DirectoryPlan | None:
    """Plans bfloat16 weights, of which the columns are multiplied by what modelopt multiplies the
    inputs of their layer by; None for a directory without such factors.

    The product W (s x) of modelopt is here (W s) x: W and s are multiplied in float32 and rounded
    once. Raises ConfigError for factors without a weight of as many columns, and as `WeightSource`.
    """
    factors = set[str]()
    for file in directory.glob("*.safetensors"):
        with SafetensorsReader(file) as reader:
            factors |= {name for name in reader.tensors if name.endswith(_INPUT_SCALE)}
    if not factors:
        return None
    source = _Scaled(directory)
    plan = DirectoryPlan.of(source, without_quantisation(read_config(directory)))
    for name in source.names():
        shape, scale = source.shape(name), name.removesuffix(".weight") + _INPUT_SCALE
        outcome = plain(source, name)
        if scale in factors:
            factors.remove(scale)
            if (of_scale := source.stored_info(scale).shape) != shape[-1:]:
                raise ConfigError(
                    f"{directory}: {scale!r} has the shape {of_scale}, and {name!r} {shape}; "
                    f"expected {shape[-1:]}"
                )
            outcome = as_numbers(name, shape, torch.bfloat16, partial(_times, source, name, scale))
        plan.add(source.file_of(name).name, name, outcome)
    if factors:
        raise ConfigError(f"{directory}: {min(factors)!r} scales the inputs of no weight")
    return plan


def _times(source: WeightSource, name: str, scale: str) -> torch.Tensor:
    weight = source.read(name, torch.float32)
    return weight.mul_(source.read_stored(scale).float()).bfloat16()
