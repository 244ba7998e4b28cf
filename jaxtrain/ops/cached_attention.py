"""Attention of one new token of each row to the tokens that a cache remembers."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def cached_attention(
    q: Float[Array, "rows 1 heads head_dim"],
    k: Float[Array, "rows 1 kv_heads head_dim"],
    v: Float[Array, "rows 1 kv_heads head_dim"],
    keys: Float[Array, "rows slots kv_heads head_dim"],
    values: Float[Array, "rows slots kv_heads head_dim"],
    first: Int[Array, " rows"],
    slot: Int[Array, ""],
    window: int | None = None,
) -> Float[Array, "rows 1 heads head_dim"]:
    """What `ops.attention.causal_attention` gives for the token that stands at `slot` of its row.

    The token sees the cache's slots from its row's `first` to `slot` - 1, and itself (`k`, `v`); with a `window` w only
    the w nearest of them. Other slots may hold anything finite. Scores and softmax are float32.
    """
    rows, _, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    keys = jax.lax.dynamic_update_slice_in_dim(keys, k, slot, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(values, v, slot, axis=1)
    place = jnp.arange(keys.shape[1])
    visible = (place >= first[:, None]) & (place <= slot)
    if window is not None:
        visible &= slot - place < window
    scores = jnp.einsum("bkgd,bskd->bkgs", grouped, keys, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    return jnp.einsum("bkgs,bskd->bkgd", probabilities, values).reshape(q.shape)
