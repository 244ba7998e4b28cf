"""Which checkpoints stay: the newest always, and beside them what was asked for, over all restarts."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import Checkpointer, Meta, list_checkpoints
from jaxtrain.checkpoint.retention import Kept, Retention, superfluous
from jaxtrain.config import CheckpointConfig
from jaxtrain.errors import ConfigError
from jaxtrain.evaluation import Evaluator
from tests.checkpoint.test_directory import make_checkpoint
from tests.runs import (
    checkpoint_meta,
    checkpoint_steps,
    crash_after,
    events,
    kill_when,
    row_log,
    run_here,
    start,
    tiny_config,
    train,
    write_tiny,
)

HOUR = 3600


def left(rules: dict[str, Any], found: list[Kept]) -> list[int]:
    """What stays, if it is asked after each save as in a run; also that asking again deletes nothing more."""
    config = CheckpointConfig.model_validate(rules)
    there: list[Kept] = []
    for checkpoint in found:
        there.append(checkpoint)
        gone = superfluous(there, config)
        there = [kept for kept in there if kept.step not in gone]
        assert superfluous(there, config) == []
    return [checkpoint.step for checkpoint in there]


def saves(losses: list[float] | None = None, hours: float = 0.4) -> list[Kept]:
    losses = losses or [1.0] * 10
    return [
        Kept(10 * number, number * hours * HOUR, {"eval_loss": loss}) for number, loss in enumerate(losses, start=1)
    ]


@pytest.mark.parametrize(("keep", "kept"), [(1, [100]), (3, [80, 90, 100]), (20, list(range(10, 101, 10)))])
def test_the_newest_stay(keep: int, kept: list[int]) -> None:
    assert left({"keep": keep}, saves()) == kept


def test_each_nth_step_stays_for_ever() -> None:
    assert left({"keep": 1, "keep_every": 40}, saves()) == [40, 80, 100]


def test_one_an_hour_stays_for_ever() -> None:
    # Saved at 0.4, 0.8, 1.2, … hours: after 0.4 the next is 1.6, then 2.8, then 4.0.
    assert left({"keep": 1, "keep_every_hours": 1}, saves()) == [10, 40, 70, 100]


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        ({"count": 1}, [20, 100]),
        ({"count": 3}, [10, 20, 70, 100]),
        ({"count": 1, "mode": "max"}, [50, 100]),
        ({"count": 1, "metric": "eval_accuracy"}, [100]),
    ],
)
def test_the_best_stay_beside_the_newest(best: dict[str, Any], kept: list[int]) -> None:
    losses = [3, 1, 4, 5, 9, 6, 2, 8, 7, 7]
    assert left({"keep": 1, "keep_best": best}, saves([float(loss) for loss in losses])) == kept


def test_of_equals_the_earlier_is_the_best() -> None:
    assert left({"keep": 1, "keep_best": {}}, saves()) == [10, 100]


def test_one_that_was_not_evaluated_is_never_the_best() -> None:
    found = saves()
    found[0] = Kept(10, 0.0, {})
    assert left({"keep": 1, "keep_best": {"count": 2}}, found) == [20, 30, 100]


def test_the_rules_add_up() -> None:
    rules = {"keep": 2, "keep_every": 50, "keep_every_hours": 2, "keep_best": {"mode": "max"}}
    losses = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert left(rules, saves(losses)) == [10, 30, 50, 60, 90, 100]


@pytest.fixture
def rising_loss(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Each evaluation in the test is worse than the one before; gives how many there were."""
    count = 0

    def worse(evaluator: Evaluator, params: Any) -> dict[str, float]:
        nonlocal count
        count += 1
        return {"loss": float(count)}

    monkeypatch.setattr(Evaluator, "__call__", worse)
    return lambda: count


def test_keeping_the_best_never_costs_the_newest_and_is_remembered_over_a_restart(
    rising_loss: Callable[[], int], tmp_path: Path, tiny_data: Path
) -> None:
    best = "checkpoint.keep_best={count: 2}"
    config = tiny_config(tmp_path, tiny_data, "checkpoint.keep=1", "checkpoint.every=1", "eval.every=1", best)
    with crash_after(6):
        run_here(config)
    assert checkpoint_steps(config.run_dir) == [1, 2, 5]
    assert checkpoint_meta(config.run_dir, 2)["metrics"] == {"eval_loss": 2.0}
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "restore")] == [5]
    assert rising_loss() == 10
    assert checkpoint_steps(config.run_dir) == [1, 2, 10]


def test_a_checkpoint_has_the_metrics_of_its_own_step_alone(tmp_path: Path, tiny_data: Path) -> None:
    keep = ["checkpoint.keep=10", "checkpoint.every=2", "eval.every=4"]
    config = tiny_config(tmp_path, tiny_data, *keep)
    metrics = run_here(config)
    losses = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
    saved = {step: checkpoint_meta(config.run_dir, step)["metrics"] for step in checkpoint_steps(config.run_dir)}
    assert list(saved) == [2, 4, 6, 8, 10]
    assert list(losses) == [4, 8, 10]
    assert saved[2] == saved[6] == {}
    for step, loss in losses.items():
        assert saved[step]["eval_loss"] == loss


def test_a_metric_that_no_evaluation_gives_is_refused_with_those_there_are(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "eval.every=5", "checkpoint.keep_best={metric: eval_los}")
    with pytest.raises(ConfigError, match=r"keep_best\.metric=eval_los: .*it has .*eval_loss"):
        run_here(config)
    assert not config.run_dir.exists()


def state(value: float = 1.0) -> dict[str, Any]:
    return {"params": {"w": jnp.full((4, 2), value)}, "step": jnp.int32(7)}


def save_steps(folder: Path, steps: list[int], **rules: Any) -> None:
    checkpointer = Checkpointer(folder, CheckpointConfig(**rules), lambda *saved: None)
    for step in steps:
        checkpointer.save(state(), Meta(step=step, position=0, skipped=0, config={}, data_hash=""))
    checkpointer.close()


def test_what_is_no_checkpoint_of_this_run_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2], keep=2)
    make_checkpoint(tmp_path, "3", without="meta")  # incomplete
    (tmp_path / "4").mkdir()
    for name in ("2.unreadable", "notes", "007", "old-5"):
        make_checkpoint(tmp_path, name)
    make_checkpoint(tmp_path, "9")  # it looks complete, but describes nothing
    before = {path.name for path in tmp_path.iterdir()}
    save_steps(tmp_path, [10], keep=2)
    assert {path.name for path in tmp_path.iterdir()} == before - {"1"} | {"10"}


def test_a_smaller_keep_takes_effect_though_nothing_new_was_saved(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2, 3], keep=3)
    save_steps(tmp_path, [3], keep=1)
    assert list_checkpoints(tmp_path).steps == [3]


def test_a_deletion_that_fails_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, [1, 2], keep=2)
    retention = Retention(tmp_path, CheckpointConfig(keep=1))
    with monkeypatch.context() as patch:

        def refuse(path: Path, target: Path) -> Path:
            raise PermissionError(13, "Permission denied")

        patch.setattr(Path, "rename", refuse)
        retention.apply()
    assert f"{tmp_path / '1'} can't be deleted: [Errno 13] Permission denied" in caplog.text
    assert list_checkpoints(tmp_path).steps == [2, 1]
    retention.apply()
    assert list_checkpoints(tmp_path).steps == [2]


def test_an_old_one_goes_as_soon_as_the_new_one_is_complete_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    remove = shutil.rmtree

    def watched(path: Any, *arguments: Any, **options: Any) -> None:
        seen.append(list_checkpoints(tmp_path).steps)
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    checkpointer = Checkpointer(tmp_path, CheckpointConfig(keep=1), lambda *saved: None)
    for step in (1, 2, 3):
        checkpointer.save(state(), Meta(step=step, position=0, skipped=0, config={}, data_hash=""))
        checkpointer.wait()
        assert list_checkpoints(tmp_path).steps == [step], "its predecessor doesn't wait for the next save"
    assert seen == [[2], [3]]
    checkpointer.close()


@pytest.mark.slow
def test_with_a_slow_writer_one_checkpoint_is_complete_at_every_moment_and_after_a_kill(
    tmp_path: Path, tiny_data: Path
) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data)), "checkpoint.keep=1", "checkpoint.every=1", "data.log_rows=true"]
    checkpoints, complete = tmp_path / "run" / "checkpoints", []

    def is_saving(step: int) -> bool:
        """Polled every 20 ms; the gap is where a step is being written, and its predecessor is all that there is."""
        complete.append(list_checkpoints(checkpoints).steps)
        return (checkpoints / f"{step}.orbax-checkpoint-tmp").exists() and complete[-1] == [step - 1]

    kill_when(lambda: is_saving(4), [start(["slow-saves=0.3", *arguments], program=("-m", "tests.faults"))])
    first = next(index for index, steps in enumerate(complete) if steps)
    assert all(complete[first:]), "none was complete at some moment"
    assert max(map(len, complete)) <= 2
    assert list_checkpoints(checkpoints).steps == [3]
    code, output = train(arguments)
    assert code == 0, output
    assert [event["step"] for event in events(tmp_path / "run", "restore")] == [3]
    assert sorted(row_log(tmp_path / "run")) == list(range(1, 11))
    assert checkpoint_steps(tmp_path / "run") == [10]
