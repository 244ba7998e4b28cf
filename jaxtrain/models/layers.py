"""Parts that several families are made of."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain.config import DecoderConfig, VitConfig
from jaxtrain.models.parameters import constant, parameter
from jaxtrain.ops.projection import Axes

Residual = Float[Array, "rows seq embed"]


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, epsilon: float, *, rngs: nnx.Rngs):
        self.epsilon = epsilon
        self.scale = parameter(rngs, (size,), ("norm",), "norm", constant(1.0))

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        wide = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + self.epsilon)
        return (wide * inverse_rms * self.scale[...]).astype(x.dtype)


def output_scale(config: DecoderConfig | VitConfig) -> float:
    """Initial scale of what is added to the residual stream: 1/√(2 layers) of the others' (GPT-2)."""
    return config.initial_scale / math.sqrt(2 * config.layers)


def with_axes(weight: nnx.Param) -> tuple[Array, Axes]:
    """A weight with its logical axes, as `ops.projection` takes it."""
    return weight[...], weight.axes
