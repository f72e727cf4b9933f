"""The tables of the swap-tier file: every key, its kind of value, its default and its meaning.

All are frozen. Sizes are bytes, paths are absolute once read, an unknown key is an error. What
concerns more than one table is in `infinity.config.swap`.
"""

from infinity.config.schema.adapter import (
    ALL_LINEAR,
    AUTO_TARGETS,
    AdapterConfig,
    AdapterMethod,
)
from infinity.config.schema.engine import (
    ComputeDtype,
    Distributed,
    ExpertProducts,
    Io,
    IoEngineName,
    MomentFormat,
    Precision,
    RankBudgets,
    RankExchange,
    ReduceDtype,
    RingFlagsName,
    Schedule,
    ShardOver,
    UpdateOn,
    UpdatesMode,
)
from infinity.config.schema.inputs import PYTHON_STDLIB, Data, DataSource, Model
from infinity.config.schema.optimizer import Optimizer, OptimizerName
from infinity.config.schema.section import SCHEMA, Section, defaults, null_as_empty
from infinity.config.schema.tiers import (
    DeviceKind,
    DeviceTier,
    DirectIo,
    HostTier,
    NvmeTier,
    Placement,
    TierList,
    TierName,
    Tiers,
)
from infinity.config.schema.train import (
    Checkpoint,
    Durability,
    LrSchedule,
    Nonfinite,
    Output,
    Sample,
    Train,
)

__all__ = [
    "ALL_LINEAR",
    "AUTO_TARGETS",
    "PYTHON_STDLIB",
    "SCHEMA",
    "AdapterConfig",
    "AdapterMethod",
    "Checkpoint",
    "ComputeDtype",
    "Data",
    "DataSource",
    "DeviceKind",
    "DeviceTier",
    "DirectIo",
    "Distributed",
    "Durability",
    "ExpertProducts",
    "HostTier",
    "Io",
    "IoEngineName",
    "LrSchedule",
    "Model",
    "MomentFormat",
    "Nonfinite",
    "NvmeTier",
    "Optimizer",
    "OptimizerName",
    "Output",
    "Placement",
    "Precision",
    "RankBudgets",
    "RankExchange",
    "ReduceDtype",
    "RingFlagsName",
    "Sample",
    "Schedule",
    "Section",
    "ShardOver",
    "TierList",
    "TierName",
    "Tiers",
    "Train",
    "UpdateOn",
    "UpdatesMode",
    "defaults",
    "null_as_empty",
]
