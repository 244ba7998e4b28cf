"""What must be decided before JAX wakes up: XLA's flags and the compile cache, all in one place."""

import hashlib
import os
import platform
from pathlib import Path

from jaxtrain.config import Config
from jaxtrain.errors import refusing_os_errors


def xla_flags(config: Config) -> list[str]:
    """The flags that this config adds to XLA_FLAGS."""
    return ["--xla_gpu_deterministic_ops=true"] if config.deterministic else []


def configure(config: Config) -> None:
    """Sets the environment for JAX; call it before jax is imported. What the user has set in XLA_FLAGS stays."""
    present = os.environ.get("XLA_FLAGS", "").split()
    added = [flag for flag in xla_flags(config) if flag not in present]
    if present or added:
        os.environ["XLA_FLAGS"] = " ".join(present + added)
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = str(config.compile_cache is not None).lower()
    if config.compile_cache is not None:
        _share_compile_cache(config.compile_cache)


def _share_compile_cache(root: Path) -> None:
    """Keeps what took a moment to compile, in a directory for each kind of processor, since CPU code differs."""
    directory = root / _processor()
    with refusing_os_errors(f"compile_cache={root}", "choose a directory that can be written, or null for none"):
        directory.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _processor() -> str:
    """A name for the instructions that this machine's processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
