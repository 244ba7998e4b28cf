"""Muon: the momentum of each layer's matrix, orthogonalised (https://kellerjordan.github.io/posts/muon)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxtrain.config import MuonConfig
from jaxtrain.models.parameters import ParameterInfo
from jaxtrain.optimizer.matrices import MatrixView, each_layer, matrix_view
from jaxtrain.sharding import axes_of, current_layout

CONSISTENT_RMS = 0.2
"""An orthogonal update times 0.2 · √max(in, out) has the root mean square of a usual AdamW update, so that learning
rate and decay can be shared with it (arXiv 2502.16982, section 2.2)."""


class MuonState(NamedTuple):
    """Attributes:
    count: updates done.
    momentum: a tree like the parameters, with None for those that have AdamW.
    """

    count: Any
    momentum: Any


def is_muons(info: ParameterInfo) -> bool:
    """Whether a parameter is Muon's: a matrix of the layers, with inputs and outputs. All else has AdamW."""
    return info.role == "matrix" and matrix_view(info).is_matrix


def scale_by_muon(config: MuonConfig, infos: Any) -> optax.GradientTransformation:
    """Orthogonalised Nesterov momentum with one layer at a time, scaled by the matrix's shape.

    Equal to `optax.contrib.scale_by_muon` and `scale_by_shape` on each layer's matrix alone. It is computed in float32,
    in whatever precision the program multiplies matrices in: in full for `precision: float32`.
    """
    # Without momentum what is left of optax's is the orthogonalisation.
    orthogonalize = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, ns_steps=config.iterations)

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        count = optax.safe_increment(state.count)
        momentum = optax.tree_utils.tree_update_moment(updates, state.momentum, config.momentum, 1)
        ahead = optax.tree_utils.tree_bias_correction(momentum, config.momentum, optax.safe_increment(count))
        here = optax.tree_utils.tree_bias_correction(updates, config.momentum, count)
        nesterov = jax.tree.map(lambda a, b: config.momentum * a + (1 - config.momentum) * b, ahead, here)

        def one(info: ParameterInfo, change: Any) -> Any:
            if change is None:
                return None
            view = matrix_view(info)

            def orthogonal(change: Float[Array, "..."]) -> Float[Array, "..."]:
                matrix = change.reshape(view.matrix_shape)
                return orthogonalize.update(matrix, orthogonalize.init(matrix))[0].reshape(change.shape)

            places = layer_places(view)
            result = each_layer(orthogonal, view)(_move(change, places))
            return _shape_factor(view, config.update_scale) * _move(result, places[::-1])

        return jax.tree.map(one, infos, nesterov), MuonState(count, momentum)

    return optax.GradientTransformation(init, update)


def _shape_factor(view: MatrixView, scale: str) -> float:
    inputs, outputs = view.matrix_shape
    if scale == "width":
        return math.sqrt(max(1.0, outputs / inputs))
    return CONSISTENT_RMS * math.sqrt(max(inputs, outputs))


def layer_places(view: MatrixView) -> list[NamedSharding]:
    """From where a parameter is stored to where each device holds whole layers, as far as their number divides.

    The iterations multiply a matrix by itself: one that is split is gathered again and again, one that lies whole on
    its device is not. Memory stays the same: a mesh axis that takes layers is taken from the matrix. One axis moves at
    a time, since XLA makes an all-to-all of that, and replicates the array to move two.
    """
    layout = current_layout()
    if layout is None or not layout.splits:
        return []
    stored = layout.moment(view.axes, view.shape, "parameter")
    places, spec = [stored], [axes_of(entry) for entry in stored.spec]
    for axis in [axis for entry in spec[view.stacked :] for axis in reversed(entry)] if view.stacked else []:
        if view.shape[0] % layout.size(*spec[0], axis) == 0:
            spec = [tuple(other for other in entry if other != axis) for entry in spec]
            spec[0] = (*spec[0], axis)
            places.append(NamedSharding(layout.mesh, PartitionSpec(*(entry or None for entry in spec))))
    return places


def _move(x: Array, places: Sequence[NamedSharding]) -> Array:
    for place in places:
        x = jax.lax.with_sharding_constraint(x, place)
    return x
