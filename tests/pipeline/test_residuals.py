"""What waits for a layer's backward is what rematerialisation says, and no weight or what the batch tells again."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.config import DecoderConfig, VitConfig
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import unbox
from jaxtrain.models.remat import KEEP_ALL, Remat, checkpointed
from jaxtrain.models.task import Staged
from jaxtrain.models.vision import VisionTask
from jaxtrain.pipeline.residuals import SplitLayer
from jaxtrain.sharding import use_layout
from tests.runs import make_layout

ROWS, SEQUENCE, KEY = 4, 16, jax.random.key(3)
DECODER = DecoderConfig(vocab=64, layers=2, embed=32, heads=4, kv_heads=2, mlp=48, initial_scale=0.1, dropout=0.3)
VIT = VitConfig(family="vit", image=8, patch=2, layers=2, embed=32, heads=4, mlp=48, dropout=0.3)
REMATS = {"none": KEEP_ALL, "full": Remat("full"), "dots": Remat("dots"), "named": Remat("named", save=("hidden",))}
INPUT, HIDDEN = ROWS * SEQUENCE * 32, ROWS * SEQUENCE * 48
PROJECTIONS = {"decoder": 32 + 16 + 16 + 32 + 48 + 48, "vit": 3 * 32 + 32 + 48}
"""Numbers a token that come out of matrix products with weights, and that something is computed from."""


def task_of(family: str, remat: Remat) -> Staged:
    return LanguageTask(DECODER, SEQUENCE, remat=remat) if family == "decoder" else VisionTask(VIT, remat=remat)


def batch_of(task: Staged) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    batch = {"row": np.arange(ROWS, dtype=np.int32)}
    for name, spec in task.example_batch(ROWS).items():
        drawn = random.standard_normal(spec.shape)
        batch[name] = (3 + drawn if spec.dtype == np.int32 else drawn).astype(spec.dtype)
    return batch


def split(task: Staged) -> tuple[SplitLayer, Any, Any]:
    """A layer cut in two, its weights, and what it looks up."""

    def layer(weights: Any, carry: Any, lookups: Any) -> Any:
        context, key, place = lookups
        return task.layer(weights, carry, context, jax.random.fold_in(key, place))

    weights = jax.tree.map(lambda leaf: leaf[1], unbox(task.init(jax.random.key(0)))["layers"])
    return SplitLayer(checkpointed(layer, task.remat)), weights, (task.context(batch_of(task)), KEY, np.int32(5))


def carry(seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (ROWS, SEQUENCE, 32))


def as_bag(array: Any) -> bytes:
    """The same for an array and all its transposes and shapes."""
    return np.sort(np.asarray(array, np.float32), axis=None).tobytes()


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("family", PROJECTIONS)
def test_weights_and_what_is_looked_up_are_not_stored(family: str, remat: str, axes: dict[str, int]) -> None:
    task = task_of(family, REMATS[remat])
    layer, weights, lookups = split(task)
    with use_layout(make_layout(**axes)):
        _, stored = jax.jit(layer.forward)(weights, carry(), lookups)
    matrices = {as_bag(leaf) for leaf in jax.tree.leaves(weights) if leaf.ndim > 1}
    assert not [leaf.shape for leaf in stored if leaf.size > 1 and as_bag(leaf) in matrices]
    if remat != "none":  # which keeps products' operands as they are broadcast: scales of norms, rotary angles
        given = {as_bag(leaf) for leaf in jax.tree.leaves((weights, lookups[0])) if np.size(leaf) > 1}
        assert not [leaf.shape for leaf in stored if as_bag(leaf) in given]
    sizes = {"full": INPUT, "named": INPUT + HIDDEN, "dots": INPUT + ROWS * SEQUENCE * PROJECTIONS[family]}
    total = sum(leaf.size for leaf in stored)
    if remat == "none":
        assert total > sizes["dots"]
    else:
        assert total == sizes[remat]


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("family", PROJECTIONS)
def test_both_halves_give_the_gradients_of_the_whole(family: str, remat: str) -> None:
    task = task_of(family, REMATS[remat])
    layer, weights, lookups = split(task)

    def halves(weights: Any, x: Any, cotangent: Any) -> Any:
        _, stored = layer.forward(weights, x, lookups)
        return layer.backward(weights, lookups, stored, (cotangent, {}))

    def whole(weights: Any, x: Any, cotangent: Any) -> Any:
        context, key, place = lookups
        function = lambda weights, x: task.layer(weights, x, context, jax.random.fold_in(key, place))[0]  # noqa: E731
        return jax.vjp(function, weights, x)[1](cotangent)

    got, want = (jax.jit(function)(weights, carry(1), carry(2)) for function in (halves, whole))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
