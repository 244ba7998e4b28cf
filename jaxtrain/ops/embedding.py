"""Embedding lookup in a table that is split over the mesh."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxtrain.sharding import BATCH_AXES, Layout, current_layout


def embed(
    table: Float[Array, "vocab embed"], ids: Int[Array, "rows seq"], dtype: jnp.dtype
) -> Float[Array, "rows seq embed"]:
    """The table's rows at `ids`, as `dtype`, with the sharding of the residual stream.

    The table (float32, vocab over `tensor`, embed over `fsdp`) is cast before it is gathered over `fsdp`. Each tensor
    shard looks up the ids that it holds; the sum over shards leaves the sequence split over `tensor`. The gradient is
    added up in float32. The ids must lie in [0, vocab): the data pipeline has checked them.
    """
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return _lookup(table, ids, table.shape[0], dtype, ())
    return _embed_on_mesh(table, ids, dtype, layout)


def _embed_on_mesh(table: Array, ids: Array, dtype: jnp.dtype, layout: Layout) -> Array:
    fsdp, tensor = layout.split_axes("fsdp"), layout.split_axes("tensor")
    batch = layout.split_axes(*BATCH_AXES)

    def local(table: Array, ids: Array) -> Array:
        vocab = table.shape[0]
        if not tensor:
            return _lookup(table, ids, vocab, dtype, fsdp)
        local_ids = ids - jax.lax.axis_index(tensor) * vocab
        mine = (local_ids >= 0) & (local_ids < vocab)
        rows = jnp.where(mine[..., None], _lookup(table, jnp.where(mine, local_ids, 0), vocab, dtype, fsdp), 0)
        return jax.lax.psum_scatter(rows, tensor, scatter_dimension=1, tiled=True)

    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(tensor or None, fsdp or None), PartitionSpec(batch or None)),
        out_specs=PartitionSpec(batch or None, tensor or None),
        check_vma=False,
    )(table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _lookup(table: Array, ids: Array, vocab: int, dtype: jnp.dtype, fsdp: tuple[str, ...]) -> Array:
    """The rows at `ids` of this device's part of the table, whole over `fsdp`."""
    if not fsdp:
        return table[ids].astype(dtype)
    return jax.lax.all_gather(table.astype(dtype), fsdp, axis=1, tiled=True)[ids]


def _lookup_forward(
    table: Array, ids: Array, vocab: int, dtype: jnp.dtype, fsdp: tuple[str, ...]
) -> tuple[Array, Array]:
    return _lookup(table, ids, vocab, dtype, fsdp), ids


def _lookup_backward(
    vocab: int, dtype: jnp.dtype, fsdp: tuple[str, ...], ids: Array, gradient: Array
) -> tuple[Array, None]:
    # Derived by JAX, this sum would have the rows' dtype: in bfloat16 a frequent token's gradient stops growing.
    total = jnp.zeros((vocab, gradient.shape[-1]), jnp.float32).at[ids].add(gradient.astype(jnp.float32))
    return jax.lax.psum_scatter(total, fsdp, scatter_dimension=1, tiled=True) if fsdp else total, None


_lookup.defvjp(_lookup_forward, _lookup_backward)
