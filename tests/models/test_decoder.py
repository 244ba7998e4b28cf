import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.config import DecoderConfig, RopeConfig, RopeScaling
from jaxtrain.models.decoder import DecoderContext, rotary_angles, rotate
from jaxtrain.models.layers import RMSNorm, output_scale
from jaxtrain.ops.attention import causal_attention

LLAMA_31 = RopeScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_sequence=8192)


def llama_31_frequencies(size: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The published procedure, one frequency at a time."""
    longest = scaling.original_sequence / scaling.low_frequency_factor
    shortest = scaling.original_sequence / scaling.high_frequency_factor
    frequencies = []
    for i in range(0, size, 2):
        frequency = 1.0 / theta ** (i / size)
        wavelength = 2 * math.pi / frequency
        if wavelength < shortest:
            frequencies.append(frequency)
        elif wavelength > longest:
            frequencies.append(frequency / scaling.factor)
        else:
            smooth = (scaling.original_sequence / wavelength - scaling.low_frequency_factor) / (
                scaling.high_frequency_factor - scaling.low_frequency_factor
            )
            frequencies.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    return np.array(frequencies)


@pytest.mark.parametrize("scaling", [None, LLAMA_31], ids=["plain", "llama 3.1"])
def test_rotary_angles_are_those_of_the_published_formula(scaling: RopeScaling | None) -> None:
    config = DecoderConfig(embed=128, heads=1, rope=RopeConfig(theta=500000.0, scaling=scaling))
    cosine, sine = rotary_angles(config, jnp.array([[0, 1, 2]]))
    unscaled = RopeScaling(factor=1.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_sequence=8192)
    angles = np.array([0, 1, 2])[:, None] * llama_31_frequencies(128, 500000.0, scaling or unscaled)
    np.testing.assert_allclose(cosine[0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sine[0], np.sin(angles), rtol=1e-5, atol=1e-12)


def context_at(positions: jax.Array) -> DecoderContext:
    cosine, sine = rotary_angles(DecoderConfig(embed=8, heads=1), positions)
    return DecoderContext(cosine, sine, jnp.ones_like(positions), jnp.arange(positions.shape[0]))


def test_rotation_turns_the_pair_of_a_dimension_and_its_counterpart_in_the_other_half() -> None:
    x = jnp.zeros((1, 1, 1, 8)).at[..., 1].set(1.0)
    angle = 10000 ** (-2 / 8)
    turned = rotate(x, context_at(jnp.array([[1]])))[0, 0, 0]
    np.testing.assert_allclose(turned, [0, math.cos(angle), 0, 0, 0, math.sin(angle), 0, 0], atol=1e-6)


def test_shifting_all_positions_does_not_change_attention() -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 1, 8))
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))

    def attend(positions: jax.Array) -> jax.Array:
        context = context_at(positions)
        return causal_attention(rotate(q, context), rotate(k, context), v, context.segments)

    np.testing.assert_allclose(attend(positions), attend(positions + 100), atol=2e-5)
    assert jnp.abs(attend(positions) - attend(2 * positions)).max() > 1e-2


def test_rms_norm_divides_by_the_root_mean_square_in_float32() -> None:
    scale = jnp.array([1.0, 2.0, 3.0, 4.0])
    x = np.array([[1.0, -2.0, 3.0, -4.0], [300.0, 300.0, 300.0, 300.0]], np.float32)
    norm = _norm_with(scale, epsilon=0.5)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5) * np.asarray(scale)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-6)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def _norm_with(scale: jax.Array, epsilon: float) -> RMSNorm:
    norm = RMSNorm(scale.size, epsilon, rngs=nnx.Rngs(params=0))
    norm.scale.set_value(scale)
    return norm


def test_what_is_added_to_the_residual_stream_starts_smaller_with_depth() -> None:
    assert output_scale(DecoderConfig(layers=8, initial_scale=0.04)) == pytest.approx(0.01)
