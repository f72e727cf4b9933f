"""The files of a checkpoint in Hugging Face layout: one file, or several and an index.

Source: the index of sharded safetensors checkpoints (transformers, `save_pretrained`): a JSON
object whose `weight_map` gives the file of every tensor.
"""

from __future__ import annotations

import errno
from pathlib import Path

from infinity.bounded import MalformedError, field, plain_name, read_json, table_of
from infinity.errors import ConfigError, CorruptionError, StorageError, corrupt, listed

_SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def find_files(path: Path) -> dict[Path, list[str]]:
    """Returns the files of a checkpoint, each with the tensors that the index expects in it.

    Reads the index, and no other file. Raises ConfigError for a path without weights,
    CorruptionError for a damaged index or a file that is not there, StorageError for a read that
    fails.
    """
    if path.is_file():
        return {path: []}
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; expected a local Hugging Face checkpoint")
    index = path / INDEX_NAME
    single = path / _SINGLE_NAME
    if single.is_file():
        return {single: []}
    if not index.is_file():
        have = sorted(entry.name for entry in path.iterdir())
        raise ConfigError(
            f"{path} has neither {_SINGLE_NAME} nor {INDEX_NAME}; it has {listed(have)}. "
            "Weights in other formats must be saved as safetensors first "
            "(model.save_pretrained)"
        )
    names_in: dict[str, list[str]] = {}
    for name, file_name in _read_weight_map(index).items():
        names_in.setdefault(file_name, []).append(name)
    files = {path / file_name: names for file_name, names in names_in.items()}
    for file, names in files.items():
        if not file.is_file():
            raise CorruptionError(
                errno.ENOENT,
                operation="open",
                path=str(file),
                detail=f"{INDEX_NAME} places {len(names)} tensors in it ({listed(names)}), "
                "but there is no such file; the checkpoint is incomplete: copy it again",
            )
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        table = table_of(read_json(index), "it")
        weight_map = table_of(field(table, "weight_map"), "weight_map")
        for name, file_name in weight_map.items():
            plain_name(file_name, f"the file of tensor {name!r}")
    except OSError as error:
        raise StorageError(error.errno or 0, operation="read", path=str(index)) from None
    except MalformedError as error:
        raise corrupt(str(index), f"no weight_map can be read: {error}") from None
    return weight_map
