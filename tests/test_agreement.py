"""What is due by time: saves, and the end of a start, at the same step on every process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain import agreement
from jaxtrain.checkpoint.interval import Cost, best_interval
from jaxtrain.data import RowTable
from jaxtrain.errors import EXIT_REQUEUE, RunPaused
from jaxtrain.recorder import Recorder
from jaxtrain.telemetry.jsonl import read
from jaxtrain.training_data import open_data
from tests.faults import with_nan_row
from tests.runs import (
    STRAIGHT,
    Straight,
    checkpoint_meta,
    checkpoint_steps,
    events,
    read_checkpoint,
    row_log,
    run_here,
    step_losses,
    tiny_config,
    train,
    train_group,
    write_tiny,
)

FAULTS = ("-m", "tests.faults")


@pytest.fixture
def a_minute_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes on by a minute with each step that is read, and never else."""
    minutes = 0
    record = Recorder.step

    def ageing(recorder: Recorder, metrics: dict[str, Any]) -> None:
        nonlocal minutes
        minutes += 1
        record(recorder, metrics)

    monkeypatch.setattr(Recorder, "step", ageing)
    monkeypatch.setattr(agreement, "now", lambda: 60.0 * minutes)
    monkeypatch.setattr("jaxtrain.loop.now", agreement.now)


@pytest.mark.usefixtures("a_minute_a_step")
def test_saves_by_time_come_so_long_after_the_last_save_of_any_kind(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(
        tmp_path, tiny_data, "steps=30", "checkpoint.every=12", "checkpoint.every_minutes=5", "checkpoint.keep=30"
    )
    run_here(config)
    # A step is dispatched while the one before it is computed: what is due at step n is done after step n + 3.
    assert checkpoint_steps(config.run_dir) == [8, 12, 20, 24, 30]


@pytest.mark.usefixtures("a_minute_a_step")
def test_saving_by_time_changes_no_loss(straight: Straight, tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, "checkpoint.every=0", "checkpoint.every_minutes=2")
    run_here(config)
    assert checkpoint_steps(config.run_dir) == [5, 10]
    assert step_losses(config.run_dir) == step_losses(straight("one device"))


@pytest.mark.usefixtures("a_minute_a_step")
def test_the_interval_follows_from_what_the_first_save_cost(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    rate = "checkpoint.failures_per_day=24"
    auto = ["checkpoint.every=0", "checkpoint.interval=auto", rate]
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, *auto)
    run_here(config)
    save, interval = events(config.run_dir, "save")[0], events(config.run_dir, "interval")[0]
    assert save["step"] == 4, "it comes after a minute"
    assert 0 < save["stall"] <= save["seconds"]
    cost = Cost(interval["stall"], interval["write"])
    assert (interval["stall"], interval["write"]) == (save["stall"], save["seconds"])
    assert interval["seconds"] == pytest.approx(best_interval(cost, 3600), abs=0.1)
    assert step_losses(config.run_dir) == step_losses(straight("one device"))


@pytest.mark.usefixtures("a_minute_a_step")
def test_max_hours_is_the_time_of_one_start(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=25", "checkpoint.every=0", "max_hours=0.1")  # six minutes
    with pytest.raises(RunPaused, match=r"paused at step 9 of 25 after max_hours=0\.1, and saved"):
        run_here(config)
    assert checkpoint_steps(config.run_dir) == [9]
    with pytest.raises(RunPaused, match="paused at step 18 of 25"):
        run_here(config)
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "stop")] == [9, 18, 25]
    assert [event["exit_code"] for event in events(config.run_dir, "stop")] == [EXIT_REQUEUE, EXIT_REQUEUE, 0]


@pytest.mark.usefixtures("a_minute_a_step")
def test_a_run_whose_last_step_is_done_when_its_time_is_over_is_complete(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=8", "checkpoint.every=0", "max_hours=0.1")
    run_here(config)
    assert events(config.run_dir, "stop")[-1]["exit_code"] == 0
    assert checkpoint_steps(config.run_dir) == [8]


@pytest.mark.parametrize("mesh", ["one device"])
def test_a_run_that_is_paused_again_and_again_ends_bit_equal(
    mesh: str, straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    """Each start gets some steps further, however short its time is: it can't be requeued for ever."""
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, "eval.every=4", "checkpoint.every=0", "max_hours=1e-9")
    for step in (2, 4, 6, 8):
        with pytest.raises(RunPaused, match=f"paused at step {step} of 10"):
            run_here(config)
        assert checkpoint_steps(config.run_dir)[-1] == step
    run_here(config)
    assert step_losses(config.run_dir) == step_losses(straight(mesh))
    assert row_log(config.run_dir) == row_log(straight(mesh))
    assert [event["step"] for event in events(config.run_dir, "eval")] == [4, 8, 10]
    ours, theirs = (checkpoint_meta(path, 10)["checksums"] for path in (config.run_dir, straight(mesh)))
    assert ours == theirs


def test_a_batch_skipped_when_time_is_over_is_consumed_once(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["data.pack=false", "data.log_rows=true", "non_finite=skip", "max_hours=1e-9", "checkpoint.every=0"]
    config = tiny_config(tmp_path, tiny_data, *overrides)
    rows = open_data(config).order.rows_at(np.arange(88)).tolist()
    once = next(row for row in rows[32:40] if rows.count(row) == 1)
    monkeypatch.setattr(RowTable, "assemble", with_nan_row(once))
    for step in (2, 4, 6, 8):
        with pytest.raises(RunPaused, match=f"paused at step {step} of 10"):
            run_here(config)
    run_here(config)
    lines = read(config.run_dir / "rows-0.jsonl")
    assert [line["position"] for line in lines] == list(range(0, 88, 8))
    assert [line["position"] for line in lines if line["skipped"]] == [32]
    assert checkpoint_meta(config.run_dir, 10)["position"] == 88


@pytest.mark.slow
def test_the_process_ends_with_its_own_exit_code_and_no_error(tmp_path: Path, tiny_data: Path) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data)), "max_hours=1e-9", "checkpoint.every=0"]
    codes = []
    for _ in range(5):
        code, output = train(arguments)
        codes.append(code)
        assert "error" not in output
        assert "Traceback" not in output
    assert codes == [75, 75, 75, 75, 0]
    assert "complete: 10 steps" in output
    assert "Traceback" not in (tmp_path / "run" / "logs" / "process-0.log").read_text()


@pytest.mark.slow
def test_the_clock_of_the_first_process_decides_for_all(tmp_path: Path, tiny_data: Path) -> None:
    path = str(write_tiny(tmp_path, tiny_data))

    def arguments(fault: str, name: str) -> list[str]:
        return [fault, path, "mesh.fsdp=8", "max_hours=1", "checkpoint.every_minutes=600", f"run_dir={tmp_path / name}"]

    results = train_group(arguments("late=1@3", "alone"), program=FAULTS)
    assert [code for code, _ in results] == [0, 0], results
    assert checkpoint_steps(tmp_path / "alone") == [5, 10], "process 1 is late, and nobody asked it"
    results = train_group(arguments("late=0@4", "run"), program=FAULTS)
    assert [code for code, _ in results] == [75, 75], results
    (paused,) = events(tmp_path / "run", "stop")
    assert paused["step"] == max(checkpoint_steps(tmp_path / "run"))
    assert 4 < paused["step"] < 10
    without_time = [path, "mesh.fsdp=8", f"run_dir={tmp_path / 'run'}"]
    results = train_group(without_time)
    assert [code for code, _ in results] == [0, 0], results
    assert step_losses(tmp_path / "run") == step_losses(tmp_path / "alone")
    ours, theirs = read_checkpoint(tmp_path / "run", 10), read_checkpoint(tmp_path / "alone", 10)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
