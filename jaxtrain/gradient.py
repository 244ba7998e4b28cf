"""The gradient of the loss, in one pass or accumulated over micro-batches.

Both have the same type, and so has the pipelined one: a `Gradient` takes the whole global batch and the denominators
that the whole batch fixed, and returns the gradient of Σ_terms sum / denominator in float32, and the sums. Since the
denominators are fixed first, micro-batches only add.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxtrain.models.parameters import ParameterInfo, Role
from jaxtrain.models.task import Batch, Denominators, Params, Sums, Task
from jaxtrain.sharding import Layout

Gradient = Callable[[Params, Batch, Denominators, Key[Array, ""]], tuple[Params, Sums]]

CAST_ROLES: frozenset[Role] = frozenset({"matrix", "bias"})
"""Cast before the model sees them, shard by shard, so that what is gathered is already small. Embedding and head are
cast in their own operations (which keep their gradient in float32); norms and routers compute in float32."""


def cast_for_compute(params: Params, infos: Any, dtype: jnp.dtype, layout: Layout) -> Params:
    """`params` with the leaves of `CAST_ROLES` in `dtype`, each still sharded as it is stored."""
    if dtype == jnp.float32:
        return params

    def cast(info: ParameterInfo, leaf: Array) -> Array:
        if info.role not in CAST_ROLES:
            return leaf
        sharding = layout.parameter(info.axes, info.shape, "parameter")
        return layout.constrain(leaf.astype(dtype), sharding)

    return jax.tree.map(cast, infos, params, is_leaf=lambda x: isinstance(x, ParameterInfo))


def total_loss(sums: Sums, denominators: Denominators) -> Float[Array, ""]:
    """Σ_terms sum / denominator.

    Raises:
        ValueError: a term without a denominator, or a denominator without its term.
    """
    if set(sums) != set(denominators):
        raise ValueError(f"the task's losses {sorted(sums)} and denominators {sorted(denominators)} differ in name")
    return sum((sums[name] / denominators[name] for name in sorted(sums)), jnp.zeros((), jnp.float32))


def plain_gradient(task: Task, cast: Callable[[Params], Params]) -> Gradient:
    """The gradient of the whole batch in one pass. `cast` is `cast_for_compute` with all but its first argument."""

    def loss(params: Params, batch: Batch, denominators: Denominators, key: Key[Array, ""]) -> tuple[Array, Sums]:
        sums = task.losses(cast(params), batch, key)
        return total_loss(sums, denominators), sums

    def gradient(params: Params, batch: Batch, denominators: Denominators, key: Key[Array, ""]) -> tuple[Params, Sums]:
        return jax.grad(loss, has_aux=True)(params, batch, denominators, key)

    return gradient


def accumulated_gradient(task: Task, cast: Callable[[Params], Params], layout: Layout, passes: int) -> Gradient:
    """The same, in `passes` micro-batches one after the other, added up in float32.

    A micro-batch takes an equal share of the rows that each device already holds, so splitting moves no data.
    """
    one_pass = plain_gradient(task, cast)

    def gradient(params: Params, batch: Batch, denominators: Denominators, key: Key[Array, ""]) -> tuple[Params, Sums]:
        def add(total: Any, micro: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one_pass(params, micro, denominators, key)), None

        split = {name: split_rows(array, layout, passes) for name, array in batch.items()}
        first = jax.tree.map(lambda array: array[0], split)
        shapes = jax.eval_shape(one_pass, params, first, denominators, key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, split)[0]

    return gradient


def split_rows(array: Array, layout: Layout, passes: int) -> Array:
    """[rows, …] as [passes, rows / passes, …], where each device keeps its own rows."""
    axes = layout.batch_axes
    shards, rows = layout.size(*axes), array.shape[0]
    split = array.reshape(shards, passes, rows // (shards * passes), *array.shape[1:])
    split = split.swapaxes(0, 1).reshape(passes, rows // passes, *array.shape[1:])
    spec = jax.sharding.PartitionSpec(None, axes or None)
    return layout.constrain(split, jax.sharding.NamedSharding(layout.mesh, spec))
