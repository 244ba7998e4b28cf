"""Cross-entropy from hidden states, without ever holding all logits.

Loss and gradient are computed in one sweep over chunks of tokens (a scalar's gradient only has to be scaled later), so
the logits are computed once. On a mesh the head is gathered once over `fsdp`, its gradient is summed locally in
float32 and reduced once at the end; the vocabulary stays split over `tensor`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxtrain.sharding import Layout, current_layout


@dataclass(frozen=True)
class CrossEntropySettings:
    """What is summed per token: (1-s)·nll + s·mean_v(-log p_v) + z·logsumexp², with softly capped logits.

    Attributes:
        chunk: tokens per device whose logits exist at once.
        z: coefficient of the squared log-normaliser (PaLM, arXiv 2204.02311, section 5).
        label_smoothing: s, the share of probability spread evenly over the vocabulary.
        logit_softcap: c in c·tanh(logits / c) (Gemma 2, arXiv 2408.00118), or None.
    """

    chunk: int
    z: float = 0.0
    label_smoothing: float = 0.0
    logit_softcap: float | None = None


def cross_entropy(
    x: Float[Array, "rows seq embed"],
    head: Float[Array, "embed vocab"],
    targets: Int[Array, "rows seq"],
    weights: Float[Array, "rows seq"],
    settings: CrossEntropySettings,
) -> Float[Array, ""]:
    """The weighted sum over all tokens of the loss that `settings` describe, in float32.

    `head` is float32 and is cast to `x`'s dtype for the matrix products. Only `x` and `head` get gradients.
    """
    layout = current_layout()
    if layout is not None and not layout.splits:
        layout = None
    return _cross_entropy(x, head, targets, weights, settings, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _cross_entropy(
    x: Array, head: Array, targets: Array, weights: Array, settings: CrossEntropySettings, layout: Layout | None
) -> Array:
    return _sweep(x, head, targets, weights, settings, layout, with_gradient=False)[0]


def _forward(
    x: Array, head: Array, targets: Array, weights: Array, settings: CrossEntropySettings, layout: Layout | None
) -> tuple[Array, tuple[Array, Array]]:
    total, gradient_x, gradient_head = _sweep(x, head, targets, weights, settings, layout, with_gradient=True)
    return total, (gradient_x, gradient_head)


def _backward(
    settings: CrossEntropySettings, layout: Layout | None, gradients: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array, None, None]:
    gradient_x, gradient_head = gradients
    return (gradient_x * cotangent).astype(gradient_x.dtype), gradient_head * cotangent, None, None


_cross_entropy.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Axes:
    """The mesh axes that really split each operand, and the head's gradient further; all empty on one device."""

    batch: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    tensor: tuple[str, ...] = ()


def _sweep(
    x: Array,
    head: Array,
    targets: Array,
    weights: Array,
    settings: CrossEntropySettings,
    layout: Layout | None,
    with_gradient: bool,
) -> tuple[Array, Any, Any]:
    """(sum, gradient of x, gradient of head); the gradients are None unless asked for."""
    if layout is None:
        return _local_sweep(x, head, targets, weights, settings, _Axes(), with_gradient)
    stored, gradient = layout.weight_axes, layout.gradient_axes
    axes = _Axes(
        layout.batch_axes, stored, tuple(each for each in gradient if each not in stored), layout.split_axes("tensor")
    )
    rows = PartitionSpec(axes.batch or None)
    residual = PartitionSpec(axes.batch or None, axes.tensor or None)
    head_spec = PartitionSpec(stored or None, axes.tensor or None)
    gradient_spec = PartitionSpec(gradient or None, axes.tensor or None)
    return layout.shard_map(
        functools.partial(_local_sweep, settings=settings, axes=axes, with_gradient=with_gradient),
        (residual, head_spec, rows, rows),
        (PartitionSpec(), residual, gradient_spec) if with_gradient else (PartitionSpec(), None, None),
    )(x, head, targets, weights)


def _local_sweep(
    x: Array,
    head: Array,
    targets: Array,
    weights: Array,
    settings: CrossEntropySettings,
    axes: _Axes,
    with_gradient: bool,
) -> tuple[Array, Any, Any]:
    """One device's share: its rows, all of embed, its part of the vocabulary."""
    head = head.astype(x.dtype)
    if axes.stored:
        head = jax.lax.all_gather(head, axes.stored, axis=0, tiled=True)
    if axes.tensor:
        x = jax.lax.all_gather(x, axes.tensor, axis=1, tiled=True)
    rows, length, embed = x.shape
    chunks, chunked = _split_into_chunks((x, targets, weights), rows * length, settings.chunk)

    def add_chunk(carry: tuple[Array, Any], chunk: tuple[Array, ...]) -> tuple[tuple[Array, Any], Any]:
        total, gradient_head = carry
        x, targets, weights = chunk
        logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)
        loss, gradient_logits = _chunk_loss(logits, targets, weights, settings, axes.tensor, with_gradient)
        if gradient_logits is None:
            return (total + loss, None), None
        gradient_logits = gradient_logits.astype(x.dtype)
        gradient_head += jnp.matmul(x.T, gradient_logits, preferred_element_type=jnp.float32)
        return (total + loss, gradient_head), gradient_logits @ head.T

    gradient_head = jnp.zeros(head.shape, jnp.float32) if with_gradient else None
    (total, gradient_head), gradient_x = jax.lax.scan(
        add_chunk, (jnp.zeros((), jnp.float32), gradient_head), chunked, unroll=chunks == 1
    )
    total = jax.lax.psum(total, axes.batch) if axes.batch else total
    if not with_gradient:
        return total, None, None
    gradient_x = gradient_x.reshape(-1, embed)[: rows * length].reshape(rows, length, embed)
    if axes.tensor:
        gradient_x = jax.lax.psum_scatter(gradient_x, axes.tensor, scatter_dimension=1, tiled=True)
    for split in (axes.stored, axes.further):
        if split:
            gradient_head = jax.lax.psum_scatter(gradient_head, split, scatter_dimension=0, tiled=True)
    others = tuple(axis for axis in axes.batch if axis not in (*axes.stored, *axes.further))
    return total, gradient_x, jax.lax.psum(gradient_head, others) if others else gradient_head


def _split_into_chunks(arrays: tuple[Array, ...], tokens: int, chunk: int) -> tuple[int, tuple[Array, ...]]:
    """(n, arrays of [n, chunk, …]) from arrays of [rows, seq, …], padded with zeros (weight 0) to whole chunks."""
    count = -(-tokens // chunk)
    size = -(-tokens // count)

    def split(array: Array) -> Array:
        flat = array.reshape(tokens, *array.shape[2:])
        padded = jnp.pad(flat, [(0, count * size - tokens)] + [(0, 0)] * (flat.ndim - 1))
        return padded.reshape(count, size, *flat.shape[1:])

    return count, tuple(split(array) for array in arrays)


def _chunk_loss(
    logits: Float[Array, "tokens vocab_shard"],
    targets: Int[Array, " tokens"],
    weights: Float[Array, " tokens"],
    settings: CrossEntropySettings,
    tensor: tuple[str, ...],
    with_gradient: bool,
) -> tuple[Array, Array | None]:
    """(weighted loss of the tokens, its gradient by the raw logits), with sums over the vocabulary's shards."""
    cap = settings.logit_softcap
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    shard = logits.shape[-1]
    first = jax.lax.axis_index(tensor) * shard if tensor else 0
    vocab = shard * (jax.lax.axis_size(tensor) if tensor else 1)

    def over_vocab(partial: Array) -> Array:
        return jax.lax.psum(partial, tensor) if tensor else partial

    largest = logits.max(-1)
    largest = jax.lax.pmax(largest, tensor) if tensor else largest
    exponentials = jnp.exp(logits - largest[:, None])
    normaliser = over_vocab(exponentials.sum(-1))
    log_normaliser = jnp.log(normaliser) + largest
    is_target = jnp.arange(shard) + first == targets[:, None]
    target_logit = over_vocab(jnp.where(is_target, logits, 0).sum(-1))
    s, z = settings.label_smoothing, settings.z
    loss = log_normaliser - (1 - s) * target_logit + z * log_normaliser**2
    if s:
        loss -= s * over_vocab(logits.sum(-1)) / vocab
    total = jnp.sum(weights * loss)
    if not with_gradient:
        return total, None
    scale = (weights * (1 + 2 * z * log_normaliser) / normaliser)[:, None]
    expected = jnp.where(is_target, (weights * (1 - s))[:, None], 0) + (weights * s / vocab)[:, None]
    gradient = exponentials * scale - expected
    if cap is not None:
        gradient *= 1 - (logits / cap) ** 2
    return total, gradient
