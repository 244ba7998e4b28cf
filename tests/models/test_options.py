"""Every option of the model does something, trains every parameter, and means the same on a mesh."""

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import DecoderConfig
from jaxtrain.gradient import total_loss
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import ParameterInfo, describe, named_leaves, path_name
from jaxtrain.sharding import Layout, use_layout
from jaxtrain.step import with_rows
from tests.runs import make_layout

SEQUENCE = 16
BASE: dict[str, Any] = {"vocab": 64, "layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "mlp": 48}
STRETCHED = {
    "theta": 100.0,
    "scaling": {
        "factor": 4.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_sequence": 16,
    },
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "all query heads have a key head": {"kv_heads": 4},
    "head width": {"head_dim": 10},
    "GeGLU": {"activation": "gelu"},
    "norm epsilon": {"norm_epsilon": 0.1},
    "rope theta": {"rope": {"theta": 100.0}},
    "rope scaling": {"rope": STRETCHED},
    "qk norm": {"qk_norm": True},
    "window": {"window": 3},
    "logit softcap": {"logit_softcap": 0.5},
    "qkv bias": {"bias": "qkv"},
    "all biases": {"bias": "all"},
    "tied embeddings": {"tied_embeddings": True},
    "dropout": {"dropout": 0.1},
    "z": {"loss": {"z": 0.1}},
    "label smoothing": {"loss": {"label_smoothing": 0.1}},
}
COVERING: dict[str, dict[str, Any]] = {
    "biases, tied, capped, windowed": {
        "bias": "all", "tied_embeddings": True, "logit_softcap": 2.0, "window": 5, "dropout": 0.2,
        "loss": {"z": 0.01, "label_smoothing": 0.1, "chunk": 7},
    },
    "normalised, stretched, GeGLU": {
        "qk_norm": True, "activation": "gelu", "rope": STRETCHED, "bias": "qkv", "logit_softcap": 2.0,
        "loss": {"z": 0.01},
    },
    "tied, smoothed, dropped": {
        "tied_embeddings": True, "qk_norm": True, "kv_heads": 4, "dropout": 0.5, "head_dim": 6,
        "loss": {"label_smoothing": 0.2, "chunk": 5},
    },
}  # fmt: skip


def task_with(options: dict[str, Any]) -> LanguageTask:
    return LanguageTask(DecoderConfig.model_validate({**BASE, **options}), SEQUENCE)


def params_of(task: LanguageTask) -> Any:
    """Values drawn by the parameter's name, so that options don't shift them, no bias is 0 and no scale 1."""

    def draw(path: Any, info: ParameterInfo) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(path_name(path).encode()))
        return np.float32((info.role == "norm") + 0.2 * random.standard_normal(info.shape))

    return jax.tree_util.tree_map_with_path(draw, infos_of(task))


def infos_of(task: LanguageTask) -> Any:
    return describe(jax.eval_shape(task.init, jax.random.key(0)))


def make_batch() -> dict[str, jax.Array]:
    """Eight rows of two documents each; every fifth token isn't counted."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (8, SEQUENCE + 1))
    position = np.arange(SEQUENCE)
    rows = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.broadcast_to(1 + (position >= 10), (8, SEQUENCE)),
        "positions": np.broadcast_to(np.where(position >= 10, position - 10, position), (8, SEQUENCE)),
    }
    batch = {name: jnp.asarray(array, jnp.int32) for name, array in rows.items()}
    batch["weights"] = jnp.broadcast_to(jnp.asarray(position % 5 > 0, jnp.float32), (8, SEQUENCE))
    return with_rows(batch)


def loss(task: LanguageTask, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return total_loss(task.losses(params, batch, jax.random.key(1)), task.denominators(batch))


@functools.cache
def losses_by_option() -> dict[str, float]:
    """The loss with each option alone, in one program."""
    tasks = {name: task_with(options) for name, options in {"none": {}, **OPTIONS}.items()}

    def every(params: dict[str, Any], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: loss(task, params[name], batch) for name, task in tasks.items()}

    params = {name: params_of(task) for name, task in tasks.items()}
    return {name: value.item() for name, value in jax.jit(every)(params, make_batch()).items()}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_changes_the_loss(option: str) -> None:
    losses = losses_by_option()
    assert np.isfinite(losses[option])
    assert abs(losses[option] - losses["none"]) > 1e-5 * losses["none"]


def test_no_two_options_mean_the_same() -> None:
    assert len(set(losses_by_option().values())) == 1 + len(OPTIONS)


def gradients(name: str, layout: Layout) -> tuple[float, dict[str, np.ndarray]]:
    task = task_with(COVERING[name])
    shardings = jax.tree.map(lambda info: layout.parameter(info.axes, info.shape, "parameter"), infos_of(task))
    params = jax.device_put(params_of(task), shardings)
    batch = {
        key: jax.device_put(array, layout.activation(("batch", "seq")[: array.ndim], array.shape, key))
        for key, array in make_batch().items()
    }
    with use_layout(layout):
        value, gradient = jax.jit(jax.value_and_grad(functools.partial(loss, task)))(params, batch)
    return value.item(), {key: np.asarray(leaf) for key, leaf in named_leaves(gradient).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERING)
def test_options_train_every_parameter_and_agree_between_one_device_and_a_mesh(name: str) -> None:
    value, single = gradients(name, make_layout())
    sharded_value, sharded = gradients(name, make_layout(data=2, fsdp=2, tensor=2))
    assert sharded_value == pytest.approx(value, rel=1e-5)
    for key, gradient in single.items():
        assert np.isfinite(gradient).all(), key
        if not key.endswith("key_bias") or "qk_norm" in COVERING[name]:
            assert np.linalg.norm(gradient) > 1e-4, key
        np.testing.assert_allclose(sharded[key], gradient, rtol=1e-4, atol=1e-5 * np.abs(gradient).max(), err_msg=key)
