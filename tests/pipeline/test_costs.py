"""What a stage's parts weigh, against operations counted by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.config import DecoderConfig, VitConfig
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.remat import Remat
from jaxtrain.models.vision import VisionTask
from jaxtrain.pipeline.costs import costs_of, products
from tests.pipeline.staged import INPUTS, MLP, Balanced

VECTOR, MATRIX = jnp.ones(5), jnp.ones((5, 5))


def test_the_parts_of_a_small_task_are_counted_by_hand() -> None:
    """On one row; a backward pass takes twice the forward one."""
    costs = costs_of(Balanced(3, embed_size=8))
    assert costs.embed == costs.head == 3 * 2 * INPUTS * 8
    assert costs.layer == 3 * 2 * (8 * MLP + MLP * 8)


def test_a_layer_that_is_computed_again_costs_a_forward_more() -> None:
    kept, again = (costs_of(Balanced(3, remat=remat)) for remat in (Balanced(3).remat, Remat("full")))
    assert again.layer == 4 / 3 * kept.layer
    assert (again.embed, again.head) == (kept.embed, kept.head)


def test_a_decoder_embeds_for_nothing_and_its_head_is_one_product() -> None:
    config = DecoderConfig(vocab=96, layers=2, embed=32, heads=4, kv_heads=2, mlp=48)
    costs, tokens = costs_of(LanguageTask(config, 16)), 16
    assert costs.embed == 0
    assert costs.head == 3 * 2 * tokens * 32 * 96
    weights = 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48
    # Scores and values: of all pairs, where attention computes blocks whole.
    assert costs.layer == 3 * 2 * tokens * (weights + 2 * 4 * 8 * tokens)


def test_a_vision_transformer_embeds_patches_and_classifies_their_mean() -> None:
    config = VitConfig(family="vit", image=8, patch=2, channels=3, classes=7, layers=2, embed=32, heads=4, mlp=48)
    costs, patches = costs_of(VisionTask(config)), 16
    assert costs.embed == 3 * 2 * patches * (2 * 2 * 3) * 32
    assert costs.head == 3 * 2 * 32 * 7
    assert costs.layer == 3 * 2 * patches * (4 * 32 * 32 + 2 * 32 * 48 + 2 * 32 * patches)


def looped(matrix: Any, vector: Any) -> Any:
    return jax.lax.scan(lambda x, _: (matrix @ x, None), vector, length=7)[0]


def chosen(matrix: Any, vector: Any) -> Any:
    return jax.lax.cond(vector.sum() > 0, lambda: matrix @ (matrix @ vector), lambda: matrix @ vector)


@pytest.mark.parametrize(
    ("function", "times"),
    [(jnp.matmul, 1), (looped, 7), (jax.jit(looped), 7), (chosen, 2), (jax.checkpoint(looped), 7)],
)
def test_loops_count_each_turn_and_branches_the_longer_one(function: Any, times: int) -> None:
    assert products(function, MATRIX, VECTOR) == times * 2 * 5 * 5


def test_batched_products_count_all_of_the_batch() -> None:
    function = jax.vmap(jnp.matmul)
    assert products(function, jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))) == 2 * 3 * 4 * 5 * 6
