"""The two matrix products at the borders of a tensor region, with the collectives that belong to them.

Between tensor regions the residual stream is split over the sequence; inside, heads or mlp are split. `enter` gathers
the sequence, `leave` scatters it; both gather their weights over `fsdp` and scatter the weights' gradient. Each is one
`shard_map`, so what travels doesn't depend on what the partitioner makes of it:

- weights and residual travel in the compute dtype, the residual once for all projections that enter together;
- the gradient of a weight is one reduce-scatter inside the layer loop, which the compiler can move behind the next
  layer's matrix products (the all-reduce and slice that the partitioner writes there, it can't);
- only sharded operands are kept for the backward pass, which gathers them again.

The split of the sequence between regions is Megatron's sequence parallelism (arXiv 2205.05198, section 4.2.2).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxtrain.sharding import BATCH_AXES, Layout, current_layout

MAXIMUM_PARTS = 4
SMALLEST_PART = 2048
"""Tokens. Products of fewer lose more than hiding what is sent can win."""

PROJECTION = "projection"
"""What rematerialisation calls the results: a policy that keeps matrix products can't see into a custom gradient."""

Axes = tuple[str | None, ...]
"""The logical axes of a weight."""


def enter(
    x: Float[Array, "rows seq embed"], *weights: tuple[Float[Array, "embed ..."], Axes]
) -> tuple[Float[Array, "rows seq ..."], ...]:
    """x · w for each weight w [embed, …]: from the residual stream into a tensor region."""
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return tuple(checkpoint_name(jnp.tensordot(x, weight, axes=1), PROJECTION) for weight, _ in weights)
    border = _Border.of(layout, x.shape)
    specs = tuple(_weight_spec(layout, weight, axes) for weight, axes in weights)
    outputs = tuple(PartitionSpec(border.batch or None, None, *spec[1:]) for spec in specs)
    results = jax.shard_map(
        lambda x, *local: _enter(x, local, border),
        mesh=layout.mesh,
        in_specs=(border.residual, *specs),
        out_specs=outputs,
        check_vma=False,
    )(x, *(weight for weight, _ in weights))
    return tuple(checkpoint_name(result, PROJECTION) for result in results)


def leave(
    x: Float[Array, "rows seq ..."], weight: Float[Array, "... embed"], axes: Axes
) -> Float[Array, "rows seq embed"]:
    """x · w for a weight w […, embed]: out of a tensor region into the residual stream, summed over the shards."""
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return checkpoint_name(jnp.tensordot(x, weight, axes=weight.ndim - 1), PROJECTION)
    border = _Border.of(layout, (*x.shape[:2], weight.shape[-1]))
    spec = _weight_spec(layout, weight, axes)
    result = jax.shard_map(
        lambda x, local: _leave(x, local, border),
        mesh=layout.mesh,
        in_specs=(PartitionSpec(border.batch or None, None, *spec[:-1]), spec),
        out_specs=border.residual,
        check_vma=False,
    )(x, weight)
    return checkpoint_name(result, PROJECTION)


@dataclass(frozen=True)
class _Border:
    """The mesh axes that split what crosses the border of a tensor region.

    Attributes:
        batch: split the rows.
        fsdp: those of them that split a weight's `embed`.
        tensor: split the heads or mlp.
        sequence: those of them that split the residual's sequence; () where each tensor shard holds it whole.
        parts: of a device's rows, so that what is sent of one hides behind the products of another.
    """

    batch: tuple[str, ...]
    fsdp: tuple[str, ...]
    tensor: tuple[str, ...]
    sequence: tuple[str, ...]
    parts: int

    @classmethod
    def of(cls, layout: Layout, residual_shape: Sequence[int]) -> "_Border":
        spec = layout.activation(("batch", "residual_seq", "embed"), residual_shape, "residual").spec
        tensor = layout.split_axes("tensor")
        rows, length = residual_shape[0] // layout.size(*BATCH_AXES), residual_shape[1]
        parts = math.gcd(rows, MAXIMUM_PARTS) if tensor else 1
        parts = parts if rows * length >= parts * SMALLEST_PART else 1
        return cls(layout.split_axes(*BATCH_AXES), layout.split_axes("fsdp"), tensor, _names(spec[1]), parts)

    @property
    def residual(self) -> PartitionSpec:
        return PartitionSpec(self.batch or None, self.sequence or None)

    def whole_sequence(self, x: Array) -> Array:
        return jax.lax.all_gather(x, self.sequence, axis=1, tiled=True) if self.sequence else x

    def summed_over_tensor(self, x: Array) -> Array:
        if self.sequence:
            return jax.lax.psum_scatter(x, self.sequence, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x, self.tensor) if self.tensor else x

    def whole_weight(self, weight: Array, axis: int) -> Array:
        return jax.lax.all_gather(weight, self.fsdp, axis=axis, tiled=True) if self.fsdp else weight

    def scattered(self, gradient: Array, axis: int) -> Array:
        """A weight's gradient summed over `fsdp`; over axes that don't split the weight, `shard_map` sums it."""
        if not self.fsdp:
            return gradient
        return jax.lax.psum_scatter(gradient, self.fsdp, scatter_dimension=axis, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _enter(x: Array, weights: tuple[Array, ...], border: _Border) -> tuple[Array, ...]:
    whole = tuple(border.whole_weight(weight, 0) for weight in weights)
    parts = [border.whole_sequence(part) for part in jnp.split(x, border.parts)]
    return tuple(jnp.concatenate([jnp.tensordot(part, weight, axes=1) for part in parts]) for weight in whole)


def _enter_forward(x: Array, weights: tuple[Array, ...], border: _Border) -> tuple[tuple[Array, ...], tuple]:
    return _enter(x, weights, border), (x, weights)


def _enter_backward(border: _Border, kept: tuple, gradients: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    x, weights = kept
    whole = tuple(border.whole_weight(weight, 0) for weight in weights)
    whole_x = jnp.concatenate([border.whole_sequence(part) for part in jnp.split(x, border.parts)])
    parts = []
    for some in zip(*(jnp.split(gradient, border.parts) for gradient in gradients), strict=True):
        products = [_times_transposed(gradient, weight, 1) for gradient, weight in zip(some, whole, strict=True)]
        part = functools.reduce(jnp.add, products)
        # Where the sequence is not split, x is the same on each tensor shard, and `shard_map` sums its gradient.
        parts.append(border.summed_over_tensor(part) if border.sequence else part)
    local = tuple(
        _outer(whole_x, gradient).astype(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)
    )
    return jnp.concatenate(parts), tuple(border.scattered(each, 0) for each in local)


_enter.defvjp(_enter_forward, _enter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _leave(x: Array, weight: Array, border: _Border) -> Array:
    whole = border.whole_weight(weight, weight.ndim - 1)
    parts = [jnp.tensordot(part, whole, axes=weight.ndim - 1) for part in jnp.split(x, border.parts)]
    return jnp.concatenate([border.summed_over_tensor(part) for part in parts])


def _leave_forward(x: Array, weight: Array, border: _Border) -> tuple[Array, tuple[Array, Array]]:
    return _leave(x, weight, border), (x, weight)


def _leave_backward(border: _Border, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = kept
    last = weight.ndim - 1
    whole = border.whole_weight(weight, last)
    # Of a result that all tensor shards share, `shard_map` hands each its part of the gradient.
    combine = border.whole_sequence if border.sequence else border.summed_over_tensor
    parts = [combine(part) for part in jnp.split(gradient, border.parts)]
    gradient_x = jnp.concatenate([_times_transposed(part, whole, last) for part in parts])
    gradient_x, local = _both_now(gradient_x.astype(x.dtype), _outer(x, jnp.concatenate(parts)).astype(weight.dtype))
    return gradient_x, border.scattered(local, last)


_leave.defvjp(_leave_forward, _leave_backward)


def _both_now(gradient_x: Array, gradient_weights: Any) -> tuple[Array, Any]:
    """Ties the backward pass to the weights' gradient, so that what that needs is not kept until later."""
    tied: tuple[Array, Any] = jax.lax.optimization_barrier((gradient_x, gradient_weights))
    return tied


def _times_transposed(gradient: Array, weight: Array, inputs: int) -> Array:
    """gradient [rows, seq, …out] · weightᵀ, where the first `inputs` dimensions of weight [in…, out…] are inputs."""
    outputs = range(inputs, weight.ndim)
    return jax.lax.dot_general(gradient, weight, ((tuple(range(2, gradient.ndim)), tuple(outputs)), ((), ())))


def _outer(x: Array, gradient: Array) -> Array:
    """Σ over rows and sequence of x [rows, seq, …in] ⊗ gradient [rows, seq, …out]: [in…, out…]."""
    return jax.lax.dot_general(x, gradient, (((0, 1), (0, 1)), ((), ())))


def _weight_spec(layout: Layout, weight: Array, axes: Axes) -> PartitionSpec:
    spec = layout.parameter(axes, weight.shape, f"weight {axes}").spec
    return PartitionSpec(*spec, *(None,) * (weight.ndim - len(spec)))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
