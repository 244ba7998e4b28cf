"""XLA's flags for tests, in this process and in its children. Imports nothing, since they must be set before JAX is."""

FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Without LLVM's optimisations and without the MLIR in which XLA writes fusions: a third of the time to compile.

JAX traces and XLA partitions the same programs; only the code of their loops is written otherwise.
"""

AS_USERS_COMPILE = {"xla_cpu_use_fusion_emitters": True}
"""Compiler options that take that back, where last bits matter: fusions written otherwise round otherwise."""


def virtual_devices(count: int) -> str:
    """The flag that makes so many devices of the processor."""
    return f"--xla_force_host_platform_device_count={count}"
