"""The weights of a Hugging Face directory or safetensors file, tensor by tensor, by their names.

Usage:

    source = weight_source("path/to/checkpoint")  # reads and checks the headers of all files
    plan = source.plan(model)                     # checks every name, shape and conversion
    plan.load(engine.write_parameter)             # streams; nothing is written before this line

or, in one call, `weight_source(path).load_into(model, engine.write_parameter)`. The tensors are in
`weight_tensors.py`, the plan is in `import_weights.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import nn

from infinity.checkpoint.huggingface.import_weights import ImportPlan, Write, plan_import
from infinity.checkpoint.huggingface.weight_tensors import WeightTensors


def weight_source(path: str | os.PathLike[str]) -> WeightSource:
    """Opens a directory in Hugging Face layout (one file or an index), or one safetensors file.

    Reads and checks all headers. Raises ConfigError for a path without weights, CorruptionError for
    a damaged header or index, StorageError for a read that fails.
    """
    return WeightSource(path)


class WeightSource(WeightTensors):
    """The tensors of a checkpoint, and plans of loading them into a model. Raises as
    `WeightTensors`."""

    def plan(
        self, model: nn.Module, *, strict: bool = True, ignore: Sequence[str] = ()
    ) -> ImportPlan:
        """Plans every write. Reads no tensor, except to compare tied weights that are stored twice.

        With `strict`, ConfigError is raised for a parameter that the checkpoint lacks, unless it is
        a head that the class of the checkpoint does not have; and for a tensor that the model has
        no place for, unless transformers ignores it, it belongs to the head of another class, or a
        pattern in `ignore` matches it. Without `strict` both are only listed, in `missing` and
        `unexpected` of the plan. Codes of quantised weights always raise ConfigError.
        """
        return plan_import(self, model, strict=strict, ignore=ignore)

    def load_into(
        self, model: nn.Module, write: Write, *, strict: bool = True, ignore: Sequence[str] = ()
    ) -> ImportPlan:
        """Runs `plan` and `load`; returns the plan. Raises as these."""
        plan = self.plan(model, strict=strict, ignore=ignore)
        plan.load(write)
        return plan
