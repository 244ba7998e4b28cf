"""Where arrays live: the mesh, the two maps from logical axes to mesh axes, and the constraint helper."""

from jaxtrain.config import BATCH_AXES
from jaxtrain.sharding.layout import Layout, constrain, current_layout, use_layout
from jaxtrain.sharding.mesh import MESH_AXES, PIPELINE, make_mesh
from jaxtrain.sharding.rules import ACTIVATION_RULES, PARAMETER_RULES, ShardingError, axes_of, padded, partition_spec
