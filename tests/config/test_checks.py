"""What several keys must satisfy together: which combinations are refused, and what the refusal says."""

from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import Config, MeshConfig, check, check_layout, check_steps, load, resolve_mesh
from jaxtrain.errors import ConfigError

ONE_DEVICE = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


def config(**sections: Any) -> Config:
    tiny = {"vocab": 256, "layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "mlp": 128} | sections.pop("model", {})
    return Config.model_validate({"run_dir": "r", "steps": 10, "global_batch": 8, "model": tiny, **sections})


def refusal(config: Config, **axis_sizes: int) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_layout(config, ONE_DEVICE | axis_sizes) if axis_sizes else check(config)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"heads": 6, "kv_heads": 4, "head_dim": 16}},
            "model.heads=6 doesn't divide by model.kv_heads=4; kv_heads may be 1, 2, 3 or 6",
        ),
        (
            {"model": {"embed": 62}},
            "model.embed=62 doesn't divide by model.heads=4; the nearest embed is 56 or 64, or set model.head_dim",
        ),
        (
            {"model": {"head_dim": 15}},
            "the head width must be even for rotary embedding, but model.head_dim=15 gives 15; the nearest is 14 or 16",
        ),
        (
            {"model": {"embed": 60}},
            "the head width must be even for rotary embedding, but model.embed=60, model.heads=4 gives 15; "
            "the nearest is 14 or 16",
        ),
        (
            {"checkpoint": {"interval": "auto", "every": 50}},
            "checkpoint.interval=auto chooses when to save, which checkpoint.every=50 says too; "
            "leave one out (checkpoint.every=0, or checkpoint.interval=null)",
        ),
        (
            {"checkpoint": {"interval": "auto", "every_minutes": 5.0}},
            "checkpoint.interval=auto chooses when to save, which checkpoint.every_minutes=5.0 says too; "
            "leave one out (checkpoint.every_minutes=null, or checkpoint.interval=null)",
        ),
        (
            {"checkpoint": {"failures_per_day": 2.0}},
            "checkpoint.failures_per_day: nothing is chosen by it with checkpoint.interval=null; "
            "set checkpoint.interval to auto, or leave it out",
        ),
        (
            {"checkpoint": {"interval": "auto", "failures_per_day": 2.0, "failures_per_day_per_host": 1.0}},
            "checkpoint.failures_per_day and checkpoint.failures_per_day_per_host both say how often the run fails; "
            "leave one out",
        ),
        (
            {"checkpoint": {"local": {"dir": "/scratch"}}},
            "checkpoint.local is never saved to; set checkpoint.local.every_minutes, such as 5, "
            "or checkpoint.local.every, in steps",
        ),
        (
            {"steps": None},
            "the run has no end: steps=null and data.epochs=null; set steps, or data.epochs to let the data set it",
        ),
        (
            {"optimizer": {"schedule": {"warmup": 11}}},
            "optimizer.schedule.warmup=11 is longer than the run, steps=10; it may be at most 10",
        ),
        (
            {"optimizer": {"name": "sgd", "schedule": {"kind": "constant", "warmup": 11}}},
            "optimizer.schedule.warmup=11 is longer than the run, steps=10; it may be at most 10",
        ),
        (
            {"optimizer": {"schedule": {"warmup": 3, "warmup_tokens": 1e3}}},
            "optimizer.schedule.warmup=3, optimizer.schedule.warmup_tokens=1000.0: the warm-up has one length; "
            "leave one of them out",
        ),
        (
            {"optimizer": {"schedule": {"warmup_tokens": 8 * 256 * 10 + 1}}},
            "optimizer.schedule.warmup_tokens=20481.0 (11 steps here) is longer than the run, steps=10; "
            "it may take at most 10 steps",
        ),
        (
            {"optimizer": {"batch_scaling": "sqrt", "reference_batch": 16, "schedule": {"warmup": 6}}},
            "optimizer.schedule.warmup=6 (12 steps here) is longer than the run, steps=10; "
            "it may take at most 10 steps",
        ),
        (
            {"optimizer": {"schedule": {"kind": "wsd", "warmup": 6, "decay": 0.5}}},
            "optimizer.schedule.warmup=6 and optimizer.schedule.decay=0.5 (5 steps) are together longer "
            "than the run, steps=10; the decay may have at most 4 steps",
        ),
        (
            {"optimizer": {"batch_scaling": "linear"}},
            "optimizer.batch_scaling=linear needs optimizer.reference_batch: the examples per update that "
            "optimizer.learning_rate was chosen for (global_batch=8 would change nothing)",
        ),
        (
            {"optimizer": {"reference_batch": 64}},
            "optimizer.reference_batch=64 does nothing with optimizer.batch_scaling=none; "
            "set batch_scaling to linear or sqrt, or leave reference_batch out",
        ),
        (
            {"batch_ramp": [{"steps": 4, "global_batch": 2}, {"steps": 6, "global_batch": 4}]},
            "batch_ramp takes 10 steps of the run, steps=10, so global_batch=8 is never reached; "
            "its parts may have at most 9 steps together",
        ),
        (
            {"checkpoint": {"every": 4, "keep_every": 10}},
            "checkpoint.keep_every=10 names steps that checkpoint.every=4 doesn't save; "
            "the nearest keep_every is 8 or 12",
        ),
        (
            {"checkpoint": {"every": 0, "keep_every": 10}},
            "checkpoint.keep_every=10 names steps that checkpoint.every=0 doesn't save; the nearest keep_every is null",
        ),
        (
            {"checkpoint": {"keep_best": {}}},
            "checkpoint.keep_best has nothing to judge by with eval.every=0; set eval.every, or keep_best to null",
        ),
        (
            {"checkpoint": {"every": 6, "keep_best": {}}, "eval": {"every": 4}},
            "checkpoint.keep_best judges checkpoints by an evaluation at the same step, and checkpoint.every=6 and "
            "eval.every=4 don't fall together; the nearest checkpoint.every is 4 or 8",
        ),
        (
            {"checkpoint": {"every": 0, "keep_best": {}}, "eval": {"every": 4}},
            "checkpoint.keep_best judges checkpoints by an evaluation at the same step, and checkpoint.every=0 and "
            "eval.every=4 don't fall together; the nearest checkpoint.every is 4",
        ),
        (
            {"eval": {"sets": {"a": "d", "b": "e"}}},
            "eval.sets.a, eval.sets.b: nothing is evaluated with eval.every=0; set eval.every, or leave eval.sets out",
        ),
        (
            {"profile": {"steps": 5}},
            "profile.steps=5 does nothing with profile.start=null; set profile.start, or leave steps out",
        ),
        (
            {"mesh": {"pipeline": 4}, "model": {"layers": 3}},
            "model.layers=3 are too few for mesh.pipeline=4: each of the 4 parts needs a layer; "
            "mesh.pipeline may be at most 3",
        ),
        (
            {"pipeline": {"chunks": 2}},
            "pipeline.chunks=2, but pipeline.schedule=1f1b has one chunk for each stage; set pipeline.chunks: 1 or "
            "pipeline.schedule: interleaved_1f1b",
        ),
        ({"mesh": {"expert": 2}}, "mesh.expert=2 is not supported yet; the nearest value is 1"),
        ({"mesh": {"context": -1, "data": 1}}, "mesh.context=-1 is not supported yet; the nearest value is 1"),
        ({"mesh": {"tensor": 0}}, "mesh.tensor=0 leaves no device; use 1, or -1 for all that are left"),
        ({"mesh": {"fsdp": -1}}, "mesh.data=-1 and mesh.fsdp=-1: only one axis may be -1"),
        (
            {"data": {"vocab": 260}},
            "data.vocab=260 gives token ids that model.vocab=256 has no rows for; data.vocab may be at most 256",
        ),
        (
            {"eval": {"every": 5}, "data": {"source": "python_stdlib", "held_out": 0.0}},
            "eval.every=5 has nothing to evaluate on with data.held_out=0.0; "
            "set data.held_out above 0 (its default is 0.02), or eval.every=0",
        ),
        (
            {"distributed": {"coordinator": "h:1", "process_id": 1}},
            "distributed.coordinator, distributed.processes, distributed.process_id are given together or not at all; "
            "distributed.processes is null",
        ),
        (
            {"distributed": {"coordinator": "h:1", "processes": 2, "process_id": 2}},
            "distributed.processes=2, distributed.process_id=2: process_id may be at most 1",
        ),
        (
            {
                "model": {
                    "rope": {
                        "scaling": {
                            "factor": 8,
                            "low_frequency_factor": 4,
                            "high_frequency_factor": 4,
                            "original_sequence": 8192,
                        }
                    }
                }
            },
            "model.rope.scaling.low_frequency_factor=4.0, model.rope.scaling.high_frequency_factor=4.0: "
            "the first must be below the second; Llama 3.1 has 1 and 4",
        ),
        (
            {"mesh": {"tensor": 4}},
            "model.kv_heads=2 doesn't divide by mesh.tensor=4; the nearest model.kv_heads is 4, "
            "and mesh.tensor may be 1 or 2",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused_with_the_nearest_values(
    sections: dict[str, Any], message: str
) -> None:
    assert refusal(config(**sections)) == [message]


def test_a_warmup_in_tokens_needs_rows_of_tokens() -> None:
    optimizer = {"schedule": {"warmup_tokens": 1e3}}
    images = {"model": {"family": "vit"}, "data": {"kind": "digits"}, "optimizer": optimizer}
    assert refusal(Config.model_validate({"run_dir": "r", "steps": 10, **images})) == [
        "optimizer.schedule.warmup_tokens=1000.0 needs the length of a row, and data.kind=digits gives none; "
        "set optimizer.schedule.warmup in steps"
    ]


def test_what_is_just_right_passes() -> None:
    check(
        config(
            mesh={"data": 2, "fsdp": 2, "tensor": 2},
            microbatch=1,
            eval={"every": 5, "batch": 4},
            data={"vocab": 256},
            optimizer={"schedule": {"warmup": 10}},
            distributed={"coordinator": "h:1", "processes": 2, "process_id": 1},
        )
    )
    check(config(steps=None, data={"epochs": 1}))


def test_all_contradictions_are_listed_at_once() -> None:
    lines = refusal(config(mesh={"expert": 2, "tensor": 3}, optimizer={"schedule": {"warmup": 11}}))
    named = ["warmup", "expert=2", "heads=4", "kv_heads=2", "mlp=128", "vocab=256", "sequence=256"]
    assert len(lines) == len(named)
    assert all(key in line for key, line in zip(named, lines, strict=True))


def test_a_contradiction_is_placed_at_every_line_that_takes_part(tmp_path: Path) -> None:
    path = tmp_path / "c.yml"
    path.write_text("run_dir: r\nsteps: 10\nmodel:\n  heads: 4\n  kv_heads: 2\n")
    with pytest.raises(ConfigError, match=rf"^{path}:5, override mesh.tensor=4: model.kv_heads=2 doesn't divide"):
        load(path, ["mesh.tensor=4"])
    loaded = load(path)
    with pytest.raises(ConfigError, match=rf"^{path}:5: model.kv_heads=2 doesn't divide by mesh.tensor=4"):
        check_layout(loaded, ONE_DEVICE | {"tensor": 4})


VIT = {"family": "vit", "layers": 2}
OWN = {"target": "m:T"}


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            {},
            {"kind": "digits"},
            "model.family=decoder reads tokens, but data.kind=digits are images; "
            "set data.kind=tokens, or model.family=vit",
        ),
        (
            VIT,
            {},
            "model.family=vit reads images, but data.kind=tokens are text; "
            "set data.kind=digits, or model.family=decoder",
        ),
        ({}, OWN, "data.target=m:T with model.family=decoder needs data.sequence, the tokens in a row; set it"),
        (
            {},
            {**OWN, "sequence": "long"},
            "data.target=m:T with model.family=decoder needs data.sequence, the tokens in a row; set it",
        ),
        (
            VIT | {"image": 28, "patch": 7},
            {"kind": "digits"},
            "model.image=28, but data.kind=digits needs 8; set it so",
        ),
        (VIT | {"classes": 9}, {"kind": "digits"}, "model.classes=9, but data.kind=digits needs 10; set it so"),
        (
            VIT | {"patch": 3},
            {"kind": "digits"},
            "model.image=8 doesn't divide by model.patch=3; patch may be 1, 2, 4 or 8",
        ),
        (VIT | {"embed": 30}, OWN, "model.embed=30 doesn't divide by model.heads=4; the nearest embed is 28 or 32"),
        (VIT | {"shift": 8}, OWN, "model.shift=8 moves images out of sight; with model.image=8 it may be at most 7"),
        (
            OWN,
            {"source": "python_stdlib"},
            "data.source=python_stdlib trains a tokenizer, but neither data.vocab=null nor a model.vocab "
            "says its size; set data.vocab, such as 8192",
        ),
        (
            OWN | {"vocab": 100},
            {"source": "python_stdlib", "vocab": 101},
            "data.vocab=101 gives token ids that model.vocab=100 has no rows for; data.vocab may be at most 100",
        ),
    ],
)
def test_a_model_and_data_that_do_not_fit_are_refused_with_both_keys(
    model: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    found = Config.model_validate({"run_dir": "r", "steps": 10, "model": model, "data": data})
    assert refusal(found) == [message]


def test_what_fits_passes() -> None:
    for model, data in (
        ({}, OWN | {"sequence": 32}),
        (VIT, {"kind": "digits"}),
        (VIT | {"image": 28, "patch": 7}, OWN),
        (OWN, {}),
        (OWN, {"kind": "digits"}),
        (OWN | {"vocab": 100}, {"source": "python_stdlib"}),
        (VIT | {"classes": 11}, {"kind": "digits"}),
    ):
        check(Config.model_validate({"run_dir": "r", "steps": 10, "model": model, "data": data}))


def test_evaluating_digits_of_which_none_is_held_out_is_refused() -> None:
    sections = {"model": VIT, "data": {"kind": "digits", "held_out": 0.0}, "eval": {"every": 5}}
    (line,) = refusal(Config.model_validate({"run_dir": "r", "steps": 10, **sections}))
    assert line.endswith("set data.held_out above 0 (its default is 0.2), or eval.every=0")


@pytest.mark.parametrize(
    ("model", "axis_sizes", "message"),
    [
        (
            VIT,
            {"tensor": 3},
            "model.heads=4 doesn't divide by mesh.tensor=3; the nearest model.heads is 3 or 6, "
            "and mesh.tensor may be 1, 2 or 4",
        ),
        (
            VIT | {"patch": 4, "heads": 8, "mlp": 64},
            {"tensor": 8},
            "the 4 patches that model.image=8, model.patch=4 give "
            "don't divide by mesh.tensor=8; mesh.tensor may be 1, 2 or 4",
        ),
        (
            VIT | {"embed": 36},
            {"fsdp": 8},
            "model.embed=36 doesn't divide by mesh.fsdp=8; "
            "the nearest model.embed is 32 or 40, and mesh.fsdp may be 1, 2, 3, 4 or 6",
        ),
    ],
)
def test_images_that_do_not_divide_over_the_mesh_are_refused(
    model: dict[str, Any], axis_sizes: dict[str, int], message: str
) -> None:
    digits = {"run_dir": "r", "steps": 10, "global_batch": 24, "model": model, "data": {"kind": "digits"}}
    assert message in refusal(Config.model_validate(digits), **axis_sizes)


def test_ones_own_model_is_left_to_the_sharding_rules() -> None:
    own = Config.model_validate({"run_dir": "r", "steps": 10, "model": OWN, "data": {"kind": "digits"}})
    check_layout(own, ONE_DEVICE | {"tensor": 7})


@pytest.mark.parametrize(
    ("sections", "axis_sizes", "message"),
    [
        (
            {"global_batch": 6},
            {"data": 8},
            "global_batch=6 doesn't divide over 8 batch shards (mesh.data=8); the nearest is 8",
        ),
        (
            {"global_batch": 14},
            {"data": 2, "fsdp": 4},
            "global_batch=14 doesn't divide over 8 batch shards (mesh.data=2 × mesh.fsdp=4); the nearest is 8 or 16",
        ),
        (
            {"microbatch": 3},
            {"data": 2},
            "microbatch=3 doesn't divide the 4 examples that each device has of global_batch=8; it may be 1, 2 or 4",
        ),
        (
            {"batch_ramp": [{"steps": 1, "global_batch": 8}, {"steps": 1, "global_batch": 4}]},
            {"data": 8},
            "batch_ramp[1].global_batch=4 doesn't divide over 8 batch shards (mesh.data=8); the nearest is 8",
        ),
        (
            {"microbatch": 2, "batch_ramp": [{"steps": 1, "global_batch": 2}]},
            {"data": 2},
            "microbatch=2 doesn't divide the 1 examples that each device has of batch_ramp[0].global_batch=2; "
            "it may be 1",
        ),
        (
            {"eval": {"batch": 3}},
            {"fsdp": 8},
            "eval.batch=3 doesn't divide over 8 batch shards (mesh.fsdp=8); the nearest is 8",
        ),
        (
            {"model": {"embed": 60, "head_dim": 16}},
            {"fsdp": 8},
            "model.embed=60 doesn't divide by mesh.fsdp=8; the nearest model.embed is 56 or 64, "
            "and mesh.fsdp may be 1, 2, 3, 4, 5 or 6",
        ),
        (
            {"model": {"embed": 68, "heads": 2}},
            {"fsdp": 8},
            "model.embed=68 doesn't divide by mesh.fsdp=8; the nearest model.embed is 64 or 72, "
            "and mesh.fsdp may be 1, 2 or 4",
        ),
        (
            {"model": {"vocab": 255, "kv_heads": 4}},
            {"tensor": 4},
            "model.vocab=255 doesn't divide by mesh.tensor=4; the nearest model.vocab is 252 or 256, "
            "and mesh.tensor may be 1",
        ),
        (
            {"model": {"heads": 2, "kv_heads": None}},
            {"tensor": 4},
            "model.heads=2 doesn't divide by mesh.tensor=4; "
            "the nearest model.heads is 4, and mesh.tensor may be 1 or 2",
        ),
        (
            {"data": {"sequence": 30}},
            {"tensor": 4},
            "data.sequence=30 doesn't divide by mesh.tensor=4; the nearest data.sequence is 28 or 32, "
            "and mesh.tensor may be 1 or 2",
        ),
    ],
)
def test_what_does_not_divide_over_the_mesh_is_refused_with_key_value_and_axis(
    sections: dict[str, Any], axis_sizes: dict[str, int], message: str
) -> None:
    assert message in refusal(config(**sections), **axis_sizes)
    at_config_time = config(**sections, mesh=ONE_DEVICE | axis_sizes)
    assert message in refusal(at_config_time)


def test_kv_heads_that_follow_heads_are_not_reported_beside_them() -> None:
    assert len(refusal(config(model={"heads": 2, "kv_heads": None}), tensor=4)) == 1


def test_batches_are_not_judged_before_the_open_axis_is_known() -> None:
    open_mesh = config(global_batch=6)
    check(open_mesh)
    check_layout(open_mesh, resolve_mesh(open_mesh.mesh, 2))
    assert refusal(open_mesh, **resolve_mesh(open_mesh.mesh, 8))


def test_the_warmup_is_checked_against_the_length_that_the_data_give() -> None:
    by_epochs = config(steps=None, data={"epochs": 1}, optimizer={"schedule": {"warmup": 5}})
    check(by_epochs)
    check_steps(by_epochs, 5)
    with pytest.raises(ConfigError, match=r"^optimizer.schedule.warmup=5 is longer than the run, steps=4"):
        check_steps(by_epochs, 4)


def test_the_open_axis_takes_the_devices_that_are_left() -> None:
    assert resolve_mesh(MeshConfig(fsdp=2, tensor=2), 8) == ONE_DEVICE | {"data": 2, "fsdp": 2, "tensor": 2}
    assert resolve_mesh(MeshConfig(data=2, tensor=-1), 8) == ONE_DEVICE | {"data": 2, "tensor": 4}
    assert resolve_mesh(MeshConfig(data=1), 1) == ONE_DEVICE
    assert list(resolve_mesh(MeshConfig(), 3)) == ["pipeline", "data", "fsdp", "expert", "context", "tensor"]


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        (
            {"data": 2, "fsdp": 3},
            8,
            "mesh.data=2 × mesh.fsdp=3 needs 6 devices, but there are 8; mesh.fsdp=4 would fit",
        ),
        ({"data": 16}, 8, "mesh.data=16 needs 16 devices, but there are 8; mesh.data=8 would fit"),
        ({"data": 1}, 8, "all axes 1 needs 1 device, but there are 8; mesh.data=8 would fit"),
        (
            {"data": 3, "fsdp": 3},
            8,
            "mesh.data=3 × mesh.fsdp=3 needs 9 devices, but there are 8; "
            "the axes must multiply to that; one of them may be -1 for all that are left",
        ),
        (
            {"tensor": 3},
            8,
            "mesh.tensor=3 doesn't divide 8 devices, so mesh.data=-1 has no whole size; "
            "the axes other than that one may multiply to 1, 2, 4 or 8",
        ),
        ({"fsdp": -1}, 8, "mesh.data=-1 and mesh.fsdp=-1: only one axis may be -1"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(mesh: dict[str, int], devices: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_mesh(MeshConfig(**mesh), devices)
    assert str(caught.value) == message


def test_a_mesh_that_does_not_fit_is_placed_where_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"^c.yml:4: mesh.data=16 needs 16 devices"):
        resolve_mesh(MeshConfig(data=16), 8, {"mesh.data": "c.yml:4"})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"remat_save": ["query"]},
            "remat_save is given, but remat=none keeps nothing by name; set remat: named",
        ),
        (
            {"remat": "named"},
            "remat=named without remat_save or remat_offload keeps nothing; name tensors, or use full",
        ),
        (
            {"remat": "named", "remat_save": ["query", "key"], "remat_offload": ["query"]},
            "remat_save and remat_offload both name query; keep it in one place",
        ),
    ],
)
def test_tensors_are_named_where_that_does_something_and_once(sections, message):
    assert refusal(config(**sections)) == [message]


@pytest.mark.parametrize(("every", "evaluated"), [(4, 8), (8, 4), (4, 4)])
def test_saves_and_evaluations_may_be_each_others_multiples_to_keep_the_best(every: int, evaluated: int) -> None:
    check(config(checkpoint={"every": every, "keep_best": {"count": 2}}, eval={"every": evaluated}))
