"""Norms of single parameters, layer by layer, measured inside the train step."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxtrain.models.parameters import ParameterInfo, named_leaves

KINDS = ("gradient_norm", "parameter_norm", "update_norm")
"""Of the gradient before clipping, of the parameter before the update, and of what the update added to it."""


def measure_norms(infos: Any, gradients: Any, before: Any, after: Any) -> Float[Array, "kinds rows"]:
    """The norm of each parameter, or of each layer of a stacked one, in the order of `name_norms`.

    Args:
        infos: a tree of `ParameterInfo`; the others are trees like it, and may be sharded in any way.
        gradients: with None for frozen parameters, whose norm is 0.
        before, after: the parameters before and after the update.
    """
    update = jax.tree.map(jnp.subtract, after, before)
    trees = [named_leaves(tree) for tree in (gradients, before, update)]
    return jnp.stack(
        [
            jnp.concatenate([_norms_of_leaf(tree.get(name), info) for name, info in named_leaves(infos).items()])
            for tree in trees
        ]
    )


def name_norms(infos: Any, norms: Float[np.ndarray, "kinds rows"]) -> dict[str, dict[str, float | list[float]]]:
    """What `measure_norms` returned, by kind and parameter: its norm, or a list with that of each layer."""
    return {kind: dict(_named_rows(infos, row)) for kind, row in zip(KINDS, norms, strict=True)}


def _norms_of_leaf(leaf: Float[Array, "..."] | None, info: ParameterInfo) -> Float[Array, " rows"]:
    if leaf is None:
        return jnp.zeros(_row_count(info), jnp.float32)
    # Summed over axes as they are: reshaped first, a split dimension would be gathered.
    stacked = int(info.is_stacked)
    sums = jnp.sum(jnp.square(leaf), axis=range(stacked, leaf.ndim))
    return jnp.sqrt(jnp.atleast_1d(sums))


def _named_rows(infos: Any, row: Float[np.ndarray, " rows"]) -> Iterator[tuple[str, float | list[float]]]:
    first = 0
    for name, info in named_leaves(infos).items():
        count = _row_count(info)
        # As decimals of float32: half as many digits, and the same number.
        values = [float(str(norm)) for norm in row[first : first + count]]
        yield name, values if info.is_stacked else values[0]
        first += count


def _row_count(info: ParameterInfo) -> int:
    return info.shape[0] if info.is_stacked else 1
