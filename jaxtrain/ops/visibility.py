"""What a query of a packed row sees, and which blocks of keys a kernel has to visit for that.

A document is a run of equal segment ids. Causality, document and window together leave each query one interval of keys
that ends at itself, and each key one interval of queries that begins at itself. No end ever moves back along a row, so
a block of queries needs one interval of key blocks, and the other way round.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Intervals(NamedTuple):
    """Query i sees the keys first_key[i] … i, so key j is seen by the queries j … last_query[j]."""

    first_key: Int[Array, "rows seq"]
    last_query: Int[Array, "rows seq"]


def intervals(segments: Int[Array, "rows seq"], window: int | None) -> Intervals:
    """What is visible where a query sees the `window` nearest keys of its own run, itself included (None: all)."""
    length = segments.shape[1]
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape)
    changes = segments[:, 1:] != segments[:, :-1]
    edge = jnp.ones((segments.shape[0], 1), bool)
    starts, ends = jnp.concatenate((edge, changes), axis=1), jnp.concatenate((changes, edge), axis=1)
    first = jax.lax.cummax(jnp.where(starts, position, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, position, length - 1), axis=1, reverse=True)
    if window is not None:
        first, last = jnp.maximum(first, position - window + 1), jnp.minimum(last, position + window - 1)
    return Intervals(first, last)


class Visit(NamedTuple):
    """Block numbers begin ≤ whole_begin ≤ whole_end ≤ end: those to visit, and among them those without a mask."""

    begin: Int[Array, "rows blocks"]
    whole_begin: Int[Array, "rows blocks"]
    whole_end: Int[Array, "rows blocks"]
    end: Int[Array, "rows blocks"]


def key_blocks(first_key: Int[Array, "rows seq"], queries: int, keys: int) -> Visit:
    """For each block of so many `queries`: the blocks of so many `keys` that one of them sees, that all see whole."""
    first_query = jnp.arange(0, first_key.shape[1], queries, dtype=jnp.int32)
    seen_by_first, seen_by_last = first_key[:, ::queries], first_key[:, queries - 1 :: queries]
    whole_begin = -(-seen_by_last // keys)
    whole_end = jnp.maximum((first_query + 1) // keys, whole_begin)
    end = jnp.broadcast_to((first_query + queries - 1) // keys + 1, whole_begin.shape)
    return Visit(seen_by_first // keys, whole_begin, whole_end, end)


def query_blocks(last_query: Int[Array, "rows seq"], keys: int, queries: int) -> Visit:
    """For each block of so many `keys`: the blocks of so many `queries` that see one of them, that see all."""
    first_key = jnp.arange(0, last_query.shape[1], keys, dtype=jnp.int32)
    of_first, of_last = last_query[:, ::keys], last_query[:, keys - 1 :: keys]
    begin = jnp.broadcast_to(first_key // queries, of_first.shape)
    whole_begin = -(-(first_key + keys - 1) // queries)
    whole_end = jnp.maximum((of_first + 1) // queries, whole_begin)
    return Visit(begin, jnp.broadcast_to(whole_begin, of_first.shape), whole_end, of_last // queries + 1)
