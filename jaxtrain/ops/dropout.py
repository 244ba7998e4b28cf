"""Dropout without random state: the mask is a function of (key, site, global row)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def dropout(
    x: Float[Array, "rows ..."], rate: float, key: Key[Array, ""] | None, site: int, rows: Int[Array, " rows"]
) -> Float[Array, "rows ..."]:
    """`x` with a share `rate` of its elements set to 0 and the others scaled by 1 / (1 - rate).

    The key is that of the step and layer, None where nothing is dropped; `site` numbers the places in a layer; `rows`
    are the rows' indices in the global batch. So a row gets the same mask on every mesh, in every split into
    micro-batches, and after every resume.
    """
    if key is None or rate == 0.0:
        return x
    site_key = jax.random.fold_in(key, site)

    def keep(row: Int[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(site_key, row), 1.0 - rate, x.shape[1:])

    return jnp.where(jax.vmap(keep)(rows), x / (1.0 - rate), 0).astype(x.dtype)
