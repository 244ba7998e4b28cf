"""Tokens are drawn with exactly the probabilities that temperature, top-k and top-p say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.generation import Sampling
from jaxtrain.generation.sampling import choose, likeliest

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 0.0, 1.0, 2.0, -3.0], np.float32)
"""With three equal largest ones."""
CASES = {
    "plain": Sampling(1.0),
    "cold": Sampling(0.5),
    "hot": Sampling(3.0),
    "top-k": Sampling(1.0, top_k=4),
    "top-k through equal ones": Sampling(1.0, top_k=2),
    "top-k above the vocabulary": Sampling(1.0, top_k=100),
    "top-p": Sampling(1.0, top_p=0.9),
    "top-p through equal ones": Sampling(1.0, top_p=0.3),
    "tiny top-p": Sampling(1.0, top_p=1e-6),
    "a top-p that is 0 in float32": Sampling(1.0, top_p=1e-300),
    "all three": Sampling(2.0, top_k=6, top_p=0.8),
}


def probabilities(sampling: Sampling) -> np.ndarray:
    """By the definition, one token after the other in float64."""
    assert sampling.temperature is not None
    scaled = np.exp(LOGITS.astype(np.float64) / sampling.temperature)
    ranked = sorted(range(len(LOGITS)), key=lambda token: (-LOGITS[token], token))[: sampling.top_k]
    weights = {token: scaled[token] / scaled[ranked].sum() for token in ranked}
    kept: list[int] = []
    for token in ranked:
        if sampling.top_p is None or sum(weights[other] for other in kept) < sampling.top_p:
            kept.append(token)
    wanted = np.zeros(len(LOGITS))
    wanted[kept] = scaled[kept] / scaled[kept].sum()
    return wanted


@pytest.mark.parametrize("name", CASES)
def test_the_probabilities_are_exact(name: str) -> None:
    kept = likeliest(jnp.array([LOGITS, LOGITS[::-1]]), CASES[name])
    np.testing.assert_allclose(jax.nn.softmax(kept[0]), probabilities(CASES[name]), atol=1e-6)


@pytest.mark.parametrize("name", ["hot", "top-k through equal ones", "all three"])
def test_tokens_are_drawn_with_these_probabilities(name: str) -> None:
    draws, wanted = 20_000, probabilities(CASES[name])
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = choose(jnp.broadcast_to(LOGITS, (draws, len(LOGITS))), CASES[name], keys)
    counts = np.bincount(tokens, minlength=len(LOGITS))
    assert (counts[wanted == 0] == 0).all()
    expected = draws * wanted[wanted > 0]
    chi_square = ((counts[wanted > 0] - expected) ** 2 / expected).sum()
    assert chi_square < 24.3, "24.3 is passed once in a thousand with seven degrees of freedom"


def test_without_a_temperature_it_is_the_likeliest_and_of_equal_ones_the_first() -> None:
    assert choose(jnp.array([LOGITS, LOGITS[::-1]]), Sampling(), None).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-38, 1e30])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = jnp.array([[100.0, 3e4, -3e4]])
    kept = likeliest(logits, Sampling(jnp.float32(temperature)))
    assert not jnp.isnan(jax.nn.softmax(kept)).any()
    assert kept[0, 1] == 0
