"""Whether somebody's own object keeps the contract of a `Task`, found out before anything is compiled.

Everything is evaluated abstractly: shapes and types, no numbers. What the task's own code raises is left as it is.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import ConfigError
from jaxtrain.models.parameters import CAST_ROLES, ParameterInfo, describe, is_parameter, named_leaves, path_name
from jaxtrain.models.task import ArraySpec, Flops, Staged, Task, abstract_batch

METHODS = tuple(name for name, member in vars(Task).items() if inspect.isfunction(member) and not name.startswith("_"))
ROWS = 8


def refuse_what_is_no_task(task: Any, what: str, dtype: Any = jnp.float32) -> None:
    """Raises where `task` lacks a method, or a method gives something else than the trainer works with.

    Args:
        what: the beginning of the message.
        dtype: of the computation, which the task is given some of its parameters in.

    Raises:
        ConfigError: names the method, what it gave and what it must give.
    """
    missing = [name for name in METHODS if _lacks(task, name)]
    if missing:
        raise ConfigError(
            f"{what} gives a {type(task).__name__} that lacks {_and(missing)}; "
            f"jaxtrain/models/task.py says what a task must have"
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = computed_with(_parameters(task, key, what), dtype)
    batch = _batch(task, what)
    if isinstance(task, Staged):
        _refuse_other_parts(task, params, batch, key, what)
    denominators = jax.eval_shape(task.denominators, batch)
    losses = jax.eval_shape(task.losses, params, batch, key)
    _refuse_other_sums(denominators, f"{what}: denominators(batch)")
    _refuse_other_sums(losses, f"{what}: losses(params, batch, key)")
    if set(losses) != set(denominators):
        raise ConfigError(
            f"{what}: losses are {_and(sorted(losses))}, but denominators are {_and(sorted(denominators))}; "
            f"each loss needs the denominator of its name"
        )
    _refuse_other_metrics(jax.eval_shape(task.metrics, params, batch), what)
    counted = jax.eval_shape(task.counted, batch)
    if getattr(counted, "shape", None) != () or not jnp.issubdtype(counted.dtype, jnp.integer):
        raise ConfigError(f"{what}: counted(batch) gives {_described(counted)}; it must be one whole number")
    if not isinstance(task.flops(ROWS), Flops):
        raise ConfigError(f"{what}: flops(rows) gives {_described(task.flops(ROWS))}; it must be a Flops")


def _lacks(task: Any, name: str) -> bool:
    # A subclass of the protocol inherits its empty methods, which return None.
    return not callable(getattr(task, name, None)) or getattr(type(task), name, None) is getattr(Task, name)


def _parameters(task: Any, key: Any, what: str) -> Any:
    boxed = jax.eval_shape(task.init, key)
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_parameter)
    if not isinstance(boxed, Mapping) or not leaves:
        raise ConfigError(f"{what}: init(key) gives {_described(boxed)}; it must be a dictionary of parameters")
    for path, leaf in leaves:
        name = path_name(path)
        if not is_parameter(leaf) or not {"axes", "role"} <= set(leaf.get_metadata()):
            raise ConfigError(
                f"{what}: init(key): {name} has no logical axes and role; "
                f"make it with jaxtrain.models.parameters.parameter"
            )
        if leaf.get_value().dtype != jnp.float32:
            raise ConfigError(f"{what}: init(key): {name} is {leaf.get_value().dtype}; parameters are float32")
    return boxed


def computed_with(boxed: Any, dtype: Any) -> Any:
    """Abstract parameters as a model is given them: those of `CAST_ROLES` in the type of the computation."""

    def one(info: ParameterInfo) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(info.shape, dtype if info.role in CAST_ROLES else jnp.float32)

    return jax.tree.map(one, describe(boxed))


def _batch(task: Any, what: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract batch that the task describes, with the `row` that the step adds."""
    example = task.example_batch(ROWS)
    where = f"{what}: example_batch({ROWS})"
    if not isinstance(example, Mapping) or not example:
        raise ConfigError(f"{where} gives {_described(example)}; it must be a dictionary of ArraySpec")
    for name, spec in example.items():
        if not isinstance(spec, ArraySpec):
            raise ConfigError(f"{where}: {name} is {_described(spec)}; it must be an ArraySpec(shape, dtype, axes)")
        if tuple(spec.shape[:1]) != (ROWS,) or tuple(spec.axes[:1]) != ("batch",) or len(spec.axes) != len(spec.shape):
            raise ConfigError(
                f"{where}: {name} has shape {spec.shape} and axes {spec.axes}; "
                f"rows come first, as axis 'batch', and each dimension has an axis or None"
            )
    if "row" in example:
        raise ConfigError(f"{where}: has an array named row, which the trainer adds itself; rename it")
    return abstract_batch(task, ROWS)


def _refuse_other_parts(task: Staged, params: Any, batch: Any, key: Any, what: str) -> None:
    """Raises where embed, layers and head of a staged task don't fit together, or aren't of rows."""
    layers = params.get("layers") if isinstance(params.get("layers"), Mapping) else None
    if layers is None:
        raise ConfigError(f"{what}: init(key) has no layers, which a Staged task keeps in a dictionary of that name")
    for name, leaf in named_leaves(layers).items():
        if leaf.shape[:1] != (task.layer_count,):
            raise ConfigError(
                f"{what}: layer_count is {task.layer_count}, but layers.{name} has shape {leaf.shape}; "
                f"layers are stacked along the first dimension"
            )
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
    carry = jax.eval_shape(task.embed, params, batch, key)
    for name, leaf in _named(carry).items():
        if leaf.shape[:1] != (ROWS,):
            raise ConfigError(f"{what}: embed(params, batch, key): {name} is {_described(leaf)}; rows come first")
    context = jax.eval_shape(task.context, batch)
    after, auxiliary = jax.eval_shape(task.layer, one, carry, context, key)
    if _types(after) != _types(carry):
        raise ConfigError(
            f"{what}: layer(params, carry, context, key) makes of {_typed(carry)} {_typed(after)}; "
            f"a layer's carry is of one structure and type before and after it"
        )
    sums = jax.eval_shape(task.head, params, carry, batch)
    if twice := sorted(set(sums) & set(auxiliary)):
        raise ConfigError(f"{what}: head and layer both give {_and(twice)}; name the terms of the loss apart")


def _types(carry: Any) -> Any:
    return jax.tree.structure(carry), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(carry)]


def _typed(carry: Any) -> str:
    return _and([f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(carry).items()])


def _named(carry: Any) -> dict[str, Any]:
    return {path_name(path) or "the carry": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(carry)}


def _refuse_other_sums(sums: Any, where: str) -> None:
    if not isinstance(sums, Mapping) or not sums:
        raise ConfigError(f"{where} gives {_described(sums)}; it must be a dictionary of sums by name")
    for name, value in sums.items():
        if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ConfigError(f"{where}: {name} is {_described(value)}; it must be one floating-point number")


def _refuse_other_metrics(metrics: Any, what: str) -> None:
    where = f"{what}: metrics(params, batch)"
    if not isinstance(metrics, Mapping) or "loss" not in metrics:
        raise ConfigError(f"{where} gives {_described(metrics)}; it must be a dictionary with loss among its names")
    for name, metric in metrics.items():
        if not callable(getattr(metric, "result", None)):
            raise ConfigError(
                f"{where}: {name} is {_described(metric)}; it must have result(), as jaxtrain.models.task.Mean has"
            )


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dictionary of {_and(list(named_leaves(value)))}" if value else "an empty dictionary"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"a {type(value).__name__}"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
