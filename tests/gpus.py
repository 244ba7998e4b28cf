"""GPUs that aren't there, to compile for."""

import importlib.util

import jax
import pytest
from jax.experimental import topologies

needs_cuda_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda12") is None,
    reason="compiling for a GPU needs JAX's CUDA packages (the extra cuda12), though no GPU",
)

_SAME = """
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
"""
_OWN = {
    "h100": """
      core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 cuda_compute_capability { major: 9 }
      shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472 l2_cache_size: 52428800
      memory_bandwidth: 3352320000000 device_memory_size: 84942979072
    """,
    "a100": """
      core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 cuda_compute_capability { major: 8 }
      shared_memory_per_block_optin: 166912 shared_memory_per_core: 167936 l2_cache_size: 41943040
      memory_bandwidth: 2039040000000 device_memory_size: 85100068864
    """,
}


def gpu(name: str) -> jax.Device:
    """One GPU, `h100` or `a100`."""
    target = (
        f'gpu_device_info {{ {_SAME} {_OWN[name]} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}'
    )
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1").devices[0]
