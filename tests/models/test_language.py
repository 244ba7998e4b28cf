import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.config import DecoderConfig
from jaxtrain.models.decoder import DecoderLayer
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import parameters_of, unbox
from jaxtrain.models.task import Task, run_layers
from jaxtrain.step import with_rows

CONFIG = DecoderConfig(vocab=64, layers=3, embed=32, heads=4, kv_heads=2, mlp=48, initial_scale=0.1)
TASK = LanguageTask(CONFIG, sequence=16)
KEY = jax.random.key(0)


def make_batch(rows: int = 4, sequence: int = 16, seed: int = 0) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 64, (rows, sequence + 1))
    return with_rows(
        {
            "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
            "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
            "segments": jnp.ones((rows, sequence), jnp.int32),
            "positions": jnp.broadcast_to(jnp.arange(sequence), (rows, sequence)),
            "weights": jnp.asarray(random.random((rows, sequence)) < 0.8, jnp.float32),
        }
    )


@functools.cache
def params_of(task: LanguageTask) -> Any:
    return jax.jit(lambda: unbox(task.init(KEY)))()


def test_a_language_task_has_every_method_of_the_task_protocol() -> None:
    assert isinstance(TASK, Task)
    for name in ("context", "embed", "layer", "head", "layer_count", "remat"):
        assert hasattr(TASK, name), name


def test_an_object_without_losses_is_no_task() -> None:
    members = {name: getattr(LanguageTask, name) for name in dir(Task) if not name.startswith("_")}
    assert isinstance(type("Complete", (), members)(), Task)
    del members["losses"]
    assert not isinstance(type("Incomplete", (), members)(), Task)


def test_the_loss_is_head_after_each_layer_after_embed() -> None:
    task, batch = LanguageTask(CONFIG.model_copy(update={"dropout": 0.3}), 16), make_batch()
    params, key = params_of(task), jax.random.key(7)
    carry = task.embed(params, batch, jax.random.fold_in(key, 0))
    for i in range(3):
        one_layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        carry, sums = task.layer(one_layer, carry, task.context(batch), jax.random.fold_in(key, i + 1))
        assert sums == {}
    by_hand = task.head(params, carry, batch)
    losses = task.losses(params, batch, key)
    assert set(losses) == set(by_hand) == {"cross_entropy"}
    np.testing.assert_allclose(losses["cross_entropy"], by_hand["cross_entropy"], rtol=1e-5)


def test_each_layer_draws_its_own_dropout_mask() -> None:
    task, batch = LanguageTask(CONFIG.model_copy(update={"dropout": 0.5, "layers": 2}), 16), make_batch()
    layer = jax.tree.map(lambda leaf: leaf[0], params_of(task)["layers"])
    carry = jnp.ones((4, 16, 32))
    context = task.context(batch)
    with_same_weights = [task.layer(layer, carry, context, jax.random.fold_in(KEY, i + 1))[0] for i in range(2)]
    assert (with_same_weights[0] != with_same_weights[1]).any()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layer)
    twice, _ = run_layers(task, {"layers": stacked}, carry, context, KEY)
    by_hand = task.layer(layer, with_same_weights[0], context, jax.random.fold_in(KEY, 2))[0]
    np.testing.assert_allclose(twice, by_hand, rtol=1e-5, atol=1e-5)


def test_denominators_are_the_counted_weights_and_never_zero() -> None:
    batch = make_batch()
    assert TASK.denominators(batch)["cross_entropy"] == batch["weights"].sum()
    nothing = {**batch, "weights": jnp.zeros((4, 16))}
    assert TASK.denominators(nothing)["cross_entropy"] == 1.0
    assert TASK.counted(batch) == (np.asarray(batch["weights"]) > 0).sum()


def test_the_evaluation_loss_is_plain_cross_entropy_without_dropout() -> None:
    batch, params = make_batch(), params_of(TASK)
    loss = CONFIG.loss.model_copy(update={"z": 0.1, "label_smoothing": 0.2})
    regularised = LanguageTask(CONFIG.model_copy(update={"loss": loss, "dropout": 0.5}), 16)
    metric = regularised.metrics(params, batch)["loss"]
    plain = TASK.losses(params, batch, KEY)["cross_entropy"] / batch["weights"].sum()
    assert metric.result() == pytest.approx(float(plain), rel=1e-6)
    assert regularised.losses(params, batch, KEY)["cross_entropy"] != plain * batch["weights"].sum()


def test_evaluation_sums_add_over_batches() -> None:
    params, whole = params_of(TASK), make_batch()
    halves = [{name: array[rows] for name, array in whole.items()} for rows in (slice(0, 1), slice(1, 4))]
    first, second = (TASK.metrics(params, half)["loss"] for half in halves)
    together = jax.tree.map(jnp.add, first, second)
    assert together.result() == pytest.approx(TASK.metrics(params, whole)["loss"].result(), rel=1e-5)


def test_a_mean_of_nothing_is_not_a_number() -> None:
    metric = TASK.metrics(params_of(TASK), {**make_batch(), "weights": jnp.zeros((4, 16))})["loss"]
    assert np.isnan(metric.result())


def test_the_example_batch_describes_the_arrays_of_a_batch() -> None:
    batch = make_batch()
    specs = TASK.example_batch(4)
    assert set(specs) == set(batch) - {"row"}
    for name, spec in specs.items():
        assert (spec.shape, spec.dtype, spec.axes) == (batch[name].shape, batch[name].dtype, ("batch", "seq"))


def test_stacked_layers_start_like_single_ones() -> None:
    params = params_of(TASK)
    key = jax.random.fold_in(jax.random.fold_in(KEY, 1), 2)
    third = jax.jit(lambda: unbox(parameters_of(DecoderLayer(TASK.config, rngs=nnx.Rngs(params=key)))))()
    for a, b in zip(jax.tree.leaves(third), jax.tree.leaves(params["layers"]), strict=True):
        np.testing.assert_array_equal(a, b[2])


def test_no_two_matrices_start_equal() -> None:
    params = params_of(TASK)
    mlp = params["layers"]["mlp"]
    drawn = [mlp["gate"][0], mlp["gate"][1], mlp["up"][0], mlp["down"][0].T]
    assert len({np.asarray(matrix).tobytes() for matrix in drawn}) == 4
