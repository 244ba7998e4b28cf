"""Which devices each process of a machine gets."""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.config import Config
from jaxtrain.config.checks.problems import divisors
from jaxtrain.errors import ConfigError
from jaxtrain.runtime import cpu_devices


def share_of_devices(
    config: Config, processes: int, slots: int, environment: Mapping[str, str]
) -> tuple[int, list[dict[str, str]]]:
    """How many devices each process has, and what each slot must be told so that it has its own.

    GPUs are divided among all slots, in order. Where there are none, each process makes devices of the processor, as
    many as `cpu_devices` says, or one.

    Raises:
        ConfigError: the GPUs don't divide, or there is no device.
    """
    gpus = visible_gpus(environment)
    if gpus:
        share, left = divmod(len(gpus), slots)
        if left or not share:
            raise ConfigError(
                f"{len(gpus)} GPUs don't divide among {slots} processes and spares; "
                f"--processes and --spares together may be {divisors(len(gpus))}"
            )
        parts = [gpus[slot * share : (slot + 1) * share] for slot in range(slots)]
        return share, [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
    given = environment.get("JAX_NUM_CPU_DEVICES", "")
    if forced or given.isdecimal():
        found = int(forced[1] if forced else given)
        if found < 1:
            raise ConfigError(
                f"{f'XLA_FLAGS={forced[0]}' if forced else 'JAX_NUM_CPU_DEVICES=0'}: at least 1 is needed"
            )
        return found, []
    alone = cpu_devices(config, len(os.sched_getaffinity(0)))
    devices = alone if processes == 1 else config.cpu_devices or 1
    return devices, [{"JAX_NUM_CPU_DEVICES": str(devices)}] * slots


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that JAX would use here, as CUDA_VISIBLE_DEVICES names them; found without opening any."""
    platforms = environment.get("JAX_PLATFORMS", "")
    wanted = not platforms or bool({"cuda", "gpu"} & set(platforms.split(",")))
    if not wanted or not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return []
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")]
    drivers = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number, _ in enumerate(drivers.iterdir())] if drivers.is_dir() else []
