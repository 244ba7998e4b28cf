from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.config import DecoderConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.parameters import unbox
from jaxtrain.models.remat import KEEP_ALL, Remat
from jaxtrain.program import build
from tests.runs import tiny_config, train_steps

ROWS, SEQUENCE = 2, 16
CONFIG = DecoderConfig(vocab=64, layers=3, embed=32, heads=4, kv_heads=2, mlp=48, initial_scale=0.1)
TASK = LanguageTask(CONFIG, SEQUENCE)
POLICIES = {
    "full": Remat("full"),
    "dots": Remat("dots"),
    "save hidden": Remat("named", save=("hidden",)),
    "offload residual": Remat("named", save=("query",), offload=("residual",)),
}
RUNS = {
    "full": ["remat=full"],
    "dots": ["remat=dots"],
    "named": ["remat=named", "remat_save=[query, key, value]", "remat_offload=[residual]"],
}


def batch() -> dict[str, jax.Array]:
    tokens = jax.random.randint(jax.random.key(1), (ROWS, SEQUENCE), 0, CONFIG.vocab)
    ones = np.ones((ROWS, SEQUENCE), np.int32)
    positions = np.tile(np.arange(SEQUENCE, dtype=np.int32), (ROWS, 1))
    fields = {"tokens": tokens, "targets": tokens, "segments": ones, "positions": positions}
    return {**fields, "weights": ones.astype(np.float32), "row": np.arange(ROWS, dtype=np.int32)}


def loss(task: LanguageTask, params: Any) -> jax.Array:
    return task.losses(params, batch(), None)["cross_entropy"]


def kept(task: LanguageTask) -> int:
    """Numbers that the backward pass finds in memory."""
    params = unbox(TASK.init(jax.random.key(0)))
    _, vjp = jax.eval_shape(lambda params: jax.vjp(lambda params: loss(task, params), params), params)
    return sum(leaf.size for leaf in jax.tree.leaves(vjp))


@pytest.mark.parametrize("remat", POLICIES.values(), ids=POLICIES)
def test_every_policy_gives_the_same_gradients(remat: Remat) -> None:
    params = unbox(TASK.init(jax.random.key(0)))
    stored, recomputed = (
        jax.jit(jax.grad(lambda params, task=task: loss(task, params)))(params)
        for task in (TASK, replace(TASK, remat=remat))
    )
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(a).max())


def test_a_policy_keeps_what_it_says() -> None:
    sizes = {name: kept(replace(TASK, remat=remat)) for name, remat in POLICIES.items()}
    tokens = CONFIG.layers * ROWS * SEQUENCE
    assert sizes["save hidden"] == sizes["full"] + tokens * CONFIG.mlp
    assert sizes["offload residual"] == sizes["full"] + 2 * tokens * CONFIG.embed
    kv = 2 * CONFIG.embed // 2
    assert sizes["dots"] == sizes["full"] + tokens * (2 * CONFIG.embed + kv + 2 * CONFIG.mlp)
    assert sizes["dots"] < kept(replace(TASK, remat=KEEP_ALL))


def test_what_is_offloaded_lies_in_the_memory_of_the_host() -> None:
    task = replace(TASK, remat=POLICIES["offload residual"])
    params = unbox(TASK.init(jax.random.key(0)))
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda params: loss(task, params)))(params))
    assert "<host>" in jaxpr or "pinned_host" in jaxpr


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_runs_on_a_mesh_have_the_same_losses_with_every_policy(overrides, tmp_path, tiny_data) -> None:
    mesh = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    plain = train_steps(tiny_config(tmp_path, tiny_data, *mesh), 3, 8)
    remade = train_steps(tiny_config(tmp_path, tiny_data, *mesh, *overrides), 3, 8)
    np.testing.assert_allclose(remade.losses, plain.losses, rtol=1e-5)


def test_a_tensor_that_the_model_lacks_is_refused_with_those_it_has(tmp_path, tiny_data) -> None:
    config = tiny_config(tmp_path, tiny_data, "remat=named", "remat_save=[hidden, hiden]")
    with pytest.raises(ConfigError, match=r"remat_save: the model has no tensor named hiden; it has .*hidden"):
        build(config, jax.devices()[:1])
