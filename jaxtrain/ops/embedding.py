"""Embedding lookup in a table that is split over the mesh."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxtrain.sharding import Layout, current_layout


def embed(
    table: Float[Array, "vocab embed"], ids: Int[Array, "rows seq"], dtype: jnp.dtype
) -> Float[Array, "rows seq embed"]:
    """The table's rows at `ids`, as `dtype`, with the sharding of the residual stream.

    The table is float32, vocab over `tensor`, embed over `fsdp`; nobody gathers it. The ids are gathered over `fsdp`
    instead: each device looks up its part of every row, and one all-to-all gives each device its own rows whole. Each
    tensor shard looks up the ids that it holds; the sum over shards leaves the sequence split over `tensor` where the
    layout splits it. So what travels is as large as the device's part of the residual, where the table may be many
    times that. The gradient is added up in float32. The ids must lie in [0, vocab): the data pipeline has checked them.
    """
    layout = current_layout()
    if layout is None or not layout.splits:
        return _lookup(table, ids, table.shape[0], dtype)
    return _embed_on_mesh(table, ids, dtype, layout)


def _embed_on_mesh(table: Array, ids: Array, dtype: jnp.dtype, layout: Layout) -> Array:
    stored, tensor, batch = layout.weight_axes, layout.split_axes("tensor"), layout.batch_axes
    sequence = tensor if "tensor" in layout.activation_rules["residual_seq"] else ()

    def local(table: Array, ids: Array) -> Array:
        if stored:
            ids = jax.lax.all_gather(ids, stored, axis=0, tiled=True)
        rows = _rows_of_shard(table, ids, dtype, tensor)
        if sequence:
            rows = jax.lax.psum_scatter(rows, sequence, scatter_dimension=1, tiled=True)
        elif tensor:
            rows = jax.lax.psum(rows, tensor)
        return jax.lax.all_to_all(rows, stored, split_axis=0, concat_axis=2, tiled=True) if stored else rows

    given = (PartitionSpec(tensor or None, stored or None), PartitionSpec(batch or None))
    rows: Array = layout.shard_map(local, given, PartitionSpec(batch or None, sequence or None))(table, ids)
    return rows


def _rows_of_shard(table: Array, ids: Array, dtype: jnp.dtype, tensor: tuple[str, ...]) -> Array:
    """The rows at `ids` that this tensor shard holds, and zeros for the others."""
    vocab = table.shape[0]
    if not tensor:
        return _lookup(table, ids, vocab, dtype)
    local_ids = ids - jax.lax.axis_index(tensor) * vocab
    mine = (local_ids >= 0) & (local_ids < vocab)
    return jnp.where(mine[..., None], _lookup(table, jnp.where(mine, local_ids, 0), vocab, dtype), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Array, ids: Array, vocab: int, dtype: jnp.dtype) -> Array:
    return table[ids].astype(dtype)


def _lookup_forward(table: Array, ids: Array, vocab: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    return _lookup(table, ids, vocab, dtype), ids


def _lookup_backward(vocab: int, dtype: jnp.dtype, ids: Array, gradient: Array) -> tuple[Array, None]:
    # Derived by JAX, this sum would have the rows' dtype: in bfloat16 a frequent token's gradient stops growing.
    return jnp.zeros((vocab, gradient.shape[-1]), jnp.float32).at[ids].add(gradient.astype(jnp.float32)), None


_lookup.defvjp(_lookup_forward, _lookup_backward)
