"""Parameters that say what they are: each leaf carries the logical axes of its dimensions and a role.

`Task.init` returns nested dictionaries of `flax.nnx.Param` made by `parameter`. The metadata is read once, from an
abstract evaluation, by `describe`; the running program then works on plain nested dictionaries of arrays.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

Role = Literal["matrix", "embedding", "head", "norm", "bias", "router", "table"]
"""What a parameter is to the optimizer: it decides decay, learning-rate factor, sparse path, freezing, compute cast."""

CAST_ROLES: frozenset[Role] = frozenset({"matrix", "bias"})
"""Given to the model in the type of the computation. Embedding and head are cast in their own operations (which keep
their gradient in float32); norms and routers compute in float32."""

Initializer = Callable[[Key[Array, ""], tuple[int, ...]], Array]


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter: its shape, the logical axis of each dimension, its role, whether it is left as it is.

    Parameters are float32.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    role: Role
    frozen: bool = False

    @property
    def is_stacked(self) -> bool:
        """Whether the first dimension counts layers."""
        return self.axes[:1] == ("layers",)


def normal(scale: float) -> Initializer:
    """Normal values with standard deviation `scale`."""
    return lambda key, shape: scale * jax.random.normal(key, shape, jnp.float32)


def constant(value: float) -> Initializer:
    """The same value everywhere."""
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], role: Role, initializer: Initializer
) -> nnx.Param:
    """A float32 parameter with its logical `axes` and `role`; draws the next key of `rngs.params`.

    Raises:
        ValueError: axes and shape differ in length, or the role is unknown.
    """
    if len(axes) != len(shape):
        raise ValueError(f"a parameter of shape {shape} needs {len(shape)} logical axes, not {axes}")
    if role not in get_args(Role):
        raise ValueError(f"unknown parameter role {role!r}; known: {', '.join(get_args(Role))}")
    return nnx.Param(initializer(rngs.params(), shape), axes=axes, role=role)


def stack(init: Callable[[Key[Array, ""]], Any], key: Key[Array, ""], count: int, axis: str = "layers") -> Any:
    """`count` initialisations by `init` stacked along a new first dimension named `axis`.

    Layer i gets `fold_in(key, i)`, so its values don't depend on `count` or on being stacked.
    """
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))
    stacked = jax.vmap(init)(keys)
    return jax.tree.map(
        lambda leaf: nnx.Param(leaf.get_value(), axes=(axis, *leaf.axes), role=leaf.role), stacked, is_leaf=is_parameter
    )


def parameters_of(module: nnx.Module) -> dict[str, Any]:
    """A module's parameters as nested dictionaries of `nnx.Param`, as `Task.init` returns them."""
    return _nested(nnx.state(module, nnx.Param))


def _nested(state: Any) -> Any:
    return {name: _nested(value) for name, value in state.items()} if isinstance(state, nnx.State) else state


def graph_of(make: Callable[..., nnx.Module], config: Any) -> nnx.GraphDef:
    """A module's structure without its parameters: `nnx.merge(graph, nnx.State(params))` is the module."""
    return nnx.split(nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(params=0))), nnx.Param)[0]


def is_parameter(node: Any) -> bool:
    """Whether a tree node is a boxed parameter."""
    return isinstance(node, nnx.Variable)


def unbox(parameters: Any) -> Any:
    """The same tree with bare arrays in place of `nnx.Param` boxes."""
    return jax.tree.map(lambda leaf: leaf.get_value(), parameters, is_leaf=is_parameter)


def describe(abstract_parameters: Any) -> Any:
    """The same tree with a `ParameterInfo` in place of each `nnx.Param` box.

    Raises:
        ValueError: a leaf that isn't a parameter with axes and role, named by its path.
    """

    def info(path: tuple[Any, ...], leaf: Any) -> ParameterInfo:
        where = path_name(path)
        if not is_parameter(leaf) or "axes" not in leaf.get_metadata() or "role" not in leaf.get_metadata():
            raise ValueError(
                f"parameter {where} has no logical axes and role; make it with models.parameters.parameter"
            )
        shape = tuple(leaf.get_value().shape)
        if len(leaf.axes) != len(shape):
            raise ValueError(f"parameter {where} of shape {shape} needs an axis per dimension, not {leaf.axes}")
        return ParameterInfo(shape, tuple(leaf.axes), leaf.role)

    return jax.tree_util.tree_map_with_path(info, abstract_parameters, is_leaf=is_parameter)


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as `layers.attention.q`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Any) -> Mapping[str, Any]:
    """Leaves by path name, in tree order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def count_parameters(infos: Any) -> int:
    """The number of scalars in a tree of `ParameterInfo`."""
    return sum(math.prod(info.shape) for info in jax.tree.leaves(infos))
