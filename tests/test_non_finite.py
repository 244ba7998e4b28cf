"""A loss that is not finite never reaches the parameters: the run stops at it, or passes over it, by key."""

from pathlib import Path

import numpy as np
import pytest

from jaxtrain import training
from jaxtrain.data import ROW_IDS, RowTable, host_batches
from jaxtrain.errors import DataError, NonFiniteError
from jaxtrain.placement import Placement
from jaxtrain.telemetry.jsonl import read
from jaxtrain.training_data import open_data
from tests.faults import with_nan_row
from tests.runs import (
    MESHES,
    checkpoint_meta,
    checkpoint_steps,
    crash_after,
    events,
    read_checkpoint,
    run_here,
    step_losses,
    tiny_config,
    train,
    train_group,
    train_on,
    train_steps,
    write_tiny,
)

FINITE = ["data.pack=false", "data.log_rows=true", "log_every=10", "checkpoint.every=1", "checkpoint.keep=20"]
OVERRIDES = [*FINITE, "data.epochs=2"]


def row_of_step(folder: Path, data: Path, step: int) -> int:
    """A row of the step's batch that no other of the first ten steps reads, held by the last device of the mesh."""
    order = open_data(tiny_config(folder, data, *OVERRIDES)).order
    rows = order.rows_at(np.arange(80)).tolist()
    candidates = rows[8 * step - 4 : 8 * step]
    return next(row for row in reversed(candidates) if rows.count(row) == 1)


@pytest.fixture
def bad_row(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The loss of step 5 is NaN in this process."""
    row = row_of_step(tmp_path, tiny_data, 5)
    monkeypatch.setattr(RowTable, "assemble", with_nan_row(row))
    return row


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8"])
def test_stop_ends_the_run_at_the_step_itself_with_good_parameters(
    mesh: str, bad_row: int, tmp_path: Path, tiny_data: Path
) -> None:
    devices, overrides = MESHES[mesh]
    config = tiny_config(tmp_path, tiny_data, *OVERRIDES, *overrides)
    with pytest.raises(NonFiniteError, match="step 5: loss nan") as error:
        run_here(config, devices)
    assert error.value.exit_code == 3
    assert sorted(step_losses(config.run_dir)) == [1, 2, 3, 4]
    assert max(checkpoint_steps(config.run_dir)) == 4
    assert all(np.isfinite(leaf).all() for leaf in read_checkpoint(config.run_dir, 4).values())
    assert events(config.run_dir, "stop")[0]["exit_code"] == 3


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8"])
def test_skip_passes_over_the_batch_and_leaves_the_state_bit_unchanged(
    mesh: str, bad_row: int, tmp_path: Path, tiny_data: Path
) -> None:
    devices, overrides = MESHES[mesh]
    config = tiny_config(tmp_path, tiny_data, *OVERRIDES, "non_finite=skip", *overrides)
    metrics = run_here(config, devices)
    assert [line["step"] for line in metrics] == list(range(1, 11)), "ten updates, the fifth on the sixth batch"
    assert all(np.isfinite(line["loss"]) for line in metrics)
    assert [(event["step"], event["reason"]) for event in events(config.run_dir, "skip")] == [(5, "non-finite")]
    meta = checkpoint_meta(config.run_dir, 10)
    assert (meta["skipped"], meta["position"]) == (1, 88)
    assert read_checkpoint(config.run_dir, 10)["optimizer.adam.count"] == 10


def test_the_batch_after_a_skip_trains_the_state_from_before_it(
    bad_row: int, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run whose fifth batch never existed: the state and the step's dropout key, not the position, decide."""
    skipping = tiny_config(tmp_path, tiny_data, *OVERRIDES, "non_finite=skip")
    run_here(skipping)
    monkeypatch.undo()
    before = train_steps(skipping, 4)
    data = open_data(skipping)
    rows = Placement(before.program.batch).rows
    sixth = next(host_batches(data.table, data.order, 8, rows, start=40, prefetch=0))
    sixth.pop(ROW_IDS)
    after = train_on(before.program, [sixth], 10, before.state)
    assert step_losses(skipping.run_dir)[5] == after.losses[0]


def test_a_resume_after_a_skip_goes_on_at_the_position_and_not_at_step_times_batch(
    bad_row: int, tmp_path: Path, tiny_data: Path
) -> None:
    def config(name: str):
        return tiny_config(tmp_path, tiny_data, *OVERRIDES, "non_finite=skip", f"run_dir={tmp_path / name}")

    run_here(config("straight"))
    with crash_after(8):
        run_here(config("stopped"))
    run_here(config("stopped"))
    restores = events(tmp_path / "stopped", "restore")
    assert [(event["step"], event["position"]) for event in restores] == [(7, 64)]
    assert step_losses(tmp_path / "stopped") == step_losses(tmp_path / "straight")
    assert checkpoint_meta(tmp_path / "stopped", 10)["skipped"] == 1


def test_a_finite_run_whose_goal_are_its_data_ends_with_them_after_a_skip(
    bad_row: int, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, *FINITE, "data.epochs=1", "steps=null", "non_finite=skip")
    run_here(config)
    assert sorted(step_losses(config.run_dir)) == list(range(1, 7)), "52 rows are 7 batches, one was skipped"
    assert checkpoint_steps(config.run_dir)[-1] == 6
    run_here(config)
    assert events(config.run_dir, "stop")[-1]["reason"] == "already complete"


@pytest.mark.parametrize("start", [1, 2])
def test_steps_that_the_data_can_no_longer_give_after_a_skip_are_a_failure_at_every_start(
    start: int, bad_row: int, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, *FINITE, "data.epochs=1", "steps=7", "non_finite=skip")
    for _ in range(start):
        with pytest.raises(DataError, match=r"the data ended at step 6, after 1 skipped batches, before steps=7"):
            run_here(config)


def test_a_skipped_batch_stands_in_the_row_log(bad_row: int, tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, *OVERRIDES, "non_finite=skip")
    run_here(config)
    lines = read(config.run_dir / "rows-0.jsonl")
    (skipped,) = [line for line in lines if line["skipped"]]
    assert bad_row in skipped["rows"]
    assert [line["position"] for line in lines] == list(range(0, 88, 8))


def test_a_batch_that_was_skipped_after_the_last_save_stands_once_in_the_row_log_after_a_resume(
    bad_row: int, tmp_path: Path, tiny_data: Path
) -> None:
    overrides = [override for override in OVERRIDES if override != "checkpoint.every=1"]
    config = tiny_config(tmp_path, tiny_data, *overrides, "non_finite=skip", "checkpoint.every=4")
    with crash_after(5):
        run_here(config)
    (config.run_dir / "rows-1.jsonl").write_bytes((config.run_dir / "rows-0.jsonl").read_bytes())
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "restore")] == [4]
    lines = read(config.run_dir / "rows-0.jsonl")
    assert [line["position"] for line in lines] == list(range(0, 88, 8))
    of_a_lost_process = read(config.run_dir / "rows-1.jsonl")
    assert [line["position"] for line in of_a_lost_process] == [0, 8, 16, 24], "the rest was read again by others"


@pytest.mark.slow
def test_stop_prints_one_line_and_exits_with_its_own_code(tmp_path: Path, tiny_data: Path) -> None:
    fault = f"nan-row={row_of_step(tmp_path, tiny_data, 5)}"
    code, output = train([fault, str(write_tiny(tmp_path, tiny_data)), *OVERRIDES], program=("-m", "tests.faults"))
    assert code == 3, output
    assert "error: step 5: loss nan" in output
    assert "non_finite: skip" in output
    assert "Traceback" not in output
    assert max(checkpoint_steps(tmp_path / "run")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "code"), [("stop", 3), ("skip", 0)])
def test_two_processes_take_the_same_branch_where_one_has_the_bad_row(
    policy: str, code: int, tmp_path: Path, tiny_data: Path
) -> None:
    fault = f"nan-row={row_of_step(tmp_path, tiny_data, 5)}"
    arguments = [fault, str(write_tiny(tmp_path, tiny_data)), *OVERRIDES, "mesh.fsdp=8", f"non_finite={policy}"]
    results = train_group(arguments, timeout=120, program=("-m", "tests.faults"))
    assert [result[0] for result in results] == [code, code], results
    run_dir = tmp_path / "run"
    assert sorted(step_losses(run_dir)) == list(range(1, 5 if policy == "stop" else 11))
    assert max(checkpoint_steps(run_dir)) == (4 if policy == "stop" else 10)
    bad = int(fault.split("=")[1])
    assert bad not in [row for rows in _all_rows(run_dir, 0) for row in rows]
    assert bad in [row for rows in _all_rows(run_dir, 1) for row in rows]


def _all_rows(run_dir: Path, process: int) -> list[list[int]]:
    return [line["rows"] for line in read(run_dir / f"rows-{process}.jsonl")]


def test_skipping_without_end_stops_the_run(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MOST_SKIPPED_IN_A_ROW", 4)
    config = tiny_config(tmp_path, tiny_data, "optimizer.learning_rate=1e38", "non_finite=skip")
    with pytest.raises(NonFiniteError, match="4 batches in a row"):
        run_here(config)
    assert len(events(config.run_dir, "skip")) == 3
    assert events(config.run_dir, "stop")[-1]["exit_code"] == 3
