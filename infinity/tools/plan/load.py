"""The configuration that a plan is about: that of a file, or of a model without one. Imports no
torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from infinity.config import SwapConfig
from infinity.config.paths import refuse_absent_model_of, with_located_model
from infinity.config.source import ConfigSource, override, read_file
from infinity.plan.hardware import load_hardware
from infinity.tools.training.settle import settle

# The tiers of a model by name without a file: state that fits stays in host memory.
_DEFAULTS: dict[str, Any] = {
    "tiers": {"host": {"capacity": "85%"}},
    "precision": {"compute": "bfloat16"},
}
_ADAPTER_MICRO_BATCH = 8  # Sequences; of 2,048 tokens, enough for each of some hundred experts.
_KINDS = ("parameters", "master", "moments", "gradients")


def load_config(
    file: Path | None,
    overrides: list[str],
    hardware: str | None,
    *,
    by_name: bool,
    is_quantised: bool,
) -> SwapConfig:
    """Returns the configuration. `by_name`: the model is not that of the file, and does not lie in
    a directory; `is_quantised`: it can be trained by an adapter alone."""
    if file is not None:
        table, source = read_file(file)
    else:
        table, source = copy.deepcopy(_DEFAULTS), ConfigSource()
        if hardware is not None and load_hardware(hardware).nvme is not None:
            table["tiers"]["nvme"] = [{"path": "/mnt/nvme"}]
            table["placement"] = {kind: ["host", "nvme"] for kind in _KINDS}
    for text in overrides:
        override(table, text)
    if is_quantised:
        table.setdefault("adapter", {})  # Codes cannot be trained.
    if file is None and "adapter" in table:
        _train_by_layers(table)
    config = with_located_model(SwapConfig.from_table(table, source))
    if not by_name:
        refuse_absent_model_of(config)
    return settle(config)


def _train_by_layers(table: dict[str, Any]) -> None:
    """Sets the order in which adapters train: all micro-batches pass a block together."""
    schedule = table.setdefault("schedule", {})
    schedule.setdefault("micro_batch", _ADAPTER_MICRO_BATCH)
    tiers = ["host", "nvme"] if "nvme" in table["tiers"] else ["host"]
    table.setdefault("placement", {}).setdefault("activations", tiers)
