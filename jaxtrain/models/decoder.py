"""The decoder family: Llama, Mistral, SmolLM, Qwen, Gemma-like language models as Flax modules.

Pre-norm blocks of grouped-query attention with rotary positions and a gated MLP. Modules name the dimensions of their
activations through `constrain`; they know no mesh.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from jaxtrain.config import DecoderConfig, RopeScaling
from jaxtrain.models.layers import Residual, RMSNorm, output_scale, with_axes
from jaxtrain.models.parameters import constant, normal, parameter
from jaxtrain.ops.attention import causal_attention
from jaxtrain.ops.cached_attention import cached_attention
from jaxtrain.ops.dropout import dropout
from jaxtrain.ops.projection import enter, leave
from jaxtrain.sharding import constrain

ATTENTION_SITE, MLP_SITE, EMBED_SITE = 0, 1, 2
"""The places in a layer that have dropout masks of their own."""


@dataclass(frozen=True)
class DecoderContext:
    """What each layer needs beside the residual stream; the same for all layers."""

    cosine: Float[Array, "rows seq half_head_dim"]
    sine: Float[Array, "rows seq half_head_dim"]
    segments: Int[Array, "rows seq"]
    rows: Int[Array, " rows"]


class KeysValues(NamedTuple):
    """What attention remembers of the tokens of one layer: rotated keys, and values."""

    keys: Float[Array, "rows slots kv_heads head_dim"]
    values: Float[Array, "rows slots kv_heads head_dim"]


class LayerCache(NamedTuple):
    """What the one token of each row that is decoded sees: the slots from `first` on, before its own `slot`."""

    remembered: KeysValues
    first: Int[Array, " rows"]
    slot: Int[Array, ""]


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed, heads, kv_heads, size = config.embed, config.heads, config.resolved_kv_heads, config.resolved_head_dim
        inner, outer = normal(config.initial_scale), normal(output_scale(config))
        self.query = parameter(rngs, (embed, heads, size), ("embed", "heads", "head_dim"), "matrix", inner)
        self.key = parameter(rngs, (embed, kv_heads, size), ("embed", "kv_heads", "head_dim"), "matrix", inner)
        self.value = parameter(rngs, (embed, kv_heads, size), ("embed", "kv_heads", "head_dim"), "matrix", inner)
        self.output = parameter(rngs, (heads, size, embed), ("heads", "head_dim", "embed"), "matrix", outer)
        zero = constant(0.0)
        if config.bias != "none":
            self.query_bias = parameter(rngs, (heads, size), ("heads", "head_dim"), "bias", zero)
            self.key_bias = parameter(rngs, (kv_heads, size), ("kv_heads", "head_dim"), "bias", zero)
            self.value_bias = parameter(rngs, (kv_heads, size), ("kv_heads", "head_dim"), "bias", zero)
        if config.bias == "all":
            self.output_bias = parameter(rngs, (embed,), ("norm",), "bias", zero)
        if config.qk_norm:
            self.query_norm = RMSNorm(size, config.norm_epsilon, rngs=rngs)
            self.key_norm = RMSNorm(size, config.norm_epsilon, rngs=rngs)

    def __call__(
        self, x: Residual, context: DecoderContext, cache: LayerCache | None = None
    ) -> tuple[Residual, KeysValues]:
        """What is added to `x`, and these tokens' keys and values; with a cache, `x` is one token of each row."""
        config = self.config
        q, k, v = enter(x, *(with_axes(each) for each in (self.query, self.key, self.value)))
        if config.bias != "none":
            q, k, v = q + self.query_bias[...], k + self.key_bias[...], v + self.value_bias[...]
        q = constrain(q, "batch", "seq", "heads", "head_dim")
        k = constrain(k, "batch", "seq", "kv_heads", "head_dim")
        v = constrain(v, "batch", "seq", "kv_heads", "head_dim")
        if config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, context), rotate(k, context)
        q, k, v = checkpoint_name(q, "query"), checkpoint_name(k, "key"), checkpoint_name(v, "value")
        if cache is None:
            mixed = causal_attention(q, k, v, context.segments, config.window)
        else:
            mixed = cached_attention(q, k, v, *cache.remembered, cache.first, cache.slot, config.window)
        mixed = constrain(mixed, "batch", "seq", "heads", "head_dim")
        y = leave(mixed, *with_axes(self.output))
        y = y + self.output_bias[...] if config.bias == "all" else y
        return constrain(y, "batch", "residual_seq", "embed"), KeysValues(k, v)


class GatedMLP(nnx.Module):
    """down(activation(gate x) · up x): SwiGLU or GeGLU (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed, mlp = config.embed, config.mlp
        inner, outer = normal(config.initial_scale), normal(output_scale(config))
        self.gate = parameter(rngs, (embed, mlp), ("embed", "mlp"), "matrix", inner)
        self.up = parameter(rngs, (embed, mlp), ("embed", "mlp"), "matrix", inner)
        self.down = parameter(rngs, (mlp, embed), ("mlp", "embed"), "matrix", outer)
        if config.bias == "all":
            self.gate_bias = parameter(rngs, (mlp,), ("mlp",), "bias", constant(0.0))
            self.up_bias = parameter(rngs, (mlp,), ("mlp",), "bias", constant(0.0))
            self.down_bias = parameter(rngs, (embed,), ("norm",), "bias", constant(0.0))

    def __call__(self, x: Residual) -> Residual:
        with_bias = self.config.bias == "all"
        activation = jax.nn.silu if self.config.activation == "silu" else jax.nn.gelu
        gate, up = enter(x, with_axes(self.gate), with_axes(self.up))
        if with_bias:
            gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
        gate, up = checkpoint_name(gate, "gate"), checkpoint_name(up, "up")
        hidden = checkpoint_name(constrain(activation(gate) * up, "batch", "seq", "mlp"), "hidden")
        y = leave(hidden, *with_axes(self.down))
        y = y + self.down_bias[...] if with_bias else y
        return constrain(y, "batch", "residual_seq", "embed")


class DecoderLayer(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x); dropout on what is added."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = RMSNorm(config.embed, config.norm_epsilon, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_epsilon, rngs=rngs)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(
        self, x: Residual, context: DecoderContext, key: Key[Array, ""] | None, cache: LayerCache | None = None
    ) -> tuple[Residual, KeysValues]:
        """The next residual, and what attention would remember of these tokens."""
        attended, remembered = self.attention(self.attention_norm(x), context, cache)
        attended = dropout(attended, self.config.dropout, key, ATTENTION_SITE, context.rows)
        x = checkpoint_name(x + attended, "residual")
        y = dropout(self.mlp(self.mlp_norm(x)), self.config.dropout, key, MLP_SITE, context.rows)
        return x + y, remembered


def rotary_angles(
    config: DecoderConfig, positions: Int[Array, "rows seq"]
) -> tuple[Float[Array, "rows seq half_head_dim"], Float[Array, "rows seq half_head_dim"]]:
    """Cosines and sines of position · theta^(-2i/head_dim) (RoFormer, arXiv 2104.09864)."""
    size = config.resolved_head_dim
    frequencies = config.rope.theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if config.rope.scaling is not None:
        frequencies = scale_frequencies(frequencies, config.rope.scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def scale_frequencies(frequencies: Float[Array, " half"], scaling: RopeScaling) -> Float[Array, " half"]:
    """Llama 3.1's stretch of the context: long wavelengths divided by `factor`, short ones kept, a ramp between."""
    turns = scaling.original_sequence * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(
    x: Float[Array, "rows seq heads head_dim"], context: DecoderContext
) -> Float[Array, "rows seq heads head_dim"]:
    """Rotates the pairs (i, i + head_dim/2), as Llama's released weights expect."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = context.cosine[:, :, None], context.sine[:, :, None]
    return jnp.concatenate((first * cosine - second * sine, second * cosine + first * sine), axis=-1).astype(x.dtype)
