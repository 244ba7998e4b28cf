"""Causal attention over packed rows."""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxtrain.ops.flash_attention import ATTENTION, flash_attention, why_not
from jaxtrain.sharding import current_layout

MINIMUM_QUERY_BLOCK = 64
MAXIMUM_QUERY_BLOCKS = 16
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def causal_attention(
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq kv_heads head_dim"],
    v: Float[Array, "rows seq kv_heads head_dim"],
    segments: Int[Array, "rows seq"],
    window: int | None = None,
) -> Float[Array, "rows seq heads head_dim"]:
    """Softmax attention where a query sees the keys before it in its own segment, and itself.

    Each group of heads / kv_heads query heads shares a key head (grouped-query attention). `window` w limits a query to
    the w nearest keys, itself included (Mistral, arXiv 2310.06825). Scores and softmax are float32. A segment is a run
    of one id.

    On GPUs flash kernels compute it where they can, and XLA does elsewhere; which, the layout's `choices` tell. The
    result has the name `attention` for rematerialisation.
    """
    layout = current_layout()
    if layout is not None:
        objection = why_not(layout.platform, q.dtype, q.shape[1], q.shape[3])
        layout.choices["attention"] = f"blocks in XLA ({objection})" if objection else "flash kernels in Pallas"
        if objection is None:
            return flash_attention(q, k, v, segments, layout, window)
    return checkpoint_name(_attend_in_blocks(q, k, v, segments, window), ATTENTION)


def _attend_in_blocks(q: Array, k: Array, v: Array, segments: Array, window: int | None) -> Array:
    """The same on any device, in blocks of queries.

    A block multiplies only with the keys that its last query may see, so the upper triangle is neither computed nor
    stored.
    """
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    block = max(MINIMUM_QUERY_BLOCK, -(-length // MAXIMUM_QUERY_BLOCKS))
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first_key = 0 if window is None else max(0, start - window + 1)
        mask = _visible(segments, start, stop, first_key, window)
        outputs.append(_attend(grouped[:, start:stop], k[:, first_key:stop], v[:, first_key:stop], mask))
    return jnp.concatenate(outputs, axis=1).reshape(rows, length, heads, head_dim)


def _visible(
    segments: Int[Array, "rows seq"], start: int, stop: int, first_key: int, window: int | None
) -> Bool[Array, "rows queries keys"]:
    query, key = jnp.arange(start, stop)[:, None], jnp.arange(first_key, stop)[None, :]
    in_reach = key <= query
    if window is not None:
        in_reach &= query - key < window
    return in_reach & (segments[:, start:stop, None] == segments[:, None, first_key:stop])


def _attend(
    q: Float[Array, "rows queries kv_heads group head_dim"],
    k: Float[Array, "rows keys kv_heads head_dim"],
    v: Float[Array, "rows keys kv_heads head_dim"],
    mask: Bool[Array, "rows queries keys"],
) -> Float[Array, "rows queries kv_heads group head_dim"]:
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", probabilities, v)
