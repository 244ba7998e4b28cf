"""A run that was stopped goes on as if nothing had happened."""

import logging
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from tests.factories import make_dataset, make_documents
from tests.runs import (
    FAMILIES,
    MESHES,
    STRAIGHT,
    Straight,
    checkpoint_meta,
    checkpoint_steps,
    content,
    crash_after,
    events,
    read_checkpoint,
    row_log,
    run_here,
    step_losses,
    stopped_copy,
    straight_overrides,
    tiny_config,
    train,
    write_tiny,
)


def assert_same_end(run_dir: Path, straight: Path) -> None:
    """Bit-equal losses, rows and final state."""
    assert step_losses(run_dir) == step_losses(straight)
    assert row_log(run_dir) == row_log(straight)
    assert checkpoint_meta(run_dir, 10)["checksums"] == checkpoint_meta(straight, 10)["checksums"]


RESUMED = [(mesh, family) for mesh in ("one device", "fsdp=8", "data=2 fsdp=2 tensor=2") for family in FAMILIES]
RESUMED += [("pipeline=2", "decoder"), ("data=2 fsdp=2 zero=2", "decoder")]


@pytest.mark.usefixtures("programs_built_anew")
@pytest.mark.parametrize(("mesh", "family"), RESUMED)
def test_a_resumed_run_with_dropout_and_shuffle_is_bit_equal(
    mesh: str, family: str, straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(straight(mesh, family), tmp_path)
    devices, overrides = MESHES[mesh]
    run_here(tiny_config(tmp_path, tiny_data, *straight_overrides(family), *overrides), devices)
    assert [event["step"] for event in events(run_dir, "restore")] == [5]
    assert_same_end(run_dir, straight(mesh, family))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """The directory of the straight run on one device, in a process that has only that one.

    How many threads a CPU device has depends on how many virtual devices there are, and with it the last bits.
    """
    folder = tmp_path_factory.mktemp("process")
    code, output = train([str(write_tiny(folder, tiny_data)), *STRAIGHT])
    assert code == 0, output
    return folder / "run"


@pytest.mark.slow
def test_a_new_process_goes_on_bit_equal(process: Path, tmp_path: Path, tiny_data: Path) -> None:
    run_dir = stopped_copy(process, tmp_path)
    code, output = train([str(write_tiny(tmp_path, tiny_data)), *STRAIGHT])
    assert code == 0, output
    assert "resumed after step 5" in output
    assert "INFO" not in output, "what a library logs is for the file"
    assert_same_end(run_dir, process)


@pytest.mark.slow
def test_another_number_of_loader_workers_changes_no_row_and_leaves_no_process(
    process: Path, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(process, tmp_path)
    code, output = train([str(write_tiny(tmp_path, tiny_data)), *STRAIGHT, "data.workers=2"])
    assert code == 0, output  # a worker that lived on would hold the pipe, and this would never return
    assert [event["step"] for event in events(run_dir, "restore")] == [5]
    assert_same_end(run_dir, process)


def test_half_the_devices_go_on_with_every_row_once(straight: Straight, tmp_path: Path, tiny_data: Path) -> None:
    run_dir = stopped_copy(straight("data=8"), tmp_path)
    run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT, "mesh.data=4"), devices=4)
    assert [event["step"] for event in events(run_dir, "restore")] == [5]
    assert row_log(run_dir) == row_log(straight("data=8"))
    ours, theirs = step_losses(run_dir), step_losses(straight("data=8"))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)


def test_dropout_masks_need_no_random_state_in_the_checkpoint(straight: Straight) -> None:
    names = read_checkpoint(straight("one device"), 10).keys()
    assert {name.split(".")[0] for name in names} == {"params", "optimizer", "step"}
    without = [name for name in names if "key" in name.lower().replace("attention.key", "") or "rng" in name.lower()]
    assert without == []


def test_a_resume_in_the_second_and_third_epoch_keeps_the_order(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_documents([20] * 20))
    overrides = ["steps=null", "data.epochs=3", "global_batch=4", "data.pack=false", "data.log_rows=true"]
    overrides += ["checkpoint.every=1", "checkpoint.keep=20"]

    def config(name: str):
        return tiny_config(tmp_path, tmp_path / "data", *overrides, f"run_dir={tmp_path / name}")

    run_here(config("straight"))
    with crash_after(8):
        run_here(config("stopped"))
    with crash_after(13):
        run_here(config("stopped"))
    run_here(config("stopped"))
    assert [event["step"] for event in events(tmp_path / "stopped", "restore")] == [7, 12]
    straight, stopped = row_log(tmp_path / "straight"), row_log(tmp_path / "stopped")
    assert stopped == straight
    epochs = [[row for step in range(first, first + 5) for row in straight[step]] for first in (1, 6, 11)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    "intervals",
    [["eval.every=2", "log_every=1", "checkpoint.every=3"], ["eval.every=5", "checkpoint.every=0", "eval.batch=4"]],
)
def test_evaluating_logging_and_saving_change_no_loss(
    intervals: list[str], straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, *intervals)
    run_here(config)
    assert events(config.run_dir, "eval"), "nothing was evaluated"
    assert step_losses(config.run_dir) == step_losses(straight("one device"))


def test_intervals_and_warmup_count_updates_not_micro_batches(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(
        tmp_path, tiny_data, "microbatch=2", "eval.every=5", "optimizer.schedule.warmup=4", "data.log_rows=true"
    )
    metrics = run_here(config)
    assert [event["step"] for event in events(config.run_dir, "eval")] == [5, 10]
    assert [event["step"] for event in events(config.run_dir, "save")] == [5, 10]
    assert read_checkpoint(config.run_dir, 10)["optimizer.adam.count"] == 10
    assert sum(len(rows) for rows in row_log(config.run_dir).values()) == 80 == 40 * config.microbatch
    assert checkpoint_meta(config.run_dir, 10)["position"] == 80
    rates = {line["step"]: line["learning_rate"] for line in metrics if "learning_rate" in line}
    assert rates[4] == max(rates.values()) == pytest.approx(1e-2)


def test_nine_steps_in_three_starts_are_nine_steps(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=9", "checkpoint.every=3")
    for step in (4, 7):
        with crash_after(step):
            run_here(config)
    run_here(config)
    assert sorted(step_losses(config.run_dir)) == list(range(1, 10))
    assert checkpoint_steps(config.run_dir) == [3, 6, 9]
    final = read_checkpoint(config.run_dir, 9)
    assert final["step"] == final["optimizer.adam.count"] == 9
    assert [event["step"] for event in events(config.run_dir, "start")] == [0, 3, 6]


def test_each_step_stands_once_in_the_metrics_after_a_crash(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=12", "eval.every=3", "data.log_rows=true")
    with crash_after(8):
        run_here(config)
    assert max(step_losses(config.run_dir)) == 8
    metrics = run_here(config)
    assert [line["step"] for line in metrics if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in metrics if "eval_loss" in line] == [3, 6, 9, 12]
    assert sorted(row_log(config.run_dir)) == list(range(1, 13))
    assert [event["step"] for event in events(config.run_dir, "start")] == [0, 5]


@pytest.mark.usefixtures("programs_built_anew")
def test_steps_and_evaluations_are_compiled_once_with_ragged_tails_and_after_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import jax

    make_dataset(tmp_path / "data", make_documents([20] * 19), make_documents([9] * 11, seed=1))
    config = tiny_config(
        tmp_path, tmp_path / "data", "steps=null", "data.epochs=2", "data.pack=false", "eval.every=2", "eval.batch=4"
    )

    def compiled() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [text.split()[1] for text in messages if text.startswith("Compiling ")]

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        with crash_after(4):
            run_here(config)
        first = compiled()
        caplog.clear()
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 5})})
        run_here(config)
    assert sorted(step_losses(config.run_dir)) == [1, 2, 3, 4, 5]
    for names in (first, compiled()):
        assert [name for name in names if "train_step" in name] == ["jit(train_step)"], names
        assert [name for name in names if "eval_step" in name] == ["jit(eval_step)"], names


def test_a_finished_run_started_again_does_nothing(
    straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path, step=10)
    before = content(run_dir / "checkpoints"), content(run_dir)["metrics.jsonl"]
    run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert (content(run_dir / "checkpoints"), content(run_dir)["metrics.jsonl"]) == before
    assert "already complete" in capsys.readouterr().out
    assert events(run_dir, "compile") == []
    (stop,) = events(run_dir, "stop")
    assert (stop["step"], stop["exit_code"]) == (10, 0)


def test_a_finished_run_started_with_more_steps_is_refused_by_name(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    """The length of the run sets the learning-rate schedule, so it may not change."""
    stopped_copy(straight("one device"), tmp_path, step=10)
    with pytest.raises(ConfigError, match=r"steps: +10 +-> 12"):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT, "steps=12"))


def test_a_resumed_run_goes_on_from_the_state_and_not_only_from_the_step(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    """The first loss after the resume is the straight run's, and not that of fresh parameters on the same rows."""
    run_dir = stopped_copy(straight("one device"), tmp_path)
    fresh = run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT, f"run_dir={tmp_path / 'fresh'}", "seed=1"))
    run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    sixth = step_losses(run_dir)[6]
    assert sixth == step_losses(straight("one device"))[6]
    assert not np.isclose(sixth, fresh[5]["loss"], rtol=1e-6)
