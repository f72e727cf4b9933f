"""A matrix for each expert, of experts of Llama 4 that modelopt has packed into one tensor.

modelopt quantises the transposed weight, and stores what it gets transposed back: FP8 codes as
(experts, in, out), pairs of FP4 codes as (experts, in / 2, out) and their scales as
(experts, in / 16, out). Transposed again, they are the codes and scales of the experts' own
matrices, of which the class of transformers computes with the transpose. Source: modelopt
`torch/export/unified_export_hf.py`, `_export_quantized_weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from infinity.checkpoint.huggingface.safetensors_file import SafetensorsReader, TensorInfo
from infinity.checkpoint.huggingface.weight_tensors import read_config
from infinity.errors import ConfigError
from infinity.tools.convert.rewrite import DirectoryPlan, PlannedTensor, copied

_SCALE = "_weight_scale"
_PACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_(weight_scale(_2)?|input_scale))?")
_TYPES = ("llama4", "llama4_text")


def plan_apart(directory: Path) -> DirectoryPlan | None:
    """Plans the same codes and scales with matrices for each expert; None for a directory without
    packed experts. One expert is in memory at a time.

    Raises ConfigError for another model than Llama 4, and as `SafetensorsReader`.
    """
    config, files = read_config(directory), sorted(directory.glob("*.safetensors"))
    with ExitStack() as stack:
        readers = [stack.enter_context(SafetensorsReader(file)) for file in files]
        stored = {name: reader for reader in readers for name in reader.tensors}
        packed = {name.removesuffix(_SCALE) for name in stored if name.endswith(_SCALE)}
        packed = {name for name in packed & stored.keys() if _PACKED.fullmatch(name)}
        if not packed:
            return None
        if config.get("model_type") not in _TYPES:
            raise ConfigError(
                f"{directory}: the packed experts of {config.get('model_type')!r} have no known "
                f"order of gate and up; expected one of {', '.join(_TYPES)}"
            )
        nbytes = sum(info.nbytes for reader in readers for info in reader.tensors.values())
        plan = DirectoryPlan(directory, nbytes, config, stack.pop_all().close)
    for file, reader in zip(files, readers, strict=True):
        for name, info in reader.tensors.items():
            found = _PACKED.fullmatch(name)
            if name in packed:
                if len(info.shape) != 3 or 0 in info.shape:
                    raise _misfit(name, info)
                for number in range(info.shape[0]):
                    plan.add(file.name, name, _expert(name, number, stored))
            elif found is None or f"{found[1]}{found[2]}" not in packed:
                plan.add(file.name, name, copied(directory, [info], reader.read))
    return plan


def _expert(packed: str, number: int, stored: Mapping[str, SafetensorsReader]) -> PlannedTensor:
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
