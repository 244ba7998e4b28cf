from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.program import Program, build
from tests.runs import tiny_config, tiny_program


def built(folder: Path, devices: int, overrides: Sequence[str]) -> Program:
    return build(tiny_config(folder, folder / "data", *overrides), jax.devices()[:devices])


REFUSED = {
    "a global batch of 6 over eight data shards": (
        8, ["mesh.data=8", "global_batch=6"], ["global_batch=6", "mesh.data=8"],
    ),
    "a width of 60 over fsdp=8": (8, ["mesh.fsdp=8", "model.embed=60"], ["model.embed=60", "mesh.fsdp=8"]),
    "a width of 68, which jax alone would replicate": (
        8, ["mesh.fsdp=8", "model.embed=68", "model.head_dim=16"], ["model.embed=68", "mesh.fsdp=8"],
    ),
    "a mesh of 6 on 8 devices": (
        8, ["mesh.data=3", "mesh.tensor=2", "global_batch=6"], ["mesh.data=3 × mesh.tensor=2", "there are 8"],
    ),
    "a mesh of 16 on 8 devices": (8, ["mesh.data=8", "mesh.tensor=2"], ["mesh.data=8 × mesh.tensor=2", "there are 8"]),
    "two key heads over tensor=4": (4, ["mesh.tensor=4"], ["model.kv_heads=2", "mesh.tensor=4"]),
    "six query heads in four groups": (
        1, ["model.heads=6", "model.kv_heads=4", "model.head_dim=16"], ["model.heads=6", "model.kv_heads=4"],
    ),
    "a vocabulary of 255 over tensor=4": (
        4, ["mesh.tensor=4", "model.kv_heads=4", "model.vocab=255"], ["model.vocab=255", "mesh.tensor=4"],
    ),
    "two stages on one device": (1, ["mesh.pipeline=2"], ["mesh.pipeline=2 doesn't divide 1 device", "cpu_devices=2"]),
    "a micro-batch of 3 in 8 rows": (1, ["microbatch=3"], ["microbatch=3", "global_batch=8"]),
    "mostly replicated parameters": (
        2, ["mesh.fsdp=2", "model.embed=8", "model.head_dim=2", "model.mlp=2", "model.vocab=2", "model.layers=9"],
        ["mesh.fsdp=2", "layers.attention_norm.scale", "sharding.allow_replicated: true"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_mesh_is_refused_with_key_value_and_axis(case: str, tmp_path: Path) -> None:
    devices, overrides, named = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        built(tmp_path, devices, overrides)
    for words in named:
        assert words in str(error.value)


def test_replicated_parameters_are_allowed_by_key(tmp_path: Path) -> None:
    devices, overrides, _ = REFUSED["mostly replicated parameters"]
    program = built(tmp_path, devices, [*overrides, "sharding.allow_replicated=true"])
    assert any(row.replicated for row in program.parameter_table())


def test_building_allocates_nothing(tmp_path: Path) -> None:
    before = {id(array) for array in jax.live_arrays()}
    program = built(tmp_path, 8, ["mesh.fsdp=8"])
    new = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in new) < 100
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((program.state, program.batch)))


def test_the_start_up_table_adds_up_to_the_parameters_on_each_device() -> None:
    program = tiny_program(8, "mesh.fsdp=8")
    table = {row.name: row for row in program.parameter_table()}
    params = program.init(program.initial_key())["params"]
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    assert sum(row.bytes_per_device for row in table.values()) == here
    assert sum(row.bytes_total for row in table.values()) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert {name for name, row in table.items() if row.replicated} == {
        "layers.attention_norm.scale",
        "layers.mlp_norm.scale",
        "head.norm.scale",
    }


def test_state_and_batch_are_described_as_they_come_to_be() -> None:
    program = tiny_program(8, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    state = program.init(program.initial_key())
    assert jax.tree.structure(state) == jax.tree.structure(program.state)
    for leaf, planned in zip(jax.tree.leaves(state), jax.tree.leaves(program.state), strict=True):
        assert (leaf.shape, leaf.dtype) == (planned.shape, planned.dtype)
        assert leaf.sharding.is_equivalent_to(planned.sharding, leaf.ndim)
    assert {name: leaf.shape for name, leaf in program.batch.items()} == dict.fromkeys(
        ("tokens", "targets", "segments", "positions", "weights"), (8, 32)
    )
    assert program.batch["tokens"].sharding.shard_shape((8, 32)) == (2, 32)


def test_evaluation_batches_have_a_size_of_their_own(tmp_path: Path) -> None:
    program = built(tmp_path, 1, ["eval.batch=3"])
    assert (program.batch["tokens"].shape, program.eval_batch["tokens"].shape) == ((8, 32), (3, 32))


def lowered(folder: Path, *overrides: str) -> str:
    program = built(folder, 1, overrides)
    return program.train_step.lower(program.state, program.batch, program.abstract_inputs()).as_text()


def test_learning_rate_schedule_seed_and_steps_are_inputs_of_one_program(tmp_path: Path) -> None:
    want = lowered(tmp_path)
    other = ["optimizer.learning_rate=2e-3", "optimizer.schedule.warmup=3", "optimizer.schedule.final=0.3"]
    assert lowered(tmp_path, *other, "steps=77", "seed=5") == want
    for kind in ("linear", "constant", "wsd", "inverse_sqrt"):
        assert lowered(tmp_path, f"optimizer.schedule.kind={kind}", "optimizer.schedule.warmup=3") == want
    assert lowered(tmp_path, "optimizer.b1=0.8") != want


def test_micro_batches_are_one_loop_more_and_null_is_none(tmp_path: Path) -> None:
    loops = [
        lowered(tmp_path, *overrides).count("stablehlo.while") for overrides in ([], ["microbatch=8"], ["microbatch=2"])
    ]
    assert loops[0] == loops[1] < loops[2]


TOLD: dict[str, tuple[int, list[str], dict[str, str]]] = {
    "what one device can't divide": (
        1, ["sharding.zero=2", "pipeline={schedule: interleaved_1f1b, chunks: 2}", "fsdp.gather=step", "microbatch=2"],
        {"sharding.zero": "mesh.data is 1", "pipeline": "mesh.pipeline is 1", "fsdp.gather": "no axis divides"},
    ),
    "a step of one micro-batch": (
        8, ["mesh.data=2", "mesh.fsdp=4", "sharding.zero=1", "fsdp.gather=step"],
        {"fsdp.gather": "one micro-batch; set microbatch"},
    ),
    "gradients that stages sum at once": (
        4, ["mesh.pipeline=2", "mesh.data=2", "sharding.zero=2", "microbatch=1"], {"sharding.zero": "fsdp.gather=step"},
    ),
    "what all do": (8, ["mesh.data=2", "mesh.fsdp=4", "global_batch=16", "microbatch=1", "sharding.zero=1"], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_a_key_that_has_nothing_to_divide_is_told(case: str, tmp_path: Path) -> None:
    devices, overrides, words = TOLD[case]
    choices = built(tmp_path, devices, overrides).layout.choices
    assert choices.keys() == words.keys()
    assert all(words[key] in told for key, told in choices.items())


@pytest.mark.parametrize(("mesh", "weights"), [("mesh.pipeline=2", None), ("mesh.fsdp=2", "gathered for each")])
def test_weights_that_no_micro_batch_gathers_are_not_said_to_be(mesh: str, weights: str | None, tmp_path: Path) -> None:
    program = built(tmp_path, 2, [mesh, "microbatch=1", "batch_ramp=[{steps: 1, global_batch: 4}]"])
    for rows in (4, 8):
        jax.eval_shape(program.train_step, program.state, program.batch_of(rows), program.abstract_inputs())
    choices = program.layout.choices
    assert weights in choices.get("weights", "") if weights else "weights" not in choices
    if "pipeline" in mesh:
        assert [choices[f"pipeline of {rows} rows"].split(" over")[0] for rows in (4, 8)] == [
            "1f1b of 4 micro-batches", "1f1b of 8 micro-batches",
        ]  # fmt: skip


def test_the_inputs_of_the_step_are_what_its_description_says(tmp_path: Path) -> None:
    program = built(tmp_path, 8, ["mesh.data=8", "optimizer.learning_rate=2e-3", "optimizer.schedule.warmup=3"])
    inputs, described = program.inputs(50), program.abstract_inputs()
    assert jax.tree.structure(inputs) == jax.tree.structure(described)
    for leaf, planned in zip(jax.tree.leaves(inputs), jax.tree.leaves(described), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (planned.shape, planned.dtype, planned.sharding)
    schedule = {name: value.item() for name, value in inputs["schedule"].items()}
    assert schedule == pytest.approx({"peak": 2e-3, "warmup": 3, "start": 3, "end": 50, "final": 0.1, "shape": 1})


def test_dropout_and_initial_values_draw_from_different_keys() -> None:
    program = tiny_program(1)
    initial, training = (jax.random.key_data(key) for key in (program.initial_key(), program.inputs(1)["key"]))
    assert (np.asarray(initial) != np.asarray(training)).any()
    other = tiny_program(1, "seed=1")
    assert (jax.random.key_data(other.inputs(1)["key"]) != training).any()


def test_the_compute_type_is_the_configs_precision(tmp_path: Path) -> None:
    program = built(tmp_path, 1, ["precision=bfloat16"])
    assert program.task.compute_dtype == jnp.bfloat16  # type: ignore[attr-defined]
    assert {leaf.dtype for leaf in jax.tree.leaves(program.state["params"])} == {jnp.dtype(jnp.float32)}


def test_float32_is_float32_in_every_matrix_product_on_gpus_too(tmp_path: Path) -> None:
    """On a GPU the default precision of a float32 product is TF32."""
    program = built(tmp_path, 1, ["microbatch=4"])
    steps = [
        program.train_step.lower(program.state, program.batch, program.abstract_inputs()).as_text(),
        program.eval_step.lower(program.state["params"], program.eval_batch).as_text(),
    ]
    for text in steps:
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) > 8
        assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []
