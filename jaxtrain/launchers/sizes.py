"""With how many processes a config can train, and what must change in it for fewer than it was written for.

Global batch, data order and learning rate stay. The mesh gets smaller along `data`, or where that can't be along
`fsdp`; a device's pass never gets larger than at full size, so that what fitted into its memory does still: there are
more passes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.config import BATCH_AXES, Config, check_layout, resolve_mesh
from jaxtrain.config.checks.problems import listed
from jaxtrain.config.source import OVERRIDE
from jaxtrain.errors import ConfigError

SHRINKING_AXES = ("data", "fsdp")
"""Where a mesh that is spelled out gets smaller, the first that can."""


@dataclass(frozen=True)
class Size:
    """A number of processes that can train, and the overrides that the config needs for it."""

    processes: int
    overrides: tuple[str, ...] = ()


def workable_sizes(config: Config, devices: int, most: int) -> dict[int, Size]:
    """The numbers of processes, up to `most`, with which the config trains, each with `devices` devices.

    The config is for `most` of them; all checks that a start makes on the mesh are made here.

    Raises:
        ConfigError: it can't train with `most`.
    """
    full = _mesh(config, devices * most)
    sizes = {most: Size(most)}
    for processes in range(1, most):
        overrides = _overrides(config, full, devices * processes)
        if overrides is not None:
            sizes[processes] = Size(processes, overrides)
    return sizes


def with_overrides(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The arguments of a training with overrides that take the place of those which set the same keys."""

    def key(argument: str) -> str | None:
        match = OVERRIDE.fullmatch(argument)
        return None if match is None else match["key"]

    keys = {key(override) for override in overrides}
    return [*(argument for argument in arguments if key(argument) is None or key(argument) not in keys), *overrides]


def largest(sizes: Mapping[int, Size], at_most: int, at_least: int) -> Size | None:
    """The largest of the sizes between two; None: there is none."""
    fitting = [processes for processes in sizes if at_least <= processes <= at_most]
    return sizes[max(fitting)] if fitting else None


def in_words(sizes: Mapping[int, Size]) -> str:
    """The numbers of processes, for a person."""
    return listed(sorted(sizes))


def _mesh(config: Config, devices: int) -> dict[str, int]:
    """The mesh on so many devices, checked as a start checks it."""
    sizes = resolve_mesh(config.mesh, devices, config.origins)
    check_layout(config, sizes)
    return sizes


def _overrides(config: Config, full: Mapping[str, int], devices: int) -> tuple[str, ...] | None:
    """What makes the config train on `devices` instead of those of the mesh `full`; None: nothing does."""
    for mesh in ({}, *(_shrunk(full, axis, devices) for axis in SHRINKING_AXES)):
        if mesh is None:
            continue
        try:
            changed = config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh)})
            sizes = resolve_mesh(changed.mesh, devices)
            microbatch = _microbatch(config, full, sizes)
            changed = changed.model_copy(update={"microbatch": microbatch})
            check_layout(changed, sizes)
        except ConfigError:
            continue
        keys = [f"mesh.{axis}={size}" for axis, size in mesh.items() if size != full[axis]]
        return (*keys, *((f"microbatch={microbatch}",) if microbatch != config.microbatch else ()))
    return None


def _shrunk(full: Mapping[str, int], axis: str, devices: int) -> dict[str, int] | None:
    """The mesh with one axis changed so that it has so many devices; None: that axis can't."""
    others = math.prod(full.values()) // full[axis]
    return None if devices % others else {**full, axis: devices // others}


def _microbatch(config: Config, full: Mapping[str, int], sizes: Mapping[str, int]) -> int | None:
    """Examples per device and pass: as many as at full size, or the next fewer that divide every batch."""
    rows = config.batches.sizes
    most = config.microbatch or max(size // _shards(full) for size in rows)
    share = math.gcd(*(size // _shards(sizes) for size in rows))
    if config.microbatch is None and all(size // _shards(sizes) <= most for size in rows):
        return None
    return max((count for count in range(1, most + 1) if share % count == 0), default=None)


def _shards(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in BATCH_AXES)
