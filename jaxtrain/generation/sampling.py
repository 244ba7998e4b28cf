"""Choosing the next token from its logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


class Sampling(NamedTuple):
    """How a token is drawn. None switches a part off, at no cost; numbers are inputs of the compiled program.

    Attributes:
        temperature: logits are divided by it; None takes the likeliest token (of equal ones the lower id).
        top_k: only the k likeliest tokens are drawn.
        top_p: only the fewest likeliest tokens that have this probability together (arXiv 1904.09751), counted after
            temperature and `top_k`.
    """

    temperature: Float[Array, ""] | float | None = None
    top_k: Int[Array, ""] | int | None = None
    top_p: Float[Array, ""] | float | None = None


def choose(
    logits: Float[Array, "rows vocab"], sampling: Sampling, keys: Key[Array, " rows"] | None
) -> Int[Array, " rows"]:
    """One token for each row, drawn with its own key; no keys are needed without a temperature."""
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert keys is not None
    kept = likeliest(logits, sampling)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


def likeliest(logits: Float[Array, "rows vocab"], sampling: Sampling) -> Float[Array, "rows vocab"]:
    """The logits at this temperature, those of tokens that are not drawn at -inf.

    Of equally likely tokens, lower ids come first: exactly k are kept, and no more than `top_p` needs.
    """
    assert sampling.temperature is not None
    # The largest becomes 0, so that no temperature makes it overflow; smaller ones than this count as 0.
    temperature = jnp.maximum(sampling.temperature, jnp.finfo(jnp.float32).tiny)
    logits = (logits - logits.max(-1, keepdims=True)) / temperature
    if sampling.top_k is None and sampling.top_p is None:
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    if sampling.top_k is not None:
        ranked = jnp.where(jnp.arange(logits.shape[-1]) < sampling.top_k, ranked, -jnp.inf)
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(ranked, axis=-1)
        likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
        first = jnp.arange(logits.shape[-1]) == 0  # also where float32 makes 0 of the probability asked for
        ranked = jnp.where(first | (likelier < sampling.top_p), ranked, -jnp.inf)
    # Drawn by id and not by rank: two tokens that are about as likely may swap ranks on another mesh.
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
