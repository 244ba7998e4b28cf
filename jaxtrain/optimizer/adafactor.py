"""Adafactor's second moment: a number for each row and column of each layer's matrix (arXiv 1804.04235)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxtrain.config import AdafactorConfig
from jaxtrain.models.parameters import ParameterInfo
from jaxtrain.optimizer.matrices import MatrixView, each_layer, matrix_view


class AdafactorState(NamedTuple):
    """The moments, each a tree like the parameters with None where a parameter has no such moment.

    Attributes:
        count: updates done.
        rows: of factored matrices, [stack…, inputs…].
        columns: of factored matrices, [stack…, outputs…].
        full: of all others, shaped like the parameter.
    """

    count: Any
    rows: Any
    columns: Any
    full: Any


class _Leaf(NamedTuple):
    """What an update makes of one parameter; deliberately kept from `jax.tree.map`, which would take it apart."""

    update: Any
    rows: Any
    columns: Any
    full: Any


def is_factored(view: MatrixView, smallest: int) -> bool:
    """Whether each layer's matrix has both sides of at least `smallest`."""
    return view.is_matrix and min(view.matrix_shape) >= smallest


def scale_by_factored_rms(config: AdafactorConfig, infos: Any) -> optax.GradientTransformation:
    """`optax.scale_by_factored_rms` with one layer at a time, and moments that keep the parameter's dimensions."""
    inner = optax.scale_by_factored_rms(decay_rate=config.decay_exponent, min_dim_size_to_factor=config.factored_from)
    # A stack of vectors looks like a matrix too.
    unfactored = optax.scale_by_factored_rms(factored=False, decay_rate=config.decay_exponent)

    def init(params: Any) -> AdafactorState:
        def moments(info: ParameterInfo, leaf: Any) -> _Leaf:
            view = matrix_view(info)
            if leaf is None:
                return _Leaf(None, None, None, None)
            if not is_factored(view, config.factored_from):
                return _Leaf(None, None, None, jnp.zeros_like(leaf))
            rows, columns = ([info.shape[i] for i in dims] for dims in (view.input_dims(), view.output_dims()))
            return _Leaf(None, jnp.zeros(rows, jnp.float32), jnp.zeros(columns, jnp.float32), None)

        return _state(jnp.zeros((), jnp.int32), jax.tree.map(moments, infos, params))

    def update(updates: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        def one(info: ParameterInfo, gradient: Any, rows: Any, columns: Any, full: Any) -> _Leaf:
            view = matrix_view(info)
            if gradient is None:
                return _Leaf(None, None, None, None)
            if rows is None:
                moments = optax.FactoredState(state.count, _unused(), _unused(), full)
                change, moments = unfactored.update(gradient, moments, gradient)
                return _Leaf(change, None, None, moments.v)
            by_layer = each_layer(lambda *arrays: _factored(inner, state.count, *arrays), view)
            change, rows, columns = by_layer(gradient, rows, columns)
            return _Leaf(change, rows, columns, None)

        leaves = jax.tree.map(one, infos, updates, state.rows, state.columns, state.full)
        directions = jax.tree.map(lambda leaf: leaf.update, leaves, is_leaf=_is_leaf)
        return directions, _state(optax.safe_increment(state.count), leaves)

    return optax.GradientTransformation(init, update)


def _factored(
    inner: optax.GradientTransformation, count: Array, gradient: Array, rows: Array, columns: Array
) -> tuple[Array, Array, Array]:
    """One matrix's update, rows and columns, each in the dimensions that it came in."""
    matrix = gradient.reshape(rows.size, columns.size)
    # optax sorts the sides by size: its v_row belongs to the smaller one.
    wide = rows.size <= columns.size
    matrix = matrix if wide else matrix.T
    small, large = (rows, columns) if wide else (columns, rows)
    moments = optax.FactoredState(count, small.ravel(), large.ravel(), _unused())
    change, moments = inner.update(matrix, moments, matrix)
    small, large = moments.v_row.reshape(small.shape), moments.v_col.reshape(large.shape)
    change = change if wide else change.T
    return change.reshape(gradient.shape), *((small, large) if wide else (large, small))


def clip_by_rms(limit: float, infos: Any) -> optax.GradientTransformation:
    """`optax.clip_by_block_rms` where each layer's slice is a block of its own."""
    return _of_each_layer(optax.clip_by_block_rms(limit), infos)


def scale_by_parameter_rms(infos: Any) -> optax.GradientTransformation:
    """`optax.scale_by_param_block_rms` where each layer's slice is a block of its own."""
    return _of_each_layer(optax.scale_by_param_block_rms(), infos)


def _of_each_layer(inner: optax.GradientTransformation, infos: Any) -> optax.GradientTransformation:
    """A transformation without state, applied to each layer's slice alone."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        def one(info: ParameterInfo, change: Any, value: Any) -> Any:
            if change is None:
                return None
            apply = each_layer(lambda change, value: inner.update(change, state, value)[0], matrix_view(info))
            return apply(change, value)

        return jax.tree.map(one, infos, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _state(count: Array, leaves: Any) -> AdafactorState:
    def moment(name: str) -> Any:
        return jax.tree.map(lambda leaf: getattr(leaf, name), leaves, is_leaf=_is_leaf)

    return AdafactorState(count, moment("rows"), moment("columns"), moment("full"))


def _is_leaf(node: Any) -> bool:
    return isinstance(node, _Leaf)


def _unused() -> Array:
    """optax's stand-in for the moments that a parameter doesn't have."""
    return jnp.zeros((1,), jnp.float32)
