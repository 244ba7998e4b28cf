"""Where the optimizer's state lies: each moment where its parameter lies, each row and column with its dimensions."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.models.parameters import ParameterInfo, named_leaves, path_name
from jaxtrain.optimizer.matrices import matrix_view

_SMALL = 16
"""Elements of a leaf that may belong to no parameter: a counter, some coefficients."""


def state_axes(state: Any, infos: Any) -> Any:
    """A tree like `state` with the logical axes of each leaf.

    A leaf belongs to the parameter whose path its own path ends with.

    Raises:
        ValueError: a leaf that would be replicated without a word, since no parameter tells how to split it.
    """
    parameters = named_leaves(infos)

    def axes(path: tuple[Any, ...], leaf: Any) -> tuple[str | None, ...]:
        found = _parameter_of(path, parameters)
        if found is None:
            if leaf.size > _SMALL:
                raise ValueError(f"optimizer state {path_name(path)} of shape {leaf.shape} belongs to no parameter")
            return (None,) * leaf.ndim
        depth, info = found
        view = matrix_view(info)
        field = path_name(path[-depth - 1 : -depth])
        dims = {"rows": view.input_dims(), "columns": view.output_dims()}.get(field, list(range(len(info.shape))))
        if leaf.shape != tuple(info.shape[i] for i in dims):
            raise ValueError(f"optimizer state {path_name(path)} has shape {leaf.shape}, unlike its parameter {info}")
        return tuple(info.axes[i] for i in dims)

    return jax.tree_util.tree_map_with_path(axes, state)


def _parameter_of(path: tuple[Any, ...], parameters: Mapping[str, ParameterInfo]) -> tuple[int, ParameterInfo] | None:
    """The parameter that the path ends with, and the length of its own path."""
    for depth in range(len(path), 0, -1):
        info = parameters.get(path_name(path[-depth:]))
        if info is not None:
            return depth, info
    return None
