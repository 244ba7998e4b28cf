"""Where arrays live: the mesh, the two maps from logical axes to mesh axes, and the constraint helper."""

from jaxtrain.config import BATCH_AXES
from jaxtrain.sharding.layout import Layout, Zero, constrain, current_layout, use_layout
from jaxtrain.sharding.mesh import MESH_AXES, PIPELINE, make_mesh
from jaxtrain.sharding.rules import ACTIVATION_RULES, PARAMETER_RULES, ShardingError, partition_spec

__all__ = [
    "ACTIVATION_RULES",
    "BATCH_AXES",
    "MESH_AXES",
    "PARAMETER_RULES",
    "PIPELINE",
    "Layout",
    "ShardingError",
    "Zero",
    "constrain",
    "current_layout",
    "make_mesh",
    "partition_spec",
    "use_layout",
]
