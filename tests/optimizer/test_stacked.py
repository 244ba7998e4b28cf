"""Law: what is stacked for the compiler's sake trains as if each layer stood alone, and each matrix as a matrix."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig, OptimizerConfig, SgdConfig
from jaxtrain.models.parameters import ParameterInfo, Role
from jaxtrain.optimizer import make_optimizer
from jaxtrain.optimizer.adafactor import is_factored
from jaxtrain.optimizer.matrices import matrix_view
from tests.flags import AS_USERS_COMPILE

LAYERS, EXPERTS, STEPS = 3, 2, 4
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(weight_decay=0.1),
    "sgd": SgdConfig(name="sgd", weight_decay=0.1),
    "lion": LionConfig(name="lion"),
    "adafactor": AdafactorConfig(name="adafactor", weight_decay=0.1, factored_from=4),
    "adafactor, not factored": AdafactorConfig(name="adafactor", factored_from=1000),
    "muon": MuonConfig(name="muon", weight_decay=0.1),
    "muon by width": MuonConfig(name="muon", update_scale="width"),
}
LAYER: dict[str, tuple[tuple[int, ...], tuple[str | None, ...], Role]] = {
    "query": ((8, 4, 6), ("embed", "heads", "head_dim"), "matrix"),
    "output": ((4, 6, 8), ("heads", "head_dim", "embed"), "matrix"),
    "square": ((8, 8), ("embed", "mlp"), "matrix"),
    "scale": ((8,), ("norm",), "norm"),
    "shift": ((4, 6), ("heads", "head_dim"), "bias"),
    "gate": ((8, 5), ("embed", None), "router"),
}
"""One layer's parameters: shape, axes, role."""
TREE = {
    **{name: (("layers",), *rest) for name, rest in LAYER.items()},
    "expert": (("layers", "experts"), (8, 10), ("embed", "mlp"), "matrix"),
}
"""Name to stacked axes, and shape, axes and role of one slice."""
SIZES = {"layers": LAYERS, "experts": EXPERTS}


def info(stack: tuple[str, ...], shape: tuple[int, ...], axes: tuple[str | None, ...], role: Role) -> ParameterInfo:
    return ParameterInfo((*(SIZES[axis] for axis in stack), *shape), (*stack, *axes), role)


STACKED = {name: info(*entry) for name, entry in TREE.items()}


def arrays(seed: int) -> dict[str, jax.Array]:
    """Stacked arrays whose layers differ in size by orders of magnitude, as they do in a network."""
    random = np.random.default_rng(seed)
    found = {}
    for name, parameter in STACKED.items():
        sizes = np.array([1.0, 30.0, 0.01]).reshape(LAYERS, *[1] * (len(parameter.shape) - 1))
        found[name] = jnp.asarray(sizes * random.standard_normal(parameter.shape), jnp.float32)
    return found


def slices(tree: dict[str, jax.Array]) -> list[dict[str, jax.Array]]:
    """One tree a layer, with each expert's matrix a parameter of its own."""
    layers = []
    for layer in range(LAYERS):
        alone = {name: leaf[layer] for name, leaf in tree.items() if name != "expert"}
        layers.append(alone | {f"expert{i}": tree["expert"][layer, i] for i in range(EXPERTS)})
    return layers


ALONE = {name: info((), *entry) for name, entry in LAYER.items()} | {
    f"expert{i}": info((), *TREE["expert"][1:]) for i in range(EXPERTS)
}


def directions(config: OptimizerConfig, infos: Any, params: Any, gradients: list[Any]) -> list[Any]:
    optimizer = make_optimizer(config, infos)
    # Muon amplifies last bits.
    state, found, update = optimizer.init(params), [], jax.jit(optimizer.update, compiler_options=AS_USERS_COMPILE)
    for gradient in gradients:
        direction, state = update(gradient, state, params)
        found.append(direction)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stacked_tree_trains_as_its_layers_alone(name: str) -> None:
    params, gradients = arrays(0), [arrays(1 + step) for step in range(STEPS)]
    stacked = directions(OPTIMIZERS[name], STACKED, params, gradients)
    for layer in range(LAYERS):
        of_layer = [slices(gradient)[layer] for gradient in gradients]
        alone = directions(OPTIMIZERS[name], ALONE, slices(params)[layer], of_layer)
        for step in range(STEPS):
            got = slices(stacked[step])[layer]
            for leaf, want in alone[step].items():
                atol = 1e-6 * np.abs(want).max()
                np.testing.assert_allclose(got[leaf], want, rtol=1e-6, atol=atol, err_msg=f"{leaf} {layer} {step}")


def matrices(seed: int, layer: int) -> dict[str, jax.Array]:
    """One layer's matrices of role `matrix`, as inputs × outputs."""
    of_layer = slices(arrays(seed))[layer]
    return {
        name: of_layer[name].reshape(matrix_view(ALONE[name]).matrix_shape) for name in ("query", "output", "square")
    }


def steps_of(optimizer: optax.GradientTransformation, layer: int) -> dict[str, jax.Array]:
    params = matrices(0, layer)
    state, direction, update = optimizer.init(params), params, jax.jit(optimizer.update)
    for step in range(STEPS):
        direction, state = update(matrices(1 + step, layer), state, params)
    return direction


@pytest.mark.parametrize("scale", ["rms", "width"])
def test_muon_is_optax_muon_of_each_matrix(scale: Literal["rms", "width"]) -> None:
    config = MuonConfig(name="muon", weight_decay=0.0, update_scale=scale)
    got = slices(directions(config, STACKED, arrays(0), [arrays(1 + step) for step in range(STEPS)])[-1])
    reference = optax.contrib.muon(-1.0, consistent_rms=0.2 if scale == "rms" else None)
    for layer in range(LAYERS):
        for name, want in steps_of(reference, layer).items():
            have = got[layer][name].reshape(want.shape)
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("parameter_scale", [True, False])
def test_adafactor_is_optax_adafactor_of_each_matrix(parameter_scale: bool) -> None:
    config = AdafactorConfig(name="adafactor", factored_from=4, parameter_scale=parameter_scale)
    got = slices(directions(config, STACKED, arrays(0), [arrays(1 + step) for step in range(STEPS)])[-1])
    reference = optax.adafactor(1.0, min_dim_size_to_factor=4, multiply_by_parameter_scale=parameter_scale)
    for layer in range(LAYERS):
        for name, want in steps_of(reference, layer).items():
            have = -got[layer][name].reshape(want.shape)
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_muon_leaves_all_but_the_matrices_to_adamw() -> None:
    params, gradients = arrays(0), [arrays(1 + step) for step in range(STEPS)]
    muon = directions(MuonConfig(name="muon"), STACKED, params, gradients)[-1]
    adamw = directions(AdamWConfig(), STACKED, params, gradients)[-1]
    for name in ("scale", "shift", "gate"):
        np.testing.assert_array_equal(muon[name], adamw[name])
    for name in ("query", "output", "square", "expert"):
        assert not np.allclose(muon[name], adamw[name], rtol=0.1)


def test_muons_update_is_orthogonal_and_as_large_as_said() -> None:
    config = MuonConfig(name="muon", weight_decay=0.0, iterations=10)
    update = directions(config, STACKED, arrays(0), [arrays(1)])[0]["query"]
    for layer in update:
        singular = np.linalg.svd(layer.reshape(8, 24), compute_uv=False) / (0.2 * np.sqrt(24))
        assert (singular.min(), singular.max()) == pytest.approx((0.9, 0.9), abs=0.35)


@pytest.mark.parametrize(
    ("axes", "shape", "stacked", "matrix"),
    [
        (("embed", "mlp"), (8, 10), 0, (8, 10)),
        (("layers", "embed", "heads", "head_dim"), (3, 8, 4, 6), 1, (8, 24)),
        (("layers", "embed", "kv_heads", "head_dim"), (3, 8, 2, 6), 1, (8, 12)),
        (("layers", "heads", "head_dim", "embed"), (3, 4, 6, 8), 1, (24, 8)),
        (("layers", "experts", "embed", "mlp"), (3, 2, 8, 10), 2, (8, 10)),
        ((None, None, None, "embed"), (4, 4, 3, 8), 0, (48, 8)),
        (("layers", "norm"), (3, 8), 1, None),
        (("layers", "heads", "head_dim"), (3, 4, 6), 1, None),
        (("norm",), (8,), 0, None),
    ],
)
def test_a_parameter_is_seen_as_inputs_times_outputs(
    axes: tuple[str | None, ...], shape: tuple[int, ...], stacked: int, matrix: tuple[int, int] | None
) -> None:
    view = matrix_view(ParameterInfo(shape, axes, "matrix"))
    assert (view.stacked, view.is_matrix) == (stacked, matrix is not None)
    if matrix is not None:
        assert view.matrix_shape == matrix


def test_a_stack_of_vectors_is_never_factored() -> None:
    many = ParameterInfo((200, 200), ("layers", "norm"), "norm")
    assert not is_factored(matrix_view(many), 128)
    config = AdafactorConfig(name="adafactor")
    state = make_optimizer(config, {"scale": many}).init({"scale": jnp.zeros((200, 200))})["adafactor"]
    assert (state.rows["scale"], state.columns["scale"], state.full["scale"].shape) == (None, None, (200, 200))


def test_a_factored_moment_is_one_number_a_row_and_one_a_column_in_the_parameters_dimensions() -> None:
    state = make_optimizer(OPTIMIZERS["adafactor"], STACKED).init(arrays(0))["adafactor"]
    assert (state.rows["query"].shape, state.columns["query"].shape) == ((3, 8), (3, 4, 6))
    assert (state.rows["output"].shape, state.columns["output"].shape) == ((3, 4, 6), (3, 8))
    assert (state.rows["expert"].shape, state.columns["expert"].shape) == ((3, 2, 8), (3, 2, 10))
    assert state.full["query"] is None
