"""What a run is told: the typed configuration, how it is read, checked, compared and printed. Never imports jax."""

from jaxtrain.config.arguments import parse_arguments
from jaxtrain.config.base import Section
from jaxtrain.config.batches import BatchPlan
from jaxtrain.config.checkpoint import CheckpointConfig, KeepBestConfig
from jaxtrain.config.checks import BATCH_AXES, check, check_layout, check_steps, resolve_mesh
from jaxtrain.config.data import (
    DataConfig,
    DigitsDataConfig,
    MixtureDataConfig,
    OwnDataConfig,
    TokenDataConfig,
    TokenRowsConfig,
)
from jaxtrain.config.difference import Difference, difference, format_differences
from jaxtrain.config.load import dump, from_saved, json_schema, load
from jaxtrain.config.model import DecoderConfig, ModelConfig, OwnModelConfig, RopeConfig, RopeScaling, VitConfig
from jaxtrain.config.optimizer import (
    AdafactorConfig,
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    RoleFactors,
    SgdConfig,
    StableSchedule,
)
from jaxtrain.config.resilience import HealthConfig, SpikesConfig
from jaxtrain.config.schema import Config, DistributedConfig, MeshConfig, PipelineConfig, ProfileConfig
from jaxtrain.config.tree import flat, keys, value_at
