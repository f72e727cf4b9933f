"""The swap-tier file: one frozen schema for TOML, YAML, JSON and a dict. Imports no torch."""

from infinity.config.problems import InvalidConfigError, Problem
from infinity.config.schema import SCHEMA
from infinity.config.schema.engine import Io, Optimizer, Precision, Schedule
from infinity.config.schema.inputs import PYTHON_STDLIB, AdapterConfig, Data, DataSource, Model
from infinity.config.schema.tiers import DeviceTier, HostTier, NvmeTier, Placement, TierName, Tiers
from infinity.config.schema.train import Checkpoint, Output, Sample, Train
from infinity.config.source import ConfigSource
from infinity.config.swap import JobConfig, Resolved, SwapConfig, from_deepspeed
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
    "JobConfig",
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
