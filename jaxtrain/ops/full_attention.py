"""Attention in which every position sees every other, as in encoders of images."""

import jax
from jaxtyping import Array, Float


def full_attention(
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq heads head_dim"],
    v: Float[Array, "rows seq heads head_dim"],
) -> Float[Array, "rows seq heads head_dim"]:
    """softmax(q kᵀ / √head_dim) v for each head, scores and softmax in float32 (arXiv 1706.03762).

    Rows have no padding and are short (an image's patches), so the scores are held whole.
    """
    return jax.nn.dot_product_attention(q, k, v)
