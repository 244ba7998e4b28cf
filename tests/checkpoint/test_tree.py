"""Any state becomes nested dictionaries and comes back."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxtrain.checkpoint.tree import from_plain, to_plain

PARAMS = {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}, "scale": jnp.float32(2)}

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "named chain": optax.named_chain(("adam", optax.scale_by_adam()), ("decay", optax.add_decayed_weights(0.1))),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "schedule": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1.0, 10))),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "masked": optax.masked(optax.adam(1e-3), {"dense": {"kernel": True, "bias": False}, "scale": True}),
    "accumulating": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "factored": optax.adafactor(1e-3),
}


def assert_plain(node: Any) -> None:
    if isinstance(node, dict):
        assert all(type(key) is str for key in node)
        for child in node.values():
            assert_plain(child)
    else:
        assert isinstance(node, jax.Array)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_state_comes_back_as_it_was(name: str) -> None:
    state = {"params": PARAMS, "optimizer": OPTIMIZERS[name].init(PARAMS)}
    plain = to_plain(state)
    assert_plain(plain)
    back = from_plain(plain, jax.eval_shape(lambda: state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True))


def test_names_on_disk_are_the_fields_names() -> None:
    plain = to_plain(optax.named_chain(("adam", optax.scale_by_adam())).init(PARAMS))
    assert plain["adam"].keys() == {"count", "mu", "nu"}
    assert plain["adam"]["mu"]["dense"].keys() == {"kernel", "bias"}


def test_empty_containers_leave_nothing_on_disk() -> None:
    assert to_plain({"a": {}, "b": optax.EmptyState(), "c": jnp.ones(1)}).keys() == {"c"}


def test_a_leaf_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="bias"):
        from_plain({"dense": {"kernel": jnp.ones(1)}}, {"dense": {"kernel": 0, "bias": 0}})
