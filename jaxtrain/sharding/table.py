"""The start-up table: each parameter's shape, sharding and bytes per device, and a refusal of silent replication."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jax.sharding import NamedSharding
from rich.table import Table

from jaxtrain.sharding.mesh import MESH_AXES
from jaxtrain.sharding.rules import ShardingError, axes_of

REPLICATED_SHARE_LIMIT = 0.02
"""More than this share of parameter bytes unsharded on a mesh that shards parameters is an error."""


@dataclass(frozen=True)
class TableRow:
    """One parameter as it lies on a device."""

    name: str
    shape: tuple[int, ...]
    sharding: NamedSharding
    bytes_total: int
    bytes_per_device: int
    frozen: bool = False

    @property
    def replicated(self) -> bool:
        """Whether no dimension is split."""
        return self.bytes_total == self.bytes_per_device


def parameter_rows(
    shapes: Mapping[str, tuple[int, ...]], shardings: Mapping[str, NamedSharding], frozen: Collection[str] = ()
) -> list[TableRow]:
    """Rows for float32 parameters with the given shapes and shardings, in the given order; `frozen` by name."""
    rows = []
    for name, shape in shapes.items():
        local = shardings[name].shard_shape(shape)
        total, here = 4 * math.prod(shape), 4 * math.prod(local)
        rows.append(TableRow(name, shape, shardings[name], total, here, name in frozen))
    return rows


def render_table(rows: list[TableRow]) -> Table:
    """The table that a run prints at its start."""
    table = Table(title="parameters", title_justify="left", box=None, pad_edge=False)
    for column in ("parameter", "shape", "split over"):
        table.add_column(column, no_wrap=True)
    table.add_column("MiB per device", justify="right")
    for row in rows:
        spec = ", ".join("×".join(axes_of(entry)) or "·" for entry in row.sharding.spec) or "·"
        shape = "×".join(map(str, row.shape))
        name = f"{row.name} (frozen)" if row.frozen else row.name
        table.add_row(name, shape, spec, f"{row.bytes_per_device / 2**20:,.2f}")
    total, local = sum(row.bytes_total for row in rows), sum(row.bytes_per_device for row in rows)
    table.add_section()
    table.add_row("total", f"{total // 4:,}", f"of {total / 2**20:,.1f} MiB", f"{local / 2**20:,.2f}")
    return table


def refuse_silent_replication(rows: list[TableRow], axis_sizes: Mapping[str, int], allowed: bool) -> None:
    """Raises where parameters that a sharded mesh should split are whole on every device.

    Raises:
        ShardingError: names the parameters and their share of all bytes.
    """
    sharding_axes = [axis for axis in MESH_AXES if axis in ("fsdp", "tensor") and axis_sizes[axis] > 1]
    total = sum(row.bytes_total for row in rows)
    whole = [row for row in rows if row.replicated]
    share = sum(row.bytes_total for row in whole) / max(total, 1)
    if not sharding_axes or allowed or share <= REPLICATED_SHARE_LIMIT:
        return
    largest = sorted(whole, key=lambda row: -row.bytes_total)[:4]
    names = ", ".join(f"{row.name} {row.shape}" for row in largest)
    axes = ", ".join(f"mesh.{axis}={axis_sizes[axis]}" for axis in sharding_axes)
    raise ShardingError(
        f"{share:.1%} of the parameter bytes are whole on every device although {axes}: {names}; "
        f"give these dimensions a logical axis that the mesh splits, or set sharding.allow_replicated: true"
    )
