"""The gradient of the loss, in one pass or accumulated over micro-batches.

Both have the same type, and so has the pipelined one: a `Gradient` takes the whole global batch and the denominators
that the whole batch fixed, and returns the gradient of Σ_terms sum / denominator in float32, and the sums. Since the
denominators are fixed first, micro-batches only add.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key

from jaxtrain.models.parameters import CAST_ROLES, ParameterInfo
from jaxtrain.models.task import Batch, Denominators, Params, Sums, Task
from jaxtrain.sharding import Layout, axes_of, use_layout

Gradient = Callable[[Params, Batch, Denominators, Key[Array, ""]], tuple[Params, Sums]]


def cast_for_compute(params: Params, infos: Any, dtype: jnp.dtype, layout: Layout) -> Params:
    """`params` with the leaves of `CAST_ROLES` in `dtype`, each still sharded as it is stored.

    So what is gathered is already small.
    """
    if dtype == jnp.float32:
        return params

    def cast(info: ParameterInfo, leaf: Array) -> Array:
        if info.role not in CAST_ROLES:
            return leaf
        sharding = layout.parameter(info.axes, info.shape, "parameter")
        return layout.constrain(leaf.astype(dtype), sharding)

    return jax.tree.map(cast, infos, params)


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
        split = {name: split_rows(array, layout, passes) for name, array in batch.items()}
        return _added_up(lambda micro: one_pass(params, micro, denominators, key), split)

    return gradient


def gathered_gradient(
    task: Task, cast: Callable[[Params], Params], layout: Layout, infos: Any, passes: int
) -> Gradient:
    """The same, where weights are gathered once for all passes, and their gradients scattered once.

    It runs in a `shard_map` over the axes that split the rows, so that a pass adds to a device's own gradient: left to
    the partitioner, the reduce-scatter would stay inside the loop. Takes the memory of the whole weights in the
    compute dtype, and of their gradient in float32, divided by `tensor` alone.
    """
    rows = layout.batch_axes
    inside = layout.inside(*rows)
    one_pass = plain_gradient(task, lambda whole: whole)
    stored, scattered = (
        jax.tree.map(lambda info, of=of: of(info.axes, info.shape, "parameter").spec, infos)
        for of in (layout.parameter, layout.gradient)
    )

    def gradient(params: Params, batch: Batch, denominators: Denominators, key: Key[Array, ""]) -> tuple[Params, Sums]:
        def on_shard(params: Params, batch: Batch, denominators: Denominators, key: Array) -> tuple[Params, Sums]:
            with use_layout(inside):
                whole = gather_whole(params, stored, inside)
                gradients, sums = _added_up(lambda micro: one_pass(whole, micro, denominators, key), batch)
            return scatter_whole(gradients, scattered, inside), jax.lax.psum(sums, rows)

        mapped = jax.shard_map(
            on_shard,
            mesh=layout.mesh,
            in_specs=(manual_part(stored, inside), PartitionSpec(None, rows), PartitionSpec(), PartitionSpec()),
            out_specs=(manual_part(scattered, inside), PartitionSpec()),
            axis_names=inside.manual,
            check_vma=False,
        )
        split = {name: split_rows(array, layout, passes) for name, array in batch.items()}
        result: tuple[Params, Sums] = mapped(cast(params), split, denominators, key)
        return result

    return gradient


def _added_up(one_pass: Callable[[Batch], tuple[Params, Sums]], batch: Batch) -> tuple[Params, Sums]:
    """The results of `one_pass` for each micro-batch of arrays [passes, rows, …], in float32."""

    def add(total: Any, micro: Batch) -> tuple[Any, None]:
        return jax.tree.map(lambda old, new: old + new.astype(jnp.float32), total, one_pass(micro)), None

    first = jax.tree.map(lambda array: array[0], batch)
    shapes = jax.eval_shape(one_pass, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
    total: tuple[Params, Sums] = jax.lax.scan(add, zeros, batch)[0]
    return total


def gather_whole(params: Params, specs: Any, layout: Layout) -> Params:
    """Each device's part of the parameters, made whole along the axes of rows that are manual in `layout`."""
    axes = layout.manual & set(layout.activation_rules["batch"])

    def one(leaf: Array, spec: PartitionSpec) -> Array:
        for dimension, entry in enumerate(spec):
            if among := _among(entry, axes):
                leaf = jax.lax.all_gather(leaf, among, axis=dimension, tiled=True)
        return leaf

    return _on_shards(one, params, specs, layout) if axes else params


def scatter_whole(gradients: Params, specs: Any, layout: Layout) -> Params:
    """The other way: the sum of all devices' gradients, of which each keeps its part."""
    axes = layout.manual & set(layout.activation_rules["batch"])

    def one(leaf: Array, spec: PartitionSpec) -> Array:
        rest = set(axes)
        for dimension, entry in enumerate(spec):
            if among := _among(entry, axes):
                leaf = jax.lax.psum_scatter(leaf, among, scatter_dimension=dimension, tiled=True)
                rest -= set(among)
        return jax.lax.psum(leaf, tuple(axis for axis in layout.mesh.axis_names if axis in rest)) if rest else leaf

    return _on_shards(one, gradients, specs, layout) if axes else gradients


def _on_shards(one: Callable[[Array, PartitionSpec], Array], tree: Params, specs: Any, layout: Layout) -> Params:
    """`one` of each leaf, on what a single device has of it: else the partitioner gathers it over the other axes."""
    others = _select(specs, set(layout.mesh.axis_names) - layout.manual)
    mapped = layout.shard_map(lambda tree: jax.tree.map(one, tree, specs), (others,), others)
    result: Params = mapped(tree)
    return result


def manual_part(specs: Any, layout: Layout) -> Any:
    """What of the specs is about axes that are manual in `layout`, as a `shard_map` over them takes it."""
    return _select(specs, layout.manual)


def _select(specs: Any, axes: Collection[str]) -> Any:
    def one(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(_among(entry, axes) or None for entry in spec))

    return jax.tree.map(one, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _among(entry: str | tuple[str, ...] | None, axes: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in axes_of(entry) if name in axes)


def split_rows(array: Array, layout: Layout, passes: int) -> Array:
    """[rows, …] as [passes, rows / passes, …], where each device keeps its own rows."""
    axes = layout.batch_axes
    shards, rows = layout.size(*axes), array.shape[0]
    split = array.reshape(shards, passes, rows // (shards * passes), *array.shape[1:])
    split = split.swapaxes(0, 1).reshape(passes, rows // passes, *array.shape[1:])
    spec = jax.sharding.PartitionSpec(None, axes or None)
    return layout.constrain(split, jax.sharding.NamedSharding(layout.mesh, spec))
