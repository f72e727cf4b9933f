"""The swap-tier file: one frozen schema for TOML, YAML, JSON and a dict. Imports no torch."""

from infinity.config.deepspeed import from_deepspeed
from infinity.config.problems import InvalidConfigError, Problem
from infinity.config.schema import (
    PYTHON_STDLIB,
    SCHEMA,
    AdapterConfig,
    Checkpoint,
    Data,
    DataSource,
    DeviceTier,
    HostTier,
    Io,
    Model,
    NvmeTier,
    Optimizer,
    Output,
    Placement,
    Precision,
    Sample,
    Schedule,
    TierName,
    Tiers,
    Train,
)
from infinity.config.source import ConfigSource
from infinity.config.swap import Resolved, SwapConfig
from infinity.config.values import Capacity

__all__ = [
    "PYTHON_STDLIB",
    "SCHEMA",
    "AdapterConfig",
    "Capacity",
    "Checkpoint",
    "ConfigSource",
    "Data",
    "DataSource",
    "DeviceTier",
    "HostTier",
    "InvalidConfigError",
    "Io",
    "Model",
    "NvmeTier",
    "Optimizer",
    "Output",
    "Placement",
    "Precision",
    "Problem",
    "Resolved",
    "Sample",
    "Schedule",
    "SwapConfig",
    "TierName",
    "Tiers",
    "Train",
    "from_deepspeed",
]
