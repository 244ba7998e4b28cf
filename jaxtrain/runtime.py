"""What must be decided before JAX wakes up: XLA's flags and the compile cache, all in one place."""

import contextlib
import hashlib
import math
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from jaxtrain.config import Config, MeshConfig
from jaxtrain.errors import refusing_os_errors

_CLOCKS_DIFFER = 60.0
"""Seconds by which a file server's clock may be behind."""
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_OF_SEVERAL_PROCESSES = ("JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def xla_flags(config: Config) -> list[str]:
    """The flags that this config adds to XLA_FLAGS."""
    return ["--xla_gpu_deterministic_ops=true"] if config.deterministic else []


def configure(config: Config) -> None:
    """Sets the environment for JAX; call it before a device is used. What the user has set in XLA_FLAGS stays."""
    present = os.environ.get("XLA_FLAGS", "").split()
    added = [flag for flag in xla_flags(config) if flag not in present]
    if present or added:
        os.environ["XLA_FLAGS"] = " ".join(present + added)
    if _DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):  # else the user has divided the processor
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(cpu_devices(config, len(os.sched_getaffinity(0)))))
    _set("jax_num_cpu_devices", int, unless_other_than=-1)
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = str(config.compile_cache is not None).lower()
    _set("jax_enable_compilation_cache", lambda text: text == "true", unless_other_than=True)
    if config.compile_cache is not None:
        _share_compile_cache(config.compile_cache)
        _set("jax_persistent_cache_min_compile_time_secs", float, unless_other_than=1.0)
        _set("jax_compilation_cache_dir", str, unless_other_than=None)


def cpu_devices(config: Config, cores: int) -> int:
    """CPU devices for a run on a machine with so many cores.

    Left to us, one a core: a matrix product scales worse over a device's threads than rows over devices (18 % slower
    on two cores). So many that they divide the batches; and only one for each of several processes, which share the
    cores, and on a mesh that is spelled out.
    """
    if config.cpu_devices is not None:
        return config.cpu_devices
    alone = config.distributed.coordinator is None and not any(name in os.environ for name in _OF_SEVERAL_PROCESSES)
    if not alone or config.mesh != MeshConfig():
        return 1
    rows = math.gcd(*(size // (config.microbatch or 1) for size in config.batches.sizes), config.eval_batch)
    return max(count for count in range(1, max(cores, 1) + 1) if rows % count == 0)


def _share_compile_cache(root: Path) -> None:
    """Keeps what took a moment to compile, in a directory for each kind of processor, since CPU code differs."""
    directory = root / _processor()
    with refusing_os_errors(f"compile_cache={root}", "choose a directory that can be written, or null for none"):
        directory.mkdir(parents=True, exist_ok=True)
    drop_torn_programs(directory)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def drop_torn_programs(directory: Path) -> None:
    """Deletes compiled programs that a killed process has half written.

    JAX writes them in place and never again: without this, every start would find such a one, warn, and compile anew.
    Only what is newer than the last look is read. One that another process writes just now may be deleted too: that
    process has it, and the next one compiles it again.
    """
    looked, now = directory / "looked-through", time.time()
    with contextlib.suppress(OSError):
        since = looked.stat().st_mtime - _CLOCKS_DIFFER if looked.exists() else 0.0
        for program in directory.glob("*-cache"):
            if program.stat().st_mtime >= since and _is_torn(program):
                program.unlink()
        looked.touch()
        os.utime(looked, (now, now))


def _is_torn(program: Path) -> bool:
    """Whether this is a zlib stream, as JAX writes where it has no zstandard, that lacks its end or was altered."""
    stream = zlib.decompressobj()
    with program.open("rb") as file:
        chunk = file.read(2**20)
        if chunk[:1] not in (b"", b"\x78"):
            return False
        try:
            while chunk:
                stream.decompress(chunk)
                chunk = file.read(2**20)
        except zlib.error:
            return True
    return not stream.eof


def _set(name: str, kind: Callable[[str], object], unless_other_than: object) -> None:
    """For commands that need JAX to read their config: it read the environment before, and has its default."""
    jax = sys.modules.get("jax")
    if jax is not None and name.upper() in os.environ and getattr(jax.config, name) == unless_other_than:
        jax.config.update(name, kind(os.environ[name.upper()]))


def _processor() -> str:
    """A name for the instructions that this machine's processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
