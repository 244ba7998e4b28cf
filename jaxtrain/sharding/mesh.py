"""The one place where a device mesh is made."""

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

PIPELINE = "pipeline"
MESH_AXES = (PIPELINE, "data", "fsdp", "expert", "context", "tensor")
"""Outermost first: neighbours in the last axis are the closest devices, and tensor parallelism talks most."""


def make_mesh(axis_sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of `devices` with all of `MESH_AXES`, each of the given size.

    The axes are `Auto`: shardings are propagated by the compiler from constraints (`jax.make_mesh` would make them
    Explicit). The sizes must multiply to the number of devices, which `config.resolve_mesh` has checked.
    """
    shape = tuple(axis_sizes[axis] for axis in MESH_AXES)
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=list(devices))
