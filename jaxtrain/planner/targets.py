"""GPUs that aren't there, as devices to compile for."""

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from jaxtrain.config.cluster import ClusterConfig, GpuConfig
from jaxtrain.errors import ConfigError, first_line

_DESCRIPTION = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  shared_memory_per_core: {gpu.shared_memory_per_core}
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory} memory_bandwidth: {gpu.memory_bandwidth} l2_cache_size: {gpu.l2_cache}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
"""
"""XLA's GpuTargetConfig; the numbers that stand here are the same for all GPUs since 2020."""


def cuda_compiler_missing() -> str:
    """Why nothing can be compiled for a GPU here, and what helps; empty where it can."""
    if any(importlib.util.find_spec(f"jax_plugins.{name}") for name in ("xla_cuda12", "xla_cuda13")):
        return ""
    return "compiling for a GPU needs JAX's CUDA packages, though no GPU: scripts/setup --cuda adds them"


def target_description(gpu: GpuConfig) -> str:
    """The GPU as XLA's compiler reads it, a text proto."""
    major, minor = gpu.compute_capability
    return _DESCRIPTION.format(gpu=gpu, major=major, minor=minor)


def compile_only_devices(cluster: ClusterConfig, devices: int) -> Sequence[jax.Device]:
    """So many GPUs of a cluster, host by host, for which programs can be compiled but not run.

    Raises:
        ConfigError: no CUDA compiler here, or a number of devices that hosts don't hold.
    """
    if missing := cuda_compiler_missing():
        raise ConfigError(missing)
    per_host = min(devices, cluster.devices_per_host)
    if devices < 1 or devices % per_host:
        nearest = max(round(devices / cluster.devices_per_host), 1) * cluster.devices_per_host
        raise ConfigError(f"{devices} devices don't fill hosts of {cluster.devices_per_host}; the nearest is {nearest}")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target_description(cluster.gpu),
            topology=f"{devices // per_host}x{per_host}x1",
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{cluster.gpu.name}: JAX can't compile for it here: {first_line(error)}") from error
    return list(topology.devices)
