import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.models.parameters import (
    constant,
    count_parameters,
    describe,
    named_leaves,
    normal,
    parameter,
    stack,
    unbox,
)

KEY = jax.random.key(5)


def init_layer(key: jax.Array) -> dict[str, nnx.Param]:
    rngs = nnx.Rngs(params=key)
    return {
        "up": parameter(rngs, (4, 6), ("embed", "mlp"), "matrix", normal(0.1)),
        "scale": parameter(rngs, (4,), ("norm",), "norm", constant(1.0)),
    }


def test_a_stacked_layer_starts_like_a_single_one_with_its_own_key() -> None:
    stacked = unbox(stack(init_layer, KEY, 3))
    for i in range(3):
        single = unbox(init_layer(jax.random.fold_in(KEY, i)))
        for name, values in single.items():
            np.testing.assert_array_equal(stacked[name][i], values)


def test_a_layers_initial_values_do_not_depend_on_the_number_of_layers() -> None:
    np.testing.assert_array_equal(unbox(stack(init_layer, KEY, 2))["up"], unbox(stack(init_layer, KEY, 5))["up"][:2])


def test_stacking_names_the_new_dimension_and_keeps_the_role() -> None:
    infos = describe(jax.eval_shape(lambda key: stack(init_layer, key, 3), KEY))
    assert infos["up"] == infos["up"].__class__((3, 4, 6), ("layers", "embed", "mlp"), "matrix")
    assert (infos["scale"].axes, infos["scale"].role) == (("layers", "norm"), "norm")
    assert count_parameters(infos) == 3 * (4 * 6 + 4)


def test_normal_values_have_the_given_deviation() -> None:
    values = normal(0.02)(KEY, (100, 100))
    assert values.dtype == jnp.float32
    assert abs(float(values.std()) - 0.02) < 0.001


def test_a_parameter_with_too_few_axes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 6\) needs 2 logical axes, not \('embed',\)"):
        parameter(nnx.Rngs(params=0), (4, 6), ("embed",), "matrix", constant(0.0))


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown parameter role 'weight'; known: matrix, embedding, head"):
        parameter(nnx.Rngs(params=0), (4,), ("norm",), "weight", constant(0.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "leaf",
    [nnx.Param(jnp.ones(3), role="norm"), nnx.Param(jnp.ones(3), axes=("norm",)), jnp.ones(3)],
    ids=["without axes", "without role", "not a parameter"],
)
def test_a_leaf_that_says_nothing_of_itself_is_refused_by_name(leaf: object) -> None:
    with pytest.raises(ValueError, match="parameter layers.mlp.up has no logical axes and role"):
        describe({"layers": {"mlp": {"up": leaf}}})


def test_a_leaf_whose_names_lost_a_dimension_is_refused_by_name() -> None:
    stacked_without_its_axis = nnx.Param(jnp.ones((2, 3)), axes=("norm",), role="norm")
    with pytest.raises(ValueError, match=r"layers.norm.scale of shape \(2, 3\) needs an axis per dimension, not"):
        describe({"layers": {"norm": {"scale": stacked_without_its_axis}}})


def test_leaves_are_named_by_their_path() -> None:
    assert dict(named_leaves({"layers": {"mlp": {"up": 1}}, "head": 2})) == {"head": 2, "layers.mlp.up": 1}
