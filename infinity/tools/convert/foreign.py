"""A directory of safetensors made of what no codec reads in place: pickled shards
(`pytorch_model.bin`, or those of an index), tensors of torchao, experts of Llama 4 that modelopt
has packed into one tensor, and layers whose inputs modelopt scales.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.huggingface.import_weights import WeightSource
from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader, TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import read_config, read_index
from infinity.config.hub import download_remedy
from infinity.errors import ConfigError, corrupt, refusing
from infinity.tools.convert.quantize import plain, without_quantisation
from infinity.tools.convert.rewrite import DirectoryPlan, PlannedTensor, as_numbers, copied

_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_INPUT_SCALE = ".pre_quant_scale"

Readers = Mapping[str, SafetensorsReader]  # Of a directory's files, by the names of their tensors.
Planned = tuple[str, str, PlannedTensor]  # The file of the result, the logical name, the outcome.


def plan_foreign(directory: Path) -> DirectoryPlan:
    """Plans the same tensors in a form that is read in place, from headers. One tensor is in memory
    at a time.

    Raises ConfigError and CorruptionError for a directory that has none of the forms above, or one
    of them in part.
    """
    config = read_config(directory)
    is_torchao = (config.get("quantization_config") or {}).get("quant_method") == "torchao"
    if is_torchao:
        _refuse_torchao(directory)
    with ExitStack() as stack:
        files = sorted(directory.glob("*.safetensors"))
        readers = {file: stack.enter_context(SafetensorsReader(file)) for file in files}
        stored = {name: reader for reader in readers.values() for name in reader.tensors}
        if is_torchao:
            tensors = _torchao_tensors(directory, readers, stored)
            config = without_quantisation(config)
        elif packed := _packed_in(stored, directory, config.get("model_type")):
            tensors = _apart(directory, readers, stored, packed)
        elif factors := {name for name in stored if name.endswith(_INPUT_SCALE)}:
            return _plan_scaled(directory, config, factors)
        else:
            return _plan_pickled(directory, config)
        nbytes = sum(reader.tensors[name].nbytes for name, reader in stored.items())
        plan = DirectoryPlan(directory, nbytes, config)
        for shard, name, outcome in tensors:
            plan.add(shard, name, outcome)
        plan.close = stack.pop_all().close
    return plan


# -- Pickled shards --------------------------------------------------------------------------------


def _shards_of(directory: Path) -> dict[str, Mapping[str, torch.Tensor]]:
    """Returns the tensors of each file, those that its index places in it."""
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return {_SINGLE: _tensors_of(directory / _SINGLE)}
    if not index.is_file():
        raise ConfigError(
            f"{directory} has neither {_SINGLE} nor {_INDEX}; safetensors need no conversion, and "
            f"other weights are not converted{download_remedy(directory)}"
        )
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


def _plan_pickled(directory: Path, config: dict[str, Any]) -> DirectoryPlan:
    """Plans the same tensors as safetensors, shard by shard. The shards are mapped into memory, and
    only tensors are unpickled.

    Raises ConfigError for a directory without pickled weights or with a missing shard,
    CorruptionError for a shard that cannot be unpickled as tensors, or lacks one of the index.
    """
    shards = _shards_of(directory)
    nbytes = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    plan = DirectoryPlan(directory, nbytes, config)
    for file, tensors in shards.items():
        shard = file.replace("pytorch_model", "model").removesuffix(".bin") + ".safetensors"
        for name, tensor in tensors.items():
            info = TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            plan.add(shard, name, PlannedTensor((info,), partial(_plain, name, tensor)))
    return plan


def _plain(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.resolve_conj().resolve_neg().contiguous()}


# -- torchao ---------------------------------------------------------------------------------------


def _refuse_torchao(directory: Path) -> None:
    """Raises ConfigError without torchao, and for pickled tensors of it."""
    if find_spec("torchao") is None:
        raise ConfigError(
            f"{directory} has tensors of torchao, which decodes them: pip install torchao"
        )
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{directory} has pickled tensors of torchao, whose classes change with its releases; "
            "expected *.safetensors. Save it again by transformers' save_pretrained, or use the "
            "bfloat16 model"
        )


def _torchao_tensors(
    directory: Path, readers: Mapping[Path, SafetensorsReader], stored: Readers
) -> Iterator[Planned]:
    """Yields the numbers of torchao's tensors, which torchao computes, in the dtype that each
    names.

    The metadata of a file name its tensors, and the class and the stored parts of each. Source:
    torchao `prototype/safetensors/safetensors_support.py`. Raises ConfigError for a class that it
    does not store, and for a part that is missing.
    """

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

    def planned(name: str, metadata: Mapping[str, str]) -> PlannedTensor:
        table = json.loads(metadata[name])
        if table["_type"] == "Tensor":
            return copied(directory, [stored[name].tensors[name]], stored[name].read)
        module, _, leaf = name.rpartition(".")
        parts = [f"{module}._{leaf}_{part}" for part in table["_tensor_data_names"]]
        told = {name: metadata[name], "tensor_names": json.dumps([name])}
        shown = tensor(parts, told, is_read=False)
        make = partial(tensor, parts, told, is_read=True)
        return as_numbers(name, tuple(shown.shape), shown.dtype, make)

    for file, reader in readers.items():
        with refusing(f"{file}: torchao's metadata cannot be read", Exception):
            for name in json.loads(reader.metadata["tensor_names"]):
                yield file.name, name, planned(name, reader.metadata)


# -- Experts of Llama 4 that modelopt has packed into one tensor -----------------------------------
#
# modelopt quantises the transposed weight, and stores what it gets transposed back: FP8 codes as
# (experts, in, out), pairs of FP4 codes as (experts, in / 2, out) and their scales as
# (experts, in / 16, out). Transposed again, they are the codes and scales of the experts' own
# matrices, of which the class of transformers computes with the transpose. Source: modelopt
# `torch/export/unified_export_hf.py`, `_export_quantized_weight`.


_SCALE = "_weight_scale"
_PACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_(weight_scale(_2)?|input_scale))?")
_TYPES = ("llama4", "llama4_text")


def _packed_in(stored: Readers, directory: Path, kind: str | None) -> set[str]:
    """Returns the names of packed experts. Raises ConfigError for those of a `kind` of model that
    is not Llama 4."""
    scaled = {name.removesuffix(_SCALE) for name in stored if name.endswith(_SCALE)}
    packed = {name for name in scaled & stored.keys() if _PACKED.fullmatch(name)}
    if packed and kind not in _TYPES:
        raise ConfigError(
            f"{directory}: the packed experts of {kind!r} have no known order of gate and up; "
            f"expected one of {', '.join(_TYPES)}"
        )
    return packed


def _apart(
    directory: Path, readers: Mapping[Path, SafetensorsReader], stored: Readers, packed: set[str]
) -> Iterator[Planned]:
    """Yields the same codes and scales with matrices for each expert."""
    for file, reader in readers.items():
        for name, info in reader.tensors.items():
            found = _PACKED.fullmatch(name)
            if name in packed:
                if len(info.shape) != 3 or 0 in info.shape:
                    raise _misfit(name, info)
                for number in range(info.shape[0]):
                    yield file.name, name, _expert(name, number, stored)
            elif found is None or f"{found[1]}{found[2]}" not in packed:
                yield file.name, name, copied(directory, [info], reader.read)


def _expert(packed: str, number: int, stored: Readers) -> PlannedTensor:
    """Returns the matrices of an expert, with all that the packed tensor has beside its codes."""
    stem, kind = packed.rpartition(".experts.")[0], packed.rpartition(".")[2]
    of_codes, parts = stored[packed].tensors[packed].shape, kind.removesuffix("_proj").split("_")
    infos, made = list[TensorInfo](), dict[str, Callable[[], torch.Tensor]]()
    for end in ("", _SCALE, f"{_SCALE}_2", "_input_scale"):
        name = packed + end
        if name not in stored:
            continue
        info = stored[name].tensors[name]
        is_of_each = info.shape[:1] == of_codes[:1]  # A number of all has no dimension of experts.
        shape = tuple(length for length in info.shape[is_of_each:] if length != 1)
        has_columns = is_of_each and len(shape) < 3 and shape[-1:] == of_codes[-1:]
        if shape and not (has_columns and shape[-1] % len(parts) == 0):
            raise _misfit(name, info)
        start = number * math.prod(shape) * is_of_each
        for index, part in enumerate(parts):
            own = shape and (shape[-1] // len(parts), *shape[-2:-1])
            ended = f"{stem}.experts.{number}.{part}_proj{end.replace('_', '.', 1) or '.weight'}"
            infos.append(TensorInfo(name=ended, dtype=info.dtype, shape=own))
            part_of = index, len(parts)
            made[ended] = partial(_read, stored[name], name, start, shape, part_of)
    return PlannedTensor(tuple(infos), lambda: {name: make() for name, make in made.items()})


def _misfit(name: str, info: TensorInfo) -> ConfigError:
    return ConfigError(
        f"{name!r} has the shape {info.shape}; expected what modelopt packs: codes (experts, in, "
        "out), and scales of all, of each expert or of its columns"
    )


def _read(
    reader: SafetensorsReader, name: str, start: int, shape: tuple[int, ...], part: tuple[int, int]
) -> torch.Tensor:
    """Returns the part (its number, how many) of what is stored for one expert, transposed."""
    values = torch.empty(shape, dtype=reader.tensors[name].dtype)
    reader.read_into(name, start, values)
    if not shape:
        return values
    number, count = part
    length = shape[-1] // count
    return values.narrow(-1, number * length, length).movedim(-1, 0).contiguous()


# -- Inputs that modelopt scales -------------------------------------------------------------------


class _Scaled(WeightSource):
    """The weights of a directory without the factors of their inputs, which no codec reads."""

    def stored_facts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        facts = super().stored_facts()
        return {name: fact for name, fact in facts.items() if not name.endswith(_INPUT_SCALE)}


def _plan_scaled(directory: Path, config: dict[str, Any], factors: set[str]) -> DirectoryPlan:
    """Plans bfloat16 weights, of which the columns are multiplied by what modelopt multiplies the
    inputs of their layer by: tensors of the names `factors`.

    The product W (s x) of modelopt is here (W s) x: W and s are multiplied in float32 and rounded
    once. Raises ConfigError for factors without a weight of as many columns, and as `WeightSource`.
    """
    source = _Scaled(directory)
    plan = DirectoryPlan.of(source, without_quantisation(config))
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
