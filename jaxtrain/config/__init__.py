"""What a run is told: the typed configuration, how it is read, checked, compared and printed. Never imports jax."""

from jaxtrain.config.arguments import Arguments, parse_arguments
from jaxtrain.config.base import Section
from jaxtrain.config.checks import check, check_layout, check_steps, resolve_mesh
from jaxtrain.config.data import DataConfig, DigitsDataConfig, OwnDataConfig, TokenDataConfig
from jaxtrain.config.difference import Difference, difference, format_differences
from jaxtrain.config.load import dump, from_saved, json_schema, load
from jaxtrain.config.model import (
    DecoderConfig,
    LossConfig,
    ModelConfig,
    OwnModelConfig,
    RopeConfig,
    RopeScaling,
    VitConfig,
)
from jaxtrain.config.optimizer import (
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    OptimizerConfig,
    Schedule,
    SgdConfig,
)
from jaxtrain.config.schema import (
    CheckpointConfig,
    Config,
    DistributedConfig,
    EvalConfig,
    MeshConfig,
    ProfileConfig,
    ShardingConfig,
    TelemetryConfig,
)
from jaxtrain.config.tree import flat, keys, value_at

__all__ = [
    "AdamWConfig",
    "Arguments",
    "CheckpointConfig",
    "Config",
    "ConstantSchedule",
    "CosineSchedule",
    "DataConfig",
    "DecoderConfig",
    "Difference",
    "DigitsDataConfig",
    "DistributedConfig",
    "EvalConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OwnDataConfig",
    "OwnModelConfig",
    "ProfileConfig",
    "RopeConfig",
    "RopeScaling",
    "Schedule",
    "Section",
    "SgdConfig",
    "ShardingConfig",
    "TelemetryConfig",
    "TokenDataConfig",
    "VitConfig",
    "check",
    "check_layout",
    "check_steps",
    "difference",
    "dump",
    "flat",
    "format_differences",
    "from_saved",
    "json_schema",
    "keys",
    "load",
    "parse_arguments",
    "resolve_mesh",
    "value_at",
]
