"""What is made small, and what stays."""

from pathlib import Path

import pytest

from jaxtrain.config import Config, MeshConfig, check_layout, difference, load
from jaxtrain.models.families import make_task
from jaxtrain.models.vision import VisionTask
from jaxtrain.verification.shrink import changes, device_count, on_one_device, shrunk, small_mesh
from tests.runs import ROOT

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yml"))}
PIPELINED = ("mesh.pipeline=4", "mesh.fsdp=8", "microbatch=1")
SIZES = {
    "model.vocab", "model.layers", "model.embed", "model.heads", "model.kv_heads", "model.head_dim", "model.mlp",
    "model.window", "model.loss.chunk", "model.image", "data.sequence", "data.vocab", "mesh.data", "mesh.fsdp",
    "mesh.tensor", "mesh.pipeline", "global_batch", "microbatch", "steps", "optimizer.schedule.warmup",
}  # fmt: skip


def small(name: str, *overrides: str) -> Config:
    return shrunk(load(CONFIGS[name], list(overrides)))


MESHES: dict[str, tuple[dict[str, int], int, dict[str, int]]] = {
    "what is left is left out": ({"fsdp": 8}, 0, {"fsdp": 2}),
    "unless nothing else splits": ({}, 0, {"data": 2}),
    "whichever axis that is": ({"data": 1, "fsdp": -1}, 0, {"fsdp": 2}),
    "an odd size too": ({"pipeline": 3, "fsdp": 6}, 0, {"pipeline": 2, "fsdp": 2}),
    "all axes": ({"pipeline": 4, "data": 9, "fsdp": 8, "tensor": 8}, 0, dict.fromkeys(MeshConfig.model_fields, 2)),
    "ZeRO divides over data": ({"fsdp": 8}, 1, {"data": 2, "fsdp": 2}),
    "one device": ({"data": 1}, 0, {}),
}


@pytest.mark.parametrize("name", MESHES)
def test_every_axis_that_splits_something_becomes_two(name: str) -> None:
    axes, zero, expected = MESHES[name]
    found = {axis: size for axis, size in small_mesh(MeshConfig(**axes), zero).items() if size != 1}
    assert found == {axis: size for axis, size in expected.items() if axis not in ("expert", "context")}


@pytest.mark.parametrize(("name", "overrides"), [*((name, ()) for name in CONFIGS), ("llama3-70b", PIPELINED)])
def test_of_a_shipped_config_only_sizes_change_and_the_mesh_divides_them(name: str, overrides: tuple[str, ...]) -> None:
    config = load(CONFIGS[name], list(overrides))
    one = shrunk(config)
    changed = {change.key for change in difference(config.to_dict(), one)}
    assert changed <= SIZES | {"precision", "sharding.allow_replicated"}
    assert one.precision == "float32"
    check_layout(one, small_mesh(config.mesh))
    assert device_count(config) == {"llama3-70b": 4, "llama3-405b": 8}.get(name, 2) * (2 if overrides else 1)


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ((), 4),
        (("model.layers=79",), 5),
        (("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=4"), 16),
        (("pipeline.schedule=interleaved_1f1b", "pipeline.chunks=3"), 13),
        (("model.layers=4",), 4),
        (("mesh.pipeline=1", "mesh.fsdp=32", "model.layers=79"), 2),
    ],
)
def test_stages_keep_their_chunks_and_have_unequal_layers_where_they_had(
    overrides: tuple[str, ...], layers: int
) -> None:
    axes = {text.partition("=")[0] for text in overrides}
    rest = [text for text in PIPELINED if text.partition("=")[0] not in axes]
    one = small("llama3-70b", *rest, *overrides)
    assert one.model.layers == layers
    assert one.pipeline == load(CONFIGS["llama3-70b"], [*rest, *overrides]).pipeline


@pytest.mark.parametrize(
    ("overrides", "batches"),
    [
        (("global_batch=64", "microbatch=1"), (8, 1)),  # 64 passes become 4
        (("global_batch=64", "microbatch=8"), (16, 2)),
        (("global_batch=64", "microbatch=32"), (8, 2)),  # 2 stay
        (("global_batch=64", "microbatch=64"), (4, 2)),  # one stays
        (("global_batch=64", "microbatch=null"), (4, None)),
        (("global_batch=64", "microbatch=8", "mesh.data=2", "mesh.fsdp=2"), (16, 2)),
    ],
)
def test_accumulation_stays_accumulation(overrides: tuple[str, ...], batches: tuple[int, int | None]) -> None:
    one = small("gpt2-124m", *overrides)
    assert (one.global_batch, one.microbatch) == batches


def test_the_schedule_passes_in_few_steps_and_the_batch_s_scaling_keeps_its_factor() -> None:
    scaled = ("optimizer.batch_scaling=linear", "optimizer.reference_batch=32", "microbatch=1")
    one = small("gpt2-124m", *scaled, "optimizer.schedule.kind=wsd", "optimizer.schedule.decay=1.0", "steps=null",
                "data.epochs=3", "optimizer.schedule.warmup=0", "optimizer.schedule.warmup_tokens=1e6")  # fmt: skip
    assert (one.steps, one.optimizer.schedule.warmup, one.data.epochs) == (4, 0, None)
    assert (one.global_batch, one.optimizer.reference_batch) == (8, 4)
    assert small("gpt2-124m").optimizer.schedule.warmup == 2


def test_adafactor_still_factors_the_small_matrices() -> None:
    assert small("llama3-8b", "optimizer.name=adafactor").optimizer.factored_from == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(("image", "patch", "heads"), [(224, 16, 3), (48, 16, 4), (16, 16, 2), (32, 16, 6)])
def test_a_small_vision_transformer_divides_over_two_devices(image: int, patch: int, heads: int) -> None:
    sizes = [
        f"model.image={image}",
        f"model.patch={patch}",
        f"model.heads={heads}",
        "model.embed=96",
        f"model.shift={image - 1}",
    ]
    own = "{target: 'scripts.own_task:make_data', rows: 8}"
    config = load(CONFIGS["digits-vit"], [*sizes, f"data={own}", "mesh.fsdp=2"])
    one = shrunk(config)
    task = make_task(one)
    assert isinstance(task, VisionTask)
    assert task.config.image <= image
    assert task.config.shift < task.config.image
    assert task.config.patches in ((1,) if image == patch else (4, 16))
    check_layout(one, {**small_mesh(config.mesh), "tensor": 1 if image == patch else 2})


def test_what_it_is_compared_with_differs_in_how_it_is_computed_alone() -> None:
    remat = ("remat=named", "remat_save=[hidden]", "sharding.zero=2", "fsdp.gather=step")
    one = small("llama3-70b", *PIPELINED, *remat, "mesh.data=2")
    alone = on_one_device(one)
    assert (alone.remat, alone.microbatch, alone.sharding.zero, set(dict(alone.mesh).values())) == (
        "none",
        None,
        0,
        {1},
    )
    assert {change.key for change in difference(one.to_dict(), alone)} == {
        "microbatch", "remat", "remat_save", "mesh.pipeline", "mesh.data", "mesh.fsdp", "mesh.tensor",
        "sharding.zero", "model.loss.chunk",
    }  # fmt: skip


def test_what_was_made_small_is_told_by_section() -> None:
    config = load(CONFIGS["llama3-70b"], list(PIPELINED))
    told = changes(config, shrunk(config))
    assert told["mesh"] == ["pipeline 4 → 2", "data -1 → 1", "fsdp 8 → 2", "tensor 8 → 2"]
    assert "layers 80 → 4" in told["model"]
    assert {"steps 1000 → 4", "precision bfloat16 → float32"} <= set(told[""])


def test_a_path_of_the_run_is_no_part_of_it(tmp_path: Path) -> None:
    config = load(CONFIGS["quickstart"], [f"init_from={tmp_path}/other@3", "eval.batch=24"])
    one = shrunk(config)
    assert one.init_from is None
    assert one.eval.batch is None
