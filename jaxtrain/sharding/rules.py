"""Two maps from logical axes (what a dimension is) to mesh axes (where it is split).

They differ in what makes FSDP: a parameter's `embed` is split over `fsdp`, an activation's is not.
"""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxtrain.config import BATCH_AXES
from jaxtrain.errors import ConfigError

Rules = Mapping[str, tuple[str, ...]]

_EVERYWHERE: Rules = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_dim": (),
    "layers": (),
}

STORED_IN_PARTS = ("fsdp", "pipeline")
"""The mesh axes between which a weight is divided where it is stored. Stages of a pipeline divide it too, whichever of
them computes with it: so the state is the same tree for every schedule, and no stage holds more than another."""

PARAMETER_RULES: Rules = {**_EVERYWHERE, "embed": STORED_IN_PARTS, "norm": ()}
"""`norm` is a scale vector's only dimension: too small to be worth a gather, so it is replicated."""

ACTIVATION_RULES: Rules = {
    **_EVERYWHERE,
    "embed": (),
    "batch": BATCH_AXES,
    "seq": ("context",),
    "residual_seq": ("context", "tensor"),
}
"""`residual_seq` is the sequence between the tensor regions, where it is split over `tensor` too."""


class ShardingError(ConfigError):
    """A logical axis that is unknown, doesn't divide, or collides with another on the same mesh axis."""


def with_own_rules(own: Mapping[str, Sequence[str]]) -> tuple[Rules, Rules]:
    """The rules of parameters and of activations with somebody's own logical axes among them.

    A mesh axis that splits the rows of a batch splits an own axis in parameters only, as it does with `embed`.

    Raises:
        ShardingError: an own axis has the name of a standard one.
    """
    for name in own:
        if name in PARAMETER_RULES or name in ACTIVATION_RULES:
            raise ShardingError(f"sharding.rules.{name}: this logical axis has a rule already; choose another name")
    parameters = {
        name: tuple(part for axis in axes for part in (STORED_IN_PARTS if axis == "fsdp" else (axis,)))
        for name, axes in own.items()
    }
    activations = {name: tuple(axis for axis in axes if axis not in BATCH_AXES) for name, axes in own.items()}
    return {**PARAMETER_RULES, **parameters}, {**ACTIVATION_RULES, **activations}


def split_over_data(rules: Rules) -> Rules:
    """The rules of what ZeRO splits over `data`: what is stored in parts is divided further."""
    return {name: (*axes, "data") if "fsdp" in axes else axes for name, axes in rules.items()}


def partition_spec(
    rules: Rules, axes: Sequence[str | None], shape: Sequence[int], axis_sizes: Mapping[str, int], what: str
) -> PartitionSpec:
    """The spec of an array of `shape` whose dimensions are named by `axes` (None: not split).

    Mesh axes of size 1 are left out. `what` names the array in errors.

    Raises:
        ShardingError: an unknown logical axis, a dimension that its mesh axes don't divide, a mesh axis used twice.
    """
    if len(axes) != len(shape):
        raise ShardingError(
            f"{what}: {len(shape)} dimensions {tuple(shape)} but {len(axes)} logical axes {tuple(axes)}"
        )
    taken: dict[str, str] = {}
    entries: list[tuple[str, ...] | str | None] = []
    for name, size in zip(axes, shape, strict=True):
        mesh_axes = tuple(axis for axis in _lookup(rules, name, what) if axis_sizes[axis] > 1)
        for axis in mesh_axes:
            if axis in taken:
                raise ShardingError(f"{what}: logical axes {taken[axis]!r} and {name!r} both map to mesh axis {axis!r}")
            taken[axis] = str(name)
        parts = math.prod(axis_sizes[axis] for axis in mesh_axes)
        if size % parts:
            keys = " × ".join(f"mesh.{axis}={axis_sizes[axis]}" for axis in mesh_axes)
            nearest = max(size // parts, 1) * parts
            raise ShardingError(
                f"{what}: dimension {name!r} has size {size}, which {keys} doesn't divide; "
                f"nearest size that works: {nearest}"
            )
        entries.append(mesh_axes if len(mesh_axes) > 1 else mesh_axes[0] if mesh_axes else None)
    return PartitionSpec(*entries)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in an entry of a `PartitionSpec`, outermost first."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def padded(spec: PartitionSpec, dimensions: int) -> PartitionSpec:
    """The same with an entry for each of so many dimensions."""
    return PartitionSpec(*spec, *(None,) * (dimensions - len(spec)))


def _lookup(rules: Rules, name: str | None, what: str) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in rules:
        raise ShardingError(f"{what}: unknown logical axis {name!r}; known: {', '.join(sorted(rules))}")
    return rules[name]
