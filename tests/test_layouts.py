"""Law 2: a layout changes where numbers live, never the numbers."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.data import host_batches
from jaxtrain.models.parameters import named_leaves
from jaxtrain.program import Program
from jaxtrain.training_data import open_data
from tests.runs import (
    FAMILIES,
    MESHES,
    Trained,
    assert_same_first_moments,
    make_batches,
    tiny_program,
    tolerance,
    train_on,
)

STEPS = 20
SPLIT = [name for name in MESHES if name != "one device"]
VIT = ["data=8", "fsdp=8", "tensor=2", "data=2 fsdp=2 tensor=2", "pipeline=4 uneven"]
OWN = ["data=8", "fsdp=8", "data=2 fsdp=2 tensor=2", "data=2 fsdp=2 zero=2"]
FAMILY_MESHES = [
    *(("decoder", mesh) for mesh in SPLIT),
    *(("vit", mesh) for mesh in [*VIT, "pipeline=2 fsdp=2 tensor=2 gathered once"]),
    *(("own", mesh) for mesh in OWN),
]
RATES = {"decoder": "optimizer.learning_rate=1e-3", "vit": "optimizer.learning_rate=1e-3"}
RATES["own"] = "optimizer.learning_rate=1e-2"
ACCUMULATED = ["one device", "data=2 fsdp=2 tensor=2"]
ODD_SIZES = ("model.vocab=248", "model.mlp=124", "model.embed=72", "model.head_dim=10")
"""Shards of 62, 31 and 9 on tensor=4 and fsdp=8."""


def program_on(mesh: str, *overrides: str) -> Program:
    devices, layout = MESHES[mesh]
    return tiny_program(devices, *overrides, *layout)


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


def assert_same_run(split: Trained, alone: Trained, rtol: float = 1e-5) -> None:
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "step", "skipped"):
        got, want = ([metrics[name] for metrics in run.metrics] for run in (split, alone))
        # After some updates a gradient's norm differs as the parameters do; the loss is what must agree.
        np.testing.assert_allclose(got, want, rtol=10 * rtol if name == "grad_norm" else rtol, err_msg=name)


@pytest.mark.parametrize(("family", "mesh"), FAMILY_MESHES)
def test_twenty_steps_have_the_same_losses_on_every_mesh(family: str, mesh: str) -> None:
    alone = trained_alone(*reference_for(mesh), family=family)
    assert alone.losses[-5:].mean() < 0.98 * alone.losses[:5].mean()
    assert_same_run(trained(mesh, family=family), alone, tolerance(mesh))


@pytest.mark.parametrize(("family", "mesh"), FAMILY_MESHES)
def test_the_gradient_of_the_first_step_is_the_same_parameter_by_parameter(family: str, mesh: str) -> None:
    assert_same_first_moments(trained(mesh, family=family), trained_alone(*reference_for(mesh), family=family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mesh", ACCUMULATED)
def test_twenty_steps_have_the_same_losses_in_micro_batches(family: str, mesh: str) -> None:
    assert_same_run(trained(mesh, "microbatch=1", family=family), trained_alone(family=family))


@pytest.mark.parametrize("mesh", SPLIT)
def test_the_gradient_norm_of_the_first_step_is_the_same_on_every_mesh(mesh: str) -> None:
    alone, split = trained_alone(*reference_for(mesh)), trained(mesh)
    assert split.metrics[0]["grad_norm"] == pytest.approx(alone.metrics[0]["grad_norm"], rel=1e-5)
    # It is more than 1, so clipping divides by it, and numpy's norm of what the moments were given is 1.
    assert alone.metrics[0]["grad_norm"] > 1
    moments = [leaf for name, leaf in split.first.items() if ".mu." in name]
    assert np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in moments)) == pytest.approx(0.1, rel=1e-5)


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


@pytest.mark.parametrize("mesh", SPLIT)
def test_each_moment_lies_where_its_parameter_lies_before_and_after_training(mesh: str) -> None:
    """With ZeRO it is divided over `data` too, where its parameter is divided over `fsdp`."""
    run = trained(mesh)
    zero = run.program.layout.zero > 0
    for state in (run.program.state, run.state):
        params = named_leaves(state["params"])
        for moments in (state["optimizer"]["adam"].mu, state["optimizer"]["adam"].nu):
            for name, moment in named_leaves(moments).items():
                wanted = params[name].sharding.spec
                if zero and not name.endswith("scale"):
                    embed = named_leaves(run.program.infos)[name].axes.index("embed")
                    wanted = [*wanted, *[None] * (moment.ndim - len(wanted))]
                    wanted[embed] = (*(() if wanted[embed] is None else np.atleast_1d(wanted[embed])), "data")
                wanted = NamedSharding(run.program.mesh, PartitionSpec(*wanted))
                assert moment.sharding.is_equivalent_to(wanted, moment.ndim), name
    for leaf, planned in zip(jax.tree.leaves(run.state), jax.tree.leaves(run.program.state), strict=True):
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
        assert leaf.addressable_shards[0].data.shape == planned.sharding.shard_shape(leaf.shape)


@pytest.mark.parametrize(
    ("mesh", "of_parameters", "of_moments"),
    [
        ("fsdp=8", 8, 8),
        ("data=4 zero=1", 1, 4),
        ("data=2 fsdp=2 zero=2", 2, 4),
        ("data=2 fsdp=2 tensor=2 zero=2", 4, 8),
        ("pipeline=2 data=2 tensor=2 zero=1", 4, 8),
        ("pipeline=2 fsdp=2 tensor=2 gathered once", 8, 8),
    ],
)
def test_a_device_holds_its_part_of_parameters_and_moments(mesh: str, of_parameters: int, of_moments: int) -> None:
    state = trained(mesh).state
    for tree, parts in ((state["params"], of_parameters), (state["optimizer"], of_moments)):
        leaves = jax.tree.leaves(tree)
        total = sum(leaf.nbytes for leaf in leaves)
        here = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        assert total / parts <= here < 1.05 * total / parts


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
