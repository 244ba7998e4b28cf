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

from jaxtrain.sharding import Layout, axes_of, current_layout, padded

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
    if layout is None or not layout.splits:
        return tuple(checkpoint_name(jnp.tensordot(x, weight, axes=1), PROJECTION) for weight, _ in weights)
    arrays, axes = tuple(weight for weight, _ in weights), tuple(names for _, names in weights)
    results = _enter(_Border.of(layout, x.shape), axes, x, arrays)
    return tuple(checkpoint_name(result, PROJECTION) for result in results)


def leave(
    x: Float[Array, "rows seq ..."], weight: Float[Array, "... embed"], axes: Axes
) -> Float[Array, "rows seq embed"]:
    """x · w for a weight w […, embed]: out of a tensor region into the residual stream, summed over the shards."""
    layout = current_layout()
    if layout is None or not layout.splits:
        return checkpoint_name(jnp.tensordot(x, weight, axes=weight.ndim - 1), PROJECTION)
    border = _Border.of(layout, (*x.shape[:2], weight.shape[-1]))
    return checkpoint_name(_leave(border, axes, x, weight), PROJECTION)


@dataclass(frozen=True)
class _Border:
    """The mesh axes that split what crosses the border of a tensor region.

    Attributes:
        batch: split the rows.
        stored: split a weight's `embed`.
        gradient: split the `embed` of its gradient: those, and perhaps more.
        tensor: split the heads or mlp.
        sequence: those of them that split the residual's sequence; () where each tensor shard holds it whole.
        parts: of a device's rows or of its sequence, so that what is sent of one hides behind the products of another.
        by_sequence: whether it is the sequence that is parted.
    """

    layout: Layout
    batch: tuple[str, ...]
    stored: tuple[str, ...]
    gradient: tuple[str, ...]
    tensor: tuple[str, ...]
    sequence: tuple[str, ...]
    parts: int
    by_sequence: bool

    @classmethod
    def of(cls, layout: Layout, residual_shape: Sequence[int]) -> "_Border":
        spec = layout.activation(("batch", "residual_seq", "embed"), residual_shape, "residual").spec
        batch, tensor = layout.batch_axes, layout.split_axes("tensor")
        rows, length = residual_shape[0] // layout.size(*batch), residual_shape[1]
        sequence = axes_of(spec[1])
        parts = math.gcd(rows, MAXIMUM_PARTS) if tensor else 1
        pieces = math.gcd(length // layout.size(*sequence), MAXIMUM_PARTS) if sequence else 1
        by_sequence = parts == 1 < pieces
        parts = pieces if by_sequence else parts
        parts = parts if rows * length >= parts * SMALLEST_PART else 1
        return cls(layout, batch, layout.weight_axes, layout.gradient_axes, tensor, sequence, parts, by_sequence)

    def split(self, x: Array) -> list[Array]:
        """The parts of what each shard has of the residual, [rows, shard's sequence, …]."""
        return jnp.split(x, self.parts, axis=int(self.by_sequence))

    def joined(self, parts: list[Array]) -> Array:
        """The reverse of `split`."""
        return jnp.concatenate(parts, axis=int(self.by_sequence))

    def split_whole(self, x: Array) -> list[Array]:
        """The same parts of the whole sequence: of each shard's stretch a piece, where it is the sequence."""
        if not self.by_sequence:
            return jnp.split(x, self.parts)
        rows, length, *rest = x.shape
        stretches = x.reshape(rows, self.layout.size(*self.sequence), self.parts, -1, *rest)
        return [stretches[:, :, part].reshape(rows, length // self.parts, *rest) for part in range(self.parts)]

    def joined_whole(self, parts: list[Array]) -> Array:
        """The reverse of `split_whole`."""
        if not self.by_sequence:
            return jnp.concatenate(parts)
        rows, length, *rest = parts[0].shape
        stretches = [part.reshape(rows, self.layout.size(*self.sequence), -1, *rest) for part in parts]
        return jnp.stack(stretches, axis=2).reshape(rows, length * self.parts, *rest)

    @property
    def residual(self) -> PartitionSpec:
        return PartitionSpec(self.batch or None, self.sequence or None)

    def weight(self, weight: Array, axes: Axes) -> PartitionSpec:
        return padded(self.layout.parameter(axes, weight.shape, f"weight {axes}").spec, weight.ndim)

    def weight_gradient(self, weight: Array, axes: Axes) -> PartitionSpec:
        return padded(self.layout.gradient(axes, weight.shape, f"weight {axes}").spec, weight.ndim)

    def whole_sequence(self, x: Array) -> Array:
        return jax.lax.all_gather(x, self.sequence, axis=1, tiled=True) if self.sequence else x

    def summed_over_tensor(self, x: Array) -> Array:
        if self.sequence:
            return jax.lax.psum_scatter(x, self.sequence, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x, self.tensor) if self.tensor else x

    def whole_weight(self, weight: Array, axis: int) -> Array:
        return jax.lax.all_gather(weight, self.stored, axis=axis, tiled=True) if self.stored else weight

    def scattered(self, gradient: Array, axis: int) -> Array:
        """A weight's gradient summed over all rows, and divided as the layout says."""
        for axes in (self.stored, tuple(axis for axis in self.gradient if axis not in self.stored)):
            if axes:
                gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=axis, tiled=True)
        others = tuple(axis for axis in self.batch if axis not in self.gradient)
        return jax.lax.psum(gradient, others) if others else gradient


# The gradients are defined outside of the `shard_map`, so that what is kept for them are the operands themselves: a
# pipeline keeps what is left for each micro-batch, and weights must not be among it.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _enter(border: _Border, axes: tuple[Axes, ...], x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
    specs = tuple(border.weight(weight, names) for weight, names in zip(weights, axes, strict=True))

    def local(x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        whole = tuple(border.whole_weight(weight, 0) for weight in weights)
        parts = [border.whole_sequence(part) for part in border.split(x)]
        return tuple(border.joined_whole([jnp.tensordot(part, weight, axes=1) for part in parts]) for weight in whole)

    outputs = tuple(PartitionSpec(border.batch or None, None, *spec[1:]) for spec in specs)
    results: tuple[Array, ...] = border.layout.shard_map(local, (border.residual, specs), outputs)(x, weights)
    return results


def _enter_forward(
    border: _Border, axes: tuple[Axes, ...], x: Array, weights: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, tuple[Array, ...]]]:
    return _enter(border, axes, x, weights), (x, weights)


def _enter_backward(
    border: _Border, axes: tuple[Axes, ...], kept: tuple[Array, tuple[Array, ...]], gradients: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    def local(x: Array, weights: tuple[Array, ...], gradients: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        whole = tuple(border.whole_weight(weight, 0) for weight in weights)
        whole_x = border.joined_whole([border.whole_sequence(part) for part in border.split(x)])
        parts = []
        for some in zip(*(border.split_whole(gradient) for gradient in gradients), strict=True):
            products = [_times_transposed(gradient, weight, 1) for gradient, weight in zip(some, whole, strict=True)]
            parts.append(border.summed_over_tensor(functools.reduce(jnp.add, products)))
        outer = tuple(
            _outer(whole_x, gradient).astype(weight.dtype) for gradient, weight in zip(gradients, weights, strict=True)
        )
        return border.joined(parts), tuple(border.scattered(each, 0) for each in outer)

    x, weights = kept
    specs = tuple(border.weight(weight, names) for weight, names in zip(weights, axes, strict=True))
    outputs = tuple(PartitionSpec(border.batch or None, None, *spec[1:]) for spec in specs)
    scattered = tuple(border.weight_gradient(weight, names) for weight, names in zip(weights, axes, strict=True))
    mapped = border.layout.shard_map(local, (border.residual, specs, outputs), (border.residual, scattered))
    result: tuple[Array, tuple[Array, ...]] = mapped(x, weights, gradients)
    return result


_enter.defvjp(_enter_forward, _enter_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _leave(border: _Border, axes: Axes, x: Array, weight: Array) -> Array:
    last = weight.ndim - 1
    spec = border.weight(weight, axes)

    def local(x: Array, weight: Array) -> Array:
        whole = border.whole_weight(weight, last)
        parts = [jnp.tensordot(part, whole, axes=last) for part in border.split_whole(x)]
        return border.joined([border.summed_over_tensor(part) for part in parts])

    result: Array = border.layout.shard_map(local, (_inside(border, spec), spec), border.residual)(x, weight)
    return result


def _leave_forward(border: _Border, axes: Axes, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _leave(border, axes, x, weight), (x, weight)


def _leave_backward(border: _Border, axes: Axes, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    def local(x: Array, weight: Array, gradient: Array) -> tuple[Array, Array]:
        whole = border.whole_weight(weight, last)
        parts = [border.whole_sequence(part) for part in border.split(gradient)]
        gradient_x = border.joined_whole([_times_transposed(part, whole, last) for part in parts])
        outer = _outer(x, border.joined_whole(parts)).astype(weight.dtype)
        gradient_x, outer = _both_now(gradient_x.astype(x.dtype), outer)
        return gradient_x, border.scattered(outer, last)

    x, weight = kept
    last = weight.ndim - 1
    spec = border.weight(weight, axes)
    inside, scattered = _inside(border, spec), border.weight_gradient(weight, axes)
    mapped = border.layout.shard_map(local, (inside, spec, border.residual), (inside, scattered))
    result: tuple[Array, Array] = mapped(x, weight, gradient)
    return result


_leave.defvjp(_leave_forward, _leave_backward)


def _inside(border: _Border, weight: PartitionSpec) -> PartitionSpec:
    """What `leave` is given, split as the inputs of its weight are."""
    return PartitionSpec(border.batch or None, None, *weight[:-1])


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
