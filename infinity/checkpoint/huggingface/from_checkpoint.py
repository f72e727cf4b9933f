"""Exports a checkpoint to a Hugging Face directory, without engine, tiers and GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.huggingface.export_weights import export_safetensors
from infinity.checkpoint.reader import CheckpointSource, Kind, StateInfo
from infinity.errors import ConfigError
from infinity.sizes import GIB


def export_checkpoint_safetensors(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    master: bool = False,
    max_shard_nbytes: int = 2 * GIB,
    tokenizer: Any = None,
) -> list[Path]:
    """Runs `export_safetensors` on the weights of a checkpoint; returns the weight files.

    checkpoint: a checkpoint, or a directory of checkpoints, from which the newest is exported
    model: of the same architecture; it may be on meta, because only names and shapes are used

    Memory holds one tensor, or the group of tensors that transformers converts together. Raises
    ConfigError for a checkpoint of another model before anything is written, CorruptionError for
    bytes that their checksum does not match, otherwise as `export_safetensors`.
    """
    with CheckpointSource(checkpoint) as source:
        infos = {(info.name, info.kind): info for info in source.infos}
        _check_model(infos, model, source.path)

        def read(name: str) -> torch.Tensor:
            kind: Kind = "master" if master and (name, "master") in infos else "weight"
            value = source.tensor(infos[name, kind])
            return value.float() if master and value.is_floating_point() else value

        with torch.no_grad():
            buffers = source.buffers()
            for name, buffer in model.named_buffers():
                if name in buffers and not buffer.is_meta:
                    buffer.copy_(buffers[name])
        return export_safetensors(
            model,
            directory,
            max_shard_nbytes=max_shard_nbytes,
            tokenizer=tokenizer,
            read=read,
            master=master,
        )


def _check_model(infos: dict[tuple[str, Kind], StateInfo], model: nn.Module, path: Path) -> None:
    for name, parameter in model.named_parameters():
        info, shape = infos.get((name, "weight")), tuple(parameter.shape)
        if info is None or info.shape != shape:
            came = "it is not there" if info is None else f"it has the shape {info.shape} there"
            raise ConfigError(
                f"{path} is a checkpoint of another model: expected {name!r} of the shape {shape}, "
                f"{came}"
            )
