"""Law 2: a layout changes where numbers live, never the numbers."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxtrain.data import host_batches
from jaxtrain.models.parameters import named_leaves
from jaxtrain.program import Program
from jaxtrain.training_data import open_data
from tests.runs import FAMILIES, MESHES, Trained, make_batches, tiny_program, train_on

STEPS = 20
SPLIT = [name for name in MESHES if name != "one device"]
FAMILY_MESHES = [
    *(("decoder", mesh) for mesh in SPLIT),
    *(("vit", mesh) for mesh in SPLIT if mesh != "tensor=4"),
    *(("own", mesh) for mesh in ("data=8", "fsdp=8", "data=2 fsdp=2 tensor=2")),
]
RATES = {"decoder": "optimizer.learning_rate=1e-3", "vit": "optimizer.learning_rate=1e-3"}
RATES["own"] = "optimizer.learning_rate=1e-2"
ACCUMULATED = ["one device", "data=2 fsdp=2 tensor=2"]
ODD_SIZES = ("model.vocab=248", "model.mlp=124", "model.embed=72", "model.head_dim=10")
"""Shards of 62, 31 and 9 on tensor=4 and fsdp=8."""


def program_on(mesh: str, *overrides: str) -> Program:
    devices, layout = MESHES[mesh]
    return tiny_program(devices, *layout, *overrides)


def reference_for(mesh: str) -> tuple[str, ...]:
    """What the mesh's config changes in the model."""
    return tuple(override for override in MESHES[mesh][1] if override.startswith("model."))


def rows_of_data(program: Program, count: int) -> list[dict[str, np.ndarray]]:
    """Batches of the program's own data, of which some rows aren't counted."""
    data = open_data(program.config)
    batches = itertools.islice(host_batches(data.table, data.order, 8, np.arange(8), prefetch=0), count)
    random = np.random.default_rng(0)
    return [{**batch, "weights": batch["weights"] * (random.random(8) < 0.8)} for batch in batches]


def train(program: Program, family: str) -> Trained:
    batches = make_batches(STEPS) if family == "decoder" else rows_of_data(program, STEPS)
    return train_on(program, batches, steps=STEPS)


@functools.cache
def trained(mesh: str, *overrides: str, family: str = "decoder") -> Trained:
    return train(program_on(mesh, *FAMILIES[family], RATES[family], *overrides), family)


@functools.cache
def trained_alone(*model: str, family: str = "decoder") -> Trained:
    return train(tiny_program(1, *FAMILIES[family], *model, RATES[family]), family)


def assert_same_run(split: Trained, alone: Trained) -> None:
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "step", "skipped"):
        got, want = ([metrics[name] for metrics in run.metrics] for run in (split, alone))
        # After some updates a gradient's norm differs as the parameters do; the loss is what must agree.
        np.testing.assert_allclose(got, want, rtol=1e-4 if name == "grad_norm" else 1e-5, err_msg=name)


@pytest.mark.parametrize(("family", "mesh"), FAMILY_MESHES)
def test_twenty_steps_have_the_same_losses_on_every_mesh(family: str, mesh: str) -> None:
    alone = trained_alone(*reference_for(mesh), family=family)
    assert alone.losses[-5:].mean() < 0.98 * alone.losses[:5].mean()
    assert_same_run(trained(mesh, family=family), alone)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", ACCUMULATED)
def test_twenty_steps_have_the_same_losses_in_micro_batches(family: str, mesh: str) -> None:
    assert_same_run(trained(mesh, "microbatch=1", family=family), trained_alone(family=family))


@pytest.mark.parametrize("mesh", SPLIT)
def test_the_gradient_norm_of_the_first_step_is_the_same_on_every_mesh(mesh: str) -> None:
    alone = trained_alone(*reference_for(mesh))
    assert trained(mesh).metrics[0]["grad_norm"] == pytest.approx(alone.metrics[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "mesh", "sizes"),
    [*((family, mesh, ()) for family, mesh in FAMILY_MESHES), *(("decoder", mesh, ODD_SIZES) for mesh in SPLIT)],
)
def test_initial_parameters_are_bit_identical_on_every_mesh(family: str, mesh: str, sizes: tuple[str, ...]) -> None:
    model = [*FAMILIES[family], *sizes]
    alone, split = tiny_program(1, *model, *reference_for(mesh)), program_on(mesh, *model)
    want, got = (named_leaves(program.init(program.initial_key())["params"]) for program in (alone, split))
    assert want.keys() == got.keys()
    for name, leaf in want.items():
        assert np.asarray(leaf).tobytes() == np.asarray(got[name]).tobytes(), name


def test_another_seed_starts_elsewhere() -> None:
    zero, one = (tiny_program(1, f"seed={seed}") for seed in (0, 1))
    first, second = (program.init(program.initial_key())["params"] for program in (zero, one))
    assert (first["embed"]["table"] != second["embed"]["table"]).all()


@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2 fsdp=2 tensor=2"])
def test_each_moment_lies_where_its_parameter_lies_before_and_after_training(mesh: str) -> None:
    run = trained(mesh)
    for state in (run.program.state, run.state):
        params = named_leaves(state["params"])
        for moments in (state["optimizer"]["adam"].mu, state["optimizer"]["adam"].nu):
            for name, moment in named_leaves(moments).items():
                assert moment.sharding.is_equivalent_to(params[name].sharding, moment.ndim), name
    for leaf, planned in zip(jax.tree.leaves(run.state), jax.tree.leaves(run.program.state), strict=True):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
        assert leaf.addressable_shards[0].data.shape == planned.sharding.shard_shape(leaf.shape)


def test_fsdp_over_eight_devices_leaves_each_an_eighth_of_the_optimizer_state() -> None:
    adam = trained("fsdp=8").state["optimizer"]["adam"]
    moments = jax.tree.leaves((adam.mu, adam.nu))
    total = sum(leaf.nbytes for leaf in moments)
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in moments)
    assert total / 8 <= here < 1.05 * total / 8


def test_every_matrix_is_split_over_each_axis_that_its_names_allow() -> None:
    program = program_on("data=2 fsdp=2 tensor=2")
    split = {
        name: leaf.size // np.prod(leaf.sharding.shard_shape(leaf.shape))
        for name, leaf in named_leaves(program.state["params"]).items()
        if isinstance(leaf.sharding, NamedSharding)
    }
    assert {name: parts for name, parts in split.items() if parts != 4} == {
        name: 1 for name in split if name.endswith("norm.scale")
    }
