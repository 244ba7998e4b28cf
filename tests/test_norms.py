"""Norms by parameter and layer: right on every mesh, and of no influence on what is trained."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.data import RowTable
from jaxtrain.models.parameters import named_leaves
from jaxtrain.norms import KINDS, name_norms
from jaxtrain.placement import Placement
from jaxtrain.program import Program
from jaxtrain.telemetry.norms import layer_by_layer, read_norms
from tests.event_files import read_scalars
from tests.factories import make_dataset, make_documents
from tests.faults import with_nan_row
from tests.flags import AS_USERS_COMPILE
from tests.runs import (
    MESHES,
    Straight,
    crash_after,
    events,
    run_here,
    tiny_config,
    tiny_program,
)

RATE = 0.5
SGD = f"optimizer={{name: sgd, learning_rate: {RATE}, momentum: 0.0, clip: CLIP, schedule: {{kind: constant}}}}"
STACKED = "layers."


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    dataset = make_dataset(tmp_path_factory.mktemp("norms"), make_documents([33] * 8))
    return RowTable(dataset, "train", sequence=32, packed=False, vocab=256).assemble(np.arange(8))


def one_step(program: Program, batch: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every change of a parameter in the first step, and the step's metrics with its norms by name."""
    state = program.init(program.initial_key())
    before = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(state["params"]).items()}
    state, metrics = program.train_step(state, Placement(program.batch)(batch), program.inputs(10))
    after = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(state["params"]).items()}
    metrics = jax.device_get(metrics)
    metrics["norms"] = name_norms(program.infos, metrics["norms"])
    return {name: (before[name], after[name] - before[name]) for name in before}, metrics


def by_layer(name: str, leaf: np.ndarray) -> float | list[float]:
    """The norm that numpy computes, for each layer where they are stacked."""
    if name.startswith(STACKED):
        return [float(np.linalg.norm(layer)) for layer in leaf]
    return float(np.linalg.norm(leaf))


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8", "tensor=4", "data=2 fsdp=2 tensor=2"])
def test_norms_are_those_of_the_gathered_arrays_on_every_mesh(mesh: str, batch: dict[str, np.ndarray]) -> None:
    devices, overrides = MESHES[mesh]
    program = tiny_program(devices, SGD.replace("CLIP", "null"), *overrides, "telemetry.norms_every=1")
    changes, metrics = one_step(program, batch)
    norms = metrics["norms"]
    assert list(norms) == list(KINDS)
    for kind, factor in (("parameter_norm", None), ("update_norm", 1.0), ("gradient_norm", 1 / RATE)):
        assert list(norms[kind]) == list(changes)
        for name, (before, change) in changes.items():
            wanted = by_layer(name, before if factor is None else factor * change)
            # What a float32 weight changed by is known to its last digit only.
            np.testing.assert_allclose(norms[kind][name], wanted, rtol=1e-5, atol=1e-7, err_msg=f"{kind} {name}")
    assert np.shape(norms["gradient_norm"]["layers.attention.query"]) == (2,)
    assert len(set(dict(layer_by_layer(norms["gradient_norm"])).values())) > 20, "each is its own"


def test_the_gradient_is_the_one_before_clipping_and_the_update_the_one_that_was_made(
    batch: dict[str, np.ndarray],
) -> None:
    program = tiny_program(1, SGD.replace("CLIP", "0.05"), "telemetry.norms_every=1")
    _, metrics = one_step(program, batch)
    total = {
        kind: np.sqrt(sum(norm**2 for _, norm in layer_by_layer(values))) for kind, values in metrics["norms"].items()
    }
    assert metrics["grad_norm"] > 0.1
    assert total["gradient_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)
    assert total["update_norm"] == pytest.approx(0.05 * RATE, rel=1e-4)


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8"])
def test_measuring_them_changes_no_loss_and_no_weight(mesh: str, batch: dict[str, np.ndarray]) -> None:
    devices, overrides = MESHES[mesh]
    ends = []
    for every in (0, 4):
        program = tiny_program(devices, "model.dropout=0.5", *overrides, f"telemetry.norms_every={every}")
        lowered = program.train_step.lower(program.state, program.batch, program.abstract_inputs())
        step, state = lowered.compile(AS_USERS_COMPILE), program.init(program.initial_key())
        placed, inputs, losses = Placement(program.batch)(batch), program.inputs(10), []
        for _ in range(3):
            state, metrics = step(state, placed, inputs)
            losses.append(metrics["loss"].item())
        ends.append(
            (losses, {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(state["params"]).items()})
        )
    assert ends[0] == ends[1]


def test_without_the_key_the_step_has_no_norms_and_the_run_no_file(straight: Straight) -> None:
    program = tiny_program(1)
    _, metrics = jax.eval_shape(program.train_step, program.state, program.batch, program.abstract_inputs())
    assert "norms" not in metrics
    assert not (straight("one device") / "norms.jsonl").exists()
    assert not [tag for tag in read_scalars(straight("one device") / "tensorboard") if "norm/" in tag]


@pytest.mark.usefixtures("programs_built_anew")
def test_after_a_crash_and_a_resume_each_line_stands_once_and_tensorboard_shows_the_same(
    tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, tiny_data, "telemetry.norms_every=2")
    with crash_after(9):
        run_here(config)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run_here(config)
    compiled = [record.getMessage().split()[1] for record in caplog.records if "Compiling " in record.getMessage()]
    assert [name for name in compiled if "train_step" in name] == ["jit(train_step)"]
    lines = read_norms(config.run_dir / "norms.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    scalars = read_scalars(config.run_dir / "tensorboard")
    for kind in KINDS:
        for name, _ in layer_by_layer(lines[0][kind]):
            wanted = [(line["step"], dict(layer_by_layer(line[kind]))[name]) for line in lines]
            assert scalars[f"{kind}/{name}"] == [(step, np.float32(norm)) for step, norm in wanted]
    (step, ratio), *_ = scalars["update_ratio/layers.mlp.up/1"]
    first = {kind: lines[0][kind]["layers.mlp.up"][1] for kind in KINDS}
    assert (step, ratio) == (2, pytest.approx(first["update_norm"] / first["parameter_norm"]))


def test_switched_off_on_resume_the_lines_that_come_again_are_dropped(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "telemetry.norms_every=1")
    with crash_after(8):
        run_here(config)
    run_here(tiny_config(tmp_path, tiny_data))
    assert [line["step"] for line in read_norms(config.run_dir / "norms.jsonl")] == [1, 2, 3, 4, 5]


def test_a_skipped_update_has_no_norms(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["data.pack=false", "data.epochs=2", "data.shuffle=false", "non_finite=skip", "steps=4"]
    config = tiny_config(tmp_path, tiny_data, *overrides, "telemetry.norms_every=1")
    monkeypatch.setattr(RowTable, "assemble", with_nan_row(9))
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "skip")] == [2]
    lines = read_norms(config.run_dir / "norms.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(np.isfinite(norm) for line in lines for kind in KINDS for _, norm in layer_by_layer(line[kind]))


def test_a_frozen_parameter_has_no_gradient_and_no_update(batch: dict[str, np.ndarray]) -> None:
    program = tiny_program(1, "telemetry.norms_every=1", 'optimizer.frozen=["layers.mlp.*", embed.table]')
    norms = one_step(program, batch)[1]["norms"]
    for kind in ("gradient_norm", "update_norm"):
        for name, values in norms[kind].items():
            is_frozen = name.startswith("layers.mlp.") or name == "embed.table"
            assert bool(np.max(values) == 0) is is_frozen, (kind, name)
    assert all(np.min(values) > 0 for values in norms["parameter_norm"].values())
