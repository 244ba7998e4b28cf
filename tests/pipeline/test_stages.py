"""Weights find their stages, and gradients their way back, whatever is split over what."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.cluster import load_cluster
from jaxtrain.executables import without_compile_cache
from jaxtrain.models.parameters import ParameterInfo, describe, named_leaves, unbox
from jaxtrain.optimizer import freeze, trainable
from jaxtrain.pipeline.stages import PADDING, Stages, StageWeights
from jaxtrain.planner import compile_only_devices
from jaxtrain.sharding import MESH_AXES, Layout, make_mesh
from tests.pipeline.staged import Balanced
from tests.planner.programs import needs_cuda_compiler
from tests.runs import make_layout

SPLITS: dict[str, tuple[tuple[int, ...], ...]] = {
    "two even stages": ((2,), (2,)),
    "7 layers on 3 stages": ((2,), (3,), (2,)),
    "two chunks": ((2, 2), (2, 2)),
    "7 layers on 2 stages of two chunks": ((2, 1), (3, 1)),
}
LEAF_AXES = ("layers", "embed", "mlp")
MESHES: list[dict[str, int]] = [{}, {"fsdp": 2}, {"data": 2, "tensor": 2}]
CASES = [(split, axes) for split in SPLITS.values() for axes in MESHES if len(split) * 2 ** len(axes) <= 8]


def weights_of(split: tuple[tuple[int, ...], ...], frozen: tuple[str, ...] = (), **axes: int) -> tuple[Any, Any]:
    """The way to the stages of a task with as many layers, and its parameters."""
    task = Balanced(sum(map(sum, split)), embed_size=4 * len(split))
    boxed = task.init(jax.random.key(0))
    layout = make_layout(pipeline=len(split), **axes)
    weights = StageWeights(freeze(describe(boxed), frozen), layout, Stages(split))
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(layout.mesh, spec)), unbox(boxed), weights.stored
    )
    return weights, params


def as_numpy(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}


def test_layers_are_contiguous_in_the_order_in_which_a_micro_batch_passes_them() -> None:
    stages = Stages(SPLITS["7 layers on 2 stages of two chunks"])
    assert stages.slots == 3
    assert stages.layers.tolist() == [[0, 1, PADDING, 5, PADDING, PADDING], [2, 3, 4, 6, PADDING, PADDING]]
    assert stages.places.tolist() == [0, 1, 6, 7, 8, 3, 9]
    assert stages.is_padded
    assert not Stages(SPLITS["two chunks"]).is_padded


@pytest.mark.parametrize(("split", "axes"), CASES, ids=str)
def test_each_stage_has_its_layers_and_everything_else_whole(
    split: tuple[tuple[int, ...], ...], axes: dict[str, int]
) -> None:
    weights, params = weights_of(split, **axes)
    fetched, before = jax.jit(weights.fetch)(params), as_numpy(params)
    for name, leaf in as_numpy(fetched).items():
        if not name.startswith("layers."):
            np.testing.assert_array_equal(leaf, before[name], err_msg=name)
            continue
        places = weights.stages.layers.reshape(-1)
        used = places != PADDING
        np.testing.assert_array_equal(leaf[used], before[name][places[used]], err_msg=name)
    for leaf, spec in zip(jax.tree.leaves(fetched), jax.tree.leaves(weights.fetched), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(weights.layout.mesh, spec), leaf.ndim)


@pytest.mark.parametrize(("split", "axes"), CASES, ids=str)
def test_what_is_fetched_and_given_back_is_what_was_stored(
    split: tuple[tuple[int, ...], ...], axes: dict[str, int]
) -> None:
    """Layers bit by bit, where they were; of everything else each stage returns a part, and the parts are summed."""
    weights, params = weights_of(split, **axes)

    def there_and_back(params: Any) -> Any:
        fetched = weights.fetch(params)
        ends = {name: part for name, part in fetched.items() if name != "layers"}
        shares = jnp.arange(1.0, 1 + len(split))
        parts = jax.tree.map(lambda leaf: shares.reshape(-1, *[1] * leaf.ndim) * leaf[None], ends)
        return weights.give_back({**parts, "layers": fetched["layers"]})

    returned, total = jax.jit(there_and_back)(params), sum(range(1, 1 + len(split)))
    for name, leaf in as_numpy(params).items():
        got = as_numpy(returned)[name]
        np.testing.assert_array_equal(got, leaf if name.startswith("layers.") else total * leaf, err_msg=name)
    for leaf, stored in zip(jax.tree.leaves(returned), jax.tree.leaves(params), strict=True):
        assert leaf.sharding.is_equivalent_to(stored.sharding, leaf.ndim)


def test_what_a_short_stage_returns_of_its_empty_places_goes_nowhere() -> None:
    weights, params = weights_of(SPLITS["7 layers on 3 stages"])
    empty = weights.stages.layers.reshape(-1) == PADDING

    def spoiled(params: Any) -> Any:
        fetched = weights.fetch(params)
        layers = jax.tree.map(
            lambda leaf: jnp.where(empty.reshape(-1, *[1] * (leaf.ndim - 1)), jnp.nan, leaf), fetched["layers"]
        )
        ends = {name: part for name, part in fetched.items() if name != "layers"}
        return weights.give_back({**jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), ends), "layers": layers})

    returned = jax.jit(spoiled)(params)
    for name, leaf in as_numpy(params["layers"]).items():
        np.testing.assert_array_equal(as_numpy(returned["layers"])[name], leaf, err_msg=name)


def test_scales_are_stored_whole_and_matrices_in_parts_that_stages_share() -> None:
    weights, _ = weights_of(SPLITS["two even stages"], fsdp=2)
    assert weights.stored["layers"]["up"] == PartitionSpec(None, ("fsdp", "pipeline"), None)
    assert weights.fetched["layers"]["up"] == PartitionSpec("pipeline", "fsdp", None)
    assert weights.returned["head"]["projection"] == PartitionSpec("pipeline", "fsdp", None)
    assert weights.stored["layers"]["scale"] == PartitionSpec(None, None)


def test_frozen_parameters_are_fetched_but_have_nothing_to_return() -> None:
    weights, params = weights_of(SPLITS["two even stages"], ("layers.up", "head.*"))
    assert as_numpy(jax.jit(weights.fetch)(params)).keys() == as_numpy(params).keys()
    left = {"embed.table", "layers.down", "layers.scale"}
    assert set(named_leaves(weights.returned)) == left
    gradients = trainable(jax.jit(weights.fetch)(params), weights.infos)
    gradients = {**jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), gradients), "layers": gradients["layers"]}
    assert set(named_leaves(jax.jit(weights.give_back)(gradients))) == left


@needs_cuda_compiler
@pytest.mark.parametrize("split", [((8,),) * 4, ((7,), (9,), (9,), (7,)), ((4, 4),) * 4], ids=str)
def test_either_way_takes_at_most_two_leaves_of_temporaries(split: tuple[tuple[int, ...], ...]) -> None:
    """Of eight, which all at once would take eight. For GPUs: on the CPU, XLA orders them as it likes."""
    sizes = {**dict.fromkeys(MESH_AXES, 1), "pipeline": 4, "fsdp": 2}
    layout = Layout.on(make_mesh(sizes, compile_only_devices(load_cluster("h100"), 8)))
    infos = {"layers": {f"leaf{i}": ParameterInfo((32, 256, 512), LEAF_AXES, "matrix") for i in range(8)}}
    weights = StageWeights(infos, layout, Stages(split))
    places = 4 * weights.stages.layers.shape[1]
    leaf = 4 * weights.stages.layers.shape[1] * 256 * 512 // sizes["fsdp"]

    def abstract(specs: Any, layers: int) -> Any:
        shape = (layers, 256, 512)
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(layout.mesh, spec)), specs
        )

    ways = [(weights.fetch, abstract(weights.stored, 32)), (weights.give_back, abstract(weights.returned, places))]
    for way, tree in ways:
        with without_compile_cache():
            compiled = jax.jit(way).trace(tree).lower(lowering_platforms=("cuda",)).compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes <= 2.01 * leaf, memory.temp_size_in_bytes / leaf
        assert len(re.findall(r" all-to-all(?:-start)?\(", compiled.as_text())) == 8
