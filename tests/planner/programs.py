"""Small programs whose collectives are known by hand, compiled for virtual CPU devices and for absent GPUs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.config.cluster import load_cluster
from jaxtrain.executables import without_compile_cache
from jaxtrain.planner import CompiledProgram, compile_only_devices, cuda_compiler_missing
from jaxtrain.planner.compiled import read_memory

needs_cuda_compiler = pytest.mark.skipif(bool(cuda_compiler_missing()), reason=cuda_compiler_missing())

PLATFORMS = ["cpu", pytest.param("cuda", marks=needs_cuda_compiler)]

AXES = {"data": 2, "fsdp": 4}


@functools.cache
def make_mesh(platform: str) -> Mesh:
    """Eight devices, data=2 × fsdp=4: virtual ones, or H100s that aren't there."""
    devices = jax.devices() if platform == "cpu" else compile_only_devices(load_cluster("h100"), 8)
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=kinds, devices=list(devices))


def read(
    platform: str,
    function: Callable[..., Any],
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
    **shapes: tuple[int, ...],
) -> CompiledProgram:
    """`function` under `shard_map` over all axes, compiled and read; `shapes` are its float32 arguments, by name."""
    mesh = make_mesh(platform)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
    arguments = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for (name, shape), spec in zip(shapes.items(), in_specs, strict=True)
    }
    jitted = jax.jit(lambda state: mapped(*(state[name] for name in shapes)))
    with without_compile_cache():
        compiled = jitted.trace(arguments).lower(lowering_platforms=(platform,)).compile()
    return CompiledProgram(compiled.as_text(), mesh.shape, read_memory(compiled))


def totals(program: CompiledProgram) -> Mapping[tuple[str, tuple[str, ...]], int]:
    """Bytes by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for collective in program.collectives:
        key = (collective.kind, collective.axes)
        found[key] = found.get(key, 0) + collective.nbytes
    return found
