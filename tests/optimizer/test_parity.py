"""Every optimizer trains the same on every layout, and its state lies where its parameters lie."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.parameters import ParameterInfo, named_leaves
from jaxtrain.optimizer import state_axes
from tests.runs import Trained, make_batches, tiny_program, train_on

OPTIMIZERS = {
    "adamw": "optimizer={name: adamw, learning_rate: 1e-2}",
    "sgd": "optimizer={name: sgd, learning_rate: 1.0}",
    "adafactor": "optimizer={name: adafactor, learning_rate: 0.1, factored_from: 16, weight_decay: 0.1}",
    "lion": "optimizer={name: lion, learning_rate: 1e-3}",
    "muon": "optimizer={name: muon, learning_rate: 1e-2}",
}
ALL_AXES = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
MESHES = [
    pytest.param(("mesh.fsdp=8",), id="fsdp=8", marks=pytest.mark.slow),
    pytest.param(ALL_AXES, id="data=2 fsdp=2 tensor=2"),
]


@functools.cache
def trained(optimizer: str, *mesh: str) -> Trained:
    """Five updates of a model whose four layers Muon can spread over 2 × 2 devices and not over 8."""
    program = tiny_program(8 if mesh else 1, OPTIMIZERS[optimizer], "model.layers=4", *mesh)
    return train_on(program, make_batches(5), steps=5)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_five_steps_are_the_same_on_every_mesh(optimizer: str, mesh: tuple[str, ...]) -> None:
    alone, split = trained(optimizer), trained(optimizer, *mesh)
    assert alone.losses[-1] < 0.99 * alone.losses[0]
    np.testing.assert_allclose(split.losses, alone.losses, rtol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_moment_is_whole_on_a_device_where_its_parameter_is_not(optimizer: str) -> None:
    """Each moment is float32 and has as many parts as the dimensions that it shares with its parameter."""
    run = trained(optimizer, *ALL_AXES)
    params = named_leaves(run.state["params"])
    for state in (run.program.state, run.state):
        for name, moment in named_leaves(state["optimizer"]).items():
            owner = next((param for param in params if name.endswith(param)), None)
            if owner is None:
                assert moment.shape == (), name
                continue
            assert moment.dtype == jnp.float32, name
            want = _expected_spec(name, moment.shape, params[owner])
            assert moment.sharding.is_equivalent_to(want, moment.ndim), name


def _expected_spec(name: str, shape: tuple[int, ...], param: jax.Array) -> jax.sharding.Sharding:
    sharding = param.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    spec = [*sharding.spec, *[None] * (param.ndim - len(sharding.spec))]
    attention = param.ndim == 4
    if ".rows." in name:
        spec = spec[:3] if attention and name.endswith("output") else spec[: param.ndim - (2 if attention else 1)]
    elif ".columns." in name:
        inputs = 2 if attention and name.endswith("output") else 1
        stacked = len(spec) - (3 if attention else 2)
        spec = [*spec[:stacked], *spec[stacked + inputs :]]
    assert len(spec) == len(shape), name
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))


def test_adafactor_keeps_a_small_part_of_adamws_moments() -> None:
    sizes = {
        name: sum(leaf.size for leaf in jax.tree.leaves(trained(name, *ALL_AXES).program.state["optimizer"]))
        for name in ("adamw", "adafactor")
    }
    assert sizes["adafactor"] < 0.05 * sizes["adamw"]


def collectives(optimizer: str) -> dict[str, int]:
    program = tiny_program(8, OPTIMIZERS[optimizer], "model.layers=4", *ALL_AXES)
    text = program.train_step.lower(program.state, program.batch, program.abstract_inputs()).compile().as_text()
    found = re.findall(r" (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", text)
    return {kind: found.count(kind) for kind in set(found)}


def test_muon_moves_whole_layers_to_the_devices_and_gathers_no_matrix() -> None:
    """What it adds to AdamW's collectives are all-to-alls: seven matrices, there and back, over two mesh axes."""
    adamw, muon = collectives("adamw"), collectives("muon")
    added = {kind: count - adamw.get(kind, 0) for kind, count in muon.items() if count != adamw.get(kind, 0)}
    assert added == {"all-to-all": 7 * 2 * 2}


def test_state_that_no_parameter_tells_how_to_split_is_refused() -> None:
    infos = {"w": ParameterInfo((8, 8), ("embed", "mlp"), "matrix")}
    with pytest.raises(ValueError, match=r"preconditioner of shape \(8, 8\) belongs to no parameter"):
        state_axes({"preconditioner": jnp.zeros((8, 8))}, infos)
    with pytest.raises(ValueError, match=r"mu\.w has shape \(8, 4\), unlike its parameter"):
        state_axes({"mu": {"w": jnp.zeros((8, 4))}}, infos)
