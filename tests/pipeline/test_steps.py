"""Whole steps and runs on a mesh with stages: the losses, weights, evaluations and refusals of one device."""

import functools
import logging
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.telemetry.metrics import read_metrics
from tests.runs import Trained, make_batches, run_here, tiny_config, tiny_program, train_on

STEPS = 5
SGD = "optimizer={name: sgd, learning_rate: 0.3, weight_decay: 0.1}"
OWN = "model={target: 'tests.pipeline.staged:Balanced', layers: 3, tied: true, noise: 0.3}"


@functools.cache
def trained(devices: int, *overrides: str) -> Trained:
    return train_on(tiny_program(devices, SGD, *overrides), make_batches(STEPS), steps=STEPS)


def assert_same_training(split: Trained, alone: Trained) -> None:
    np.testing.assert_allclose(split.losses, alone.losses, rtol=1e-4)
    got = split.parameters()
    for name, want in alone.parameters().items():
        assert np.linalg.norm(got[name] - want) <= 1e-4 * np.linalg.norm(want), name


@pytest.mark.parametrize("microbatch", [4, 2, 1])
def test_five_steps_in_two_four_and_eight_micro_batches_are_those_of_one_device(microbatch: int) -> None:
    """Of ragged rows: in some micro-batches nothing counts."""
    weights = np.stack([batch["weights"].sum(1) for batch in make_batches(STEPS)])
    assert (weights == 0).any()
    split = trained(2, "model.dropout=0.3", "mesh.pipeline=2", f"microbatch={microbatch}")
    assert_same_training(split, trained(1, "model.dropout=0.3"))


def test_sizes_that_only_tensor_would_have_to_divide_are_right_on_stages_and_refused_with_tensor() -> None:
    sizes = ("model.vocab=255", "data.vocab=255", "model.heads=3", "model.kv_heads=1", "model.head_dim=16")
    batches = [
        {**batch, "targets": batch["targets"] % 255, "tokens": batch["tokens"] % 255} for batch in make_batches(2)
    ]
    split, alone = (
        train_on(tiny_program(devices, *sizes, *mesh), batches)
        for devices, mesh in ((2, ["mesh.pipeline=2", "microbatch=2"]), (1, []))
    )
    np.testing.assert_allclose(split.losses, alone.losses, rtol=1e-4)
    with pytest.raises(ConfigError) as refused:
        tiny_program(4, *sizes, "mesh.pipeline=2", "mesh.tensor=2")
    for key in ("model.vocab=255", "model.heads=3", "model.kv_heads=1", "mesh.tensor=2"):
        assert key in str(refused.value)


@pytest.mark.parametrize("mesh", [["mesh.pipeline=2", "mesh.data=1"], ["mesh.pipeline=2", "mesh.data=2"]])
def test_an_evaluation_in_the_run_is_that_of_one_device_where_its_batch_does_not_divide_over_the_stages(
    mesh: list[str], tmp_path: Path, tiny_data: Path
) -> None:
    """11 held-out rows, evaluated by 6 on one device and by 6 or 8 on the mesh."""
    runs = []
    for name, overrides in (("alone", []), ("split", [*mesh, "microbatch=1"])):
        more = ["steps=2", "eval.every=2", "global_batch=6", "optimizer.learning_rate=1e-3"]
        config = tiny_config(tmp_path, tiny_data, *more, *overrides, f"run_dir={tmp_path / name}")
        run_here(config, 2 * int(mesh[1][-1]) if overrides else 1)
        runs.append(read_metrics(config.run_dir / "metrics.jsonl"))
    alone, split = runs
    assert [line["step"] for line in split] == [line["step"] for line in alone] == [1, 2, 2]
    assert split[-1]["eval_loss"] == pytest.approx(alone[-1]["eval_loss"], rel=1e-5)
    assert [line["loss"] for line in split[:2]] == pytest.approx([line["loss"] for line in alone[:2]], rel=1e-4)


def test_stages_divide_the_rows_of_an_evaluation_and_each_other_s_weights() -> None:
    program = tiny_program(8, "mesh.pipeline=2", "mesh.data=2", "mesh.fsdp=2", "microbatch=1", "global_batch=12")
    tokens = program.eval_batch["tokens"]
    assert (tokens.shape[0], tokens.sharding.shard_shape(tokens.shape)[0]) == (16, 2)
    arguments = (program.state["params"], program.eval_batch)
    assert "collective-permute" not in program.eval_step.lower(*arguments).compile().as_text(), "nothing is pipelined"


def test_a_batch_ramp_has_a_schedule_for_each_size(tmp_path: Path, tiny_data: Path) -> None:
    runs = []
    for name, devices, mesh in (("alone", 1, []), ("split", 2, ["mesh.pipeline=2", "microbatch=1"])):
        ramp = "batch_ramp=[{steps: 2, global_batch: 2}]"
        config = tiny_config(tmp_path, tiny_data, "steps=4", ramp, *mesh, f"run_dir={tmp_path / name}")
        runs.append([line["loss"] for line in run_here(config, devices) if "loss" in line])
    assert len(runs[0]) == 4
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)


def test_somebodys_own_staged_task_with_a_second_loss_term_is_cut_too() -> None:
    random = np.random.default_rng(0)
    batches = [
        {
            "x": random.standard_normal((8, 6)).astype(np.float32),
            "y": random.standard_normal((8, 6)).astype(np.float32),
            "weights": random.integers(0, 3, 8).astype(np.float32),
        }
        for _ in range(STEPS)
    ]
    mesh = ["mesh.pipeline=2", "mesh.fsdp=2", "microbatch=1", "fsdp.gather=step", "sharding.allow_replicated=true"]
    data = "data={target: 'scripts.own_task:make_data', rows: 64}"
    alone, split = (
        train_on(tiny_program(devices, OWN, data, SGD, *mesh), batches) for devices, mesh in ((1, []), (4, mesh))
    )
    assert alone.losses[-1] != alone.losses[0]
    assert_same_training(split, alone)


def test_what_is_chosen_is_told_at_the_start(tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=1", "mesh.pipeline=2", "microbatch=2")
    with caplog.at_level(logging.INFO):
        run_here(config, 2)
    assert "1f1b of 4 micro-batches over stages of 1 1 layers" in caplog.text
